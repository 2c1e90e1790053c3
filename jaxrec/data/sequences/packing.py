"""Requests packed into batches of fixed sizes, with equal work for all devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int, Integer

from jaxrec.data.balance import balanced_order, sequence_work
from jaxrec.data.sequences.schema import SequenceSchema

# Work of each request, from its numbers of events and of candidates.
Work: TypeAlias = Callable[
    [Integer[np.ndarray, " requests"], Integer[np.ndarray, " requests"]],
    Float[np.ndarray, " requests"],
]

# After requests that did not fit, at most this share of them is tried.
_SHRINK = 0.99


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Sizes that all batches have, so that a step compiles once.

    A batch takes requests until the next one would exceed a device's rows, events or candidates.
    Rows of padding without events and candidates fill it up.

    Attributes:
        rows: Rows of a device.
        events: Events of a device, over all of its rows.
        candidates: Candidates of a device, over all of its rows.
        devices: Number of devices of this process.
        steps: Number of batches whose requests are dealt to devices together. More balance better.

    Raises:
        ValueError: A number is below 1.
    """

    rows: int
    events: int
    candidates: int
    devices: int = 1
    steps: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is 1 or more, got {getattr(self, field.name)}")

    def capacities(self, schema: SequenceSchema) -> dict[str, int]:
        """Return each feature's capacity on a device, for `jaxrec.mesh.shard_batch`."""
        return (
            {name: self.rows * most for name, most in schema.context.items()}
            | dict.fromkeys(schema.history, self.events)
            | dict.fromkeys(schema.candidates, self.candidates)
        )


def attention_work(
    events: Integer[np.ndarray, " requests"], candidates: Integer[np.ndarray, " requests"]
) -> Float[np.ndarray, " requests"]:
    """Return each request's work in a layer of an `HSTURanker` of 128 columns."""
    return sequence_work(
        np.asarray(events, np.int64) + candidates,
        attention_dim=128,
        dense_flops=14 * 128**2,  # 7 matrices of 128 x 128: four inputs and three outputs
        num_targets=candidates,
    )


class Stretch(NamedTuple):
    """Requests ``[start, stop)``, which are dealt together to batches."""

    start: int
    stop: int
    steps: int


def stretches(
    events: Integer[np.ndarray, " requests"],
    candidates: Integer[np.ndarray, " requests"],
    shape: BatchShape,
    work: Work = attention_work,
) -> Iterator[Stretch]:
    """Cut requests, in their order, into stretches that fit the batches they are dealt to.

    Each request is in one stretch. A stretch has ``shape.steps`` batches, the last one only as many
    as it needs.
    """
    # Sums before each request, so that a binary search finds where a capacity is full.
    sums = [np.concatenate([[0], np.cumsum(x, dtype=np.int64)]) for x in (events, candidates)]
    limits = (shape.events, shape.candidates)
    start, count = 0, len(events)
    while start < count:
        steps = shape.steps
        full = start + steps * shape.devices * shape.rows
        for total, limit in zip(sums, limits, strict=True):
            most = total[start] + steps * shape.devices * limit
            full = min(full, int(np.searchsorted(total, most, side="right")) - 1)
        stop = min(full, count)
        if full >= count:
            shares = [(count - start) / shape.rows]
            shares += [(t[count] - t[start]) / n for t, n in zip(sums, limits, strict=True)]
            steps = min(steps, max(1, math.ceil(max(shares) / shape.devices)))
        while True:
            own = slice(start, stop)
            _, fullness = deal(events[own], candidates[own], shape, steps, work)
            if fullness <= 1:
                break
            # Totals fit, but no way was found to deal them so that each device's share does.
            if steps < shape.steps:
                steps += 1
            else:
                stop = start + max(1, int((stop - start) * min(_SHRINK, 1 / fullness)))
        yield Stretch(start, stop, steps)
        start = stop


def deal(
    events: Integer[np.ndarray, " requests"],
    candidates: Integer[np.ndarray, " requests"],
    shape: BatchShape,
    steps: int,
    work: Work = attention_work,
) -> tuple[Int[np.ndarray, "steps devices_rows"], float]:
    """Deal requests to the rows of batches, so that all devices have equal work.

    Returns:
        ``[steps, devices * rows]`` numbers of requests, -1 for rows of padding, and the fullest
        device's share of its capacity. A share above 1 does not fit.
    """
    parts = steps * shape.devices
    padding = parts * shape.rows - len(events)
    if padding < 0:
        return np.zeros((steps, 0), np.int64), len(events) / (parts * shape.rows)
    own_events, own_candidates = (np.pad(x, (0, padding)) for x in (events, candidates))
    if parts == 1:
        orders: Iterable[np.ndarray] = [np.arange(shape.rows).reshape(1, 1, -1)]
    else:
        # Equal work is not equal tokens: where a device overflows, deal tokens.
        tokens = own_events / shape.events + own_candidates / shape.candidates
        amounts = (work(own_events, own_candidates), tokens)
        orders = (balanced_order(x, shape.devices, steps=steps) for x in amounts)
    for order in orders:
        fullness = max(
            float(own_events[order].sum(-1, dtype=np.int64).max() / shape.events),
            float(own_candidates[order].sum(-1, dtype=np.int64).max() / shape.candidates),
        )
        if fullness <= 1:
            break
    return np.where(order < len(events), order, -1).reshape(steps, -1), fullness
