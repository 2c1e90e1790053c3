"""Transduction units and their gates compute what the authors' do, forward and backward."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.nn import GatedNorm, TransductionUnit
from tests.nn import ranker_cases
from tests.nn.ranker_cases import CASES, assert_gradients, differentiate, fill, load, padded

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.every_case]


def gate_of(meta):
    """The gate of a case, whose ``silu_u`` means two things."""
    group, silu = meta.get("group_norm", False), meta.get("silu_u", False)
    return GatedNorm(
        meta["heads"],
        meta["hidden_dim"],
        norm="group" if group else "layer",
        activation="silu" if silu and group else meta.get("mul_u_activation_type"),
        concat=[
            name
            for name, flag in (("gate", "concat_u"), ("attended", "concat_x"))
            if meta.get(flag, False)
        ],
        concat_activation="silu" if silu else None,
        epsilon=meta["eps"],
        rngs=nnx.Rngs(0),
    )


@pytest.mark.parametrize("name", ranker_cases.names("gate_"))
def test_gates(name):
    arrays, case = load(name), CASES[name]
    module = gate_of(case["meta"])
    module.weight.set_value(jnp.asarray(arrays["weight"]))
    module.bias.set_value(jnp.asarray(arrays["bias"]))
    out, gradients, (of_x, of_u) = differentiate(
        module, GatedNorm.__call__, arrays["grad_out"], arrays["x"], arrays["u"]
    )
    assert out.shape[-1] == module.columns
    found = {
        "out": out,
        "grad__x": of_x,
        "grad__u": of_u,
        "grad__weight": gradients["weight"][...],
        "grad__bias": gradients["bias"][...],
    }
    for key, array in found.items():
        np.testing.assert_allclose(array, arrays[key], err_msg=key, **case["tolerance"])


def unit_of(meta):
    return TransductionUnit(
        meta.get("embedding_dim", 8),
        meta["heads"],
        max_length=meta["max_seq_len"],
        qk_dim=meta["attention_dim"],
        value_dim=meta["hidden_dim"],
        norm="group" if meta.get("group_norm") else "layer",
        alpha=meta["alpha"],
        contextual_length=meta.get("contextual_seq_len", 0),
        max_attention_length=meta.get("max_attn_len", 0),
        block_size=8,
        rngs=nnx.Rngs(0),
    )


class Stack(nnx.Module):
    def __init__(self, meta):
        self.units = nnx.List(unit_of(meta) for _ in range(meta["layers"]))

    def __call__(self, x, lengths, targets):
        for unit in self.units:
            x = unit(x, lengths, targets)
        return x


@pytest.mark.parametrize(
    "name", [name for name in ranker_cases.names("unit_", "stack_") if "cached" not in name]
)
def test_units(name):
    arrays, case = load(name), CASES[name]
    stack, size = Stack(case["meta"]), len(arrays["x"])
    prefix = "_stu_layers__{}_" if case["meta"]["layers"] > 1 else ""
    places = {}
    for i, unit in enumerate(stack.units):
        places |= ranker_cases.unit(unit, prefix.format(i) + ("_" if prefix else ""))
    fill(places, arrays)
    targets = arrays["num_targets"] if case["meta"]["target_aware"] else None

    def call(stack, x):
        return stack(x, jnp.asarray(arrays["lengths"]), targets)[:size]

    out, gradients, (of_x,) = differentiate(stack, call, arrays["grad_out"], padded(arrays["x"]))
    np.testing.assert_allclose(out, arrays["out"], **case["tolerance"])
    np.testing.assert_allclose(of_x[:size], arrays["grad__x"], **case["tolerance"])
    np.testing.assert_array_equal(of_x[size:], 0)
    assert_gradients(places, gradients, stack, arrays, case["tolerance"])
    if "u" in arrays:
        projected = stack.units[0].project(jnp.asarray(arrays["x"]))
        attended = stack.units[0].attend(projected, jnp.asarray(arrays["lengths"]), targets)
        found = (projected.gate, projected.query, projected.key, projected.value)
        for key, array in zip(("u", "q", "k", "v"), found, strict=True):
            np.testing.assert_allclose(array, arrays[key], err_msg=key, **case["tolerance"])
        flat = attended.reshape(arrays["attended"].shape)
        np.testing.assert_allclose(flat, arrays["attended"], **case["tolerance"])


@pytest.mark.slow
def test_a_divisor_of_the_call_replaces_the_length():
    unit = TransductionUnit(8, 2, max_length=10, rngs=nnx.Rngs(0))
    other = TransductionUnit(8, 2, rngs=nnx.Rngs(0))
    x, lengths = jnp.asarray(np.random.default_rng(0).standard_normal((6, 8), np.float32)), [4, 2]
    lengths = jnp.asarray(lengths, jnp.int32)
    expected = unit(x, lengths)
    found = nnx.jit(lambda unit, n: unit(x, lengths, longest=n))(other, jnp.int32(10))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="longest="):
        other(x, lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "batch"}, "'layer' or 'group'"),
        ({"concat": ("values",)}, "concat of 'gate' and 'attended'"),
        ({"activation": "relu"}, "'silu', 'sigmoid' or None"),
        ({"concat_activation": "relu"}, "'silu', 'sigmoid' or None"),
    ],
)
def test_gates_refuse_other_names(options, message):
    with pytest.raises(ValueError, match=message):
        GatedNorm(2, 4, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("options", [{"qk_dim": 0}, {"max_length": 0}, {"contextual_length": -1}])
def test_units_refuse_sizes(options):
    with pytest.raises(ValueError, match="a transduction unit's sizes are 1 or more"):
        TransductionUnit(8, 2, rngs=nnx.Rngs(0), **options)
