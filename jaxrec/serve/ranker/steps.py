"""The programs of a ranker's steps: encode a history, append events, score candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.export import Exported
from jaxtyping import Array

from jaxrec.nn import HSTURanker
from jaxrec.nn.history_cache import HistoryCache
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.serve.artifact.batch_spec import BatchSpec
from jaxrec.serve.artifact.programs import export_function
from jaxrec.serve.artifact.pure_model import PureModel
from jaxrec.serve.artifact.ranker_spec import NUM_SCALARS, RankerSpec, Step


def tokens_of(model: HSTURanker, events: int) -> int:
    """Return the number of tokens of context and some events."""
    return model.num_context + events * model.tokens.tokens_per_event


def export_step(
    pure: PureModel,
    batch: BatchSpec,
    spec: RankerSpec,
    names: Sequence[str],
    platform: str,
    step: Step,
    events: int,
    count: int,
    *,
    keep_unused: bool = True,
) -> Exported:
    """Export one step of a ranker for one platform and size."""
    keys = spec.features(batch, step)
    capacities = spec.capacities(batch, step, events, count)

    def features(values: Array, lengths: Array) -> KeyedJaggedArray:
        strides = (1,) * len(keys)
        return KeyedJaggedArray(
            values, lengths, None, keys=keys, capacities=capacities, strides=strides
        )

    def encode(model: HSTURanker, values: Array, lengths: Array, *request: Array) -> list[Array]:
        cache = model.encode(
            features(values, lengths),
            capacity=tokens_of(model, events),
            request_times=request[0] if request else None,
        )
        return jax.tree.leaves(cache)

    def append(model: HSTURanker, *arrays: Array) -> list[Array]:
        *cache, values, lengths = arrays
        return jax.tree.leaves(model.encode(features(values, lengths), _cache_of(cache)))

    def score(model: HSTURanker, *arrays: Array) -> list[Array]:
        *cache, values, lengths = arrays
        logits = model.score(_cache_of(cache), features(values, lengths))
        scores = model.tasks.predictions(logits).astype(jnp.float32)
        return [scores[:, task] for task in range(scores.shape[1])]

    functions: dict[Step, Callable[..., list[Array]]] = {
        "encode": encode,
        "append": append,
        "score": score,
    }
    return export_function(
        dataclasses.replace(pure, function=functions[step]),
        lambda function, arguments: function(*arguments),
        spec.arguments(batch, step, events, count),
        names,
        platform,
        keep_unused=keep_unused,
    )


def _cache_of(arrays: Sequence[Array]) -> HistoryCache:
    """Return a cache from its arrays, in the order of `jax.tree.leaves`."""
    layers = (len(arrays) - NUM_SCALARS) // 2
    keys, values = tuple(arrays[:layers]), tuple(arrays[layers : 2 * layers])
    return HistoryCache(keys, values, *arrays[2 * layers :])
