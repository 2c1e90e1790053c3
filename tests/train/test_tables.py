from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx
from safetensors.flax import save_file

import jaxrec
from jaxrec.train import CheckpointError, export_table, import_table, load_torchrec, tables


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
    monkeypatch.setattr(tables, "_ROWS", 3)
    one, other, path = Model(0).bags, Model(1).bags, tmp_path / f"table.{suffix}"
    export_table(one, table, path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    import_table(other, table, path)
    np.testing.assert_array_equal(other.table(table), one.table(table))


def test_other_tools_read_it(tmp_path):
    bags = Model().bags
    export_table(bags, "user", tmp_path / "user.parquet")
    table = pq.read_table(tmp_path / "user.parquet")
    assert table["row"].to_pylist() == list(range(7))
    np.testing.assert_array_equal(table["embedding"].to_pylist(), np.asarray(bags.table("user")))


def test_tables_on_a_mesh(tmp_path):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    placements = {"user": jaxrec.mesh.row_wise(), "item.id": jaxrec.mesh.table_wise(device=1)}
    one = Model(0).bags
    sharded = jaxrec.shard(Model(1).bags, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    export_table(one, "user", tmp_path / "user.npy")
    import_table(sharded, "user", tmp_path / "user.npy")
    np.testing.assert_array_equal(sharded.table("user"), one.table("user"))


BAGS_USER, ITEM = "bags.embedding_bags.user.weight", "bags.embedding_bags.item.id.weight"
SEQUENCE_USER = "sequence.embeddings.user.weight"


def state_dict(**changed):
    rng = np.random.default_rng(0)
    shapes = {BAGS_USER: (7, 3), ITEM: (5, 2), SEQUENCE_USER: (4, 2), "over.0.weight": (3, 3)}
    return {name: rng.random(shape, np.float32) for name, shape in (shapes | changed).items()}


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_state_dicts(tmp_path, suffix):
    arrays, path = state_dict(), tmp_path / f"model.{suffix}"
    if suffix == "npz":
        np.savez(path, **arrays)
    else:
        tensors = {name: jnp.asarray(array) for name, array in arrays.items()}
        tensors[ITEM] = tensors[ITEM].astype(jnp.bfloat16)
        save_file(tensors, path)
    model = Model()
    assert load_torchrec(model, path) == ["over.0.weight"]
    for (collection, table), name in {
        ("bags", "user"): BAGS_USER,
        ("bags", "item.id"): ITEM,
        ("sequence", "user"): SEQUENCE_USER,
    }.items():
        got = getattr(model, collection).table(table)
        np.testing.assert_array_equal(got, jnp.asarray(arrays[name]).astype(got.dtype))


@pytest.mark.parametrize("prefix", ["", "embeddings.", "ranker.embeddings."])
def test_state_dicts_of_collections_called_embeddings(tmp_path, prefix):
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.savez(tmp_path / "x.npz", **{f"{prefix}embedding_bags.user.weight": rows})
    config = jaxrec.EmbeddingBagConfig("user", 3, 2)
    bags = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    assert load_torchrec(bags, tmp_path / "x.npz") == []
    np.testing.assert_array_equal(bags.table("user"), rows)


def without(name):
    return {key: array for key, array in state_dict().items() if key != name}


STATE_DICTS = {
    "ambiguous": (
        without(BAGS_USER) | {f"ranker.{BAGS_USER}": np.zeros((7, 3))},
        "'user' of the model's bags is there 2 times",
    ),
    "missing": (without(ITEM), "'item.id' of the model's bags is not there"),
    "shape": (
        state_dict(**{SEQUENCE_USER: (4, 3)}),
        r"'user' has shape \(4, 2\), the file's \(4, 3\)",
    ),
}


@pytest.mark.parametrize(("arrays", "message"), STATE_DICTS.values(), ids=STATE_DICTS)
def test_state_dicts_of_other_models(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(CheckpointError, match=message):
        load_torchrec(Model(), tmp_path / "x.npz")


def test_files_that_are_none(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_torchrec(Model(), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"is read from \.safetensors, \.npz, \.pt"):
        load_torchrec(Model(), tmp_path / "x.csv")
    for function in (export_table, import_table):
        with pytest.raises(ValueError, match=r"\.npy or \.parquet, got user\.csv"):
            function(Model().bags, "user", tmp_path / "user.csv")
    np.save(tmp_path / "user.npy", np.zeros((7, 4)))
    with pytest.raises(ValueError, match=r"'user' has shape \(7, 3\), the file's \(7, 4\)"):
        import_table(Model().bags, "user", tmp_path / "user.npy")


def rows(numbers, width=3, **changed):
    """Embeddings of zeros; ``changed`` has others by row, as ``r3``."""
    embeddings = {f"r{number}": [0.0] * width for number in numbers} | changed
    return {"row": numbers, "embedding": [embeddings[f"r{number}"] for number in numbers]}


ALL = list(range(7))
PARQUETS = {
    "column": ({"row": [0]}, "no column 'embedding'"),
    "beyond": (rows([*range(6), 7]), "rows reach from 7 to 7, but the table has 7"),
    "missing": (rows([0, 1, 2, 4, 5, 6]), "lacks row 3 of the table's 7"),
    "width": (rows(ALL, 2), "the embedding of row 0 has 2 numbers, the table's have 3"),
    # As many numbers as the table has.
    "ragged": (
        rows(ALL, r4=[1.0, 2.0], r5=[1.0, 2.0, 3.0, 4.0]),
        "the embedding of row 4 has 2 numbers, the table's have 3",
    ),
    "empty": (rows(ALL, r4=[]), "the embedding of row 4 has 0 numbers"),
    "null": (rows(ALL, r6=None), "the embedding of row 6 is null"),
    "null within": (rows(ALL, r5=[1.0, None, 3.0]), "the embedding of row 5 has nulls"),
    "null row": (
        {"row": [0, None, 2, 3, 4, 5, 6], "embedding": [[0.0] * 3] * 7},
        "column 'row' has nulls",
    ),
    "float row": (
        {"row": [float(n) for n in ALL], "embedding": [[0.0] * 3] * 7},
        "column 'row' holds double, expected integers",
    ),
    "twice": (rows([0, 1, 2, 3, 4, 5, 6, 2]), "row 2 is there more than once"),
    "twice in one piece": (rows([0, 1, 1, 3, 4, 5, 6]), "row 1 is there more than once"),
    "text": (
        {"row": ALL, "embedding": ["0,0,0"] * 7},
        "column 'embedding' holds string, expected lists of numbers",
    ),
    "lists of text": (
        {"row": ALL, "embedding": [["a", "b", "c"]] * 7},
        "holds list<.*string>, expected lists of numbers",
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
    assert_no_table(tmp_path / "user.parquet", monkeypatch, table, message)


def assert_no_table(path, monkeypatch, table, message):
    monkeypatch.setattr(tables, "_ROWS", 3)
    pq.write_table(table, path)
    bags = Model().bags
    before = np.asarray(bags.table("user"))
    with pytest.raises(ValueError, match=message) as raised:
        import_table(bags, "user", path)
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
        import_table(Model().bags, "user", tmp_path / name)


def test_paths_as_text(tmp_path):
    one, other = Model(0), Model(1)
    for suffix in ("npy", "parquet"):
        path = f"{tmp_path}/user.{suffix}"
        export_table(one.bags, "user", path)
        import_table(other.bags, "user", path)
        np.testing.assert_array_equal(other.bags.table("user"), one.bags.table("user"))
    np.savez(f"{tmp_path}/x.npz", **state_dict())
    assert load_torchrec(other, f"{tmp_path}/x.npz") == ["over.0.weight"]
    with pytest.raises(FileNotFoundError):
        import_table(other.bags, "user", f"{tmp_path}/missing.npy")
    with pytest.raises(FileNotFoundError):
        import_table(other.bags, "user", f"{tmp_path}/missing.parquet")
