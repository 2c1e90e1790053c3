"""Batches by number: order, restarts, processes, windows of time, and a ranker that takes them."""

import collections
import pickle

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import jaxrec
from jaxrec.data import (
    BatchShape,
    CategoricalColumn,
    DataError,
    EventGroups,
    ParquetGroups,
    RequestGroups,
    RequestLimits,
    SequenceBatches,
    SequenceSchema,
    Shard,
    TableGroups,
    TimeWindow,
    movielens_schema,
    time_range,
)

IDS = CategoricalColumn("ids", 1000)
SCHEMA = SequenceSchema(
    items={"history": "candidate"},
    encodings={"history": IDS, "user": IDS},
    context={"user": 1},
    times=("time", "candidate_time"),
    actions=("action", "label"),
)
SHAPE = BatchShape(rows=6, events=60, candidates=20)
ROWS = 150


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.zipf(1.3, ROWS), 40)
    counts = rng.integers(0, 7, ROWS)
    kind = pa.list_(pa.int32())
    return pa.table(
        {
            "user": np.arange(ROWS),
            "history": pa.array([rng.integers(0, 99, n) for n in lengths], kind),
            "time": pa.array([np.sort(rng.integers(0, 500, n)) for n in lengths], kind),
            "action": pa.array([rng.integers(0, 2, n) for n in lengths], kind),
            "candidate": pa.array([rng.integers(0, 99, n) for n in counts], kind),
            "candidate_time": pa.array([np.sort(rng.integers(500, 900, n)) for n in counts], kind),
            "label": pa.array([rng.integers(0, 2, n) for n in counts], kind),
        }
    )


@pytest.fixture(scope="module")
def groups(table):
    return RequestGroups(TableGroups(table, 20), SCHEMA, RequestLimits(30, candidates=4))


def source_of(groups, **options):
    return SequenceBatches(groups, **{"shape": SHAPE, "seed": 3, "window": 3, **options})


def targets(batches):
    """Count pairs of user and candidate over all batches."""
    found = collections.Counter()
    for batch in batches:
        columns = batch.to_lists()
        for user, items in zip(columns["user"], columns["candidate"], strict=True):
            found.update((*user, item) for item in items)
    return found


def all_targets(table):
    rows = zip(table["user"].to_pylist(), table["candidate"].to_pylist(), strict=True)
    return collections.Counter((user, item) for user, items in rows for item in items)


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


@pytest.mark.parametrize("seed", [None, 3], ids=["order of the files", "shuffled"])
@pytest.mark.parametrize(("devices", "steps"), [(1, 1), (4, 1), (2, 3)])
def test_an_epoch_has_each_candidate_once(table, groups, seed, devices, steps):
    shape = BatchShape(6, 60, 20, devices, steps)
    source = source_of(groups, seed=seed, shape=shape, epochs=2)
    first, second = (
        range(source.batches_of_epoch(0)),
        range(source.batches_of_epoch(0), len(source)),
    )
    for epoch in (first, second):
        assert targets(source[n] for n in epoch) == all_targets(table)
    kinds = {(batch.keys, batch.capacities, batch.strides) for batch in source.from_batch()}
    assert kinds == {
        (SCHEMA.columns, tuple(devices * n for n in source.capacities.values()), (6 * devices,) * 7)
    }
    counts = source.counts
    assert (counts.rows, counts.candidates) == (ROWS, sum(all_targets(table).values()))


def test_a_resumed_run_goes_on_with_its_batch(groups):
    whole = list(source_of(groups, epochs=2).from_batch())
    again = pickle.loads(pickle.dumps(source_of(groups, epochs=2)))
    assert len(again) == len(whole)
    for start in (5, len(whole) - 2):
        for one, other in zip(whole[start:], again.from_batch(start), strict=True):
            assert same(one, other)
    epoch = source_of(groups).batches_of_epoch(0)
    assert not same(whole[0], whole[epoch])
    assert not same(whole[0], source_of(groups, seed=4)[0])
    with pytest.raises(IndexError, match=f"there are {len(whole)} batches, and no batch"):
        again[len(whole)]


def test_processes_have_all_candidates_and_equally_many_batches(table, groups):
    sources = [source_of(groups, shard=Shard(index, 3)) for index in range(3)]
    assert len({len(source) for source in sources}) == 1
    found = [targets(source.from_batch()) for source in sources]
    assert sum(found, collections.Counter()) == all_targets(table)
    # Whole row groups are dealt, so processes differ by the tokens of one at most.
    tokens = [
        sum(int(np.sum(batch[key].lengths)) for batch in source for key in ("history", "candidate"))
        for source in (list(each.from_batch()) for each in sources)
    ]
    requests = [groups.requests(group) for group in range(len(groups.sizes))]
    of_groups = [int(x.history.lengths.sum() + x.candidates.lengths.sum()) for x in requests]
    assert sum(tokens) == sum(of_groups)
    assert max(tokens) - min(tokens) <= max(of_groups)


def test_a_process_without_rows_makes_padding(table):
    groups = RequestGroups(TableGroups(table, ROWS), SCHEMA, RequestLimits(30, candidates=4))
    alone, other = (source_of(groups, shard=Shard(index, 2)) for index in range(2))
    assert len(alone) == len(other)
    assert targets(alone.from_batch()) == all_targets(table)
    assert targets(other.from_batch()) == {}
    assert jax.tree.structure(other[0]) == jax.tree.structure(alone[0])


def test_windows_of_time_share_the_candidates(table, groups):
    first, last = time_range(groups)
    times = [t for row in table["candidate_time"].to_pylist() for t in row]
    assert (first, last) == (min(times), max(times))
    found = collections.Counter()
    for window in TimeWindow.split(first, last, 3):
        source = source_of(groups.within(window))
        batches = list(source.from_batch())
        stamps = [t for batch in batches for row in batch.to_lists()["candidate_time"] for t in row]
        assert window.contains(np.array(stamps)).all()
        assert source.counts.outside_window == len(times) - len(stamps)
        found += targets(batches)
    assert found == all_targets(table)


def test_files_are_read_as_the_table(tmp_path, table, groups):
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=20)
    files = ParquetGroups((tmp_path / "rows.parquet",))
    of_files = source_of(RequestGroups(files, SCHEMA, groups.limits))
    assert len(of_files) == len(source_of(groups))
    for one, other in zip(of_files.from_batch(), source_of(groups).from_batch(), strict=True):
        assert same(one, other)


def make_model():
    rngs = nnx.Rngs(0)
    tables = [
        jaxrec.EmbeddingConfig("item", 1000, 4, feature_names=("history", "candidate")),
        jaxrec.EmbeddingConfig("user", 1000, 4),
    ]
    return jaxrec.nn.HSTURanker(
        jaxrec.EmbeddingCollection(tables, rngs=rngs),
        jaxrec.nn.RankerFeatures(**SCHEMA.features()),
        [jaxrec.nn.TargetTask("click", bit=1)],
        dim=8,
        num_layers=1,
        num_heads=2,
        max_length=40,
        token_hidden_dim=8,
        item_hidden_dim=8,
        task_hidden_sizes=(8,),
        rngs=rngs,
    )


def losses(batches, model):
    loss = nnx.jit(lambda model, batch: model.loss(batch)[0])
    return [float(loss(model, batch)) for batch in batches]


def test_each_device_gets_the_rows_that_it_was_dealt(groups):
    shape = BatchShape(rows=2, events=60, candidates=8, devices=8)
    source = source_of(groups, shape=shape)
    mesh = jax.make_mesh((8,), ("data",))
    batch = source[0]
    placed = jaxrec.mesh.shard_batch(batch, mesh, capacities=source.capacities)
    assert placed.capacity_per_key == source.capacities == shape.capacities(SCHEMA)
    wanted = np.asarray(batch["history"].lengths).reshape(8, 2)
    np.testing.assert_array_equal(placed["history"].lengths, wanted)


@pytest.mark.slow
def test_a_ranker_on_eight_devices_loses_as_on_one(groups):
    shape = BatchShape(rows=2, events=60, candidates=8, devices=8)
    source = source_of(groups, shape=shape)
    batches = [source[n] for n in range(2)]
    alone = losses(batches, make_model())
    mesh = jax.make_mesh((8,), ("data",))
    model = make_model()
    plan = jaxrec.plan.ShardingPlan.from_dict(
        {"item": jaxrec.mesh.row_wise(), "user": jaxrec.mesh.data_parallel()}
    )
    with jax.set_mesh(mesh):
        model = jaxrec.shard(model, plan, mesh)
        placed = [
            jaxrec.mesh.shard_batch(batch, mesh, capacities=source.capacities) for batch in batches
        ]
        together = losses(placed, model)
    np.testing.assert_allclose(together, alone, rtol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"epochs": 0}, "epochs is 1 or more, got 0", id="epochs"),
        pytest.param({"window": 0}, "window is 1 or more, got 0", id="window"),
        pytest.param({"threads": 0}, "threads is 1 or more, got 0", id="threads"),
        pytest.param(
            {"shape": BatchShape(6, 29, 20)},
            "a device has 29 events, but a request may have 30",
            id="events of a request",
        ),
        pytest.param(
            {"shape": BatchShape(6, 60, 3)},
            "a device has 3 candidates, but a request may have 4",
            id="candidates of a request",
        ),
    ],
)
def test_options_that_are_refused(groups, options, message):
    with pytest.raises(ValueError, match=message):
        source_of(groups, **options)


def test_no_request_is_an_error(groups):
    limits = RequestLimits(30, candidates=4, window=TimeWindow(start=5000))
    source = source_of(RequestGroups(groups.groups, SCHEMA, limits))
    with pytest.raises(DataError, match=r"150 rows make no request: .* outside of the window"):
        len(source)
    nothing = pa.table({"user_id": [1], "timestamp": [[]], "movie_id": [[]], "rating": [[]]})
    empty = EventGroups(TableGroups(nothing), movielens_schema(5), RequestLimits(5))
    with pytest.raises(DataError, match="no request has a candidate, so that there is no time"):
        time_range(empty)
