"""Files of ids and rows: what was written comes back, and damaged files change nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import (
    Dynamic,
    ahead,
    export_rows,
    import_rows,
    lfu,
    make,
    ttl,
)
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models

NAMES = ("item", "query", "item_wide")
ROWS = 200
SETTINGS = Dynamic(eviction=lfu())


def make_model(settings=SETTINGS, rows=ROWS, devices=1, optimizer="adam"):
    def made():
        return make(lambda: models.Ranker(rows, optimizer), dict.fromkeys(NAMES, settings))

    if devices == 1:
        return made()
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    placements = dict.fromkeys((*NAMES, "age"), jaxrec.mesh.row_wise())
    placements["query"] = jaxrec.mesh.column_wise([0, 1])
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


def train(model, batches):
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    return [
        float(models.train_step(model, optimizer, x, jnp.asarray(y)))
        for x, y in ahead(model, batches, look_ahead=2)
    ]


def trained(steps=6, vocabulary=150, **options):
    batches, _ = models.stream(steps, vocabulary, samples=8)
    model = make_model(**options)
    train(model, batches)
    return model, batches


def vocabulary_of(model, name):
    (each,) = [v for v in tier_of(model).vocabularies if name in v.name.split("+")]
    return each.vocabulary


def contents(model, name):
    """The ids of a table in order, its rows and their state."""
    ids, rows = vocabulary_of(model, name).map.items()
    collection = model.wide if name == "item_wide" else model.embeddings
    state = collection.table_state(name)
    arrays = {"row": collection.table(name)} | {f"state_{key}": x for key, x in state.items()}
    return ids, {key: np.asarray(array)[rows] for key, array in arrays.items()}


def assert_same(model, other, names=NAMES):
    for name in names:
        (ids, arrays), (expected_ids, expected) = contents(model, name), contents(other, name)
        np.testing.assert_array_equal(ids, expected_ids)
        for key, array in expected.items():
            np.testing.assert_array_equal(arrays[key], array, err_msg=f"{name} {key}")


@pytest.fixture(scope="module")
def source():
    return trained()[0]


@pytest.fixture(params=[1, 1 << 16], ids=["small_parts", "one_part"])
def sizes(request, monkeypatch):
    """Files of few rows are written in many parts."""
    monkeypatch.setattr("jaxrec.files.rows._ROWS", 7 * request.param)


@pytest.mark.parametrize("devices", [1, 4])
def test_the_file_by_pyarrow(tmp_path, devices, sizes):
    model = trained(steps=3, devices=devices)[0]
    for name, dim in (("item", 8), ("query", 8), ("item_wide", 1)):
        path = tmp_path / f"{name}.parquet"
        ids, arrays = contents(model, name)
        assert export_rows(model, name, path, with_state=True) == ids.size
        table = pq.read_table(path)
        assert table.schema.field("id").type == pa.int64()
        assert table.schema.field("row").type.equals(pa.list_(pa.float32(), dim))
        np.testing.assert_array_equal(table["id"].to_numpy(), ids)
        assert set(table.column_names) == {"id", *arrays}
        for key, array in arrays.items():
            column = np.array(table[key].to_pylist(), array.dtype)
            np.testing.assert_array_equal(column, array, err_msg=f"{name} {key}")
        assert export_rows(model, name, path) == ids.size
        assert pq.read_table(path).column_names == ["id", "row"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.parquet" for name in NAMES
    )


@pytest.mark.parametrize(("before", "after"), [(1, 1), (4, 1), (1, 4)])
def test_another_model_has_the_same_rows_and_state(tmp_path, before, after, sizes):
    """With as many rows, and with more."""
    model, _ = trained(steps=4, devices=before)
    other = make_model(rows=ROWS + 40 * (before == 1), devices=after)
    for name in NAMES:
        count = export_rows(model, name, tmp_path / f"{name}.parquet", with_state=True)
        assert import_rows(other, name, tmp_path / f"{name}.parquet") == count
    assert_same(other, model)


def test_rows_of_ids_that_are_there_are_overwritten(tmp_path, source):
    """Other ids stay; without state in the file, so does the state."""
    other = trained(steps=2, vocabulary=400)[0]
    ids, arrays = contents(other, "query")
    moved = ids[::2]
    new = np.array([5, -6, 2**62])
    values = np.arange(8 * (moved.size + 3), dtype=np.float32).reshape(-1, 8)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 8)
    all_ids = np.concatenate([moved[::-1], new])
    pq.write_table(pa.table({"id": all_ids, "row": rows}), tmp_path / "rows.parquet")
    assert import_rows(other, "query", tmp_path / "rows.parquet") == all_ids.size
    after_ids, after = contents(other, "query")
    assert set(after_ids.tolist()) == set(ids.tolist()) | set(new.tolist())
    by_id = dict(zip(all_ids.tolist(), values, strict=True))
    for i, row in zip(after_ids.tolist(), after["row"], strict=True):
        expected = by_id[i] if i in by_id else arrays["row"][list(ids).index(i)]
        np.testing.assert_array_equal(row, expected)
    for key in arrays.keys() - {"row"}:
        old = dict(zip(ids.tolist(), arrays[key], strict=True))
        for i, state in zip(after_ids.tolist(), after[key], strict=True):
            if i in old:
                np.testing.assert_array_equal(state, old[i])
            else:
                np.testing.assert_array_equal(state, np.zeros_like(state))


def test_ids_with_a_time_to_live_begin_it_now(tmp_path, source):
    export_rows(source, "item", tmp_path / "rows.parquet")
    clock = [1000.0]
    model = make_model(Dynamic(eviction=ttl(hours=1, clock=lambda: clock[0])))
    import_rows(model, "item", tmp_path / "rows.parquet")
    records = vocabulary_of(model, "item").records
    assert set(records.last_seconds[records.born >= 0].tolist()) == {1000}


def test_tables_that_share_ids_get_first_rows(tmp_path, source):
    export_rows(source, "item", tmp_path / "rows.parquet")
    model, fresh = make_model(), make_model()
    import_rows(model, "item", tmp_path / "rows.parquet")
    ids = vocabulary_of(model, "item").map.items()[0]
    capacities = {"item": ids.size, "query": 1, "context": 1, "age": 1}
    lists = {"item": [ids], "query": [[]], "context": [[]], "age": [[1]]}
    batch = jaxrec.KeyedJaggedArray.from_lists(lists, id_bits=64, capacities=capacities)
    list(ahead(fresh, [batch]))
    # As if they had come in a batch.
    assert_same(model, fresh, ["item_wide"])


@pytest.mark.slow
def test_rows_in_a_store(tmp_path):
    """Evicted rows are written when they are asked for, and a table with room takes all."""
    model, batches = trained(
        steps=24, vocabulary=300, settings=Dynamic(store="memory://"), rows=120
    )
    ids = np.unique(np.concatenate([models.ids_of(features, "item") for features, _ in batches]))
    resident = export_rows(model, "item", tmp_path / "few.parquet")
    assert resident == len(vocabulary_of(model, "item")) < ids.size
    options = {"with_state": True, "with_stored": True}
    assert export_rows(model, "item", tmp_path / "all.parquet", **options) == ids.size
    written = pq.read_table(tmp_path / "all.parquet")
    assert sorted(written["id"].to_pylist()) == ids.tolist()
    # The same training with room for all.
    roomy = make_model(rows=500)
    train(roomy, batches)
    roomy_ids, arrays = contents(roomy, "item")
    by_id = dict(zip(roomy_ids.tolist(), arrays["row"], strict=True))
    for i, row in zip(written["id"].to_pylist(), written["row"].to_pylist(), strict=True):
        np.testing.assert_allclose(row, by_id[i], rtol=1e-5, atol=1e-6)
    import_rows(make_model(rows=500), "item", tmp_path / "all.parquet")
    # Rows without room in the table go to its store.
    small = make_model(Dynamic(store="memory://"), rows=120)
    assert import_rows(small, "item", tmp_path / "all.parquet") == ids.size
    np.testing.assert_array_equal(
        small.embeddings.rows("item", written["id"].to_numpy()),
        np.array(written["row"].to_pylist(), np.float32),
    )
    with pytest.raises(ValueError, match="table 'item' has no store, so that rows of evicted ids"):
        export_rows(roomy, "item", tmp_path / "all.parquet", with_stored=True)


def test_other_types(tmp_path):
    """float16 is written as such, bfloat16 as float32."""
    for dtype, kind in (("float16", pa.float16()), ("bfloat16", pa.float32())):
        config = jaxrec.EmbeddingBagConfig("item", 20, 4, dtype=dtype, initializer="normal")

        def made(config=config):
            collection = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
            return make(collection, {"item": Dynamic()})

        model, other = made(), made()
        batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[2**60, 7]]}, id_bits=64)
        list(ahead(model, [batch]))
        path = tmp_path / f"{dtype}.parquet"
        assert export_rows(model, "item", path) == 2
        assert pq.read_schema(path).field("row").type.value_type == kind
        import_rows(other, "item", path)
        written, read = (
            np.asarray(each.table("item"), np.float32)[vocabulary_of(each, "item").map.items()[1]]
            for each in (model, other)
        )
        np.testing.assert_array_equal(read, written)


def columns(model, name="item", **changes):
    ids, arrays = contents(model, name)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(arrays["row"].reshape(-1)), 8)
    return {"id": pa.array(ids), "row": rows} | changes


def with_null_number(source):
    rows = contents(source, "item")[1]["row"]
    mask = np.zeros(rows.size, bool)
    mask[8 * 3 + 2] = True
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1), mask=mask), 8)


def lists(source, dtype=np.float32, width=8):
    count = contents(source, "item")[0].size
    return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(count * width, dtype)), width)


WRONG = {
    "no id": (lambda m: {"row": lists(m)}, "has no column 'id'; jaxrec.tier.export_rows writes it"),
    "no row": (lambda m: {"id": columns(m)["id"]}, "has no column 'row'"),
    "strings": (
        lambda m: columns(m, id=columns(m)["id"].cast(pa.string())),
        "column 'id' holds string, expected int64",
    ),
    "width": (
        lambda m: columns(m, row=lists(m, width=4)),
        r"column 'row' holds fixed_size_list<.*: float>\[4\], but table 'item' has fixed_size_list<"
        r".*: float>\[8\]",
    ),
    "type": (
        lambda m: columns(m, row=lists(m, np.float64)),
        r"column 'row' holds fixed_size_list<.*: double>\[8\], but table 'item' has",
    ),
    "numbers": (
        lambda m: columns(m, row=pa.array(np.zeros(len(columns(m)["id"]), np.float32))),
        "column 'row' holds float, but table 'item' has fixed_size_list",
    ),
    "null id": (
        lambda m: columns(m, id=pa.array([*columns(m)["id"].to_pylist()[:-1], None])),
        r"row \d+ \(from 0\): the id is null",
    ),
    "null row": (
        lambda m: columns(m, row=pa.array([None, *lists(m).to_pylist()[1:]], lists(m).type)),
        r"row 0 \(from 0\): column 'row' of id -?\d+ has a null",
    ),
    "null number": (
        lambda m: columns(m, row=with_null_number(m)),
        r"row 3 \(from 0\): column 'row' of id -?\d+ has a null",
    ),
    "duplicate": (
        lambda m: columns(m, id=pa.array([7, *columns(m)["id"].to_pylist()[:-2], 7])),
        "id 7 is there more than once",
    ),
    "reserved": (
        lambda m: columns(m, id=pa.array([*columns(m)["id"].to_pylist()[:-1], -1])),
        r"row \d+ \(from 0\): id -1 \(2\*\*64 - 1 unsigned\) is reserved",
    ),
    "state": (
        lambda m: columns(m, state_sum=columns(m)["id"]),
        r"has the optimizer state 'sum', but the state of table 'item' is: \w+.*; leave column "
        "'state_sum' out",
    ),
}


@pytest.mark.parametrize(("make_columns", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files_change_nothing(tmp_path, source, make_columns, message, sizes):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(make_columns(source)), path)
    before = contents(source, "item")
    with pytest.raises(ValueError, match=message) as error:
        import_rows(source, "item", path)
    assert str(path) in str(error.value)
    after = contents(source, "item")
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1]["row"], before[1]["row"])


def test_damaged_files_change_nothing(tmp_path, source):
    path = tmp_path / "rows.parquet"
    export_rows(source, "item", path)
    content = path.read_bytes()
    before = contents(source, "item")[1]["row"]
    for size in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"rows\.parquet cannot be read as Parquet"):
            import_rows(source, "item", path)
    # Beyond the first page's header.
    path.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be read as Parquet"):
        import_rows(source, "item", path)
    np.testing.assert_array_equal(contents(source, "item")[1]["row"], before)
    with pytest.raises(FileNotFoundError):
        import_rows(source, "item", tmp_path / "none.parquet")


def test_too_little_room_says_both_numbers(tmp_path, source):
    path = tmp_path / "rows.parquet"
    count = export_rows(source, "item", path)
    model = make_model(rows=50)
    room = vocabulary_of(model, "item").room
    assert room < count
    message = (
        f"has {count} ids, of which {count} have no row in table 'item', and {room} of its {room} "
        "rows for ids are free; give it more rows"
    )
    with pytest.raises(ValueError, match=message):
        import_rows(model, "item", path)
    assert len(vocabulary_of(model, "item")) == 0


def test_a_failed_export_leaves_the_file_as_it_was(tmp_path, source, monkeypatch):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"as it was")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxrec.tier.deltas.tables.read", fail)
    with pytest.raises(OSError, match="No space"):
        export_rows(source, "item", path)
    assert path.read_bytes() == b"as it was"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_that_there_are_not(tmp_path, source):
    path = tmp_path / "rows.parquet"
    for call in (export_rows, import_rows):
        with pytest.raises(KeyError, match="no table is named 'shop'; there are 'age', 'item', "):
            call(source, "shop", path)
        with pytest.raises(ValueError, match="'item' is kept by the model that"):
            call(source.embeddings, "item", path)
    with pytest.raises(ValueError, match=r"rows are written to \.parquet, got rows\.npy"):
        export_rows(source, "item", tmp_path / "rows.npy")
    with pytest.raises(ValueError, match=r"rows are read from \.parquet, got rows\.npy"):
        import_rows(source, "item", tmp_path / "rows.npy")


class Two(nnx.Module):
    def __init__(self):
        for name in ("first", "second"):
            config = jaxrec.EmbeddingBagConfig("item", 10, 4)
            setattr(self, name, jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)))


def test_two_tables_of_one_name(tmp_path):
    model = make(Two(), {"item": Dynamic()})
    with pytest.raises(ValueError, match="first and second have a table 'item' each; give"):
        export_rows(model, "item", tmp_path / "rows.parquet")
