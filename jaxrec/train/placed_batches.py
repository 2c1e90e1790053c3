"""Batches on the devices, ahead of the steps that take them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from flax import nnx

from jaxrec.data import Pipeline
from jaxrec.data.pipeline import each_batch
from jaxrec.mesh.batch_counts import even_batches
from jaxrec.mesh.processes import spans_processes
from jaxrec.tier import ahead
from jaxrec.tier.planning.tier import tier_of

# Number of batches whose ids get their rows ahead of the steps.
_LOOK_AHEAD = 2


def placed_batches(
    model: nnx.Module,
    batches: Iterable[Any],
    *stages: Callable[[Any], Any],
    place: Callable[[Any], Any],
    is_training: bool,
    accumulate: int = 1,
    empty: Callable[[Any], Any] | None = None,
) -> AbstractContextManager[Iterator[Any]]:
    """Process batches in threads, give their ids rows, and put them on the devices.

    Ids get rows if the model has open vocabularies (`jaxrec.tier.ahead`). If the model is on
    devices of several processes, these have equally many batches (`jaxrec.mesh.even_batches`).
    Threads end with the context.

    Args:
        model: The model that takes the batches.
        batches: Host batches.
        *stages: Functions of a host batch, in order, each with its own thread.
        place: Function that puts a batch on the devices.
        is_training: Whether new ids get rows, as for `jaxrec.tier.ahead`.
        accumulate: Number of batches whose gradients one update sums.
        empty: As for `jaxrec.mesh.even_batches`, from a batch after the stages.

    Returns:
        A context with the iterator over the batches.
    """
    is_shared, tier = spans_processes(model), tier_of(model)
    if tier is None and not is_shared:
        return Pipeline(batches, *stages, place)
    host_batches: Iterable[Any] = Pipeline(batches, *stages) if stages else each_batch(batches)
    if is_shared:
        host_batches = even_batches(host_batches, empty=empty)
    if tier is None:
        return Pipeline(host_batches, place)
    return contextlib.closing(
        ahead(
            model,
            host_batches,
            _LOOK_AHEAD,
            is_training=is_training,
            accumulate=accumulate,
            place=place,
        )
    )
