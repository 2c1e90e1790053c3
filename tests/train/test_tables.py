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
    with pytest.raises(CheckpointError, match=r"from \.safetensors or \.npz"):
        load_torchrec(Model(), tmp_path / "x.pt")
    for function in (export_table, import_table):
        with pytest.raises(ValueError, match=r"\.npy or \.parquet, got user\.csv"):
            function(Model().bags, "user", tmp_path / "user.csv")
    np.save(tmp_path / "user.npy", np.zeros((7, 4)))
    with pytest.raises(ValueError, match=r"'user' has shape \(7, 3\), the file's \(7, 4\)"):
        import_table(Model().bags, "user", tmp_path / "user.npy")


def rows(numbers, width=3):
    return {"row": numbers, "embedding": [[0.0] * width] * len(numbers)}


PARQUETS = {
    "column": ({"row": [0]}, "no column 'embedding'"),
    "beyond": (rows([*range(6), 7]), "rows reach from 0 to 7, but the table has 7"),
    "missing": (rows([0, 1, 2, 4, 5, 6]), "lacks row 3 of the table's 7"),
    "width": (rows(list(range(7)), 2), "embeddings have 2 numbers, the table's 3"),
}


@pytest.mark.parametrize(("columns", "message"), PARQUETS.values(), ids=PARQUETS)
def test_parquet_files_that_are_no_tables(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "user.parquet")
    with pytest.raises(ValueError, match=message):
        import_table(Model().bags, "user", tmp_path / "user.parquet")
