"""Training steps of sharded tables on eight simulated devices beside the same on one.

Usage: python -m benchmarks.mesh [--types row_wise ...] [--shapes onehot bags] [--rounds 5]
                                [--ids powerlaw] [--rooms measured]
Prints one JSON line per shape and sharding type:

- step time of the embedding part (lookup, a trivial loss, fused update by row-wise Adagrad) on
  eight devices over that on one, at equal total work: medians of rounds in turn, and the least and
  the most of the rounds' own ratios. Eight simulated devices share the machine's cores, so a ratio
  of 1 means that sharding costs nothing; it says nothing of links. On a machine that does other
  work, where the side with more threads gets more of it, compare processor time, ``cpu_ratio``.
- bytes that leave a device in a step, from the compiled program, over the least that moving rows
  and that moving sums of bags needs for these ids where they are (formulas in docs/sharding.md).
- memory of the compiled step on a device, batch and temporaries included, over an eighth of tables
  and optimizer state, with tables of ``memory_rows`` rows.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import tyro

DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables and a batch.

    Attributes:
        name: Name.
        batch: Samples of a batch, over all devices.
        tables: Tables, each read by a feature of its own.
        bag: Ids of each bag.
        skew: Rows of the largest table over those of the smallest; those between are evenly spread
            on a logarithmic scale.
        rows: Rows of the table in the middle.
        dim: Columns.
        ids: Their distribution.
        rooms: Whether the exchange has room as "measured" for them, or as "given".
    """

    name: str
    batch: int
    tables: int
    bag: int
    skew: float
    rows: int = 100_000
    dim: int = 64
    ids: str = "uniform"
    rooms: str = "given"

    @property
    def row_counts(self) -> list[int]:
        return [int(r) for r in self.rows * self.skew ** np.linspace(-0.5, 0.5, self.tables)]

    @property
    def names(self) -> list[str]:
        return [f"t{table}" for table in range(self.tables)]

    def draw(self, seed: int) -> list[np.ndarray]:
        """``[batch, bag]`` ids of each table."""
        rng = np.random.default_rng(seed)
        drawn = [rng.random((self.batch, self.bag)) for _ in range(self.tables)]
        if self.ids == "powerlaw":
            drawn = [(rows**u - 1) / rows for rows, u in zip(self.row_counts, drawn, strict=True)]
        return [
            np.minimum((u * rows).astype(np.int32), rows - 1)
            for rows, u in zip(self.row_counts, drawn, strict=True)
        ]


SHAPES = {
    # 26 tables fill eight devices evenly only if they are unequal, eight only if they are equal.
    "onehot": Workload("onehot", batch=8192, tables=26, bag=1, skew=4),
    "bags": Workload("bags", batch=2048, tables=8, bag=20, skew=1),
}


def spread(workload: Workload) -> dict[str, int]:
    """A device for each table: as many tables on each as on any other, and as many rows."""
    most = -(-workload.tables // DEVICES)
    rows, counts = [0] * DEVICES, [0] * DEVICES
    devices = {}
    for name, size in sorted(
        zip(workload.names, workload.row_counts, strict=True), key=lambda pair: -pair[1]
    ):
        device = min((d for d in range(DEVICES) if counts[d] < most), key=lambda d: rows[d])
        devices[name] = device
        rows[device] += size
        counts[device] += 1
    return devices


def placements(kind: str, workload: Workload) -> dict[str, Any]:
    """The placement of each table."""
    from jaxrec import mesh

    name, _, exchange = kind.partition(":")
    options = {"exchange": exchange} if exchange else {}
    make = getattr(mesh, name)
    if name == "table_wise":
        return {table: make(device, **options) for table, device in spread(workload).items()}
    if name in ("table_row_wise", "table_column_wise"):
        return {table: make(i % 2, **options) for i, table in enumerate(workload.names)}
    return {table: make(**options) for table in workload.names}


KINDS = (
    *("data_parallel", "table_wise", "row_wise:rows", "row_wise:pooled", "column_wise"),
    *("table_row_wise:rows", "table_row_wise:pooled", "table_column_wise", "grid"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        types: Sharding types; after a colon how rows travel.
        shapes: Names of the workloads.
        ids: Distribution of ids: uniform or powerlaw.
        rooms: Room of the exchange: "given", as it is without anything measured, or "measured", as
            `jaxrec.train.RoutedSteps` would choose it for these ids.
        rounds: Rounds of both in turn.
        seconds: Seconds of each of a round's two turns.
        rows: Rows of a table on average; of data-parallel ones a sixteenth.
        memory_rows: The same where memory is measured; nothing is allocated for that.
    """

    types: tuple[str, ...] = KINDS
    shapes: tuple[str, ...] = tuple(SHAPES)
    ids: str = "uniform"
    rooms: Literal["given", "measured"] = "given"
    rounds: int = 5
    seconds: float = 1.5
    rows: int = 100_000
    memory_rows: int = 1_000_000


def main(options: Options) -> None:
    for name in options.shapes:
        alone: dict[int, Worker] = {}
        for kind in options.types:
            rows = options.rows // 16 if kind == "data_parallel" else options.rows
            workload = dataclasses.replace(
                SHAPES[name], rows=rows, ids=options.ids, rooms=options.rooms
            )
            if rows not in alone:
                for worker in alone.values():
                    worker.stop()
                alone = {rows: Worker(workload, None, 0)}
            memory_rows = rows if kind == "data_parallel" else options.memory_rows
            sharded = Worker(workload, kind, memory_rows)
            print(json.dumps(compare(alone[rows], sharded, kind, options)), flush=True)
            sharded.stop()
        for worker in alone.values():
            worker.stop()


def compare(alone: Worker, sharded: Worker, kind: str, options: Options) -> dict[str, Any]:
    """Times both in turn."""
    one: list[Turn] = []
    eight: list[Turn] = []
    for _ in range(options.rounds):
        one.append(alone.time(options.seconds))
        eight.append(sharded.time(options.seconds))
    walls = [float(np.median([ms for turn in turns for ms in turn.wall])) for turns in (one, eight)]
    cpus = [float(np.median([turn.cpu for turn in turns])) for turns in (one, eight)]
    ratios = [np.median(b.wall) / np.median(a.wall) for a, b in zip(one, eight, strict=True)]
    return {
        "shape": alone.workload.name,
        "type": kind,
        "ids": options.ids,
        "rooms": options.rooms,
        "one_ms": round(walls[0], 2),
        "eight_ms": round(walls[1], 2),
        "ratio": round(walls[1] / walls[0], 2),
        "ratios": [round(float(min(ratios)), 2), round(float(max(ratios)), 2)],
        "one_cpu_ms": round(cpus[0], 2),
        "eight_cpu_ms": round(cpus[1], 2),
        "cpu_ratio": round(cpus[1] / cpus[0], 2),
        **sharded.facts,
    }


@dataclasses.dataclass(frozen=True)
class Turn:
    """Milliseconds of each step, and of processor time in a step on average."""

    wall: list[float]
    cpu: float


class Worker:
    """A process with a number of devices of its own, which steps when it is told to."""

    def __init__(self, workload: Workload, kind: str | None, memory_rows: int):
        self.workload = workload
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, workload, kind, memory_rows), daemon=True
        )
        self._process.start()
        theirs.close()
        self.facts: dict[str, Any] = self._pipe.recv()

    def time(self, seconds: float) -> Turn:
        """Time steps for about this number of seconds."""
        self._pipe.send(seconds)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def serve(pipe: Connection, workload: Workload, kind: str | None, memory_rows: int) -> None:
    """Run the steps of one worker."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if kind is None else DEVICES)

    import jaxrec

    jaxrec.keep_freed_memory()
    tables, batches = make(workload, kind)
    step = jax.jit(train_step, donate_argnums=0).lower(tables, batches[0], 0).compile()
    pipe.send({} if kind is None else facts(workload, kind, memory_rows, step))

    count = 0
    for seconds in iter(pipe.recv, None):
        times: list[float] = []
        cpu = time.process_time()
        end = time.perf_counter() + seconds
        while len(times) < 5 or time.perf_counter() < end:
            start = time.perf_counter()
            tables, loss = step(tables, batches[count % len(batches)], count)
            jax.block_until_ready((tables, loss))
            times.append((time.perf_counter() - start) * 1e3)
            count += 1
        pipe.send(Turn(times[1:], (time.process_time() - cpu) * 1e3 / len(times)))


def train_step(tables: Any, features: Any, step: Any) -> tuple[Any, Any]:
    """Lookup, the mean of squares as the loss, and update."""
    import jax
    import jax.numpy as jnp

    from jaxrec import embed

    pooled, residuals = embed.lookup(tables, features)
    loss, gradients = jax.value_and_grad(lambda pooled: jnp.square(pooled.values).mean())(pooled)
    return embed.apply_gradients(tables, residuals, gradients, step), loss


def make(workload: Workload, kind: str | None) -> tuple[Any, list[Any]]:
    """The tables and batches of a workload, on the mesh of a sharding type."""
    import jax

    import jaxrec
    from jaxrec import embed

    tables = embed.init_tables(configs(workload), optimizer(), jax.random.key(0))
    batches = []
    for seed in range(4):
        ids = workload.draw(seed)
        lengths = np.full(workload.batch * workload.tables, workload.bag, np.int32)
        flat = np.concatenate([each.reshape(-1) for each in ids])
        batches.append(
            jaxrec.KeyedJaggedArray.from_lengths(
                workload.names, flat, lengths, capacities=[ids[0].size] * workload.tables
            )
        )
    if kind is None:
        return tables, [jax.device_put(batch) for batch in batches]
    mesh = make_mesh(kind)
    tables = jaxrec.mesh.shard_tables(tables, placements(kind, workload), mesh)
    # As on one device, there is room for the ids and no more.
    room = dict.fromkeys(workload.names, workload.batch // DEVICES * workload.bag)
    batches = [jaxrec.mesh.shard_batch(batch, mesh, capacities=room) for batch in batches]
    if workload.rooms == "measured":
        tables = dataclasses.replace(tables, capacity_factors=measured_factors(tables, batches))
    return tables, batches


def measured_factors(tables: Any, batches: Sequence[Any]) -> tuple[tuple[str, float], ...]:
    """Return the capacity factor of each group that fits all batches."""
    import jax

    from jaxrec.embed.taps import Ahead
    from jaxrec.mesh.ahead import capacity_factor, measure_demand

    def demand(batch: Any) -> Any:
        return measure_demand({"": [Ahead(tables.route(batch))]})

    demands = [jax.jit(demand)(batch) for batch in batches]
    return tuple(
        (name, capacity_factor(max(float(each[path, name]) for each in demands)))
        for path, name in demands[0]
    )


def configs(workload: Workload) -> list[Any]:
    import jaxrec

    return [
        jaxrec.EmbeddingBagConfig(name, rows, workload.dim)
        for name, rows in zip(workload.names, workload.row_counts, strict=True)
    ]


def optimizer() -> Any:
    import jaxrec

    return jaxrec.optim.rowwise_adagrad(0.01)


def make_mesh(kind: str) -> Any:
    import jax
    from jax.sharding import AxisType

    if kind.startswith(("table_row", "table_column", "grid")):
        return jax.make_mesh((2, DEVICES // 2), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def facts(workload: Workload, kind: str, memory_rows: int, step: Any) -> dict[str, Any]:
    """Bytes moved and memory."""
    from jaxrec.mesh.traffic import collectives, sent_bytes

    found = collectives(step)
    sent = sent_bytes(found)
    least = least_bytes(workload, kind)
    return {
        "sent_bytes": sent,
        "least_bytes": {how: round(count) for how, count in least.items()},
        "sent_over_least": round(sent / min(least.values()), 2),
        "collectives": {k: sum(c.kind == k for c in found) for k in {c.kind for c in found}},
        **memory(dataclasses.replace(workload, rows=memory_rows), kind),
    }


def least_bytes(workload: Workload, kind: str) -> dict[str, float]:
    """The least bytes that must leave a device in a step, on average, whichever way they go."""
    from jaxrec.mesh.creation import mesh_shape

    shape = mesh_shape(make_mesh(kind))
    ids = dict(zip(workload.names, workload.draw(0), strict=True))
    total: Counter[str] = Counter()
    for config in configs(workload):
        placement = placements(kind, workload)[config.name]
        by_device = ids[config.name].reshape(DEVICES, -1, workload.bag)
        if placement.is_replicated:
            line = 4 + 4 * config.embedding_dim
            distinct = sum(np.unique(part).size for part in by_device)
            total["rows"] += distinct * (DEVICES - 1) * line
            total["sums"] += 2 * (DEVICES - 1) * config.num_embeddings * config.embedding_dim * 4
            continue
        pieces: dict[tuple[int, int], list[Any]] = {}
        for block in placement.cut(config, shape):
            pieces.setdefault(block.columns, []).append(block)
        for (start, stop), blocks in pieces.items():
            total += _least_of_piece(by_device, blocks, 4 * (stop - start))
    return {how: count / DEVICES for how, count in total.items()}


def _least_of_piece(by_device: np.ndarray, blocks: Sequence[Any], row_bytes: int) -> Counter[str]:
    """The least of either exchange, of all devices together, for columns of a table."""
    first_rows = [block.rows[0] for block in blocks]
    least: Counter[str] = Counter()
    for device, ids in enumerate(by_device):
        owners = np.array([block.device for block in blocks])[
            np.searchsorted(first_rows, ids, side="right") - 1
        ]
        away = owners != device
        # A row travels as its id, its values and its gradient.
        least["rows"] += int(np.unique(ids[away]).size) * (4 + 2 * row_bytes)
        # Each lookup sends its id; each pair of a bag and an owner sends a sum and a gradient.
        bags, others = np.nonzero(away)
        pairs = np.unique(bags * DEVICES + owners[bags, others]).size
        least["sums"] += int(away.sum()) * 4 + int(pairs) * 2 * row_bytes
    return least


def memory(workload: Workload, kind: str) -> dict[str, Any]:
    """Memory of the compiled step with tables of the workload's size, which are never made."""
    import jax
    import jax.numpy as jnp

    import jaxrec
    from jaxrec.embed.layout import layout_tables
    from jaxrec.mesh.creation import mesh_shape
    from jaxrec.mesh.layout import layout_mesh

    mesh = make_mesh(kind)
    tables = layout_tables(configs(workload), optimizer())
    layout = layout_mesh(tables, placements(kind, workload), mesh_shape(mesh))
    sharded = jaxrec.mesh.ShardedTables({}, {}, layout, mesh)
    for placed in layout.groups:
        group, sharding = placed.group, sharded.sharding(placed)
        rows, state = jax.eval_shape(
            lambda g=group, n=placed.num_slots: (jnp.zeros((n, g.dim)), g.optimizer.init(n, g.dim))
        )

        def place(x, sharding=sharding) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        sharded.rows[group.name] = place(rows)
        sharded.state[group.name] = jax.tree.map(place, state)
    _, (features, *_) = make(dataclasses.replace(workload, rows=1000), kind)
    compiled = jax.jit(train_step, donate_argnums=0).lower(sharded, features, 0).compile()
    stats = compiled.memory_analysis()
    used = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    share = (
        sum(
            rows * (group.dim * 4 + 4)
            for group in tables.groups
            for rows in (table.num_embeddings for table in group.tables)
        )
        / DEVICES
    )
    return {
        "memory_bytes": used,
        "temp_bytes": stats.temp_size_in_bytes,
        "share_bytes": round(share),
        "memory_over_share": round(used / share, 3),
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
