"""A checkpoint of tables without a padding id restores into tables with one: its row is zeros."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.train import checkpoint

pytestmark = pytest.mark.slow


def make(padding_id):
    config = jaxrec.EmbeddingBagConfig("a", 6, 2, initializer="ones", padding_id=padding_id)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    return model, jaxrec.Optimizer(model, optax.sgd(0.1))


def test_restore(tmp_path):
    checkpoint.save(tmp_path, *make(None))
    model, optimizer = make(3)
    model.load_table("a", np.full((6, 2), 5.0))
    checkpoint.restore(model, tmp_path, optimizer)
    np.testing.assert_array_equal(model.table("a")[:, 0], [1, 1, 1, 0, 1, 1])
