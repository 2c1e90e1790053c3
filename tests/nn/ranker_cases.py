"""Golden cases of the ranker's parts: recorded parameters put into modules, gradients compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests import golden

AREA = "hstu_ranker"
CASES = dict(golden.cases(AREA))
SPARE = 3  # elements of padding


def names(*prefixes):
    return [name for name in CASES if name.startswith(prefixes)]


def load(name):
    """The arrays of a case; whole numbers as int32."""
    arrays = golden.load(AREA, name)
    return {
        key: array.astype(np.int32) if array.dtype.kind == "i" else array
        for key, array in arrays.items()
    }


def padded(array):
    """An array with elements of padding: NaN, or a number that stands out."""
    fill = np.nan if array.dtype.kind == "f" else 1 << 20
    tail = np.full((SPARE, *array.shape[1:]), fill, array.dtype)
    return jnp.asarray(np.concatenate([array, tail]))


def token_mlp(module, name):
    """Where the parameters of a dense layer, norm, dense layer and norm are recorded."""
    mlp, norm = module.mlp, module.norm
    return {
        f"{name}__0__weight": (mlp.layers[0].kernel, np.transpose),
        f"{name}__0__bias": (mlp.layers[0].bias, np.array),
        f"{name}__1__weight": (mlp.activations[0].scale, np.array),
        f"{name}__1__bias": (mlp.activations[0].bias, np.array),
        f"{name}__2__weight": (mlp.layers[1].kernel, np.transpose),
        f"{name}__2__bias": (mlp.layers[1].bias, np.array),
        f"{name}__3__weight": (norm.scale, np.array),
        f"{name}__3__bias": (norm.bias, np.array),
    }


def unit(module, name=""):
    """Where the parameters of a transduction unit are recorded."""
    return {
        f"{name}_uvqk_weight": (module.inputs.kernel, np.array),
        f"{name}_uvqk_beta": (module.inputs.bias, np.array),
        f"{name}_input_norm_weight": (module.norm.scale, np.array),
        f"{name}_input_norm_bias": (module.norm.bias, np.array),
        f"{name}_output_weight": (module.out.kernel, np.array),
        f"{name}_output_norm_weight": (module.gated_norm.weight, np.array),
        f"{name}_output_norm_bias": (module.gated_norm.bias, np.array),
    }


def tokens(model, name="", inner=""):
    """Where the parameters of context, items and actions are recorded.

    Interleaved tokens have their MLPs in a module of their own, ``inner``.
    """
    places = {
        f"{name}_batched_contextual_linear_weights": (model.context.kernels, np.array),
        f"{name}_batched_contextual_linear_bias": (model.context.biases, np.squeeze),
    }
    places |= token_mlp(model.tokens.content_mlp, f"{name}_content_embedding_mlp{inner}")
    places |= token_mlp(model.tokens.action_mlp, f"{name}_action_embedding_mlp{inner}")
    if model.tokens.additional_mlp is not None:
        places |= token_mlp(model.tokens.additional_mlp, f"{name}_additional_embedding_mlp")
    return places | actions(model.tokens.actions, f"{name}_action_encoder__")


def actions(module, name=""):
    return {
        f"{name}_action_embedding_table": (module.vectors, np.array),
        f"{name}_target_action_embedding_table": (module.target, np.ravel),
    }


def output(module, name=""):
    places = {}
    if module.norm is not None:
        places |= {
            f"{name}_layer_norm__weight": (module.norm.scale, np.array),
            f"{name}_layer_norm__bias": (module.norm.bias, np.array),
        }
    if module.combine is not None:
        places |= {
            f"{name}_time_feature_combiner__weight": (module.combine.kernel, np.transpose),
            f"{name}_time_feature_combiner__bias": (module.combine.bias, np.array),
        }
    return places


def positions(module, name=""):
    return {
        f"{name}_position_embeddings_weight": (module.positions, np.array),
        f"{name}_timestamp_embeddings_weight": (module.times, np.array),
    }


def fill(places: dict[str, Any], arrays: dict[str, np.ndarray], others=()) -> None:
    """Set the parameters; every recorded one must have a place."""
    recorded = {key for key in arrays if key.startswith("p__")}
    assert {f"p__{place}" for place in places} == recorded - set(others)
    for place, (variable, how) in places.items():
        array = how(arrays[f"p__{place}"])
        assert variable.shape == array.shape, place
        variable.set_value(jnp.asarray(array))


def assert_gradients(places, gradients, module, arrays, tolerance):
    """Compare gradients, a state like the module's, with the recorded ones."""
    kept = jax.tree.map(jnp.copy, nnx.state(module, nnx.Param))
    nnx.update(module, gradients)  # the places now hold gradients
    for place, (variable, how) in places.items():
        expected = how(arrays[f"grad__p__{place}"])
        np.testing.assert_allclose(variable[...], expected, err_msg=place, **tolerance)
    nnx.update(module, kept)


def differentiate(module, call, cotangent, *inputs):
    """The outputs of ``call(module, *inputs)`` and the gradients, of parameters and inputs."""
    graph, state, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def evaluate(state, inputs):
        def forward(state, inputs):
            return call(nnx.merge(graph, state, rest), *inputs)

        out, vjp = jax.vjp(forward, state, inputs)
        return out, *vjp(jnp.asarray(cotangent))

    return evaluate(state, inputs)
