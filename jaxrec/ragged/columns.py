"""A feature's host data as one flat column."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.ragged.raw_ids import is_raw, refuse

# End of the error messages for ids that are not row indices: what to do with them.
WIDE_IDS = (
    "pack raw ids with id_bits=64 for jaxrec.tier.ahead, or make row indices of them with "
    "jaxrec.ragged.hash_ids(ids, num_embeddings)"
)


class Column(NamedTuple):
    """A ragged column on the host, without padding.

    Attributes:
        values: ``[ids]`` of an integer type, or object where Python ints exceed 64 bits. With
            ``id_bits=64`` also strings or bytes, in NumPy or Arrow.
        lengths: ``[bags]`` int64, summing to the number of ids.
        weights: ``[ids]`` floating point, or None.
    """

    values: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None


def from_dense(
    feature: str, array: Any, weights: Any | None = None, *, id_bits: int = 32
) -> Column:
    """Make a column of a dense array: ``[batch]`` ids, or ``[batch, k]`` with k per sample."""
    array = _ids(f"feature {feature!r}", array, id_bits)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"feature {feature!r} has ids of shape {array.shape}; expected [batch] or [batch, k]"
        )
    lengths = np.full(array.shape[0], 1 if array.ndim == 1 else array.shape[1], np.int64)
    if weights is None:
        return Column(array.reshape(-1), lengths)
    weights = floats(f"feature {feature!r}", "weight", weights)
    if weights.shape != array.shape:
        raise ValueError(
            f"feature {feature!r} has ids of shape {array.shape} but weights of shape "
            f"{weights.shape}; each id needs one weight"
        )
    return Column(array.reshape(-1), lengths, weights.reshape(-1))


def from_flat(
    keys: Sequence[str],
    values: Any,
    lengths: Any,
    weights: Any | None = None,
    strides: Sequence[int] | None = None,
    *,
    id_bits: int = 32,
) -> list[Column]:
    """Return the columns of TorchRec's key-major arrays, as views.

    ``values`` and ``weights`` are ``[ids]``, ``lengths`` ``[sum(strides)]``, without padding.
    """
    values, lengths = _ids("values", values, id_bits), integers("lengths", "length", lengths)
    for name, array in (("values", values), ("lengths", lengths)):
        if array.ndim != 1:
            raise ValueError(f"{name} has shape {array.shape}; expected one dimension")
    strides = bags_per_key(len(keys), lengths.size, strides)
    if (negative := np.flatnonzero(lengths < 0)).size:
        bag = int(negative[0])
        raise ValueError(f"{_bag(keys, strides, bag)} has the negative length {lengths[bag]}")
    if (beyond := np.flatnonzero(lengths > values.size)).size:  # their sum could wrap around
        bag = int(beyond[0])
        raise ValueError(
            f"{_bag(keys, strides, bag)} has the length {lengths[bag]}, but there are "
            f"{values.size} values in all"
        )
    lengths = lengths.astype(np.int64)
    if lengths.sum() != values.size:
        raise ValueError(f"lengths sum to {lengths.sum()}, but there are {values.size} values")
    if weights is not None:
        weights = floats("weights", "weight", weights)
        if weights.shape != values.shape:
            raise ValueError(
                f"values have shape {values.shape} but weights {weights.shape}; "
                "each id needs one weight"
            )
    # Views, not copies: packing copies each column once, into its segment.
    bag_ends = np.cumsum(strides, dtype=np.int64)
    id_ends = np.concatenate([[0], np.cumsum(lengths)])[bag_ends]
    return [
        Column(values[ids], lengths[bags], None if weights is None else weights[ids])
        for bags, ids in zip(_slices(bag_ends), _slices(id_ends), strict=True)
    ]


def lengths_of_offsets(
    keys: Sequence[str], offsets: Any, strides: Sequence[int] | None
) -> np.ndarray:
    """Return the lengths of bags whose offsets are ``[bags + 1]``, ascending from 0."""
    offsets = integers("offsets", "offset", offsets)
    if offsets.ndim != 1 or offsets.size == 0:
        raise ValueError(f"offsets has shape {offsets.shape}; expected [bags + 1]")
    if offsets[0] != 0:
        raise ValueError(f"offsets start at {offsets[0]}; expected 0")
    if (descends := np.flatnonzero(offsets[1:] < offsets[:-1])).size:
        bag = int(descends[0])
        where = _bag(keys, bags_per_key(len(keys), offsets.size - 1, strides), bag)
        raise ValueError(f"{where}: offsets descend from {offsets[bag]} to {offsets[bag + 1]}")
    if offsets[-1] >= 2**63:
        raise ValueError(f"offsets end at {offsets[-1]}; expected the number of values")
    return np.diff(offsets.astype(np.int64))


def bags_per_key(num_keys: int, bags: int, strides: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of bags of each key: ``strides``, checked. None: the same for all keys."""
    if strides is None:
        if bags % num_keys if num_keys else bags:
            raise ValueError(
                f"{bags} lengths do not divide among {num_keys} keys; give strides= if the keys "
                "have different numbers of bags"
            )
        return (bags // num_keys,) * num_keys if num_keys else ()
    if not isinstance(strides, Sequence | np.ndarray):
        raise TypeError(f"strides is {strides!r}; expected the number of bags of each key")
    strides = tuple(whole_number("strides", stride) for stride in strides)
    if len(strides) != num_keys or sum(strides) != bags or min(strides, default=0) < 0:
        raise ValueError(
            f"strides {strides} do not fit {num_keys} keys and {bags} lengths: they must give "
            "the number of bags of each key"
        )
    return strides


def _ids(where: str, array: Any, id_bits: int) -> np.ndarray:
    """Return ids on the host: integers, or with ``id_bits=64`` values of any type."""
    if id_bits == 32:
        return integers(where, "id", array)
    found = concrete(where, array)
    if found.dtype.kind in "iu" or isinstance(array, np.ndarray):
        return found
    # From a list NumPy would turn integers among strings into strings, and integers beyond 63 bits
    # into floats. As objects they stay what they are.
    try:
        return np.asarray(array, object)
    except ValueError as error:
        raise TypeError(f"{where}: expected an array of ids ({error})") from error


def integers(where: str, what: str, array: Any) -> np.ndarray:
    """Return ``array`` as NumPy integers, of type object where they exceed 64 bits."""
    array = concrete(where, array)
    if array.dtype.kind in "iu":
        return array
    if array.size == 0:  # NumPy makes floats of an empty list
        return array.astype(np.int64)
    if array.dtype.kind == "O" and all(map(is_integer, set(map(type, array.flat)))):
        return array
    hint = f"; {WIDE_IDS}" if what == "id" and array.dtype.kind in "USTO" else ""
    raise TypeError(f"{where}: {what}s must be integers, not of type {array.dtype}{hint}")


def floats(where: str, what: str, array: Any) -> np.ndarray:
    """Return ``array`` as a NumPy array of real numbers."""
    array = concrete(where, array)
    if array.dtype.kind in "iu":
        return array
    if not jax.dtypes.issubdtype(array.dtype, np.floating):
        raise TypeError(f"{where}: {what}s must be real numbers, not of type {array.dtype}")
    return array


def concrete(where: str, array: Any) -> np.ndarray:
    """Return ``array`` on the host, in the machine's byte order."""
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{where}: the array is traced, but batches are packed and checked on the host, "
            "outside jit"
        )
    # `np.asarray` would drop the mask and pack what lies under it.
    if np.ma.is_masked(array):
        raise ValueError(
            f"{where}: {np.ma.count_masked(array)} elements are masked, and a mask does not go "
            "into a batch; leave them out (from_lists takes array.compressed() of each sample) or "
            "fill them (array.filled(0))"
        )
    try:
        array = np.asarray(array)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: expected an array of numbers ({error})") from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def numbers(where: str, array: Any) -> np.ndarray:
    """Return ``array`` on the host, in the type that JAX would give it; integers must fit."""
    if is_raw(array):
        refuse(where)
    array = concrete(where, array)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise TypeError(
            f"{where} is of type {array.dtype}; a batch has arrays of numbers. Map strings and "
            "objects to numbers on the host"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype and jnp.issubdtype(dtype, np.integer) and array.size:
        bounds = np.iinfo(dtype)
        least, most = int(array.min()), int(array.max())
        if least < bounds.min or most > bounds.max:
            wrong = least if least < bounds.min else most
            raise ValueError(
                f"{where}: {wrong} does not fit {dtype}, the widest integer that devices take; map "
                "such ids to rows on the host, or split them with jaxrec.ragged.split_int64"
            )
    return array.astype(dtype, copy=False)


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an int; raise a TypeError if it is not an integer."""
    if not is_integer(type(value)):
        raise TypeError(f"{name}: {value!r} is not an integer")
    return int(value)


def feature_names(keys: Any) -> tuple[str, ...]:
    """Return ``keys`` as a tuple; raise a TypeError if they are not names of features."""
    if isinstance(keys, str):
        raise TypeError(f"keys is the string {keys!r}; expected a sequence of names, [{keys!r}]")
    if not isinstance(keys, Iterable):
        raise TypeError(f"keys is {keys!r}; expected a sequence of names")
    keys = tuple(keys)
    if wrong := [key for key in keys if not isinstance(key, str)]:
        raise TypeError(f"keys are names of features, strings, but {wrong[0]!r:.60} is among them")
    return keys


def by_name(name: str, data: Any) -> dict[str, Any]:
    """Return a mapping as a dictionary, None as an empty one; raise a TypeError for others."""
    if not isinstance(data, Mapping | None):
        raise TypeError(
            f"{name} is {data!r:.60} ({type(data).__name__}); expected a mapping by the names of "
            "features"
        )
    return dict(data or {})


def is_integer(kind: type) -> bool:
    """Return whether values of a type are integers; bools are not."""
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool)


def is_real(kind: type) -> bool:
    """Return whether values of a type are real numbers; bools are not."""
    return is_integer(kind) or issubclass(kind, float | np.floating)


def sample_of(lengths: np.ndarray, position: int) -> int:
    """Return the sample of the id at ``position`` in a column, for an error message."""
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def check_weight_lengths(feature: str, lengths: np.ndarray, of_weights: np.ndarray) -> None:
    """Raise a ValueError if a sample has more or fewer weights than ids."""
    if of_weights.size != lengths.size:
        raise ValueError(
            f"feature {feature!r} has {lengths.size} samples but weights for {of_weights.size}"
        )
    if (differs := np.flatnonzero(of_weights != lengths)).size:
        sample = differs[0]
        raise ValueError(
            f"feature {feature!r}, sample {sample}: {lengths[sample]} ids but "
            f"{of_weights[sample]} weights; each id needs one weight"
        )


def _slices(ends: np.ndarray) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise([0, *ends.tolist()])]


def _bag(keys: Sequence[str], strides: Sequence[int], bag: int) -> str:
    """Name the feature and the sample of a bag in the key-major layout."""
    ends = np.cumsum(strides)
    key = int(np.searchsorted(ends, bag, side="right"))
    return f"feature {keys[key]!r}, sample {bag - (ends[key] - strides[key])}"
