"""Files of the rows of tables without an open vocabulary, also those of earlier versions."""

from __future__ import annotations

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import export_rows, import_rows


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.bags = jaxrec.EmbeddingBagCollection(
            [
                jaxrec.EmbeddingBagConfig("user", 7, 3),
                jaxrec.EmbeddingBagConfig("item.id", 5, 2, dtype="bfloat16"),
            ],
            rngs=rngs,
        )
        self.sequence = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("user", 4, 2)], rngs=rngs
        )


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
@pytest.mark.parametrize("table", ["user", "item.id"])
def test_out_and_in(tmp_path, monkeypatch, suffix, table):
    monkeypatch.setattr("jaxrec.files.rows._ROWS", 3)
    one, other, path = Model(0).bags, Model(1).bags, tmp_path / f"table.{suffix}"
    export_rows(one, table, path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    import_rows(other, table, path)
    np.testing.assert_array_equal(other.table(table), one.table(table))


def test_other_tools_read_it(tmp_path):
    bags = Model().bags
    export_rows(bags, "user", tmp_path / "user.parquet")
    table = pq.read_table(tmp_path / "user.parquet")
    assert table["id"].to_pylist() == list(range(7))
    np.testing.assert_array_equal(table["row"].to_pylist(), np.asarray(bags.table("user")))


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.float32(), 3)])
def test_files_of_earlier_versions(tmp_path, kind):
    """Earlier versions wrote the columns ``row`` and ``embedding``."""
    bags, expected = Model().bags, np.arange(21, dtype=np.float32).reshape(7, 3)
    order = [3, 0, 6, 1, 2, 5, 4]
    embeddings = pa.array(expected[order].tolist(), kind)
    pq.write_table(pa.table({"row": order, "embedding": embeddings}), tmp_path / "user.parquet")
    assert import_rows(bags, "user", tmp_path / "user.parquet") == 7
    np.testing.assert_array_equal(bags.table("user"), expected)


def test_optimizer_state(tmp_path):
    def make(seed):
        config = jaxrec.EmbeddingBagConfig("user", 7, 3)
        adam = jaxrec.optim.adam(0.1)
        bags = jaxrec.EmbeddingBagCollection([config], optimizer=adam, rngs=nnx.Rngs(seed))
        state = bags.table_state("user")
        numbers = np.random.default_rng(seed)
        bags.load_table_state("user", {k: numbers.random(x.shape) for k, x in state.items()})
        return bags

    one, other, third = map(make, range(3))
    export_rows(one, "user", tmp_path / "user.parquet", with_state=True)
    import_rows(other, "user", tmp_path / "user.parquet")
    np.testing.assert_array_equal(other.table("user"), one.table("user"))
    for key, array in one.table_state("user").items():
        np.testing.assert_array_equal(other.table_state("user")[key], array)
    # Without state in the file the table keeps its own.
    before = third.table_state("user")
    export_rows(one, "user", tmp_path / "user.parquet")
    import_rows(third, "user", tmp_path / "user.parquet")
    for key, array in before.items():
        np.testing.assert_array_equal(third.table_state("user")[key], array)


def test_tables_on_a_mesh(tmp_path):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    placements = {"user": jaxrec.mesh.row_wise(), "item.id": jaxrec.mesh.table_wise(device=1)}
    one = Model(0).bags
    sharded = jaxrec.shard(Model(1).bags, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    export_rows(one, "user", tmp_path / "user.npy")
    import_rows(sharded, "user", tmp_path / "user.npy")
    np.testing.assert_array_equal(sharded.table("user"), one.table("user"))


def test_files_of_other_kinds(tmp_path):
    for function in (export_rows, import_rows):
        with pytest.raises(ValueError, match=r"\.npy or \.parquet, got user\.csv"):
            function(Model().bags, "user", tmp_path / "user.csv")
    np.save(tmp_path / "user.npy", np.zeros((7, 4)))
    with pytest.raises(ValueError, match=r"'user' has shape \(7, 3\), the file's \(7, 4\)"):
        import_rows(Model().bags, "user", tmp_path / "user.npy")
    with pytest.raises(ValueError, match=r"optimizer state is written to \.parquet"):
        export_rows(Model().bags, "user", tmp_path / "user.npy", with_state=True)


def rows(numbers, width=3, **changed):
    """Embeddings of zeros; ``changed`` has others by row, as ``r3``."""
    embeddings = {f"r{number}": [0.0] * width for number in numbers} | changed
    return {"row": numbers, "embedding": [embeddings[f"r{number}"] for number in numbers]}


ALL = list(range(7))
PARQUETS = {
    "column": ({"row": [0]}, "no column 'id'; jaxrec.tier.export_rows writes it"),
    "beyond": (rows([*range(6), 7]), "ids reach from 7 to 7, but the table has 7"),
    "missing": (rows([0, 1, 2, 4, 5, 6]), "lacks id 3 of the table's 7"),
    "width": (
        rows(ALL, 2),
        r"row 0 .*column 'embedding' of id 0 has 2 numbers, the table's rows 3",
    ),
    # As many numbers as the table has.
    "ragged": (
        rows(ALL, r4=[1.0, 2.0], r5=[1.0, 2.0, 3.0, 4.0]),
        r"row 4 .*column 'embedding' of id 4 has 2 numbers, the table's rows 3",
    ),
    "empty": (rows(ALL, r4=[]), "of id 4 has 0 numbers"),
    "null": (rows(ALL, r6=None), r"row 6 \(from 0\): column 'embedding' of id 6 has a null"),
    "null within": (rows(ALL, r5=[1.0, None, 3.0]), "of id 5 has a null"),
    "null row": (
        {"row": [0, None, 2, 3, 4, 5, 6], "embedding": [[0.0] * 3] * 7},
        r"row 1 \(from 0\): the id is null",
    ),
    "float row": (
        {"row": [float(n) for n in ALL], "embedding": [[0.0] * 3] * 7},
        "column 'row' holds double, expected int64",
    ),
    "twice": (rows([0, 1, 2, 3, 4, 5, 6, 2]), "id 2 is there more than once"),
    "twice in one piece": (rows([0, 1, 1, 3, 4, 5, 6]), "id 1 is there more than once"),
    "text": (
        {"row": ALL, "embedding": ["0,0,0"] * 7},
        "column 'embedding' holds string, but table 'user' has fixed_size_list",
    ),
    "lists of text": (
        {"row": ALL, "embedding": [["a", "b", "c"]] * 7},
        "holds list<.*string>, but table 'user' has fixed_size_list",
    ),
}


@pytest.mark.parametrize(("columns", "message"), PARQUETS.values(), ids=PARQUETS)
def test_parquet_files_that_are_no_tables(tmp_path, monkeypatch, columns, message):
    assert_no_table(tmp_path / "user.parquet", monkeypatch, pa.table(columns), message)


@pytest.mark.parametrize("case", ["null", "null within", "width"])
def test_lists_of_one_width_that_are_no_tables(tmp_path, monkeypatch, case):
    columns, message = PARQUETS[case]
    lists = pa.array(columns["embedding"], pa.list_(pa.float32(), 2 if case == "width" else 3))
    table = pa.table({"row": columns["row"], "embedding": lists})
    if case == "width":
        message = r"holds fixed_size_list<.*float>\[2\], but table 'user' has .*float>\[3\]"
    assert_no_table(tmp_path / "user.parquet", monkeypatch, table, message)


def assert_no_table(path, monkeypatch, table, message):
    monkeypatch.setattr("jaxrec.files.rows._ROWS", 3)
    pq.write_table(table, path)
    bags = Model().bags
    before = np.asarray(bags.table("user"))
    with pytest.raises(ValueError, match=message) as raised:
        import_rows(bags, "user", path)
    assert str(path) in str(raised.value)
    np.testing.assert_array_equal(bags.table("user"), before)


FILES = {
    "cut.npy": (
        lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"),
        "is not an npy file of numbers",
    ),
    "empty.npy": (lambda path: path.write_bytes(b""), "is not an npy file of numbers"),
    "zip.npy": (lambda path: path.write_bytes(b"PK\3\4" * 9), "is not an npy file of numbers"),
    "objects.npy": (
        lambda path: np.save(path, np.array([{}] * 7)),
        "is not an npy file of numbers",
    ),
    "text.npy": (lambda path: np.save(path, np.full((7, 3), "a")), "expected one array of numbers"),
    "cut.parquet": (lambda path: path.write_bytes(b"PAR1"), "cannot be read as Parquet"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(tmp_path, name):
    write, message = FILES[name]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        import_rows(Model().bags, "user", tmp_path / name)


def test_paths_as_text(tmp_path):
    one, other = Model(0), Model(1)
    for suffix in ("npy", "parquet"):
        path = f"{tmp_path}/user.{suffix}"
        export_rows(one.bags, "user", path)
        import_rows(other.bags, "user", path)
        np.testing.assert_array_equal(other.bags.table("user"), one.bags.table("user"))
    with pytest.raises(FileNotFoundError):
        import_rows(other.bags, "user", f"{tmp_path}/missing.npy")
    with pytest.raises(FileNotFoundError):
        import_rows(other.bags, "user", f"{tmp_path}/missing.parquet")
