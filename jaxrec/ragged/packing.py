"""Packing of host columns into the arrays of one padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import numpy as np
from jaxtyping import Array, Int, Int32

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.bounds import BoundsMode, check_columns
from jaxrec.ragged.capacity import CapacityMemory, capacity_for
from jaxrec.ragged.columns import Column, by_name, feature_names, integers, sample_of, whole_number
from jaxrec.ragged.raw_ids import as_raw
from jaxrec.ragged.shared_bags import capacities_of_samples, demands_of_samples, ordered_inverse


class Packed(NamedTuple):
    """The fields of a `KeyedJaggedArray`."""

    values: AnyArray
    lengths: AnyArray
    weights: AnyArray | None
    inverse_indices: AnyArray | None
    keys: tuple[str, ...]
    capacities: tuple[int, ...]
    strides: tuple[int, ...]
    slot_keys: tuple[str, ...] = ()
    sample_capacities: tuple[int, ...] = ()


class PackOptions(TypedDict, total=False):
    """Options of the constructors of a `KeyedJaggedArray` from host data.

    Attributes:
        inverse_indices: The bag of each sample: ``[keys, batch]`` integers, or ``[batch]`` for each
            feature by name, or TorchRec's pair ``(names, [keys, batch])``. Features may then have
            different numbers of bags. Without it bag ``b`` is sample ``b``'s.
        capacities: Capacity of some keys by name, or of all keys in order. Other keys get
            `capacity_for` their ids. `jaxrec.Packer` chooses capacities for a whole run.
        sample_capacities: Capacity of keys in `KeyedJaggedArray.expanded`, where samples share
            bags: of some keys by name, or of all keys in order. Other keys get their capacity,
            doubled until it holds the ids of all samples. A loop that sets ``capacities`` should
            set these too; otherwise a batch with more sharing compiles again. `jaxrec.Packer`
            chooses both.
        bounds: Number of rows of each feature's table, by the feature's name; ids must be below it.
            Ids of a feature without a bound must fit int32.
        bounds_mode: ``"raise"`` on an id outside (the default), ``"clamp"`` it to 0 with one
            warning that counts such ids, or ``"ignore"``: set it to 0 without a warning. Negative
            ids, -1 among them, are outside too.
        id_bits: 32 (the default): ids are row indices, from 0 to 2**31 - 1. 64: ids are raw, for
            `jaxrec.tier.ahead`, and the batch stays on the host. A raw id is any 64-bit integer but
            -1 (2**64 - 1), signed or not; ``values`` are int64 and keep its bits. Strings and bytes
            become 64-bit hashes (`hash_ids`); the hash -1 becomes -2. The ids of one feature are
            all integers, all strings or all bytes; features may differ. Ids of a feature in
            ``bounds`` must be integers, checked against its bound of up to 2**63.
    """

    inverse_indices: Any | None
    capacities: Mapping[str, int] | Sequence[int] | None
    sample_capacities: Mapping[str, int] | Sequence[int] | None
    bounds: Mapping[str, int] | None
    bounds_mode: BoundsMode
    id_bits: Literal[32, 64]


def id_bits_of(options: PackOptions) -> int:
    """Return the option ``id_bits``; raise a ValueError if it is neither 32 nor 64."""
    id_bits = options.get("id_bits", 32)
    if id_bits not in (32, 64):
        raise ValueError(f"id_bits is {id_bits!r}; expected 32 or 64")
    return id_bits


def pack(
    keys: Sequence[str],
    columns: Sequence[Column],
    *,
    varied_strides: bool = False,
    inverse_indices: Any | None = None,
    capacities: Mapping[str, int] | Sequence[int] | CapacityMemory | None = None,
    sample_capacities: Mapping[str, int] | Sequence[int] | None = None,
    bounds: Mapping[str, int] | None = None,
    bounds_mode: str = "raise",
    id_bits: int = 32,
) -> Packed:
    """Check columns and pack each into its own segment of static capacity.

    Takes `PackOptions`. A `CapacityMemory` in place of ``capacities`` chooses these and
    ``sample_capacities``. With ``varied_strides`` columns may differ in their number of bags
    without ``inverse_indices``.
    """
    keys = feature_names(keys)
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise ValueError(f"keys must differ, but {sorted(repeated)} occur more than once in {keys}")
    strides = tuple(column.lengths.size for column in columns)
    if inverse_indices is not None:
        inverse_indices = checked_inverse(keys, strides, inverse_indices)
    elif not varied_strides and len(set(strides)) > 1:
        raise ValueError(
            "features have different numbers of samples: "
            + ", ".join(f"{key!r} {stride}" for key, stride in zip(keys, strides, strict=True))
            + "; pass inverse_indices= (the bag of each sample) if bags are shared by samples"
        )
    weighted = [column.weights is not None for column in columns]
    if any(weighted) and not all(weighted):
        bare = [key for key, has in zip(keys, weighted, strict=True) if not has]
        raise ValueError(f"features {bare} have no weights, but others do; give all or none")

    id_type = np.int64 if id_bits == 64 else np.int32
    bounds = by_name("bounds", bounds)
    by_key = dict(zip(keys, columns, strict=True))
    # Ids are checked in the type they came in. A cast to int32 would turn 2**40 into a valid 0.
    columns = list(check_columns(by_key, bounds, bounds_mode, id_bits).values())
    needed = [column.values.size for column in columns]
    if isinstance(capacities, CapacityMemory):
        if inverse_indices is not None:
            # The number of distinct bags varies from batch to batch, and each number is a shape
            # that compiles. Padded to one bag per sample it is always the same.
            columns = [_with_bags(column, inverse_indices.shape[1]) for column in columns]
            strides = tuple(column.lengths.size for column in columns)
        of_bags = [column.lengths for column in columns]
        capacities, sample_capacities = capacities.of_batch(keys, of_bags, inverse_indices)
    capacities = pinned_capacities(keys, needed, capacities)
    lengths = _joined([column.lengths for column in columns], np.int32)
    of_samples: tuple[int, ...] = ()
    if inverse_indices is not None:
        of_samples = pinned_sample_capacities(
            keys, lengths, inverse_indices, strides, capacities, sample_capacities
        )
    weights = None
    if any(weighted):
        each = zip(keys, columns, strict=True)
        narrow = [as_float32(key, column.weights, column.lengths) for key, column in each]
        weights = _padded(narrow, capacities, np.float32)
    return Packed(
        values=as_raw(_padded([column.values for column in columns], capacities, id_type)),
        lengths=lengths,
        weights=weights,
        inverse_indices=inverse_indices,
        keys=keys,
        capacities=capacities,
        strides=strides,
        sample_capacities=of_samples,
    )


def _with_bags(column: Column, count: int) -> Column:
    """Append empty bags to a column until it has ``count`` bags."""
    missing = max(0, count - column.lengths.size)
    return column._replace(lengths=np.pad(column.lengths, (0, missing)))


def checked_values(
    keys: Sequence[str],
    columns: Sequence[Column],
    capacities: Sequence[int],
    bounds: Mapping[str, int],
    bounds_mode: str,
    id_bits: int,
) -> np.ndarray | None:
    """Return the columns' values, repaired and padded; None if no id needed repair."""
    if len(set(keys)) < len(keys):
        raise ValueError(f"keys occur more than once in {tuple(keys)}")
    by_key = dict(zip(keys, columns, strict=True))
    checked = check_columns(by_key, by_name("bounds", bounds), bounds_mode, id_bits)
    if all(checked[key] is by_key[key] for key in keys):
        return None
    values = [column.values for column in checked.values()]
    repaired = _padded(values, capacities, values[0].dtype)
    return as_raw(repaired) if id_bits == 64 else repaired


def pinned_capacities(
    keys: Sequence[str], needed: Sequence[int], capacities: Mapping[str, int] | Sequence[int] | None
) -> tuple[int, ...]:
    """Return each key's capacity: the given one, which must suffice, or `capacity_for` its ids."""
    if not isinstance(capacities, Mapping | Sequence | np.ndarray | None):
        raise TypeError(
            f"capacities is {capacities!r}; expected capacities by name, {{name: capacity}}, or "
            "one for each key in order"
        )
    if capacities is None:
        capacities = {}
    if not isinstance(capacities, Mapping):
        if len(capacities) != len(keys):
            raise ValueError(f"{len(capacities)} capacities for {len(keys)} keys {tuple(keys)}")
        capacities = dict(zip(keys, capacities, strict=True))
    if unknown := [key for key in capacities if key not in keys]:
        raise ValueError(f"capacities name {unknown}, but the keys are {list(keys)}")
    pinned = tuple(
        whole_number(f"the capacity of feature {key!r}", capacities.get(key, capacity_for(count)))
        for key, count in zip(keys, needed, strict=True)
    )
    for key, count, capacity in zip(keys, needed, pinned, strict=True):
        if capacity < count:
            raise ValueError(
                f"feature {key!r} has {count} ids, but its capacity is {capacity}; "
                f"give it at least {count} (on the ladder: {capacity_for(count)})"
            )
    # Devices index the values with int32, however wide the ids are.
    if sum(pinned) >= 2**31:
        raise ValueError(f"a batch holds fewer than 2**31 ids, but capacities sum to {sum(pinned)}")
    return pinned


def pinned_sample_capacities(
    keys: Sequence[str],
    lengths: np.ndarray,
    inverse: np.ndarray,
    strides: Sequence[int],
    capacities: Sequence[int],
    given: Mapping[str, int] | Sequence[int] | None,
) -> tuple[int, ...]:
    """Return the capacity of each key in `KeyedJaggedArray.expanded`."""
    of_samples = capacities_of_samples(lengths, inverse, strides, capacities)
    if given is None:
        return of_samples
    if isinstance(given, Mapping):
        given = dict(zip(keys, of_samples, strict=True)) | dict(given)
    try:
        return pinned_capacities(keys, demands_of_samples(lengths, inverse, strides), given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"sample_capacities, the ids of all samples: {error}") from None


def _padded(
    arrays: Sequence[np.ndarray], capacities: Sequence[int], dtype: np.typing.DTypeLike
) -> np.ndarray:
    """Put each array at the front of its segment, and zeros behind it."""
    # Zero is an id of every table: code that forgets about padding still reads a row that exists.
    padded = np.zeros(sum(capacities), dtype)
    start = 0
    for array, capacity in zip(arrays, capacities, strict=True):
        padded[start : start + array.size] = array
        start += capacity
    return padded


def as_float32(feature: str, weights: Any, lengths: np.ndarray) -> np.ndarray:
    """Return a column's weights as float32; they must be finite."""
    with np.errstate(over="ignore"):
        narrow = weights.astype(np.float32, copy=False)
    if not (finite := np.isfinite(narrow)).all():
        position = int(np.argmin(finite))
        raise ValueError(
            f"feature {feature!r}, sample {sample_of(lengths, position)}: weight "
            f"{weights[position]} is not finite in float32, the type of weights; one such weight "
            "would spoil every row of its batch"
        )
    return narrow


def _joined(arrays: Sequence[np.ndarray], dtype: np.typing.DTypeLike) -> np.ndarray:
    # The empty array is for a batch without keys: NumPy concatenates one array or more.
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")


def checked_inverse(keys: Sequence[str], strides: Sequence[int], inverse: Any) -> np.ndarray:
    """Return ``inverse_indices`` as ``[keys, batch]`` int32; raise if one names no bag."""
    inverse = integers("inverse_indices", "bag number", ordered_inverse(keys, inverse))
    if inverse.ndim != 2 or inverse.shape[0] != len(keys):
        raise ValueError(
            f"inverse_indices has shape {inverse.shape}; expected [{len(keys)} keys, batch]"
        )
    wrong = (inverse < 0) | (inverse >= np.array(strides)[:, None])
    if wrong.any():
        key, sample = np.argwhere(wrong)[0]
        raise ValueError(
            f"inverse_indices of feature {keys[key]!r}, sample {sample} is {inverse[key, sample]}, "
            f"but the feature has {strides[key]} bags"
        )
    return inverse.astype(np.int32)


def check_indices(indices: Int[AnyArray, " selected"], count: int) -> None:
    """Raise an IndexError for indices outside ``[0, count)``; traced ones pass."""
    if isinstance(indices, jax.core.Tracer):
        return
    indices = np.asarray(indices)
    if (wrong := np.flatnonzero((indices < 0) | (indices >= count))).size:
        raise IndexError(
            f"indices[{wrong[0]}] is {indices[wrong[0]]}; expected 0 to {count - 1}, one of "
            f"{count} rows"
        )


def checked_capacities(
    keys: Sequence[str],
    lengths: Int32[Array, "keys rows"],
    capacities: Mapping[str, int] | Sequence[int] | None,
) -> tuple[int, ...]:
    """Return `pinned_capacities` for ``[keys, rows]`` lengths; traced ones pass any capacity."""
    if not isinstance(lengths, jax.core.Tracer):
        return pinned_capacities(keys, np.asarray(lengths.sum(axis=1)).tolist(), capacities)
    if capacities is None:
        raise TypeError("a static capacity= is needed under jit")
    return pinned_capacities(keys, [0] * len(keys), capacities)
