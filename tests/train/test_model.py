"""Models of configurations: the type that the dense part computes in."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.train.config import DataConfig, ModelConfig, TrainConfig
from jaxrec.train.datasets import split_datasets
from jaxrec.train.model import make_model, predict
from jaxrec.train.models.labels import click_loss

CONFIG = TrainConfig(
    data=DataConfig(generated_rows=256, generated_eval_rows=64, batch_size=64),
    model=ModelConfig(embedding_dim=8, bottom_layer_sizes=(16,), top_layer_sizes=(16, 8)),
)
MODELS = ("dlrm", "dcn_v2", "deepfm")


def make(name: str, dense_dtype: str):
    model = dataclasses.replace(CONFIG.model, name=name, dense_dtype=dense_dtype)
    return make_model(dataclasses.replace(CONFIG, model=model), num_steps=8)


def batches():
    return list(split_datasets(CONFIG)[0].batches(64))


def products(jaxpr) -> list[str]:
    """Types of the operands of all matrix products."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation.invars[0].aval.dtype.name)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                found += products(inner)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_dense_layers_in_bfloat16(name):
    model, _ = make(name, "bfloat16")
    graph, state = nnx.split(model)
    (batch,) = batches()[:1]
    traced = jax.make_jaxpr(lambda state, batch: predict(nnx.merge(graph, state), batch))(
        state, batch
    )
    types = products(traced.jaxpr)
    assert types.count("bfloat16") >= 2
    # The last layer, and the linear part of DeepFM.
    assert types.count("float32") == {"dlrm": 1, "dcn_v2": 1, "deepfm": 2}[name]
    assert [each.dtype for each in traced.out_avals] == ["float32"]


@pytest.mark.parametrize("name", MODELS)
def test_training_in_bfloat16_is_near_float32(name):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        model, optimizer = make(name, dtype)

        @nnx.jit
        def step(model, optimizer, batch):
            loss, gradients = jaxrec.value_and_grad(lambda model: click_loss(model, batch)[0])(
                model
            )
            optimizer.update(model, gradients)
            return loss

        losses[dtype] = [step(model, optimizer, batch) for batch in batches()]
        assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}
        states = jax.tree.leaves(nnx.state(optimizer))
        assert {x.dtype.name for x in states} <= {"float32", "uint32", "int32"}
        assert losses[dtype][0].dtype == "float32"
    assert losses["bfloat16"] != losses["float32"]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.05)
