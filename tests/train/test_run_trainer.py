"""The trainer of a run: its errors name the options of the command."""

from __future__ import annotations

import pytest

from jaxrec.data import DataError
from jaxrec.tier.vocabulary.assignment import TableFullError
from jaxrec.train.run_trainer import train_on
from jaxrec.train.trainer import Trainer


def test_a_full_table_names_the_options_that_help(monkeypatch):
    def train(trainer, batches):
        raise TableFullError("table 'item' has no row left for id 7")

    monkeypatch.setattr(Trainer, "train", train)
    with pytest.raises(DataError, match=r"no row left for id 7: --data\.table-rows, --data\.batch"):
        train_on(object.__new__(Trainer), [])
