"""Tables on a mesh: made there block by block, written and read in place."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed import first_values
from jaxrec.mesh import (
    column_wise,
    creation,
    data_parallel,
    grid,
    row_mover,
    row_wise,
    shard_access,
    table_row_wise,
    table_wise,
)
from jaxrec.mesh import store as mesh_store

pytestmark = pytest.mark.jax_version

PLACEMENTS = {
    "rows": row_wise(),
    "cut": grid(),
    "columns": column_wise((5, 2)),
    "alone": table_wise(6),
    "host": table_row_wise(1),
    "copied": data_parallel(),
    "twice": row_wise((3, 1, 3)),
}


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)


def make_collection(names=tuple(PLACEMENTS)):
    initializers = ("uniform", "normal", "xavier_normal", jax.nn.initializers.normal(3.0))
    tables = [
        jaxrec.EmbeddingBagConfig(
            name, 101 + i, 6, initializer=initializers[i % 4], dtype=("float32", "bfloat16")[i % 2]
        )
        for i, name in enumerate(PLACEMENTS)
        if name in names
    ]
    # Row-wise Adagrad looks at whole rows, Adam keeps a state for each element.
    optimizer = jaxrec.optim.adagrad(0.1, initial_accumulator_value=0.25)
    return jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=nnx.Rngs(3))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows, so that tables have several and devices parts of them."""
    monkeypatch.setattr(first_values, "BLOCK_ELEMENTS", 96)
    # Those that were traced with other blocks. The values are the same, whatever tests come next.
    first_values._fill.clear_cache()
    creation._fill_shards.clear_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_tables_made_on_a_mesh_equal_those_made_on_a_device(mesh):
    alone = make_collection()
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS)
    made = jaxrec.shard(make_collection, plan, mesh)
    moved = jaxrec.shard(make_collection(), plan, mesh)
    assert isinstance(made.tables.get_value(), jaxrec.mesh.ShardedTables)
    for name in PLACEMENTS:
        np.testing.assert_array_equal(moved.table(name), alone.table(name), err_msg=name)
        np.testing.assert_array_equal(made.table(name), alone.table(name), err_msg=name)
        for model in (made, moved):
            for key, state in alone.table_state(name).items():
                np.testing.assert_array_equal(model.table_state(name)[key], state, err_msg=name)


@pytest.mark.filterwarnings("ignore:tables b take 5 MiB")  # one table alone on eight devices
def test_no_device_ever_holds_more_than_its_part(mesh, monkeypatch):
    """While tables are made, by the arrays that live after each step and by what a step holds."""
    tables = [jaxrec.EmbeddingBagConfig(name, 40_000, 32) for name in ("a", "b")]
    peaks = dict.fromkeys(jax.devices(), 0)
    steps = []

    def measure():
        live = dict.fromkeys(jax.devices(), 0)
        for array in jax.live_arrays():
            part = np.prod(array.sharding.shard_shape(array.shape), dtype=int)
            for device in array.sharding.addressable_devices:
                live[device] += part * array.dtype.itemsize
        for device, used in live.items():
            peaks[device] = max(peaks[device], used)

    def spied(function):
        def call(*args, **options):
            compiled = function.lower(*args, **options).compile()
            steps.append(compiled.memory_analysis().temp_size_in_bytes)
            result = function(*args, **options)
            measure()
            return result

        return call

    for module, name in ((mesh_store, "new_rows"), (creation, "_fill_shards")):
        monkeypatch.setattr(module, name, spied(getattr(module, name)))
    before = sum(array.nbytes for array in jax.live_arrays())
    plan = jaxrec.plan.ShardingPlan.from_dict({"a": row_wise(), "b": table_wise(3)})
    jaxrec.shard(lambda: jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0)), plan, mesh)
    # Every device's array has room for the fullest one's rows: the table on device 3, and a part.
    share = (40_000 + 5_000) * (32 + 1) * 4
    block = first_values.BLOCK_ELEMENTS * 4
    assert max(peaks.values()) <= share + before + 1000
    # A block of random bits, the values made of them, and what XLA needs on the way.
    assert max(steps) <= 8 * block


def test_tables_are_written_in_place(mesh, monkeypatch):
    monkeypatch.setattr(shard_access, "COPY_ELEMENTS", 120)
    names = ("rows", "columns", "copied", "twice")
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS)
    model = jaxrec.shard(lambda: make_collection(names), plan, mesh)
    rng = np.random.default_rng(0)
    expected = {}
    pointers = [
        shard.data.unsafe_buffer_pointer()
        for array in model.tables.get_value().rows.values()
        for shard in array.addressable_shards
    ]
    for name in names:
        expected[name] = rng.integers(-9, 9, model.table(name).shape).astype(np.float32)
        model.load_table(name, expected[name])
        state = {"accumulator": np.abs(expected[name])}
        assert list(model.table_state(name)) == list(state)
        model.load_table_state(name, state)
    for name, values in expected.items():
        np.testing.assert_array_equal(model.table(name).astype(jnp.float32), values)
        np.testing.assert_array_equal(model.table_state(name)["accumulator"], np.abs(values))
    assert pointers == [
        shard.data.unsafe_buffer_pointer()
        for array in model.tables.get_value().rows.values()
        for shard in array.addressable_shards
    ]


def test_what_does_not_fit(mesh):
    model = jaxrec.shard(
        lambda: make_collection(("rows",)), jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS), mesh
    )
    before = model.table("rows")
    with pytest.raises(ValueError, match=r"table 'rows' has shape \(101, 6\), got \(101, 5\)"):
        model.load_table("rows", np.zeros((101, 5)))
    with pytest.raises(ValueError, match=r"table 'rows': its optimizer keeps .*, got \['m'\]"):
        model.load_table_state("rows", {"m": np.zeros((101, 6))})
    with pytest.raises(KeyError, match="no table is named 'nowhere'"):
        model.table("nowhere")
    # Nothing was given away.
    np.testing.assert_array_equal(model.table("rows"), before)


def test_errors_before_anything_is_made(mesh):
    made = []
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS | {"alone": table_wise(8)})
    before = len(jax.live_arrays())
    with pytest.raises(ValueError, match="table 'alone' is placed table_wise on device 8"):
        made.append(jaxrec.shard(make_collection, plan, mesh))
    assert len(jax.live_arrays()) <= before + 2  # the random key


def test_a_sharded_model_is_sharded_anew(mesh):
    """From one plan to another, and to a mesh of other devices."""
    names = ("rows", "cut", "alone")
    alone = make_collection(names)
    model = jaxrec.shard(
        lambda: make_collection(names), jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS), mesh
    )
    fewer = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys(names, column_wise()))
    jaxrec.shard(model, plan, fewer)
    assert model.tables.get_value().layout.mesh.num_devices == 2
    for name in names:
        np.testing.assert_array_equal(model.table(name), alone.table(name))


def test_a_step_compiles_once(mesh, caplog):
    """The optimizer's own state lies on the mesh from the start, as a step returns it."""
    table = jaxrec.EmbeddingBagConfig("a", 16, 2)
    plan = jaxrec.plan.ShardingPlan.from_dict({"a": row_wise()})
    model = jaxrec.shard(
        lambda: jaxrec.EmbeddingBagCollection([table], rngs=nnx.Rngs(0)), plan, mesh
    )
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, features):
        loss, gradients = jaxrec.value_and_grad(lambda model: model(features).values.mean())(model)
        optimizer.update(model, gradients)
        return loss

    batch = jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * 8})
    batch = jaxrec.mesh.shard_batch(batch, mesh)
    with jax.log_compiles():
        for _ in range(3):
            train_step(model, optimizer, batch)
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()]
    assert sum("train_step" in message for message in compiled) == 1


class Peak:
    """The most bytes of arrays that a device holds while a block of code runs.

    Attributes:
        before: Bytes of each device before.
        bytes: The most bytes of each device.
    """

    def __enter__(self):
        gc.collect()
        self.before = self.bytes = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        self._update()

    def _watch(self):
        while not self._ended.wait(0.0005):
            self._update()

    def _update(self):
        self.bytes = np.maximum(self.bytes, self._now())

    @classmethod
    def _now(cls):
        # The list of arrays keeps them all: no other thread makes more before it is gone.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(10)
        try:
            return cls._held()
        finally:
            sys.setswitchinterval(interval)

    @staticmethod
    def _held():
        # A donated array and the one that takes its memory are one.
        buffers = {}
        for array in jax.live_arrays():
            if array.nbytes < 4096:  # there are many, of other tests, and no part of a table
                continue
            # JAX raises one of these for an array that another thread has just donated.
            with contextlib.suppress(RuntimeError, TypeError):
                for shard in array.addressable_shards:
                    place = shard.device.id, shard.data.unsafe_buffer_pointer()
                    buffers[place] = shard.data.nbytes
        held = np.zeros(len(jax.devices()))
        for (device, _), size in buffers.items():
            held[device] += size
        return held


@pytest.fixture
def small_copies(monkeypatch):
    """Copies of 8,192 elements or 250 rows at a time."""
    for module in (shard_access, row_mover):
        monkeypatch.setattr(module, "COPY_ELEMENTS", 1 << 13)
    monkeypatch.setattr("jaxrec.files.rows._ROWS", 250)


ROWS, WIDTH, NUM_TABLES = 2000, 64, 2
SHARE = NUM_TABLES * ROWS * WIDTH * 4 * 3 / 8  # of rows and Adam's state, on each of 8 devices


def wide_collection():
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", ROWS, WIDTH) for i in range(NUM_TABLES)]
    adam = jaxrec.optim.adam(0.01)
    return jaxrec.EmbeddingBagCollection(tables, optimizer=adam, rngs=nnx.Rngs(3))


@pytest.mark.slow
def test_no_device_holds_more_than_its_share_while_tables_move(mesh, small_copies):
    """From one device to eight, and from plan to plan: the new share and less than another."""
    model = wide_collection()
    expected = [np.asarray(model.table(f"t{i}")) for i in range(NUM_TABLES)]
    names = [f"t{i}" for i in range(NUM_TABLES)]
    with Peak() as peak:
        jaxrec.shard(model, plan_of(dict.fromkeys(names, row_wise())), mesh)
    assert SHARE <= (peak.bytes - peak.before).max() < 2 * SHARE
    for placement in (column_wise(), grid(), row_wise()):
        with Peak() as peak:
            jaxrec.shard(model, plan_of(dict.fromkeys(names, placement)), mesh)
        # The new tables, a share, and less than one more.
        assert (peak.bytes - peak.before).max() < 2 * SHARE
    for name, rows in zip(names, expected, strict=True):
        np.testing.assert_array_equal(model.table(name), rows)


@pytest.mark.slow
def test_no_device_holds_a_table_while_it_is_exported_and_imported(mesh, small_copies, tmp_path):
    model = wide_collection()
    jaxrec.shard(model, plan_of({f"t{i}": row_wise() for i in range(NUM_TABLES)}), mesh)
    expected = model.rows("t0", np.arange(ROWS))
    with Peak() as peak:
        for suffix in (".npy", ".parquet"):
            jaxrec.tier.export_rows(model, "t0", tmp_path / f"t{suffix}")
            jaxrec.tier.import_rows(model, "t1", tmp_path / f"t{suffix}")
    np.testing.assert_array_equal(model.rows("t1", np.arange(ROWS)), expected)
    assert (peak.bytes - peak.before).max() < ROWS * WIDTH * 4 / 2


def plan_of(placements):
    return jaxrec.plan.ShardingPlan.from_dict(placements)
