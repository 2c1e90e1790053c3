"""Checks sharding on the devices and processes that it finds.

Usage: python -m jaxrec.mesh.selftest [--types row_wise:rows ...] [--mebibytes 1 16]
Start it as you start training: by hand, or once for each process by Slurm, mpirun or Kubernetes,
which JAX recognises. Elsewhere pass --coordinator HOST:PORT --num-processes N --process-id I.
It trains tables of every sharding type for some steps, compares them with tables on one device, and
times the collectives. If something differs, it prints a line that says so and exits with code 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrec import optim
from jaxrec.embed import EmbeddingBagConfig, apply_gradients, init_tables, lookup
from jaxrec.embed.layout import layout_tables
from jaxrec.embed.store import TableStore
from jaxrec.mesh import sharding_types as placements
from jaxrec.mesh.agree import gather_numbers
from jaxrec.mesh.batch import shard_batch
from jaxrec.mesh.channel import on_each_device
from jaxrec.mesh.creation import init_on_mesh, mesh_shape
from jaxrec.mesh.placement import Placement
from jaxrec.mesh.processes import check_processes, join_processes
from jaxrec.mesh.shards import MeshShape
from jaxrec.mesh.traffic import collectives, sent_bytes
from jaxrec.ragged import KeyedJaggedArray

TYPES = (
    *("data_parallel", "table_wise", "row_wise:rows", "row_wise:pooled", "column_wise"),
    *("table_row_wise:rows", "table_row_wise:pooled", "table_column_wise"),
    *("grid:rows", "grid:pooled"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the checks.

    Attributes:
        coordinator: Address of process 0, ``host:port``, if JAX cannot detect it.
        num_processes: Number of processes, if JAX cannot detect it; 1: this one alone.
        process_id: Number of this process, from 0.
        cpu_devices: Number of simulated CPU devices of each process; 0: the real devices.
        types: Sharding types, each with its exchange after a colon.
        samples: Number of samples of each device in a batch.
        rows: Number of rows of a table, at least one for each device.
        steps: Number of training steps.
        mebibytes: Sizes at which to time the collectives, MiB on each device.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    cpu_devices: int = 0
    types: tuple[str, ...] = TYPES
    samples: int = 64
    rows: int = 1000
    steps: int = 3
    mebibytes: tuple[int, ...] = (1, 16)

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.types if kind not in TYPES]:
            raise ValueError(f"--types: {unknown[0]!r} is not one of {', '.join(TYPES)}")
        for name in ("samples", "rows", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} is less than 1")
        check_processes(self.coordinator, self.num_processes, self.process_id)


@dataclasses.dataclass(frozen=True)
class Checked:
    """Result of the check of a sharding type.

    Attributes:
        kind: The sharding type, with its exchange after a colon.
        deviation: Largest difference from the run on one device, over the allowed difference.
        sent_bytes: Bytes that leave a device in a step.
        collectives: Number of collectives of each kind in a step.
        milliseconds: Time of the fastest step.
        error: The error, or None.
    """

    kind: str
    deviation: float = math.nan
    sent_bytes: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    milliseconds: float = math.nan
    error: str | None = None

    @property
    def is_good(self) -> bool:
        return self.error is None and self.deviation <= 1


@dataclasses.dataclass(frozen=True)
class Timed:
    """Time of a collective, and the bytes that leave each device in it."""

    kind: str
    sent_bytes: int
    milliseconds: float


def check(kind: str, options: Options) -> Checked:
    """Train tables of a sharding type, and compare them with tables on one device."""
    try:
        mesh = make_mesh(kind)
        configs = make_configs(options, mesh_shape(mesh))
        return _compare(kind, configs, mesh, options)
    except Exception as error:
        return Checked(kind, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _compare(kind: str, configs: list[EmbeddingBagConfig], mesh: Mesh, options: Options) -> Checked:
    # A grid cuts columns over hosts, where the pooled exchange has no sums over whole rows. So the
    # optimizer works by element there. But Adagrad divides a gradient by its own size, and would
    # turn the rounding of gradients near 0 into whole steps. A large eps keeps those small.
    by_element = optim.adagrad(0.1, eps=1e-3)
    optimizer = by_element if kind == "grid:pooled" else optim.rowwise_adagrad(0.1)
    key = jax.random.key(0)
    alone: TableStore = init_tables(configs, optimizer, key)
    layout = layout_tables(configs, optimizer)
    sharded: TableStore = init_on_mesh(layout, key, place(kind, configs, mesh_shape(mesh)), mesh)
    batches = [
        draw_batch(configs, options.samples * jax.device_count(), step)
        for step in range(options.steps)
    ]
    on_mesh = [shard_batch(mine, mesh) for _, mine in batches]
    step_alone = jax.jit(train_step, donate_argnums=0)
    step_sharded = step_alone.lower(sharded, on_mesh[0], np.int32(0)).compile()
    worst, times = 0.0, []
    for step, ((whole, _), features) in enumerate(zip(batches, on_mesh, strict=True)):
        alone, expected = step_alone(alone, whole, np.int32(step))
        start = time.perf_counter()
        sharded, loss = jax.block_until_ready(step_sharded(sharded, features, np.int32(step)))
        times.append((time.perf_counter() - start) * 1e3)
        worst = max(worst, deviation(loss, expected))
    for config in configs:
        worst = max(worst, deviation(sharded.read(config.name), alone.read(config.name)))
        for name, state in alone.read_state(config.name).items():
            worst = max(worst, deviation(sharded.read_state(config.name)[name], state))
    of_step = collectives(step_sharded)
    counts = dict(Counter(collective.kind for collective in of_step))
    return Checked(kind, worst, sent_bytes(of_step), counts, min(times))


def train_step(
    tables: TableStore, features: KeyedJaggedArray, step: Array
) -> tuple[TableStore, Array]:
    """Train a step with the mean of squared embeddings as the loss; return tables and loss."""
    pooled, residuals = lookup(tables, features)
    loss, gradients = jax.value_and_grad(lambda x: jnp.square(x.values).mean())(pooled)
    return apply_gradients(tables, residuals, gradients, step), loss


def deviation(got: Array, expected: Array) -> float:
    """Return the largest of all differences divided by ``1e-6 + 1e-5 * |expected|``; NaN is inf."""
    wanted = np.asarray(expected, np.float64)
    over = np.abs(np.asarray(got, np.float64) - wanted) / (1e-6 + 1e-5 * np.abs(wanted))
    return float(np.where(np.isfinite(over), over, np.inf).max(initial=0))


def make_mesh(kind: str) -> Mesh:
    """Return a mesh of all devices, with an axis of hosts for the types that name hosts."""
    devices = jax.device_count()
    if not kind.startswith(("table_row", "table_column", "grid")):
        return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    hosts = jax.process_count()
    if hosts == 1 and devices % 2 == 0:
        hosts = 2
    return jax.make_mesh(
        (hosts, devices // hosts), ("host", "device"), axis_types=(AxisType.Auto,) * 2
    )


def make_configs(options: Options, mesh: MeshShape) -> list[EmbeddingBagConfig]:
    """Return tables large enough for every sharding type on this mesh."""
    rows = max(options.rows, mesh.num_devices)
    part = math.lcm(mesh.hosts, mesh.devices_per_host)
    dim = -(-16 // part) * part
    return [
        EmbeddingBagConfig("a", rows, dim, feature_names=("a", "again")),
        EmbeddingBagConfig("b", rows + 3, dim, pooling="mean"),
        EmbeddingBagConfig("c", 2 * rows + 1, 2 * dim),
    ]


def place(kind: str, configs: list[EmbeddingBagConfig], shape: MeshShape) -> dict[str, Placement]:
    """Return the placement of each table for a sharding type, by name."""
    name, _, exchange = kind.partition(":")
    options = {"exchange": exchange} if exchange else {}
    make = functools.partial(getattr(placements, name), **options)

    def place_table(table: int, dim: int) -> Placement:
        if name == "table_wise":
            return make(table % shape.num_devices)
        if name in ("table_row_wise", "table_column_wise"):
            return make(table % shape.hosts)
        if name == "column_wise":
            # The number of devices divides the columns.
            parts = max(n for n in range(1, shape.num_devices + 1) if dim % n == 0)
            return make(range(parts))
        return make()

    return {
        config.name: place_table(table, config.embedding_dim)
        for table, config in enumerate(configs)
    }


def draw_batch(
    configs: list[EmbeddingBagConfig], samples: int, seed: int
) -> tuple[KeyedJaggedArray, KeyedJaggedArray]:
    """Return a batch of skewed ids, and this process's part of it."""
    rng = np.random.default_rng(seed)
    # Bags have the same lengths in every batch, so that one program serves all.
    bags = np.random.default_rng(0).integers(0, 5, samples)
    ids = {
        feature: np.minimum(
            config.num_embeddings ** rng.random(bags.sum()) - 1, config.num_embeddings - 1
        ).astype(np.int64)
        for config in configs
        for feature in config.feature_names
    }
    each = samples // jax.process_count()
    mine = slice(jax.process_index() * each, (jax.process_index() + 1) * each)

    def pack(part: slice) -> KeyedJaggedArray:
        last = np.cumsum(bags)[part][-1]
        first = last - bags[part].sum()
        values = np.concatenate([of_key[first:last] for of_key in ids.values()])
        return KeyedJaggedArray.from_lengths(list(ids), values, np.tile(bags[part], len(ids)))

    return pack(slice(None)), pack(mine)


def time_collectives(options: Options) -> Iterator[Timed]:
    """Time each collective that sharding uses, over all devices."""
    mesh = make_mesh("row_wise")
    devices = mesh.devices.size
    split, everywhere = PartitionSpec("data"), PartitionSpec()
    functions: dict[str, tuple[Callable[[Array], Array], PartitionSpec]] = {
        "all_to_all": (lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), split),
        "all_gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), everywhere),
        "psum_scatter": (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), split),
        "psum": (lambda x: jax.lax.psum(x, "data"), everywhere),
    }
    for name, (function, out_specs) in functions.items():
        on_mesh = on_each_device(function, mesh, split, out_specs)
        for size in options.mebibytes:
            # The size is that of a gather's result, and of the other collectives' arguments.
            lines = 1 if name == "all_gather" else devices
            part = np.ones((lines, size * 2**18 // devices), np.float32)
            values = jax.make_array_from_process_local_data(
                NamedSharding(mesh, split), np.tile(part, (len(mesh.local_devices), 1))
            )
            program = jax.jit(on_mesh).lower(values).compile()
            times = []
            for _ in range(11):
                start = time.perf_counter()
                jax.block_until_ready(program(values))
                times.append((time.perf_counter() - start) * 1e3)
            sent = sent_bytes(collectives(program))
            yield Timed(name, sent, float(np.median(times[1:])))


def main(options: Options) -> int:
    """Run all checks; process 0 prints. Return the exit code."""
    from rich.console import Console
    from rich.table import Table

    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    join_processes(options.coordinator, options.num_processes, options.process_id)
    console = Console(quiet=jax.process_index() != 0)
    console.print(
        f"JAX {jax.__version__}; processes: {jax.process_count()}, devices: {jax.device_count()}"
    )
    for process in range(jax.process_count()):
        theirs = [d for d in jax.devices() if d.process_index == process]
        kinds = ", ".join(dict.fromkeys(device.device_kind for device in theirs))
        console.print(f"  process {process}: {len(theirs)} {theirs[0].platform} ({kinds})")

    table = Table("sharding type", "as on one device", "sent by a device", "in", "step")
    results = []
    for kind in options.types:
        checked = check(kind, options)
        results.append(checked)
        verdict = "yes" if checked.is_good else "FAILED"
        counts = ", ".join(f"{count} {name}" for name, count in checked.collectives.items())
        table.add_row(
            kind,
            verdict,
            f"{checked.sent_bytes:,} B",
            counts or "no collective",
            f"{checked.milliseconds:.2f} ms",
        )
    console.print(table)

    table = Table("collective", "sent by a device", "time", "rate")
    for timed in time_collectives(options):
        rate = timed.sent_bytes / timed.milliseconds / 1e6
        table.add_row(
            timed.kind,
            f"{timed.sent_bytes:,} B",
            f"{timed.milliseconds:.3f} ms",
            f"{rate:.2f} GB/s",
        )
    console.print(table)

    bad = [checked for checked in results if not checked.is_good]
    failures = len(bad)
    if jax.process_count() > 1:
        failures = int(gather_numbers([failures]).max())
    for checked in bad:
        reason = checked.error or (
            f"{checked.deviation:.3g} times the difference allowed to one device's result"
        )
        print(
            f"process {jax.process_index()}: {checked.kind} FAILED: {reason}",
            file=sys.stderr,
            flush=True,
        )
    if failures:
        console.print(f"FAILED: {failures} of {len(results)} sharding types differ")
        return 1
    console.print(f"All {len(results)} sharding types give what one device gives.")
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options, description=__doc__)))
