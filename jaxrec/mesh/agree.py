"""Values that several processes agree on; a single process agrees with itself."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrec.ragged.capacity import capacity_for


def require_same(what: str, facts: Mapping[str, str]) -> None:
    """Check that every process has the same facts; every process calls this.

    Args:
        what: Subject of the facts, such as "plan".
        facts: Facts by name.

    Raises:
        ValueError: A process has other facts; all processes raise it.
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


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes; every process calls this."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = gather_numbers([data.size])[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


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
    if jax.process_count() == 1:
        return [ids]
    sizes = gather_numbers([ids.size])[:, 0]
    # As 32-bit words, since JAX has no 64-bit integers by default; on a ladder of sizes.
    words = np.zeros((capacity_for(int(sizes.max())), 2), np.uint32)
    words[: ids.size] = np.ascontiguousarray(ids).view(np.uint32).reshape(-1, 2)
    gathered = of_all_processes(words)
    return [
        np.ascontiguousarray(of_process[:size]).view(np.int64)[:, 0]
        for of_process, size in zip(gathered, sizes, strict=True)
    ]


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
