from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import MLP, PLE, DeepFM, MMoE, TargetAttention, WideDeep


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
    with pytest.raises(ValueError, match=r"'selu' is not one of relu, sigmoid, swish"):
        MLP(3, (2,), activation="selu", rngs=nnx.Rngs(0))


def tables(dim):
    return jaxrec.EmbeddingBagCollection([jaxrec.EmbeddingBagConfig("a", 3, dim)], rngs=nnx.Rngs(0))


EXPERTS = {"num_tasks": 1, "expert_layer_sizes": (4,)}
ENDS_WITH_A_LOGIT = {
    "deep_layer_sizes DeepFM": lambda **sizes: DeepFM(tables(4), tables(1), **sizes),
    "deep_layer_sizes WideDeep": lambda **sizes: WideDeep(tables(1), tables(4), **sizes),
    "tower_layer_sizes MMoE": lambda **sizes: MMoE(4, num_experts=2, **EXPERTS, **sizes),
    "tower_layer_sizes PLE": lambda **sizes: PLE(
        4, task_experts=1, shared_experts=1, **EXPERTS, **sizes
    ),
    "layer_sizes TargetAttention": lambda **sizes: TargetAttention(4, **sizes),
}


@pytest.mark.parametrize("kind", ENDS_WITH_A_LOGIT)
@pytest.mark.parametrize("sizes", [(), (8,)], ids=str)
def test_layer_sizes_name_all_layers(kind, sizes):
    argument, _ = kind.split()
    with pytest.raises(ValueError, match=f"{argument} ends with 1, the column of the logit; got"):
        ENDS_WITH_A_LOGIT[kind](**{argument: sizes}, rngs=nnx.Rngs(0))


def test_last_layer_of_another_type():
    mlp = MLP(3, (4, 2), dtype=jnp.bfloat16, output_dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert [layer.dtype for layer in mlp.layers] == [jnp.bfloat16, jnp.float32]
    assert mlp(jnp.ones((5, 3))).dtype == jnp.float32
