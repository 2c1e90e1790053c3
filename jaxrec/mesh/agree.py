"""What several processes must have in common; with one there is nothing to do."""

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


def require_same(what: str, facts: Mapping[str, str]) -> None:
    """Checks that every process has the same facts; every process calls this.

    Args:
        what: What they are facts of.
        facts: By name.

    Raises:
        ValueError: If a process has others; all processes raise it.
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
    """Every process's text; every process calls this."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = gather_numbers([data.size])[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


def gather_numbers(numbers: Sequence[int]) -> np.ndarray:
    """``[processes, n]``: every process's ``n`` numbers; every process calls this."""
    gathered = multihost_utils.process_allgather(np.asarray(numbers, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), -1)


def on_host(array: Array | np.ndarray) -> np.ndarray:
    """The parts of an array over its first axis that this process's devices have, in order."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def of_all_processes(values: np.ndarray) -> np.ndarray:
    """``[processes, ...]``: every process's values, of equal shapes; every process calls this."""
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values)).reshape(-1, *values.shape)


def fingerprint(value: Any) -> str:
    """What tells arrays apart that are whole on a device of this process."""
    host = _on_host(value)
    return f"{host.dtype}{list(host.shape)} of checksum {zlib.crc32(host.tobytes()):08x}"


def on_every_device(value: Any, mesh: Mesh) -> Array:
    """A value that every process has, whole on every device of a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
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
