"""The kinds of model that `jaxrec train` trains: names, and defaults of their options."""

from __future__ import annotations

from typing import get_args

import pytest

from jaxrec.train.config import ModelName, TrainConfig
from jaxrec.train.models import KINDS, default_config

pytestmark = pytest.mark.every_case


def test_the_names_of_the_command_line_are_those_of_the_kinds():
    assert get_args(ModelName) == tuple(KINDS)


def test_defaults_of_a_kind():
    assert default_config("dlrm") == TrainConfig()
    assert default_config("sasrec").data.batch_size == 128
    assert default_config("nothing") == TrainConfig()
