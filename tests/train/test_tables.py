"""State dicts of tables, and the earlier names of files of rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import save_file

import jaxrec
from jaxrec.train import CheckpointError, load_torchrec
from tests.tier.test_plain_row_files import Model

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


def test_paths_as_text(tmp_path):
    np.savez(f"{tmp_path}/x.npz", **state_dict())
    assert load_torchrec(Model(), f"{tmp_path}/x.npz") == ["over.0.weight"]


def test_earlier_names(tmp_path):
    one, other = Model(0).bags, Model(1).bags
    with pytest.warns(DeprecationWarning, match=r"export_table is now jaxrec\.tier\.export_rows"):
        jaxrec.train.export_table(one, "user", tmp_path / "user.parquet")
    with pytest.warns(DeprecationWarning, match=r"import_table is now jaxrec\.tier\.import_rows"):
        jaxrec.train.import_table(other, "user", tmp_path / "user.parquet")
    np.testing.assert_array_equal(other.table("user"), one.table("user"))
