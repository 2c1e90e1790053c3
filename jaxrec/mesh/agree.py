"""Values that several processes agree on; a single process agrees with itself."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrec.mesh.processes import losses_first
from jaxrec.ragged.capacity import capacity_for

Result = TypeVar("Result")

# Bytes of each process that `gather_rows` sends at once.
_BYTES_AT_ONCE = 1 << 24


def require_same(what: str, facts: Mapping[str, str]) -> None:
    """Raise a ValueError in all processes unless all have the same facts on ``what``, by name."""
    if jax.process_count() == 1:
        return
    texts = gather_texts(json.dumps(dict(facts)))
    for process, text in enumerate(texts):
        theirs = json.loads(text)
        first = json.loads(texts[0])
        for name in [*first, *theirs]:
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"the {what} differs between processes: process 0 has "
                    f"{name!r}: {first.get(name)}, process {process} has "
                    f"{name!r}: {theirs.get(name)}; make it alike in all of them, say by sending "
                    "it to all from one"
                )


@losses_first()
def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes; every process calls this."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = gather_numbers([data.size])[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


@losses_first()
def gather_numbers(numbers: Sequence[int]) -> np.ndarray:
    """Return the numbers of all processes, ``[processes, n]``; every process calls this."""
    gathered = multihost_utils.process_allgather(np.asarray(numbers, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), -1)


def on_host(array: Array | np.ndarray) -> np.ndarray:
    """Return the parts of an array on this process's devices, in the order of the first axis."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


@losses_first()
def of_all_processes(values: np.ndarray) -> np.ndarray:
    """Return the values of all processes, ``[processes, ...]``; every process calls this.

    The values have equal shapes on all processes.
    """
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values)).reshape(-1, *values.shape)


def gather_ids(ids: np.ndarray) -> list[np.ndarray]:
    """Return the 64-bit ids of each process, which may have different numbers of them.

    Every process calls this.
    """
    return gather_id_lists([ids])[0]


def gather_id_lists(lists: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return for each of several lists of 64-bit ids, int64 ``[n]``, the ids of each process.

    Every process calls this with equally many lists, or `fail_together` in its place.
    """
    if jax.process_count() == 1:
        return [[ids] for ids in lists]
    sizes = _gather_sizes([ids.size for ids in lists])
    # As 32-bit words, since JAX has no 64-bit integers by default; on a ladder of sizes.
    words = np.zeros((capacity_for(int(sizes.sum(axis=1).max())), 2), np.uint32)
    joined = np.concatenate([np.zeros(0, np.int64), *lists])
    words[: joined.size] = joined.view(np.uint32).reshape(-1, 2)
    gathered = of_all_processes(words)
    result: list[list[np.ndarray]] = [[] for _ in lists]
    for of_process, of_lists in zip(gathered, sizes, strict=True):
        ids = np.ascontiguousarray(of_process).view(np.int64)[:, 0]
        parts = np.split(ids[: of_lists.sum()], np.cumsum(of_lists)[:-1])
        for ids_of_list, part in zip(result, parts, strict=True):
            ids_of_list.append(part)
    return result


def gather_rows(rows: np.ndarray, error: Exception | None = None) -> list[np.ndarray]:
    """Return the rows of each process, ``[n, ...]``, each with an ``n`` of its own.

    Every process calls this. One with an error gives any rows and raises it, and so all do.
    """
    if jax.process_count() == 1:
        raise_together(error)
        return [rows]
    sizes = _gather_sizes([len(rows)], error)[:, 0]
    row_bytes = max(1, rows.dtype.itemsize * int(np.prod(rows.shape[1:])))
    at_once = max(1, _BYTES_AT_ONCE // row_bytes)
    parts: list[list[np.ndarray]] = [[rows[:0]] for _ in sizes]
    for start in range(0, int(sizes.max()), at_once):
        ends = np.clip(sizes - start, 0, at_once)
        padded = np.zeros((capacity_for(int(ends.max())), *rows.shape[1:]), rows.dtype)
        mine = rows[start : start + at_once]
        padded[: len(mine)] = mine
        for of_process, part, end in zip(parts, of_all_processes(padded), ends, strict=True):
            of_process.append(part[:end])
    return [np.concatenate(of_process) for of_process in parts]


def gather_flags(
    flags: Sequence[np.ndarray], owners: Sequence[np.ndarray], error: Exception | None = None
) -> list[np.ndarray]:
    """Return for each of several lists all flags, bool ``[n]``, of which each process has some.

    Every process calls this with its own flags of each list, bool ``[m]``, the process that owns
    each flag, int ``[n]``, and its error, as for `gather_rows`.
    """
    if jax.process_count() == 1:
        raise_together(error)
        return list(flags)
    all_owners = np.concatenate([np.zeros(0, np.int64), *owners])
    most = int(np.bincount(all_owners, minlength=1).max())
    message = np.zeros(1 + capacity_for(-(-most // 8)), np.uint8)
    message[0] = error is not None
    if error is None:
        bits = np.packbits(np.concatenate([np.zeros(0, np.bool_), *flags]))
        message[1 : 1 + bits.size] = bits
    gathered = of_all_processes(message)
    if gathered[:, 0].any():
        raise_together(error)
    joined = np.zeros(all_owners.size, np.bool_)
    for process, of_process in enumerate(gathered):
        is_own = all_owners == process
        joined[is_own] = np.unpackbits(of_process[1:])[: np.count_nonzero(is_own)]
    return np.split(joined, np.cumsum([each.size for each in owners])[:-1])


def fail_together(error: Exception, num_lists: int) -> NoReturn:
    """Raise an error here, and its text in processes that gather ``num_lists`` lists of ids."""
    if jax.process_count() > 1:
        _gather_sizes([0] * num_lists, error)
    raise error


def raise_together(error: Exception | None, kinds: Sequence[type[Exception]] = ()) -> None:
    """Raise an error in all processes if one has it; every process calls this.

    Args:
        error: The error of this process; None: it has none.
        kinds: Types of errors that all processes raise alike, the special ones first.

    Raises:
        Exception: A process has an error: its own here, or that of another process, of the first
            of ``kinds`` that it is of, else a RuntimeError. Where several have one and ``kinds``
            are given, that of the first process counts.
    """
    if jax.process_count() > 1:
        _gather_sizes([], error, kinds)
    if error is not None:
        raise error


def on_process_zero(
    function: Callable[[], Result], kinds: Sequence[type[Exception]] = (OSError, ValueError)
) -> Result:
    """Call a function in process 0, and return its result in all processes; every process calls it.

    Args:
        function: Returns what JSON can hold; between processes tuples become lists.
        kinds: As for `raise_together`.

    Raises:
        Exception: The function raised it in process 0; see `raise_together`.
    """
    if jax.process_count() == 1:
        return function()
    result: Result | None = None
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            result = function()
        except Exception as raised:  # the other processes wait for it
            error = raised
    raise_together(error, kinds)
    return json.loads(gather_texts(json.dumps(result))[0])


def _gather_sizes(
    sizes: Sequence[int], error: Exception | None = None, kinds: Sequence[type[Exception]] = ()
) -> np.ndarray:
    """Return the sizes of all processes, ``[processes, n]``, unless one of them has an error."""
    gathered = gather_numbers([error is not None, *sizes])
    if not gathered[:, 0].any():
        return gathered[:, 1:]
    kind = next((i for i, each in enumerate(kinds) if isinstance(error, each)), None)
    text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
    texts = gather_texts(json.dumps([kind, getattr(error, "errno", None), text]))
    process = int(np.argmax(gathered[:, 0]))
    if error is not None and (not kinds or process == jax.process_index()):
        raise error
    kind, number, text = json.loads(texts[process])
    text = f"process {process} cannot go on: {text}"
    if kind is None:
        raise RuntimeError(text) from error
    raise (kinds[kind](text) if number is None else kinds[kind](number, text)) from error


def fingerprint(value: Any) -> str:
    """Return a text that tells apart arrays that lie whole on a device of this process."""
    host = _on_host(value)
    return f"{host.dtype}{list(host.shape)} of checksum {zlib.crc32(host.tobytes()):08x}"


def on_every_device(value: Any, mesh: Mesh) -> Array:
    """Put a value that every process has on every device of a mesh, whole."""
    return put_on_mesh(value, NamedSharding(mesh, PartitionSpec()))


def put_on_mesh(value: Any, sharding: NamedSharding) -> Array:
    """Put a value that every process has whole on the devices of a mesh."""
    if jax.process_count() == 1:
        return jax.device_put(value, sharding)
    host = _on_host(value)
    placed = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    if _is_key(value):
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(value))
    return placed


def _on_host(value: Any) -> np.ndarray:
    if _is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = value.addressable_data(0)
    return np.asarray(value)


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
