"""Measuring a topology: what the planner's operations take on the devices at hand.

Every operation runs on all devices at once, as in a training step, so that what they share is
shared.
Times of several sizes are fitted by ``call + item * items + byte * bytes`` with nothing below zero
(Lawson and Hanson 1974, "Solving least squares problems", chapter 23), the relative error least.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.optim import rowwise_adagrad
from jaxrec.plan.rates import Links, Rate
from jaxrec.plan.topology import Topology

# Rows of the table that is looked up: too many for a processor's cache.
_TABLE_ROWS = 1 << 18
_WIDTHS = (16, 64, 256)
_LOOKUPS = (1 << 11, 1 << 13, 1 << 15)
_BYTES = (1 << 12, 1 << 18, 1 << 22)
# Larger arrays are given back to the system after each call on a CPU, and cost more for that.
_MOST_BYTES = 1 << 23


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How long an operation took.

    Attributes:
        operation: Its name, a field of `Topology`.
        items: Its items.
        bytes: Its bytes.
        seconds: The least time of several.
        known: Part of that time that other operations took, measured before.
    """

    operation: str
    items: int
    bytes: int
    seconds: float
    known: float = 0.0


def calibrate(
    mesh: Mesh,
    *,
    name: str = "measured",
    memory: int | None = None,
    seconds: float = 0.1,
    report: Callable[[Measurement], Any] = lambda measurement: None,
) -> Topology:
    """The topology of a mesh, with measured rates.

    Links between hosts are measured where the mesh has two axes; on a mesh of one they are taken to
    be like those within the host.

    Args:
        mesh: The devices.
        name: What to call the topology.
        memory: Bytes of each device; what it says of itself if None.
        seconds: Time for each figure.
        report: Called with each figure.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> calibrate(mesh, seconds=0.001).gather.byte > 0
        True
    """
    measure = _Measure(mesh, seconds, report)
    sort = measure.sort()
    gather = measure.gather()
    update = measure.update(sort, gather)
    within = measure.links((mesh.axis_names[-1],))
    between = measure.links(mesh.axis_names[:-1]) if len(mesh.axis_names) > 1 else within
    known = Topology.from_mesh(mesh, memory=memory)
    return dataclasses.replace(
        known,
        name=name,
        gather=gather,
        update=update,
        sort=sort,
        copy=measure.copy(),
        within=within,
        between=between,
        host_link=measure.host_link(),
        disk_link=measure.disk_link(),
    )


@dataclasses.dataclass(frozen=True)
class _Measure:
    """Measures operations on the devices of a mesh; see `calibrate` for the attributes."""

    mesh: Mesh
    budget: float
    report: Callable[[Measurement], Any]

    def gather(self) -> Rate:
        """Rows at random places of a table, written one after the other."""
        found = []
        for width in _WIDTHS:
            table = self.on_each(np.zeros((_TABLE_ROWS, width), np.float32))
            for lookups in _lookups(width):
                rows = self.on_each(_random_rows(lookups))
                took = self.time(kernels.row_lookup, table, rows)
                found.append(self.note("gather", lookups, lookups * width * 4, took))
        return _fit(found)

    def update(self, sort: Rate, gather: Rate) -> Rate:
        """Rows advanced by row-wise Adagrad, less sorting them and summing their gradients."""
        optimizer = rowwise_adagrad()
        found = []
        for width in _WIDTHS:
            table = self.on_each(np.zeros((_TABLE_ROWS, width), np.float32))
            state = {"accumulator": self.on_each(np.zeros(_TABLE_ROWS, np.float32))}
            for lookups in _lookups(width):
                rows = self.on_each(_random_rows(lookups))
                gradients = self.on_each(np.ones((lookups, width), np.float32))

                def advance(table, state, rows, gradients):
                    lookups = Lookups(rows, None, None)
                    return kernels.fused_update(
                        table, state, lookups, gradients, optimizer, jnp.int32(0)
                    )

                took, (table, state) = self.time_in_place(advance, (table, state), rows, gradients)
                known = sort.seconds(items=lookups)
                known += gather.seconds(items=lookups, bytes=lookups * width * 4)
                bytes = lookups * (width + 1) * 4
                found.append(self.note("update", lookups, bytes, took, known))
        return _fit(found)

    def sort(self) -> Rate:
        """Row numbers sorted, and their runs."""
        found = []
        for lookups in _LOOKUPS:
            rows = self.on_each(_random_rows(lookups))
            took = self.time(lambda rows: kernels.build_runs(rows, _TABLE_ROWS), rows)
            found.append(self.note("sort", lookups, 0, took))
        return _fit(found)

    def copy(self) -> Rate:
        """Bytes from one place of memory to another."""
        found = []
        for bytes in _BYTES:
            array = self.on_each(np.zeros(bytes // 4, np.float32))
            took = self.time(lambda x: x + 1, array)
            found.append(self.note("copy", 0, bytes, took))
        return _fit(found)

    def links(self, axes: Sequence[str]) -> Links:
        """Collectives over some of the mesh's axes; bytes are those that leave a device."""
        axes = tuple(axes)
        count = int(np.prod([self.mesh.shape[axis] for axis in axes]))
        if count == 1:
            return Links.of(0.0, 1e12)

        def all_to_all(x):
            return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)

        def reduce_scatter(x):
            return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)

        def all_gather(x):
            return jax.lax.all_gather(x[: x.shape[0] // count], axes, tiled=True)

        rates = {}
        for collective in (all_to_all, reduce_scatter, all_gather):
            found = []
            for bytes in _BYTES:
                lines = max(1, bytes // 4 // count)
                array = self.on_each(np.zeros(lines * count, np.float32))
                took = self.time(collective, array)
                left = lines * (count - 1) * 4
                found.append(self.note(collective.__name__, 0, left, took))
            rates[collective.__name__] = _fit(found)
        return Links(**rates)

    def host_link(self) -> Rate:
        """Host arrays put on all devices; the bytes are those of one."""
        found = []
        sharding = NamedSharding(self.mesh, PartitionSpec(tuple(self.mesh.axis_names)))
        for bytes in _BYTES:
            host = np.zeros((self.mesh.devices.size, bytes // 4), np.float32)
            took = self._least(functools.partial(_put, host, sharding))
            found.append(self.note("host_link", 0, bytes, took))
        return _fit(found)

    def disk_link(self) -> Rate:
        """A file written to disk, and not only to its cache."""
        found = []
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, "rows")
            for bytes in _BYTES:
                contents = os.urandom(bytes)

                def write(contents=contents):
                    with open(path, "wb") as file:
                        file.write(contents)
                        file.flush()
                        os.fsync(file.fileno())

                found.append(self.note("disk_link", 0, bytes, self._least(write)))
        return _fit(found)

    def on_each(self, array: np.ndarray) -> jax.Array:
        """A copy on every device, as the parts of one array."""
        spec = PartitionSpec(tuple(self.mesh.axis_names))
        one = NamedSharding(self.mesh, spec)
        count = self.mesh.devices.size
        return jax.make_array_from_callback(
            (count * array.shape[0], *array.shape[1:]), one, lambda index: array
        )

    def time(self, operation: Callable, *arrays: Any) -> float:
        """The least time of an operation on every device's own arrays."""
        run = jax.jit(self._mapped(operation))
        return self._least(lambda: jax.block_until_ready(run(*arrays)))

    def time_in_place(self, operation: Callable, held: Any, *arrays: Any) -> tuple[float, Any]:
        """The same of an operation that takes and returns what it changes."""
        run = jax.jit(self._mapped(operation), donate_argnums=tuple(range(len(held))))

        def once() -> None:
            nonlocal held
            held = jax.block_until_ready(run(*held, *arrays))

        return self._least(once), held

    def _mapped(self, operation: Callable) -> Callable:
        spec = PartitionSpec(tuple(self.mesh.axis_names))
        return jax.shard_map(
            operation, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )

    def _least(self, call: Callable[[], Any]) -> float:
        call()  # compiles
        least, end = float("inf"), time.perf_counter() + self.budget
        while True:
            start = time.perf_counter()
            call()
            now = time.perf_counter()
            least = min(least, now - start)
            if now >= end:
                return least

    def note(
        self, operation: str, items: int, bytes: int, seconds: float, known: float = 0.0
    ) -> Measurement:
        measurement = Measurement(operation, items, bytes, seconds, known)
        self.report(measurement)
        return measurement


def _put(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    # A fresh array each time, or a CPU device shares the host's memory.
    return jax.block_until_ready(jax.device_put(host + 0, sharding, may_alias=False))


def _lookups(width: int) -> list[int]:
    return [lookups for lookups in _LOOKUPS if lookups * width * 4 <= _MOST_BYTES]


def _random_rows(lookups: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.choice(_TABLE_ROWS, lookups, replace=False).astype(np.int32)


def _fit(found: Sequence[Measurement]) -> Rate:
    """The rate that is nearest to measurements."""
    from scipy.optimize import nnls  # imported here as in `jaxrec.plan.exact`

    sizes = np.array([[1.0, m.items, m.bytes] for m in found])
    times = np.array([m.seconds for m in found])
    own = 1 - np.array([m.known for m in found]) / times
    scale = np.maximum(sizes.max(axis=0), 1.0)
    factors, _ = nnls(sizes / scale / times[:, None], own)
    call, item, byte = factors / scale
    return Rate(float(call), float(item), float(byte))
