from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.nn import MLP
from tests import golden

CASES = [(name, case) for name, case in golden.cases("modules") if name.startswith("mlp_")]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[name for name, _ in CASES])
def test_golden(name, case):
    arrays = golden.load("modules", name)
    mlp = MLP(
        arrays["x"].shape[1],
        case["meta"]["layer_sizes"],
        activation=nnx.sigmoid if "sigmoid" in name else nnx.relu,
        activation_on_last="no_last_act" not in name,
        bias="no_bias" not in name,
        rngs=nnx.Rngs(0),
    )
    for i, layer in enumerate(mlp.layers):
        layer.kernel.set_value(jnp.asarray(arrays[f"p___mlp__{i}___linear__weight"].T))
        if layer.bias is not None:
            layer.bias.set_value(jnp.asarray(arrays[f"p___mlp__{i}___linear__bias"]))

    def loss(mlp, x):
        out = mlp(x)
        return (out * arrays["grad_out"]).sum(), out

    gradients, out = nnx.grad(loss, argnums=(0, 1), has_aux=True)(mlp, arrays["x"])
    np.testing.assert_allclose(out, arrays["out"], **case["tolerance"])
    np.testing.assert_allclose(gradients[1], arrays["grad__x"], **case["tolerance"])
    for i, layer in enumerate(mlp.layers):
        of_layer = gradients[0]["layers"][i]
        expected = arrays[f"grad__p___mlp__{i}___linear__weight"]
        np.testing.assert_allclose(of_layer["kernel"][...].T, expected, **case["tolerance"])
        if layer.bias is not None:
            expected = arrays[f"grad__p___mlp__{i}___linear__bias"]
            np.testing.assert_allclose(of_layer["bias"][...], expected, **case["tolerance"])


def test_leading_axes_and_types():
    mlp = MLP(3, (4, 2), dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert mlp(jnp.ones((5, 6, 3))).shape == (5, 6, 2)
    assert mlp(jnp.ones((5, 3))).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(mlp))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("in_features", "sizes"), [(3, ()), (0, (2,)), (3, (2, 0))])
def test_sizes_must_be_positive(in_features, sizes):
    with pytest.raises(ValueError, match="at least one layer"):
        MLP(in_features, sizes, rngs=nnx.Rngs(0))
