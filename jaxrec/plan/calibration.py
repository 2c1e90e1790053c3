"""Calibration: measured rates of the planner's operations on the devices at hand.

Every operation runs on all devices at once, as in a training step, so that they share memory and
links as they do there. Times of several sizes are fitted by ``call + item * items + byte * bytes``
with factors of 0 or more and the smallest relative error (Lawson and Hanson 1974, "Solving least
squares problems", chapter 23).
"""

from __future__ import annotations

import dataclasses
import itertools
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
from jaxrec.plan.quantities import Links, Rate
from jaxrec.plan.topology import Topology

# Rows of the table: too many for a processor's cache.
_TABLE_ROWS = 1 << 18
_WIDTHS = (16, 64, 256)
# Batches of rows, which take turns: as in training, a batch finds few of its rows in the cache.
_TURNS = 8
_LOOKUPS = (1 << 11, 1 << 13, 1 << 15)
_BYTES = (1 << 12, 1 << 18, 1 << 22)
# On a CPU, larger arrays are returned to the system after each call, which takes time.
_MAX_BYTES = 1 << 23


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Shortest measured ``seconds`` of an operation on ``items`` items and ``bytes`` bytes.

    ``operation`` is a field of `Topology` or `Links`. Other operations, which were measured before,
    take ``known`` of the seconds.
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
    """Return the topology of a mesh, with rates measured for ``seconds`` each.

    Rates of caches are estimates; `jaxrec.tier.calibration` measures them. Links between hosts are
    measured if the mesh has two axes; else they have the rates of those within the host.
    """
    bench = _Bench(mesh, seconds, report)
    # First, since the update contains both a sort and a gather, whose times are subtracted from its
    # own.
    sort = bench.sort()
    gather = bench.gather()
    update = bench.update(sort, gather)
    within = bench.links((mesh.axis_names[-1],))
    between = bench.links(mesh.axis_names[:-1]) if len(mesh.axis_names) > 1 else within
    known = Topology.from_mesh(mesh, memory=memory)
    return dataclasses.replace(
        known,
        name=name,
        gather=gather,
        update=update,
        sort=sort,
        copy=bench.copy(),
        within=within,
        between=between,
    )


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Measurements on the devices of a mesh; see `calibrate`."""

    mesh: Mesh
    budget: float
    report: Callable[[Measurement], Any]

    def gather(self) -> Rate:
        """Measure gathers of random rows of a table."""
        measurements = []
        for width in _WIDTHS:
            table = self.on_each(np.zeros((_TABLE_ROWS, width), np.float32))
            for lookups in _lookups(width):
                seconds = self.time(kernels.row_lookup, table, in_turn=self._rows(lookups))
                bytes = lookups * width * 4
                measurements.append(self.note("gather", lookups, bytes, seconds))
        return fit(measurements)

    def update(self, sort: Rate, gather: Rate) -> Rate:
        """Measure updates of rows by row-wise Adagrad, without sorting and summing gradients."""
        optimizer = rowwise_adagrad()

        def advance(table, state, gradients, rows):
            lookups = Lookups(rows, None, None)
            return kernels.fused_update(table, state, lookups, gradients, optimizer, jnp.int32(0))

        measurements = []
        for width in _WIDTHS:
            table = self.on_each(np.zeros((_TABLE_ROWS, width), np.float32))
            state = {"accumulator": self.on_each(np.zeros(_TABLE_ROWS, np.float32))}
            for lookups in _lookups(width):
                gradients = self.on_each(np.ones((lookups, width), np.float32))
                arrays = (table, state, gradients), self._rows(lookups)
                seconds, (table, state) = self.time_in_place(advance, *arrays)
                known = sort.seconds(items=lookups)
                known += gather.seconds(items=lookups, bytes=lookups * width * 4)
                bytes = lookups * (width + 1) * 4
                measurements.append(self.note("update", lookups, bytes, seconds, known))
        return fit(measurements)

    def sort(self) -> Rate:
        """Measure sorts of row numbers, with the search for runs of equal ones."""

        def seconds(lookups: int) -> float:
            rows = self.on_each(_random_rows(lookups))
            return self.time(lambda rows: kernels.build_runs(rows, _TABLE_ROWS), rows)

        return fit([self.note("sort", lookups, 0, seconds(lookups)) for lookups in _LOOKUPS])

    def copy(self) -> Rate:
        """Measure copies of arrays within a device's memory."""

        def seconds(bytes: int) -> float:
            # Adding 1 keeps XLA from returning the argument itself.
            return self.time(lambda x: x + 1, self.on_each(np.zeros(bytes // 4, np.float32)))

        return fit([self.note("copy", 0, bytes, seconds(bytes)) for bytes in _BYTES])

    def links(self, axes: Sequence[str]) -> Links:
        """Measure the collectives over ``axes`` of the mesh."""
        axes = tuple(axes)
        count = int(np.prod([self.mesh.shape[axis] for axis in axes]))
        if count == 1:
            # No link: as good as free.
            return Links.of(0.0, 1e12)

        def all_to_all(x):
            return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)

        def reduce_scatter(x):
            return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)

        def all_gather(x):
            # A part of the array, so that all three collectives send as many bytes for one size.
            return jax.lax.all_gather(x[: x.shape[0] // count], axes, tiled=True)

        rates = {}
        for collective in (all_to_all, reduce_scatter, all_gather):
            measurements = []
            for bytes in _BYTES:
                words = max(1, bytes // 4 // count)
                seconds = self.time(collective, self.on_each(np.zeros(words * count, np.float32)))
                sent = words * (count - 1) * 4
                measurements.append(self.note(collective.__name__, 0, sent, seconds))
            rates[collective.__name__] = fit(measurements)
        return Links(**rates)

    def on_each(self, array: np.ndarray) -> jax.Array:
        """Put an array on every device; return one array with all of them along its first axis."""
        spec = PartitionSpec(tuple(self.mesh.axis_names))
        one = NamedSharding(self.mesh, spec)
        count = self.mesh.devices.size
        return jax.make_array_from_callback(
            (count * array.shape[0], *array.shape[1:]), one, lambda index: array
        )

    def _rows(self, lookups: int) -> list[jax.Array]:
        """Return the random row numbers of `_TURNS` batches, on every device."""
        return [self.on_each(_random_rows(lookups, seed)) for seed in range(_TURNS)]

    def time(self, operation: Callable, *arrays: Any, in_turn: Sequence[jax.Array] = ()) -> float:
        """Return the shortest seconds of an operation that runs on all devices' arrays at once.

        ``in_turn`` has values of the operation's last argument; each call takes the next one.
        """
        run = jax.jit(self._mapped(operation))
        turns = itertools.cycle([(last,) for last in in_turn] or [()])
        return self._shortest(lambda: jax.block_until_ready(run(*arrays, *next(turns))))

    def time_in_place(
        self, operation: Callable, arrays: Sequence[Any], in_turn: Sequence[jax.Array]
    ) -> tuple[float, tuple[Any, Any]]:
        """Return the shortest seconds of an operation that updates ``arrays[:2]``, and these two.

        The operation returns the two, changed in place. ``in_turn`` is as for `time`.
        """
        # Donated and passed on, as in training. A copy of the table would take longer than the
        # update.
        run = jax.jit(self._mapped(operation), donate_argnums=(0, 1))
        updated, others, turns = tuple(arrays[:2]), arrays[2:], itertools.cycle(in_turn)

        def once() -> None:
            nonlocal updated
            updated = jax.block_until_ready(run(*updated, *others, next(turns)))

        return self._shortest(once), updated

    def _mapped(self, operation: Callable) -> Callable:
        spec = PartitionSpec(tuple(self.mesh.axis_names))
        return jax.shard_map(
            operation, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )

    def _shortest(self, call: Callable[[], Any]) -> float:
        call()  # compiles
        # The shortest time: other programs only ever add to it.
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


def _lookups(width: int) -> list[int]:
    return [lookups for lookups in _LOOKUPS if lookups * width * 4 <= _MAX_BYTES]


def _random_rows(lookups: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.choice(_TABLE_ROWS, lookups, replace=False).astype(np.int32)


def fit(measurements: Sequence[Measurement]) -> Rate:
    """Return the rate whose seconds for the measured sizes have the least relative error."""
    from scipy.optimize import nnls  # imported here as HiGHS is in `jaxrec.plan.program`

    sizes = np.array([[1.0, m.items, m.bytes] for m in measurements])
    times = np.array([m.seconds for m in measurements])
    # Both sides are over the measured time, so that least squares weigh relative errors: the
    # largest sizes would decide alone otherwise. Columns are scaled to 1, since bytes are a million
    # times calls.
    own = 1 - np.array([m.known for m in measurements]) / times
    scale = np.maximum(sizes.max(axis=0), 1.0)
    factors, _ = nnls(sizes / scale / times[:, None], own)
    call, item, byte = factors / scale
    return Rate(float(call), float(item), float(byte))
