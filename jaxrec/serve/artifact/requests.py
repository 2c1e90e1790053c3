"""Requests of any number of samples, cut and padded to the sizes that a model is compiled for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.bounds import INT32_BOUND, find_bad_ids
from jaxrec.ragged.raw_ids import is_raw
from jaxrec.serve.artifact.batch_spec import (
    ArrayInput,
    BatchSize,
    BatchSpec,
    RaggedInput,
    leaves_of,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Samples ``start`` to ``stop - 1`` of a request; ``arrays`` are padded to ``size``."""

    start: int
    stop: int
    size: BatchSize
    arrays: list[np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """The ids of a feature in a request.

    Attributes:
        ids: Ids of all samples.
        lengths: Number of ids of each sample, ``[samples]``.
        offsets: Position of each sample's first id, then the number of ids, ``[samples + 1]``.
        weights: Weight of each id, or None.
    """

    ids: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None


class Request:
    """A batch of any number of samples, as the positional arguments of the model's function."""

    def __init__(self, spec: BatchSpec, batch: tuple[Any, ...]):
        leaves = leaves_of(spec.structure, batch, "batch")
        self._set(
            spec,
            [
                checked_array(each, leaf)
                if isinstance(each, ArrayInput)
                else columns_of(each, leaf)
                for each, leaf in zip(spec.inputs, leaves, strict=True)
            ],
        )

    @classmethod
    def of_inputs(cls, spec: BatchSpec, inputs: Sequence[np.ndarray | list[Column]]) -> Request:
        """Make a request of converted inputs, in the order of ``spec.inputs``.

        Give an array of its type for an `ArrayInput`, and a `Column` for each feature of a
        `RaggedInput`, with ids that fit int32.
        """
        # Past the constructor, which checks arguments of another form.
        request = cls.__new__(cls)
        request._set(spec, list(inputs))
        return request

    @classmethod
    def joined(cls, requests: Sequence[Request]) -> Request:
        """Return the samples of several requests for one model, in order, as one request."""
        if len(requests) == 1:
            return requests[0]
        inputs = zip(*(request._inputs for request in requests), strict=True)
        return cls.of_inputs(requests[0]._spec, [_joined(parts) for parts in inputs])

    def _set(self, spec: BatchSpec, inputs: list[np.ndarray | list[Column]]) -> None:
        self._spec, self._inputs = spec, inputs
        sizes = {
            each.name: len(given) if isinstance(given, np.ndarray) else given[0].lengths.size
            for each, given in zip(spec.inputs, inputs, strict=True)
            if len(given) or isinstance(given, np.ndarray)
        }
        if len(set(sizes.values())) > 1:
            raise ValueError(
                "the inputs of a batch must have equally many samples, got "
                + ", ".join(f"{size} in {name}" for name, size in sizes.items())
            )
        self.num_samples = next(iter(sizes.values()), 0)

    def check(self) -> None:
        """Raise each error that `chunks` could raise, so that it cannot fail later."""
        self._check_fixed()
        for (each, columns), capacities in zip(
            self._ragged, self._spec.sizes[-1].capacities, strict=True
        ):
            for column, capacity in zip(columns, capacities, strict=True):
                if column.lengths.size and (column.lengths > capacity).any():
                    raise self._too_long(int(np.argmax(column.lengths > capacity)))
            check_ids(each, columns, 0, self.num_samples)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the samples in order, in chunks of sizes that the model is compiled for."""
        self._check_fixed()
        start = 0
        while start < self.num_samples:
            size, count = self._next(start)
            yield Chunk(start, start + count, size, self._pack(start, start + count, size))
            start += count

    def _next(self, start: int) -> tuple[BatchSize, int]:
        """Return the size of the chunk that begins at a sample, and its number of samples."""
        best: tuple[BatchSize, int] | None = None
        for size in self._spec.sizes:
            count = self._fitting(start, size)
            if best is None:
                best = (size, count) if count else None
            # A larger size must be half full, or else its program computes more padding than
            # samples. It is taken nevertheless where long bags leave even the smaller size less
            # than half full.
            elif count > best[1] and (2 * count >= size.samples or 2 * best[1] < best[0].samples):
                best = (size, count)
        if best is None:
            raise self._too_long(start)
        return best

    def _fitting(self, start: int, size: BatchSize) -> int:
        """Return the number of samples from ``start`` on that fit a size."""
        stop = min(start + size.samples, self.num_samples)
        for (_, columns), capacities in zip(self._ragged, size.capacities, strict=True):
            for column, capacity in zip(columns, capacities, strict=True):
                offsets = column.offsets
                if offsets[stop] - offsets[start] > capacity:
                    # Offsets ascend, so the last sample that fits is found without a loop over
                    # samples.
                    room = offsets[start] + capacity
                    stop = int(np.searchsorted(offsets, room, side="right")) - 1
        return stop - start

    @functools.cached_property
    def _ragged(self) -> list[tuple[RaggedInput, list[Column]]]:
        return [
            (each, columns)
            for each, columns in zip(self._spec.inputs, self._inputs, strict=True)
            if isinstance(each, RaggedInput) and isinstance(columns, list)
        ]

    def _too_long(self, sample: int) -> ValueError:
        largest = self._spec.sizes[-1]
        for (each, columns), capacities in zip(self._ragged, largest.capacities, strict=True):
            for feature, column, capacity in zip(each.features, columns, capacities, strict=True):
                if (count := int(column.lengths[sample])) > capacity:
                    return ValueError(
                        f"feature {feature.name!r}, sample {sample}: {count} ids, and the model "
                        f"takes {capacity} at most in a batch; give fewer, or export it with "
                        "larger ids_per_sample or batch_sizes"
                    )
        raise AssertionError("a sample that fits the largest size raised an error")

    def _check_fixed(self) -> None:
        for each, columns in self._ragged:
            for feature, column in zip(each.features, columns, strict=True):
                if feature.fixed is not None and (column.lengths != feature.fixed).any():
                    sample = int(np.argmax(column.lengths != feature.fixed))
                    raise ValueError(
                        f"feature {feature.name!r}, sample {sample}: {column.lengths[sample]} ids, "
                        f"but the model was exported for {feature.fixed} in each sample; give as "
                        "many, or export it with ids_per_sample for this feature"
                    )

    def _pack(self, start: int, stop: int, size: BatchSize) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        capacities = iter(size.capacities)
        for each, given in zip(self._spec.inputs, self._inputs, strict=True):
            if isinstance(each, ArrayInput):
                assert isinstance(given, np.ndarray)
                arrays.append(_padded(given[start:stop], size.samples))
            else:
                assert isinstance(given, list)
                arrays += packed(each, given, start, stop, size.samples, next(capacities))
        return arrays


def checked_array(each: ArrayInput, leaf: Any) -> np.ndarray:
    """Convert a value to an array of an input's shape and type; refuse numbers that do not fit."""
    if isinstance(leaf, KeyedJaggedArray):
        raise TypeError(f"{each.name} must be an array of {each.dtype}, got a KeyedJaggedArray")
    array = np.asarray(leaf)
    shape = ", ".join(["samples", *map(str, each.shape)])
    if array.ndim == 0 or array.shape[1:] != each.shape:
        raise ValueError(f"{each.name} must have the shape [{shape}], got {array.shape}")
    wanted = jax.numpy.dtype(each.dtype)
    if array.dtype == wanted:
        return array
    # An empty list is an array of float64.
    if array.size and not np.can_cast(array.dtype, wanted, "same_kind"):
        raise TypeError(f"{each.name} must be an array of {each.dtype}, got {array.dtype}")
    # Overflow is reported below by name, not by NumPy's warning.
    with np.errstate(over="ignore"):
        converted = array.astype(wanted)
    # "same_kind" lets int64 become int32 and float64 float32. The first must keep its value; the
    # second may round, but not become infinite.
    if wanted.kind in "iu":
        is_changed = converted != array
    else:
        is_changed = np.isinf(converted) & np.isfinite(array)
    if is_changed.any():
        raise ValueError(f"{each.name} has a number that does not fit {each.dtype}")
    return converted


def _joined(parts: Sequence[np.ndarray | list[Column]]) -> np.ndarray | list[Column]:
    """Concatenate one input of several requests: arrays, or the columns of each feature."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if arrays:
        return np.concatenate(arrays)
    lists = [part for part in parts if isinstance(part, list)]
    return [_joined_column(columns) for columns in zip(*lists, strict=True)]


def _joined_column(columns: Sequence[Column]) -> Column:
    lengths = np.concatenate([column.lengths for column in columns])
    weights = [column.weights for column in columns if column.weights is not None]
    return Column(
        np.concatenate([column.ids for column in columns]),
        lengths,
        offsets_of(lengths),
        np.concatenate(weights) if weights else None,
    )


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return the offsets of bags, int64 ``[samples + 1]``, given their lengths."""
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def columns_of(each: RaggedInput, leaf: Any) -> list[Column]:
    """Return a column for each feature of a ragged input, in the program's order."""
    if not isinstance(leaf, KeyedJaggedArray):
        raise TypeError(f"{each.name} must be a KeyedJaggedArray, got {type(leaf).__name__}")
    if is_raw(leaf.values):
        raise TypeError(f"{each.name} has raw ids (id_bits=64); the model takes row indices")
    if np.ndim(leaf.values) != 1 or leaf.inverse_indices is not None:
        raise ValueError(
            f"{each.name} must have a bag for each sample and feature, on one device; make it "
            "without inverse_indices and shard_batch"
        )
    if (leaf.weights is not None) != each.is_weighted:
        raise ValueError(
            f"{each.name} has no weights, and the model takes them"
            if each.is_weighted
            else f"{each.name} has weights, and the model was exported for batches without them"
        )
    if missing := [key for key in each.keys if key not in leaf.keys]:
        raise KeyError(
            f"{each.name} lacks feature {missing[0]!r}; it has {', '.join(map(repr, leaf.keys))}"
        )
    if leaf.keys != each.keys:
        leaf = leaf.select(each.keys)
    values, lengths = np.asarray(leaf.values), np.asarray(leaf.lengths)
    weights = None if leaf.weights is None else np.asarray(leaf.weights)
    if len(set(leaf.strides)) > 1:
        raise ValueError(f"the features of {each.name} have different numbers of samples")
    by_key = lengths.reshape(len(each.keys), -1)
    offsets = np.zeros((len(each.keys), by_key.shape[1] + 1), np.int64)
    np.cumsum(by_key, axis=1, out=offsets[:, 1:])
    columns, first = [], 0
    for bags, starts, capacity in zip(by_key, offsets, leaf.capacities, strict=True):
        # A feature's ids lie at the beginning of its segment, of which the rest is padding.
        used = slice(first, first + int(starts[-1]))
        columns.append(
            Column(values[used], bags, starts, None if weights is None else weights[used])
        )
        first += capacity
    return columns


def packed(
    each: RaggedInput,
    columns: Sequence[Column],
    start: int,
    stop: int,
    samples: int,
    capacities: Sequence[int],
) -> list[np.ndarray]:
    """Return a program's ``values``, ``lengths`` and ``weights`` of some samples, padded.

    The samples are ``start`` to ``stop - 1``; the arrays are for ``samples`` samples.
    """
    values = np.zeros(sum(capacities), np.int32)
    lengths = np.zeros((len(columns), samples), np.int32)
    weights = np.zeros(values.size, np.float32) if each.is_weighted else None
    first = 0
    for column, bags, capacity in zip(columns, lengths, capacities, strict=True):
        used = slice(int(column.offsets[start]), int(column.offsets[stop]))
        end = first + used.stop - used.start
        values[first:end] = column.ids[used]
        bags[: stop - start] = column.lengths[start:stop]
        if weights is not None and column.weights is not None:
            weights[first:end] = column.weights[used]
        first += capacity
    # As unsigned numbers negative ids are too large, so one comparison finds both. Only then is the
    # bad id looked for.
    if (values.view(np.uint32) >= _limits(each, tuple(capacities))).any():
        check_ids(each, columns, start, stop)
    arrays = [values, lengths.reshape(-1)]
    return arrays if weights is None else [*arrays, weights]


# Cached, since every request of a batch size needs the same array.
@functools.lru_cache(maxsize=64)
def _limits(each: RaggedInput, capacities: tuple[int, ...]) -> np.ndarray:
    """Return the bound below which each position's id must be, uint32 ``[all capacities]``."""
    bounds = [feature.num_ids or INT32_BOUND for feature in each.features]
    return np.repeat(np.array(bounds, np.uint32), capacities)


def check_ids(each: RaggedInput, columns: Sequence[Column], start: int, stop: int) -> None:
    """Raise a ValueError if an id of samples ``start`` to ``stop - 1`` is outside of its table."""
    for feature, column in zip(each.features, columns, strict=True):
        used = slice(int(column.offsets[start]), int(column.offsets[stop]))
        lengths = column.lengths[start:stop]
        bad = find_bad_ids(
            feature.name, column.ids[used], lengths, feature.num_ids, first_sample=start
        )
        if bad is not None:
            raise ValueError(bad.message)


def _padded(array: np.ndarray, samples: int) -> np.ndarray:
    if len(array) == samples:
        return array
    padded = np.zeros((samples, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
