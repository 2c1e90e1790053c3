"""Quantized models on disk come back with the same bytes."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.serve import by_norm, quantize, restore_quantized, save_quantized
from jaxrec.train import checkpoint
from jaxrec.train.checkpoint import CheckpointError

BATCH = jaxrec.KeyedJaggedArray.from_lists(
    {"user": [[1, 2], [7]], "item": [[3], [4, 4]], "seen": [[0], [5]]}
)


class Ranker(nnx.Module):
    def __init__(self, seed: int = 0, rows: int = 40):
        rngs = nnx.Rngs(seed)
        tables = [
            jaxrec.EmbeddingBagConfig("user", rows, 8),
            jaxrec.EmbeddingBagConfig("item", 30, 8, dtype="bfloat16"),
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        self.history = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("seen", 20, 8)], rngs=rngs
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)  # has a random key
        self.unused = nnx.Param(jax.numpy.zeros((0, 3)))
        self.over = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.dropout(self.embeddings(features).values))[:, 0]


def arrays(model: nnx.Module) -> list[np.ndarray]:
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, keys) else x)
        for x in jax.tree.leaves(nnx.state(model))
    ]


OPTIONS = {
    "int8": {"dtype": "int8"},
    "mixed": {"dtype": "int2", "per_table": {"seen": "float16"}, "output_dtype": "bfloat16"},
    "pruned": {"dtype": "int4", "prune": {"user": by_norm(share=0.5), "seen": by_norm(share=1)}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("is_abstract", [False, True], ids=["concrete", "abstract"])
def test_every_array_comes_back(options, is_abstract, tmp_path):
    model = Ranker()
    # A row whose smallest element is far from the others: packing it again would change bytes.
    model.embeddings.load_rows("user", [3], np.float32([[1000, 1000.3, 1000.7] + [1001] * 5]))
    small = quantize(model, **options)
    save_quantized(small, tmp_path / "model", step=7)
    other = nnx.eval_shape(Ranker) if is_abstract else Ranker(1)
    if not is_abstract:
        before = arrays(other)
    again = restore_quantized(other, tmp_path / "model")
    assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(small))
    for restored, saved in zip(arrays(again), arrays(small), strict=True):
        assert restored.dtype == saved.dtype
        np.testing.assert_array_equal(restored, saved)
    assert again.embeddings.dtype == small.embeddings.dtype
    assert not again.embeddings.is_trainable
    again.eval()
    small.eval()
    np.testing.assert_array_equal(again(BATCH), small(BATCH))
    if not is_abstract:
        for one, two in zip(arrays(other), before, strict=True):
            np.testing.assert_array_equal(one, two)


def test_the_newest_model_replaces_the_one_before(tmp_path):
    save_quantized(quantize(Ranker(0)), tmp_path, step=1)
    small = quantize(Ranker(1), "int4")
    save_quantized(small, tmp_path, step=5)
    assert checkpoint.all_steps(tmp_path) == [5]
    again = restore_quantized(Ranker(), tmp_path)
    np.testing.assert_array_equal(again.embeddings.table("user"), small.embeddings.table("user"))


def save_training(path) -> None:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    checkpoint.save(path, model, jaxrec.Optimizer(model, optax.sgd(0.1)))


def test_checkpoints_of_training_stay(tmp_path):
    save_training(tmp_path)
    with pytest.raises(FileExistsError, match="checkpoints of training are here"):
        save_quantized(quantize(Ranker()), tmp_path)
    assert checkpoint.all_steps(tmp_path) == [0]


def test_a_float_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="tables 'user', 'item' are not quantized"):
        save_quantized(Ranker(), tmp_path)
    assert not [*tmp_path.iterdir()]


def remove_formats(path):
    (path / "quantized.yaml").unlink()


def other_format(path):
    file = path / "quantized.yaml"
    file.write_text(file.read_text().replace("int8", "int4"))


def unknown_format(path):
    file = path / "quantized.yaml"
    file.write_text(file.read_text().replace("int8", "int1"))


def text(path):
    (path / "quantized.yaml").write_text("nothing")


def other_bytes(path):
    largest = max(path.rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_formats, "there is no quantized model here"),
        (other_format, "was saved with shape|the checkpoint lacks"),
        (unknown_format, "quantized.yaml is damaged"),
        (text, "quantized.yaml is damaged"),
        (other_bytes, "the checkpoint is damaged"),
    ],
)
def test_damage(damage, message, tmp_path):
    save_quantized(quantize(Ranker()), tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        restore_quantized(Ranker(), tmp_path)


def test_another_model(tmp_path):
    save_quantized(quantize(Ranker()), tmp_path)
    with pytest.raises(CheckpointError, match="was saved with shape"):
        restore_quantized(Ranker(rows=41), tmp_path)
    config = jaxrec.EmbeddingBagConfig("user", 40, 8)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    with pytest.raises(CheckpointError, match="embeddings with user, item; history with seen, but"):
        restore_quantized(model, tmp_path)
