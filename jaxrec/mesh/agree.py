"""Host values that processes gather and compare, and errors that they raise together.

Functions that gather or raise together are collectives: all processes must call them in the same
order. A single process sends nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrec.mesh.processes import losses_first
from jaxrec.ragged.capacity import capacity_for

Result = TypeVar("Result")

# Bytes of each process that `gather_rows` sends at once. Each process receives this much from all.
_BYTES_AT_ONCE = 1 << 24


def require_same(what: str, facts: Mapping[str, str]) -> None:
    """Raise a ValueError in all processes if a fact differs between two of them.

    ``facts`` maps the name of each fact to its text. The message calls the subject ``what``, such
    as "model".
    """
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
    """Gather a text from each process; the result is ordered by process."""
    # Gathers need one shape in all processes, so lengths travel first.
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = gather_numbers([data.size])[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


@losses_first()
def gather_numbers(numbers: Sequence[int]) -> np.ndarray:
    """Gather ``n`` int32 numbers from each process: ``[processes, n]``."""
    gathered = multihost_utils.process_allgather(np.asarray(numbers, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), -1)


def on_host(value: Any) -> np.ndarray:
    """Copy an array to the host.

    If the array is sharded over several processes, the copy has only the rows on this process's
    devices. A random key becomes the array of its words.
    """
    if _is_key(value):
        value = jax.random.key_data(value)
    is_array = isinstance(value, jax.Array)
    if not is_array or value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    # By start: several devices may hold the same part.
    parts = {shard.index[0].start or 0: shard.data for shard in value.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


@losses_first()
def of_all_processes(values: np.ndarray) -> np.ndarray:
    """Gather an array of one shape from each process: ``[processes, ...]``."""
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values)).reshape(-1, *values.shape)


def gather_ids(ids: np.ndarray) -> list[np.ndarray]:
    """Gather 64-bit ids, ``[n]``, of which each process may have another number.

    The result is ordered by process.
    """
    return gather_id_lists([ids])[0]


def gather_id_lists(lists: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Gather several lists of int64 ids, ``[n]`` each: ``result[list][process]``.

    All processes pass the same number of lists. A process that has failed calls `fail_together`
    instead.
    """
    if jax.process_count() == 1:
        return [[ids] for ids in lists]
    sizes = _gather_sizes([ids.size for ids in lists])
    # As 32-bit words, since JAX has no 64-bit integers by default. The size comes from a ladder:
    # each new shape compiles a new gather.
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
    """Gather rows, ``[n, ...]``, of which each process may have another number.

    The result is ordered by process. A process that has failed passes its ``error`` and any rows;
    then all processes raise.
    """
    if jax.process_count() == 1:
        raise_together(error)
        return [rows]
    sizes = _gather_sizes([len(rows)], error)[:, 0]
    row_bytes = max(1, rows.dtype.itemsize * int(np.prod(rows.shape[1:])))
    at_once = max(1, _BYTES_AT_ONCE // row_bytes)
    # Every process receives the rows of all, padded to the longest; some at a time bounds that.
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
    """Gather lists of flags, where each flag is known to one process, its owner.

    Args:
        flags: For each list, the flags of this process, bool ``[m]``, in the order of the list.
        owners: For each list, the owner of each flag, int ``[n]``.
        error: Error of this process, which all processes then raise.

    Returns:
        Each whole list, bool ``[n]``.
    """
    if jax.process_count() == 1:
        raise_together(error)
        return list(flags)
    all_owners = np.concatenate([np.zeros(0, np.int64), *owners])
    most = int(np.bincount(all_owners, minlength=1).max())
    # One gather: a byte that says whether the process failed, then its flags as bits. All processes
    # know `owners`, so they know the size of the longest message without asking.
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
    """Raise an error in this process, and in those that call `gather_id_lists` meanwhile.

    ``num_lists`` is the number of lists that they gather.
    """
    if jax.process_count() > 1:
        # Takes part in their first gather, that of sizes, which also says that a process failed.
        _gather_sizes([0] * num_lists, error)
    raise error


def raise_together(error: Exception | None, kinds: Sequence[type[Exception]] = ()) -> None:
    """Raise an exception in all processes if one of them passes an error.

    A process without an error raises the first type of ``kinds`` that matches the error, else a
    RuntimeError. If several processes pass errors, each raises its own; with ``kinds``, all raise
    that of the first process.
    """
    if jax.process_count() > 1:
        _gather_sizes([], error, kinds)
    if error is not None:
        raise error


def in_all_processes(
    function: Callable[[], Result], kinds: Sequence[type[Exception]] = ()
) -> Result:
    """Call a function in every process, and return its result; an error of one is raised in all.

    ``kinds`` are as for `raise_together`.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as raised:  # the other processes wait for it
        error = raised
    raise_together(error, kinds)
    return cast(Result, result)


def on_process_zero(
    function: Callable[[], Result], kinds: Sequence[type[Exception]] = (OSError, ValueError)
) -> Result:
    """Call a function in process 0, and return its result or raise its error in all processes.

    The result travels as JSON, so its tuples become lists.
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
    """Gather ``n`` sizes from each process, ``[processes, n]``; raise as `raise_together` does."""
    # The flag of an error rides with the sizes, so that success costs one gather.
    gathered = gather_numbers([error is not None, *sizes])
    if not gathered[:, 0].any():
        return gathered[:, 1:]
    kind = next((i for i, each in enumerate(kinds) if isinstance(error, each)), None)
    text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
    texts = gather_texts(json.dumps([kind, getattr(error, "errno", None), text]))
    process = int(np.argmax(gathered[:, 0]))  # the first that failed
    if error is not None and (not kinds or process == jax.process_index()):
        raise error
    kind, number, text = json.loads(texts[process])
    text = f"process {process} cannot go on: {text}"
    if kind is None:
        raise RuntimeError(text) from error
    raise (kinds[kind](text) if number is None else kinds[kind](number, text)) from error


def fingerprint(value: Any) -> str:
    """Return the type, shape and checksum of an array, to compare it between processes."""
    host = on_host(value)
    return f"{host.dtype}{list(host.shape)} of checksum {zlib.crc32(host.tobytes()):08x}"


def on_every_device(value: Any, mesh: Mesh) -> Array:
    """Replicate a value on all devices of a mesh; every process must pass the same value."""
    return put_on_mesh(value, NamedSharding(mesh, PartitionSpec()))


def put_on_mesh(value: Any, sharding: NamedSharding) -> Array:
    """Shard a whole value over the devices of a mesh; every process must pass the same value."""
    if jax.process_count() == 1:
        return jax.device_put(value, sharding)
    # jax.device_put would first compare the value between all processes.
    host = on_host(value)
    placed = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    if _is_key(value):
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(value))
    return placed


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
