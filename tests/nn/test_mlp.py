from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxrec.nn import MLP


def test_leading_axes_and_types():
    mlp = nnx.eval_shape(lambda: MLP(3, (4, 2), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    out = nnx.eval_shape(lambda mlp: mlp(jnp.ones((5, 6, 3))), mlp)
    assert (out.shape, out.dtype) == ((5, 6, 2), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(mlp))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("in_features", "sizes"), [(3, ()), (0, (2,)), (3, (2, 0))])
def test_sizes_must_be_positive(in_features, sizes):
    with pytest.raises(ValueError, match="at least one layer"):
        MLP(in_features, sizes, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("unchecked")
def test_unknown_activation():
    with pytest.raises(ValueError, match=r"'selu' is none of relu, sigmoid, swish_layernorm, dice"):
        MLP(3, (2,), activation="selu", rngs=nnx.Rngs(0))
