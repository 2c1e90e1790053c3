"""Indexes of items: the nearest ones of an exact search, and errors that name the cause."""

from __future__ import annotations

import pathlib
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest
from flax import nnx

import jaxrec
from jaxrec.data import DataError, Schema, learn_encoder
from jaxrec.nn import TwoTower
from jaxrec.serve import ArtifactError, export, load_index, retrieval, write_index
from tests.serve.models import features, two_tower

try:
    retrieval._faiss()
except ModuleNotFoundError:
    HAS_FAISS = False
else:
    HAS_FAISS = True

needs_faiss = pytest.mark.skipif(
    not HAS_FAISS, reason="faiss-cpu is not installed (extra 'retrieval')"
)

NUM_ITEMS = 70
ITEMS = pa.table({"price": np.linspace(0, 1, NUM_ITEMS), "item": np.arange(NUM_ITEMS)[::-1]})


@pytest.fixture(scope="module")
def tower(tmp_path_factory) -> pathlib.Path:
    """The exported item tower; not to be changed."""
    path = tmp_path_factory.mktemp("retrieval") / "items"
    example = (features(20, ("item",)),)
    export_tower(path, two_tower().model, example)
    return path


def export_tower(path: pathlib.Path, model: TwoTower, example) -> None:
    export(
        model,
        path,
        function=TwoTower.candidate,
        example=example,
        batch_sizes=(16,),
        platforms=("cpu",),
    )


def vectors(items: pa.Table = ITEMS) -> np.ndarray:
    ids = items["item"].to_numpy()[:, None].tolist()
    batch = jaxrec.KeyedJaggedArray.from_lists({"item": ids})
    return np.asarray(two_tower().model.candidate(batch), np.float64)


def queries(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, vectors().shape[1])).astype(np.float32)


@needs_faiss
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
def test_exact_search_finds_the_nearest(metric, tower, tmp_path):
    write_index(tower, ITEMS, tmp_path / "index", metric=metric)
    index = load_index(tmp_path / "index", model=tower)
    found = index.search(queries(9), 5)
    products = queries(9) @ vectors().T
    squares = np.square(queries(9)[:, None] - vectors()[None]).sum(axis=2)
    expected = np.sort({"inner_product": -products, "l2": squares}[metric], axis=1)[:, :5]
    sign = -1 if metric == "inner_product" else 1
    np.testing.assert_allclose(sign * found.scores, expected, rtol=1e-5, atol=1e-5)
    scores = {"inner_product": products, "l2": squares}[metric]
    np.testing.assert_allclose(
        np.take_along_axis(scores, found.rows, axis=1), found.scores, rtol=1e-5, atol=1e-5
    )
    assert index.items.equals(ITEMS)  # with the columns that the tower does not read


@needs_faiss
def test_an_index_of_lists_lies_beside_the_model(tower):
    write_index(tower, ITEMS, kind="IVF4,Flat", parameters="nprobe=4")
    index = load_index(f"{tower}.index")
    assert index.faiss_index.nprobe == 4
    exact = -np.sort(-(queries(9) @ vectors().T), axis=1)[:, :5]
    np.testing.assert_allclose(index.search(queries(9), 5).scores, exact, rtol=1e-5, atol=1e-5)


@needs_faiss
def test_rows_that_are_not_found(tower, tmp_path):
    write_index(tower, ITEMS, tmp_path / "index", kind="IVF8,Flat", parameters="nprobe=1")
    found = load_index(tmp_path / "index").search(queries(20), NUM_ITEMS)
    is_missing = found.rows < 0
    assert is_missing.any(axis=1).all()
    assert np.isnan(found.scores[is_missing]).all()
    assert np.isfinite(found.scores[~is_missing]).all()


@needs_faiss
def test_items_of_raw_columns(tmp_path):
    schema = Schema.from_dict({"label": "label", "categorical": {"name": {"min_count": 1}}})
    names = [f"item {number}" for number in range(30)]
    encoder = learn_encoder(schema, [pa.table({"label": [0, 1] * 15, "name": names})])
    config = jaxrec.EmbeddingBagConfig("name", 31, 4, initializer="normal")
    tower = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    path = tmp_path / "items"
    export(
        tower,
        path,
        function=lambda tower, dense, features: tower(features)["name"],
        encoder=encoder,
        batch_sizes=(32,),
        platforms=("cpu",),
    )
    write_index(path, pa.table({"name": names}))
    index = load_index(f"{path}.index", model=path)
    rows = encoder.vocabularies["name"](pa.array(names)).to_numpy()
    expected = tower.table("name")[rows]
    np.testing.assert_array_equal(index.faiss_index.reconstruct_n(0, 30), expected)
    with pytest.raises(DataError, match="no columns 'name'"):
        write_index(path, pa.table({"title": names}))


WRONG = {
    "no rows": ((ITEMS[:0], {}), ValueError, "the table of items has no rows"),
    "no column": (
        (pa.table({"film": [1]}), {}),
        ValueError,
        "the table of items has no column 'item', which the model reads; its columns are film",
    ),
    "an id of no row": (
        (pa.table({"item": [1, 70]}), {}),
        ValueError,
        r"feature 'item', sample 1: id 70 is outside \[0, 70\), the ids of its table",
    ),
    "text": ((pa.table({"item": ["a"]}), {}), TypeError, "column 'item' is of type string"),
    "kind": ((ITEMS, {"kind": "Tree"}), ValueError, "faiss makes no index of kind 'Tree'"),
    "parameter": (
        (ITEMS, {"parameters": "depth=3"}),
        ValueError,
        "of kind 'Flat' with parameters 'depth=3' for 70 vectors of 4 elements: ",
    ),
    "few items": ((ITEMS, {"kind": "IVF128,Flat"}), ValueError, "for 70 vectors of 4 elements: "),
    "metric": ((ITEMS, {"metric": "cosine"}), ValueError, "metric is one of inner_product, l2"),
    "output": ((ITEMS, {"output": "x"}), ValueError, "output is one of score; got 'x'"),
}


@needs_faiss
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name, tower, tmp_path):
    (items, options), kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        write_index(tower, items, tmp_path / "index", **options)
    assert not (tmp_path / "index").exists()


class Several(nnx.Module):
    def __init__(self, outputs):
        config = jaxrec.EmbeddingBagConfig("item", NUM_ITEMS, 4, initializer="normal")
        self.embeddings = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        self.outputs = outputs

    def __call__(self, features):
        return self.outputs(self.embeddings(features)["item"])


OUTPUTS = {
    "several": (lambda x: {"a": x, "b": x}, "output is one of a, b; it has several"),
    "numbers": (
        lambda x: x[:, 0],
        r"output 'score' must have the shape \[rows, dim\], got \(70,\)",
    ),
    "not finite": (lambda x: x / (x.sum(1, keepdims=True) * 0), "row 0: a number is not finite"),
}


@needs_faiss
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_no_vectors(name, tmp_path):
    outputs, message = OUTPUTS[name]
    export(Several(outputs), tmp_path / "model", batch_sizes=(64,), platforms=("cpu",))
    with pytest.raises(ValueError, match=message):
        write_index(tmp_path / "model", ITEMS)


@needs_faiss
@pytest.mark.parametrize(
    ("given", "k", "message"),
    [
        (np.zeros((2, 5)), 3, r"the queries must have the shape \[queries, 4\], got \(2, 5\)"),
        (np.zeros(4), 3, r"the queries must have the shape \[rows, dim\], got \(4,\)"),
        (np.full((2, 4), np.nan), 3, "the queries, row 0: a number is not finite"),
        (np.zeros((2, 4)), 0, "k must be from 1 to 70 items, got 0"),
        (np.zeros((2, 4)), 71, "k must be from 1 to 70 items, got 71"),
    ],
    ids=["width", "one vector", "nan", "no items", "too many items"],
)
def test_wrong_queries_are_named(given, k, message, tower, tmp_path):
    write_index(tower, ITEMS, tmp_path / "index")
    with pytest.raises(ValueError, match=message):
        load_index(tmp_path / "index").search(given, k)


@needs_faiss
def test_other_folders_are_not_replaced(tower):
    with pytest.raises(FileExistsError, match="exists and is not an index of items"):
        write_index(tower, ITEMS, tower)


@needs_faiss
def test_an_index_of_another_export_is_refused(tower, tmp_path):
    write_index(tower, ITEMS, tmp_path / "index")
    export(Several(lambda x: x), tmp_path / "new", batch_sizes=(64,), platforms=("cpu",))
    with pytest.raises(ArtifactError, match=r"was made by another export than .*new; make it"):
        load_index(tmp_path / "index", model=tmp_path / "new")
    with pytest.raises(ArtifactError, match="nothing is not an exported model"):
        load_index(tmp_path / "index", model=tmp_path / "nothing")


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "no index": (lambda path: shutil.rmtree(path), "is not an index of items"),
    "description": (lambda path: cut(path / "index.json"), "index.json is damaged"),
    "format": (
        lambda path: (path / "index.json").write_text(
            (path / "index.json").read_text().replace("index 1", "index 2")
        ),
        "has the format 'jaxrec index 2', and this jaxrec reads 'jaxrec index 1'",
    ),
    "vectors cut": (lambda path: cut(path / "index.faiss"), "index.faiss has .* bytes, but"),
    "vectors": (
        lambda path: flip(path / "index.faiss"),
        "does not have the bytes that were exported",
    ),
    "items": (lambda path: (path / "items.parquet").unlink(), "items.parquet cannot be read"),
}


@needs_faiss
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_indexes_are_refused(name, tower, tmp_path):
    write_index(tower, ITEMS, tmp_path / "index")
    damage, message = DAMAGES[name]
    damage(tmp_path / "index")
    with pytest.raises(ArtifactError, match=message):
        load_index(tmp_path / "index")


@needs_faiss
def test_a_damaged_index_that_is_not_verified(tower, tmp_path):
    write_index(tower, ITEMS, tmp_path / "index")
    content = bytearray((tmp_path / "index/index.faiss").read_bytes())
    content[:4] = b"????"
    (tmp_path / "index/index.faiss").write_bytes(content)
    with pytest.raises(ArtifactError, match="index cannot be read: "):
        load_index(tmp_path / "index", verify=False)


def test_without_faiss_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faiss", None)  # an import of it fails
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxrec\[retrieval\]'"):
        write_index(tmp_path, ITEMS)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxrec\[retrieval\]'"):
        load_index(tmp_path)
