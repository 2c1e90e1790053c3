from __future__ import annotations

import errno
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxrec
from jaxrec.train import checkpoint
from jaxrec.train.checkpoint import CheckpointError


class Model(nnx.Module):
    def __init__(self, *, seed=0, order=("a", "b", "c"), width=3, optimizer=None):
        rngs = nnx.Rngs(seed)
        tables = {
            "a": jaxrec.EmbeddingBagConfig("a", 5, 2),
            "b": jaxrec.EmbeddingBagConfig("b", 7, 2, dtype="bfloat16"),
            "c": jaxrec.EmbeddingBagConfig("c", 4, 2, optimizer=optimizer),
        }
        self.bags = jaxrec.EmbeddingBagCollection([tables[name] for name in order], rngs=rngs)
        self.sequence = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("a", 6, 3)], optimizer=jaxrec.optim.adam(0.1), rngs=rngs
        )
        self.over = nnx.Linear(width, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def make(**options):
    model = Model(**options)
    return model, jaxrec.Optimizer(model, optax.adam(0.1))


@nnx.jit
def advance(model, optimizer):
    """One step, so that nothing is what it was at first."""
    batch = jaxrec.KeyedJaggedArray.from_lists({name: [[1, 2], [3]] for name in "abc"})

    def loss_fn(model):
        pooled = model.bags(batch)["c"].sum() + model.bags(batch).values.sum()
        rows = model.dropout(model.over(model.sequence(batch)["a"].values)).sum()
        return (pooled + rows) ** 2

    _, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)


def contents(model, optimizer):
    def plain(value):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(value) if is_key else value)

    arrays = {}
    for prefix, node in (("model", model), ("optimizer", optimizer)):
        for path, variable in nnx.to_flat_state(nnx.state(node)):
            if not isinstance(variable, jaxrec.embed.TableVariable):
                arrays[(prefix, *path)] = plain(variable.get_value())
    for name in ("bags", "sequence"):
        collection = getattr(model, name)
        for table in collection.configs:
            arrays[name, table.name] = plain(collection.table(table.name))
            for key, value in collection.table_state(table.name).items():
                arrays[name, table.name, key] = plain(value)
    return arrays


def test_everything_comes_back(tmp_path):
    model, optimizer = make()
    advance(model, optimizer)
    path = checkpoint.save(tmp_path, model, optimizer)
    assert path == tmp_path / "1"
    other = make(seed=1, order=("c", "b", "a"))  # other values, other layout of the tables
    checkpoint.restore(tmp_path, *other)
    expected, got = contents(model, optimizer), contents(*other)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert value.dtype == got[key].dtype
        np.testing.assert_array_equal(value, got[key], err_msg=str(key))
    advance(model, optimizer)
    advance(*other)
    for key, value in contents(model, optimizer).items():
        np.testing.assert_allclose(
            value.astype(np.float32), contents(*other)[key].astype(np.float32), rtol=1e-5
        )


def test_the_model_alone(tmp_path):
    model, optimizer = make()
    advance(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    other = Model(seed=1, optimizer=jaxrec.optim.sgd(0.1))  # another optimizer of a table
    checkpoint.restore(tmp_path, other)
    np.testing.assert_array_equal(other.bags.table("c"), model.bags.table("c"))


def test_only_the_newest_is_kept(tmp_path):
    model, optimizer = make()
    for _ in range(3):
        checkpoint.save(tmp_path, model, optimizer)
        checkpoint.save(tmp_path, model, optimizer)  # again at the same step
        advance(model, optimizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["2"]


def test_nothing_to_restore(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="there is no saved model here"):
            checkpoint.restore(directory, Model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 4}, r"over/kernel was saved with shape \(3, 1\), but the model's has \(4, 1\)"),
        ({"order": ("a", "b")}, r"lacks \['c'\] that were"),
    ],
    ids=["shape", "table"],
)
def test_another_model(tmp_path, options, message):
    checkpoint.save(tmp_path, *make())
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(tmp_path, Model(**options))


FULL = {
    "os-error": OSError(errno.ENOSPC, "No space left on device"),
    "tensorstore": ValueError("RESOURCE_EXHAUSTED: Failed to write [os_error_code='28']"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_full_disk_leaves_the_older_checkpoint(tmp_path, monkeypatch, error):
    model, optimizer = make()
    advance(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    saved = contents(model, optimizer)
    advance(model, optimizer)

    def save(self, path, *args, **kwargs):
        unfinished = path.with_name(f"{path.name}.orbax-checkpoint-tmp")
        unfinished.mkdir()
        (unfinished / "half").write_bytes(b"x")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ocp.StandardCheckpointer, "save", save)
        with pytest.raises(OSError, match="No space left") as raised:
            checkpoint.save(tmp_path, model, optimizer)
    assert raised.value.errno == errno.ENOSPC
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
    checkpoint.restore(tmp_path, model, optimizer)
    for key, value in contents(model, optimizer).items():
        np.testing.assert_array_equal(value, saved[key])


def test_space_is_asked_for_first(tmp_path, monkeypatch):
    model, optimizer = make()
    needed = sum(value.nbytes for value in contents(model, optimizer).values())
    for free in (needed, needed - 1):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        if free == needed:
            checkpoint.require_space(tmp_path, model, optimizer)
            continue
        message = f"No space left on device: the model takes {needed:,} bytes, {free:,} are free"
        with pytest.raises(OSError, match=message):
            checkpoint.save(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_pass(tmp_path, monkeypatch):
    def save(self, *args, **kwargs):
        raise ValueError("something else")

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", save)
    with pytest.raises(ValueError, match=re.escape("something else")):
        checkpoint.save(tmp_path, *make())


def test_dtype_of_the_model_wins(tmp_path):
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer)
    other = Model()
    other.over.kernel.set_value(other.over.kernel[...].astype(jnp.bfloat16))
    checkpoint.restore(tmp_path, other)
    assert other.over.kernel[...].dtype == jnp.bfloat16
