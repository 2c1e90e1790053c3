"""Fields of a `KeyedJaggedArray`: checks for its constructor, and fields of joined batches."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.bounds import INT32_BOUND, find_bad_ids, raw_column
from jaxrec.ragged.columns import (
    Column,
    bags_per_key,
    by_name,
    concrete,
    feature_names,
    floats,
    from_flat,
    integers,
    whole_number,
)
from jaxrec.ragged.jagged import BatchColumn, JaggedArray
from jaxrec.ragged.key_segments import concatenate, concatenate_weights
from jaxrec.ragged.packing import Packed, as_float32, checked_inverse, pack, pinned_capacities
from jaxrec.ragged.raw_ids import RawIds, as_raw, is_raw
from jaxrec.ragged.shared_bags import capacities_of_samples, demands_of_samples, ordered_inverse
from jaxrec.ragged.wide_ids import WideIds


def checked_fields(
    values: Any,
    lengths: Any,
    weights: Any,
    inverse_indices: Any,
    keys: Sequence[str],
    capacities: Sequence[int],
    strides: Sequence[int],
    slot_keys: Sequence[str] = (),
    sample_capacities: Sequence[int] = (),
) -> Packed:
    """Check the fields of a `KeyedJaggedArray`, or pack them if they lack ``capacities``."""
    keys = feature_names(keys)
    capacities = _sizes("capacities", capacities)
    strides = _sizes("strides", strides)
    sample_capacities = _sizes("sample_capacities", sample_capacities)
    inverse_indices = ordered_inverse(keys, inverse_indices)
    if keys and not capacities:
        packed = _packed(values, lengths, weights, inverse_indices, keys, strides)
        return packed._replace(slot_keys=_checked_slot_keys(slot_keys, keys))
    for name, sizes in (("capacities", capacities), ("sample_capacities", sample_capacities)):
        if len(sizes) != len(keys) and (sizes or name == "capacities"):
            raise ValueError(f"{len(sizes)} {name} for {len(keys)} keys {keys}")
    # Raw ids and wide ids know their own type; `_array` would make int32 of them.
    if not (is_raw(values) or isinstance(values, WideIds)):
        values = _array("values", "value", values, _numbers)
    lengths = _array("lengths", "length", lengths, integers)
    if lengths.ndim == 0:
        raise ValueError("lengths is a single number; expected [sum(strides)], one for each bag")
    if not keys and (values.size or lengths.size):
        raise ValueError(
            f"there are {values.size} values and {lengths.size} lengths, but keys=, the names of "
            "their features, is missing"
        )
    batch_axes, bags = lengths.shape[:-1], lengths.shape[-1]
    strides = bags_per_key(len(keys), bags, strides or None)
    total = sum(capacities)
    _check_shape("values", values, (*batch_axes, total), f"the capacities {capacities} of its keys")
    if weights is not None:
        weights = _array("weights", "weight", weights, floats)
        _check_shape("weights", weights, values.shape, "one for each value")
    if inverse_indices is not None:
        inverse_indices = _array("inverse_indices", "bag number", inverse_indices, integers)
        shape = (*batch_axes, len(keys), *inverse_indices.shape[-1:])
        _check_shape("inverse_indices", inverse_indices, shape, "[keys, batch]")
    return _checked_on_host(
        Packed(
            values,
            lengths,
            weights,
            inverse_indices,
            keys,
            capacities,
            strides,
            _checked_slot_keys(slot_keys, keys),
            sample_capacities if inverse_indices is not None else (),
        )
    )


def checked_columns(columns: Any) -> dict[str, JaggedArray]:
    """Check the types of columns, and return them as a dictionary by feature name."""
    columns = by_name("columns", columns)
    for key, column in columns.items():
        if not isinstance(column, JaggedArray):
            raise TypeError(
                f"feature {key!r} is {column!r:.60} ({type(column).__name__}); expected a "
                "JaggedArray; from_lists takes lists, from_dense dense arrays"
            )
        for name in ("values", "lengths"):
            if not hasattr(getattr(column, name), "shape"):
                raise TypeError(
                    f"feature {key!r}: {name} are {getattr(column, name)!r:.60}; expected an array"
                )
        if column.values.dtype != object and not _is_real(column.values):
            raise TypeError(
                f"feature {key!r}: values must be real numbers, not of type {column.values.dtype}"
            )
    return columns


def column_facts(
    columns: Mapping[str, JaggedArray], has_inverse: bool
) -> tuple[AnyArray | None, tuple[str, ...], tuple[int, ...]]:
    """Return ``inverse_indices``, ``slot_keys`` and ``sample_capacities`` of a batch of columns.

    With ``has_inverse`` the user gives ``inverse_indices``, and those of the columns are left out.
    """
    known = {key: column for key, column in columns.items() if isinstance(column, BatchColumn)}
    slot_keys = tuple(key for key, column in known.items() if column.are_slots)
    rows = {key: c.inverse_indices for key, c in known.items() if c.inverse_indices is not None}
    if has_inverse or not rows:
        return None, slot_keys, ()
    if bare := [key for key in columns if key not in rows]:
        raise ValueError(
            f"features {bare} have no inverse_indices, but others do; give inverse_indices=, the "
            "bag of each sample, for all"
        )
    sizes = {key: row.shape[-1] for key, row in rows.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the features have different numbers of samples: {sizes}")
    inverse = concatenate([row[..., None, :] for row in rows.values()], np.int32, axis=-2)
    sample_capacities = tuple(known[key].sample_capacity for key in columns)
    return inverse, slot_keys, sample_capacities if all(sample_capacities) else ()


def with_raw_ids(feature: str, column: JaggedArray) -> JaggedArray:
    """Pack checked host ids as `RawIds`, padded to the column's capacity."""
    values, lengths = concrete(feature, column.values), concrete(feature, column.lengths)
    ids = raw_column(feature, Column(values[: lengths.sum()], lengths)).values
    padded = np.pad(ids, (0, len(values) - len(ids)))
    return dataclasses.replace(column, values=as_raw(padded))


def joined(batches: Sequence[Any]) -> Packed:
    """Join the fields of batches of the same samples; raise a ValueError if they do not fit."""
    keys = _chain(batch.keys for batch in batches)
    for first, second in itertools.combinations(batches, 2):
        if shared := sorted(set(first.keys) & set(second.keys)):
            raise ValueError(f"keys {shared} are in more than one of the batches")
    inverse = [b.inverse_indices for b in batches if b.inverse_indices is not None]
    if 0 < len(inverse) < len(batches):
        raise ValueError("some of the batches have inverse indices and some have none")
    if len({batch.batch_size for batch in batches}) > 1:
        sizes = [batch.batch_size for batch in batches]
        raise ValueError(f"the batches have different numbers of samples: {sizes}")
    if len({batch.lengths.shape[:-1] for batch in batches}) > 1:
        shapes = [batch.lengths.shape for batch in batches]
        raise ValueError(
            "some of the batches lie over a mesh and some do not: their lengths have the shapes "
            f"{shapes}; concatenate them all before jaxrec.mesh.shard_batch, or all after it"
        )
    sample_capacities = [batch.sample_capacities for batch in batches]
    return Packed(
        concatenate([batch.values for batch in batches], np.int32),
        concatenate([batch.lengths for batch in batches], np.int32),
        concatenate_weights([batch.weights for batch in batches]),
        concatenate(inverse, np.int32, axis=-2) if inverse else None,
        keys,
        _chain(batch.capacities for batch in batches),
        _chain(batch.strides for batch in batches),
        _chain(batch.slot_keys for batch in batches),
        _chain(sample_capacities) if all(sample_capacities) else (),
    )


def _chain(parts: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(parts))


def present(slot_keys: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that are slot keys, each once, in the order of ``keys``."""
    return tuple(dict.fromkeys(key for key in keys if key in slot_keys)) if slot_keys else ()


def _packed(
    values: Any,
    lengths: Any,
    weights: Any,
    inverse_indices: Any,
    keys: tuple[str, ...],
    strides: tuple[int, ...],
) -> Packed:
    """Pack TorchRec's arrays, which have no padding."""
    if any(_has_no_values(array) for array in (values, lengths, weights)):
        raise TypeError(
            "a KeyedJaggedArray of traced arrays needs capacities= and strides=, the capacity "
            "and the number of bags of each key: shapes are fixed when a program is compiled"
        )
    return pack(
        keys,
        from_flat(keys, values, lengths, weights, strides or None),
        varied_strides=bool(strides),
        inverse_indices=inverse_indices,
        id_bits=64 if is_raw(values) else 32,
    )


def _checked_on_host(fields: Packed) -> Packed:
    """Check the fields that lie on the host and make them 32 bits wide."""
    values, lengths, weights, inverse, keys, capacities, strides, _, given = fields
    # One check of the whole batch passes nearly every batch. With hundreds of keys, a few NumPy
    # calls per key would take longer than packing.
    counts = _known_lengths(fields)
    if counts is not None and not _is_sound(fields, counts):
        _check_each_key(fields, counts)
    if isinstance(lengths, np.ndarray):
        lengths = lengths.astype(np.int32, copy=False)
    if isinstance(values, np.ndarray) and not is_raw(values):
        values = _narrow(values, is_checked=counts is not None)
    if isinstance(weights, np.ndarray):
        with np.errstate(over="ignore"):  # only padding can overflow here, and it is never read
            weights = weights.astype(np.float32, copy=False)
    if isinstance(inverse, np.ndarray):
        for index in np.ndindex(inverse.shape[:-2]):
            checked_inverse(keys, strides, inverse[index])
        inverse = inverse.astype(np.int32, copy=False)
        if isinstance(lengths, np.ndarray):
            demands = demands_of_samples(lengths, inverse, strides)
            # Capacities given with other arrays (by `dataclasses.replace`) may be too small now.
            if not given or any(map(operator.lt, given, demands)):
                given = capacities_of_samples(lengths, inverse, strides, capacities)
    return fields._replace(
        values=values,
        lengths=lengths,
        weights=weights,
        inverse_indices=inverse,
        sample_capacities=given,
    )


def _known_lengths(fields: Packed) -> np.ndarray | None:
    """Return the lengths on the host if values or weights can be checked with them, else None."""
    lengths = fields.lengths
    if isinstance(lengths, np.ndarray):
        return lengths
    # Lengths on a device are copied only if values or weights on the host need them: a copy waits
    # for the device.
    is_known = isinstance(lengths, jax.Array) and not isinstance(lengths, jax.core.Tracer)
    if not is_known or not lengths.is_fully_addressable:
        return None
    has_host = any(isinstance(array, np.ndarray) for array in (fields.values, fields.weights))
    return np.asarray(lengths) if has_host else None


def _is_sound(fields: Packed, lengths: np.ndarray) -> bool:
    """Return whether one check of all keys proves that `_check_each_key` would pass."""
    # False proves nothing. Weights, raw ids and keys without bags are left to the other check, and
    # a bad id may lie in the padding, which may hold anything.
    values, capacities = fields.values, fields.capacities
    if fields.weights is not None or is_raw(values) or 0 in fields.strides or not lengths.size:
        return False
    if not (isinstance(values, np.ndarray) and values.dtype.kind in "iu"):
        return False
    # Each length is checked before their sum, which could wrap around.
    if lengths.min() < 0 or lengths.max() > max(capacities) or sum(capacities) >= INT32_BOUND:
        return False
    first_bags = np.cumsum((0, *fields.strides[:-1]))
    if (np.add.reduceat(lengths, first_bags, axis=-1, dtype=np.int64) > capacities).any():
        return False
    return values.size == 0 or bool(values.min() >= 0 and values.max() < INT32_BOUND)


def _check_each_key(fields: Packed, lengths: np.ndarray) -> None:
    """Check the lengths, ids and weights that a batch uses, key by key."""
    values, weights = fields.values, fields.weights
    for index in np.ndindex(lengths.shape[:-1]):  # one, unless batches are stacked
        bag = id_ = 0
        for key, capacity, stride in zip(
            fields.keys, fields.capacities, fields.strides, strict=True
        ):
            column_lengths = lengths[index][bag : bag + stride]
            used = slice(id_, id_ + _count(key, column_lengths, capacity))
            if isinstance(values, RawIds):
                raw_column(key, Column(values[index][used], column_lengths))
            elif isinstance(values, np.ndarray) and values.dtype.kind in "iuO":
                bad = find_bad_ids(key, values[index][used], column_lengths, None)
                if bad is not None:
                    raise ValueError(bad.message)
            if isinstance(weights, np.ndarray):
                as_float32(key, weights[index][used], column_lengths)
            bag, id_ = bag + stride, id_ + capacity


def _checked_slot_keys(slot_keys: Any, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the slot keys in the order of the keys; raise an error if one is not a key."""
    if isinstance(slot_keys, str):
        raise TypeError(f"slot_keys is the string {slot_keys!r}; expected a sequence of keys")
    if unknown := [key for key in slot_keys if key not in keys]:
        raise ValueError(f"slot_keys names {unknown}, but the keys are {list(keys)}")
    return present(slot_keys, keys)


def _count(key: str, lengths: np.ndarray, capacity: int) -> int:
    """Return the number of ids of a key; raise a ValueError if lengths are bad or exceed it."""
    if lengths.size == 0:
        return 0
    if lengths.min() < 0:
        sample = int(np.argmax(lengths < 0))
        raise ValueError(
            f"feature {key!r}, sample {sample} has the negative length {lengths[sample]}"
        )
    longest = int(lengths.max())  # checked before the sum, which could wrap around
    count = longest if longest > capacity else int(lengths.sum(dtype=np.int64))
    pinned_capacities([key], [count], [capacity])
    return count


def _numbers(where: str, what: str, array: Any) -> np.ndarray:
    """Return an array as integers; a floating point array as it is."""
    is_float = isinstance(array, np.ndarray) and jax.dtypes.issubdtype(array.dtype, np.floating)
    return (floats if is_float else integers)(where, what, array)


def _narrow(values: np.ndarray, is_checked: bool) -> np.ndarray:
    """Cast values to at most 32 bits. With ``is_checked``, all ids outside the padding fit."""
    if values.dtype.kind not in "iuO":
        return values.astype(np.float32) if values.dtype == np.float64 else values
    if not (is_checked and values.dtype.kind in "iu") and values.dtype != np.int32 and values.size:
        bounds = np.iinfo(np.int32)
        if values.min() < bounds.min or values.max() > bounds.max:
            extreme = max(int(values.max()), int(values.min()), key=abs)
            raise ValueError(f"values: {extreme} does not fit int32, the type of ids on a device")
    return values.astype(np.int32, copy=False)


def _array(name: str, what: str, array: Any, convert: Callable[..., np.ndarray]) -> AnyArray:
    """Check a JAX array and cast its integers to int32; pass any other array to ``convert``."""
    if not _is_of_jax(array):
        return convert(name, what, array)
    only_integers = convert is integers
    if not (jnp.issubdtype(array.dtype, np.integer) if only_integers else _is_real(array)):
        kind = "integers" if only_integers else "real numbers"
        raise TypeError(f"{name}: {what}s must be {kind}, not of type {array.dtype}")
    is_other = jnp.issubdtype(array.dtype, np.integer) and array.dtype != np.int32
    return array.astype(np.int32) if is_other and isinstance(array, jax.Array) else array


def _check_shape(name: str, array: AnyArray | WideIds, wanted: tuple[int, ...], why: str) -> None:
    if tuple(array.shape) != wanted:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; expected {wanted}, {why}")


def _is_real(array: Any) -> bool:
    """Return whether an array holds real numbers; bools are not."""
    return any(jnp.issubdtype(array.dtype, kind) for kind in (np.integer, np.floating))


def _is_of_jax(array: Any) -> bool:
    """Return whether an array is JAX's: on a device, traced, or a `jax.ShapeDtypeStruct`."""
    return isinstance(array, jax.Array | jax.ShapeDtypeStruct)


def _has_no_values(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct)


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    if isinstance(sizes, str | Mapping) or not isinstance(sizes, Iterable):
        raise TypeError(f"{name} is {sizes!r}; expected a number for each key, in order")
    sizes = tuple(sizes)
    if set(map(type, sizes)) <= {int}:  # the common case, without a Python call per key
        return sizes
    return tuple(whole_number(name, size) for size in sizes)
