from __future__ import annotations

import errno
import math
import os
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxrec
from jaxrec.train import checkpoint
from jaxrec.train.checkpoint import (
    CheckpointError,
    CheckpointManager,
    CheckpointMetadata,
    PreservationPolicy,
    tree,
)
from jaxrec.train.checkpoint.files import UNFINISHED

pytestmark = pytest.mark.jax_version


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
    checkpoint.restore(other[0], tmp_path, other[1])
    # One committed array, and a step that is compiled for it is compiled again for its results.
    assert not any(x.committed for node in other for x in jax.tree.leaves(nnx.state(node)))
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
    checkpoint.restore(other, tmp_path)
    np.testing.assert_array_equal(other.bags.table("c"), model.bags.table("c"))


def test_only_the_newest_is_kept(tmp_path):
    model, optimizer = make()
    for _ in range(3):
        checkpoint.save(tmp_path, model, optimizer)
        checkpoint.save(tmp_path, model, optimizer)  # again at the same step
        advance(model, optimizer)
    assert checkpoint.all_steps(tmp_path) == [2]
    assert {entry.name for entry in tmp_path.iterdir()} == {"2", ".lock"}


def test_nothing_to_restore(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="there is no saved model here"):
            checkpoint.restore(Model(), directory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"width": 4},
            r"'over/kernel' was saved with shape \(3, 1\), but the model's has \(4, 1\)",
        ),
        ({"order": ("a", "b")}, r"has tables 'c' that the model lacks; build the model"),
    ],
    ids=["shape", "table"],
)
def test_another_model(tmp_path, options, message):
    checkpoint.save(tmp_path, *make())
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(Model(**options), tmp_path)


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
        patched.setattr(ocp.AsyncCheckpointer, "save", save)
        with pytest.raises(OSError, match="No space left") as raised:
            checkpoint.save(tmp_path, model, optimizer)
    assert raised.value.errno == errno.ENOSPC
    assert {entry.name for entry in tmp_path.iterdir()} == {"1", ".lock"}
    checkpoint.restore(model, tmp_path, optimizer)
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
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_other_errors_pass(tmp_path, monkeypatch):
    def save(self, *args, **kwargs):
        raise ValueError("something else")

    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", save)
    with pytest.raises(ValueError, match=re.escape("something else")):
        checkpoint.save(tmp_path, *make())


def test_dtype_of_the_model_wins(tmp_path):
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer)
    other = Model()
    other.over.kernel.set_value(other.over.kernel[...].astype(jnp.bfloat16))
    checkpoint.restore(other, tmp_path)
    assert other.over.kernel[...].dtype == jnp.bfloat16


KEEPS = {
    "last": (PreservationPolicy(), [4]),
    "two": (PreservationPolicy(latest=2), [3, 4]),
    "best": (PreservationPolicy(best=1, metric="auc"), [1, 4]),
    "best-two": (PreservationPolicy(best=2, metric="auc"), [1, 2, 4]),
    "smallest": (PreservationPolicy(best=1, metric="auc", mode="min"), [3, 4]),
    "unknown": (PreservationPolicy(best=1, metric="ne"), [4]),
}


@pytest.mark.parametrize(("keep", "expected"), KEEPS.values(), ids=KEEPS)
def test_what_is_kept(keep, expected):
    values = {0: math.nan, 1: 0.8, 2: 0.7, 3: 0.5, 4: 0.6}
    assert sorted(keep.preserved({step: {"auc": x} for step, x in values.items()})) == expected


@pytest.mark.parametrize("options", [{"latest": 0}, {"best": 1}], ids=str)
def test_keeping_nothing(options):
    with pytest.raises(ValueError, match="latest must be 1 or more"):
        PreservationPolicy(**options)


def test_several_are_kept_and_each_restores(tmp_path):
    """Saved while training goes on: what is written is what it was when `save` was called."""
    model, optimizer = make()
    aucs, expected = (0.8, 0.5, 0.7, 0.6), []
    state = {"sums": jnp.zeros(3), "count": jnp.zeros((), jnp.int32)}
    with CheckpointManager(tmp_path, PreservationPolicy(latest=2, best=1, metric="auc")) as manager:
        for number, auc in enumerate(aucs):
            state = jax.tree.map(lambda x: x + 1, state)
            metrics = {"auc": auc}
            manager.save(model, optimizer, state=state, batches=number, metrics=metrics, plan="{}")
            expected.append(contents(model, optimizer))
            advance(model, optimizer)
    assert checkpoint.all_steps(tmp_path) == [0, 2, 3]
    for step in (0, 2, 3):
        other = make(seed=3)
        run = checkpoint.restore(other[0], tmp_path, other[1], step=step)
        assert run == CheckpointMetadata(step, step, {"auc": aucs[step]}, "{}")
        for key, value in contents(*other).items():
            np.testing.assert_array_equal(value, expected[step][key], err_msg=str(key))
        restored = checkpoint.restore_state(state, tmp_path, step=step)
        assert restored["count"].dtype == jnp.int32
        assert jax.tree.map(np.max, restored) == {"sums": step + 1, "count": step + 1}
    with pytest.raises(CheckpointError, match=r"step 1 was not saved; there are \[0, 2, 3\]"):
        checkpoint.restore(make()[0], tmp_path, step=1)
    with pytest.raises(CheckpointError, match=r"here it has \[\(2,\)\]"):
        checkpoint.restore_state(jnp.zeros(2), tmp_path)


@pytest.mark.parametrize("damaged", ["_METADATA", "manifest.ocdbt", "run/metadata"])
def test_damaged(tmp_path, damaged):
    model, optimizer = make()
    with CheckpointManager(tmp_path, PreservationPolicy(latest=2)) as manager:
        manager.save(model, optimizer)
        advance(model, optimizer)
        manager.save(model, optimizer)
    files = [p for p in (tmp_path / "1").rglob("*") if str(p).endswith(damaged)]
    assert files
    for file in files:
        file.write_bytes(b"\0" * 100)
    other, other_optimizer = make()
    with pytest.raises(CheckpointError, match="the checkpoint is damaged") as raised:
        checkpoint.restore(other, tmp_path, other_optimizer)
    assert str(raised.value).count("\n") == 0
    checkpoint.restore(other, tmp_path, other_optimizer, step=0)


def test_the_earlier_order_of_arguments(tmp_path):
    model, optimizer = make()
    state = {"count": jnp.int32(7)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(model, optimizer, state=state, batches=3)
    assert checkpoint.restore(tmp_path, model, optimizer).batches == 3
    assert checkpoint.restore(str(tmp_path), model).batches == 3
    assert checkpoint.restore(tmp_path, model=model, step=0).batches == 3
    assert checkpoint.restore(directory=tmp_path, model=model).batches == 3
    assert checkpoint.restore_state(tmp_path, state) == state


def test_a_vocabulary_that_changed(tmp_path):
    class Items(nnx.Module):
        def __init__(self, rows, seed):
            self.bags = jaxrec.EmbeddingBagCollection(
                [jaxrec.EmbeddingBagConfig("item", rows, 2)],
                optimizer=jaxrec.optim.adam(0.1),
                rngs=nnx.Rngs(seed),
            )

    def trained(rows, seed):
        model = Items(rows, seed)
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[0, 1, 2]]})
        _, gradients = jaxrec.value_and_grad(lambda m: m.bags(batch).values.sum())(model)
        optimizer.update(model, gradients)
        return model, optimizer

    model, optimizer = trained(5, 0)
    checkpoint.save(tmp_path, model, optimizer)
    saved = np.asarray(model.bags.table("item"))
    state = {k: np.asarray(v) for k, v in model.bags.table_state("item").items()}
    assert len(state) > 0
    for rows in (4, 8):
        other, other_optimizer = trained(rows, 1)
        before = np.asarray(other.bags.table("item"))
        with pytest.raises(CheckpointError, match=r"'item' was saved with shape \(5, 2\)"):
            checkpoint.restore(other, tmp_path, other_optimizer)
        checkpoint.restore(other, tmp_path, other_optimizer, resized=True)
        got, common = np.asarray(other.bags.table("item")), min(rows, 5)
        np.testing.assert_array_equal(got[:common], saved[:common])
        np.testing.assert_array_equal(got[common:], before[common:])
        for key, value in other.bags.table_state("item").items():
            if np.ndim(value):
                np.testing.assert_array_equal(np.asarray(value)[:common], state[key][:common])


def test_entries_that_are_no_checkpoints(tmp_path):
    """Saving goes on beside them, restoring leaves them out, and none is written over."""
    for name in ("2026", "007", "٣", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "2026" / "mine").write_text("x")
    (tmp_path / "99").write_text("a file")
    model, optimizer = make()
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(model, optimizer)
        optimizer.step.set_value(jnp.asarray(5, optimizer.step.get_value().dtype))
        manager.save(model, optimizer)
    assert checkpoint.all_steps(tmp_path) == [5]
    assert checkpoint.restore(make()[0], str(tmp_path)).step == 5
    with pytest.raises(CheckpointError, match=r"step 2026 was not saved; there are \[5\]"):
        checkpoint.restore(make()[0], tmp_path, step=2026)
    optimizer.step.set_value(jnp.asarray(2026, optimizer.step.get_value().dtype))
    with pytest.raises(FileExistsError, match="move what is there") as raised:
        checkpoint.save(tmp_path, model, optimizer)
    assert raised.value.filename == str(tmp_path / "2026")
    assert (tmp_path / "2026" / "mine").read_text() == "x"


def test_saving_goes_on_beside_a_damaged_checkpoint(tmp_path):
    model, optimizer = make()
    path = checkpoint.save(tmp_path, model, optimizer)
    (path / "run" / "metadata").write_text("{")
    with pytest.raises(CheckpointError, match="run/metadata"):
        checkpoint.best_step(tmp_path, PreservationPolicy(best=1, metric="auc"))
    advance(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    assert checkpoint.all_steps(tmp_path) == [1]


def test_models_with_other_names(tmp_path):
    """Both sides of the difference are named, and only those."""
    checkpoint.save(tmp_path, *make())
    other = Model()
    other.extra = nnx.Param(jnp.zeros(2))
    with pytest.raises(CheckpointError, match="lacks the model's variables 'extra'; build"):
        checkpoint.restore(other, tmp_path)
    del other.extra
    other.final, other.over = other.over, None
    message = (
        "lacks the model's variables 'final/bias', 'final/kernel' and has variables 'over/bias', "
        "'over/kernel' that the model lacks; build the model as the saved one was"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoint.restore(other, tmp_path)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_failed_save_leaves_no_thread_that_waits(tmp_path, monkeypatch, number):
    """A process ends when its threads do; the checkpoint before is still there."""
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer)
    optimizer.step.set_value(jnp.asarray(1, optimizer.step.get_value().dtype))
    before, made, mkdir = set(threading.enumerate()), [], os.mkdir

    def failing(path, *arguments, **options):
        if "orbax" in str(path):
            made.append(path)
            if len(made) == number:
                raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
        return mkdir(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", failing)
        with pytest.raises(OSError, match="Disk quota exceeded"):
            checkpoint.save(tmp_path, model, optimizer)
    left = {thread for thread in threading.enumerate() if not thread.daemon} - before
    # Idle threads of asyncio's pool, which an earlier save of this process may have begun, end with
    # the process.
    assert not [thread for thread in left if not thread.name.startswith("asyncio_")]
    # A thread of Orbax may make its unfinished folder again; the next save removes it.
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names - {f"1{UNFINISHED}"} == {"0", ".lock"}
    checkpoint.save(tmp_path, model, optimizer)
    assert {entry.name for entry in tmp_path.iterdir()} == {"1", ".lock"}


def test_tables_are_copied_before_other_arrays(monkeypatch):
    """Copies on the devices of a table, on its way to the host, and of other arrays add up."""
    made = []
    for name in ("_copy", "_off_devices"):
        real = getattr(tree, name)
        monkeypatch.setattr(
            tree, name, lambda *args, name=name, real=real: made.append(name) or real(*args)
        )
    tree.saved_tree(*make(), {"loss": jnp.zeros(())})
    assert made == sorted(made, reverse=True)
    assert made.count("_off_devices") == 4
