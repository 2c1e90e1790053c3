"""A loop that compiles again and again is told once what helps."""

from __future__ import annotations

import warnings

import jax
import pytest
from flax import nnx

import jaxrec
from jaxrec.ragged import KeyedJaggedArray, Packer

TABLES = {
    jaxrec.EmbeddingBagCollection: jaxrec.EmbeddingBagConfig("t", 50, 4, ["a", "b"]),
    jaxrec.EmbeddingCollection: jaxrec.EmbeddingConfig("t", 50, 4, ["a", "b"]),
}


class Model(nnx.Module):
    def __init__(self, kind=jaxrec.EmbeddingBagCollection):
        self.embeddings = kind([TABLES[kind]], rngs=nnx.Rngs(0))

    def __call__(self, features):
        return self.embeddings(features)


@nnx.jit
def forward(model, features):
    return jax.tree.leaves(model(features))


def batch(ids, size=2):
    return KeyedJaggedArray.from_lists({"a": [[1] * ids] + [[]] * (size - 1), "b": [[1]] * size})


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_the_fifth_combination_is_told_once(kind):
    model = Model(kind)
    sizes = [8, 12, 16, 24, 32, 48, 64]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, size in enumerate(sizes):
            forward(model, batch(size))
            forward(model, batch(size))  # compiles nothing
            assert len(told) == (number >= 4)
    message = str(told[0].message)
    assert f"{kind.__name__} was compiled for 5 combinations" in message
    assert "1 of 2 differ: 'a'" in message
    assert "jaxrec.Packer()" in message


def test_what_is_no_loop_over_capacities():
    """Other models, other batch sizes, and lookups outside of a compiled step."""
    models = [Model() for _ in range(3)]
    sizes = [8, 12, 16, 24, 32, 48]
    for size in sizes:
        models[0](batch(size))
    for number, size in enumerate(sizes):
        forward(models[number % 3], batch(size))
        forward(models[0], batch(8, size=number + 1))


def test_equal_models_share_programs():
    first, second = Model(), Model()
    forward(first, batch(8))
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert hash(nnx.graphdef(first)) == hash(nnx.graphdef(second))


def test_a_packer_is_not_told():
    model, packer = Model(), Packer()
    for size in (8, 12, 16, 24, 32, 48, 64, 90):
        forward(model, packer.from_lists({"a": [[1] * size, []], "b": [[1], [1]]}))
