"""Damaged checkpoints: each is refused with the file's name, and the model stays as it was."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.train import CheckpointError, Trainer, checkpoint, restore_state
from jaxrec.train.checkpoint import files, loading
from jaxrec.train.checkpoint.files import CHECKSUMS_FILE
from tests.fuzz import max_examples
from tests.train.test_checkpoint import contents, make

STATE = {"sum": jnp.arange(3.0)}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint of the model of seed 0 and of `STATE`."""
    return checkpoint.save(tmp_path_factory.mktemp("saved"), *make(), state=STATE, batches=3)


@pytest.fixture
def saved(original, tmp_path):
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "0")


@pytest.fixture(scope="module")
def other():
    """Another model, and what it holds."""
    pair = make(seed=1)
    return pair, contents(*pair)


def assert_refused(path, pair, before, *words):
    """Restoring fails with one sentence that has the words, and leaves the model alone."""
    for restore in (
        lambda: checkpoint.restore(pair[0], path.parent, pair[1]),
        lambda: restore_state(STATE, path.parent),
    ):
        with pytest.raises(CheckpointError) as raised:
            restore()
        message = str(raised.value)
        assert "\n" not in message
        for word in (f"{path}: the checkpoint is damaged", *words):
            assert word in message, message
    assert_same(contents(*pair), before)


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(got[key], value, err_msg=str(key))


def files_of(path):
    """The files of a checkpoint, the largest last."""
    files = [entry for entry in path.rglob("*") if entry.is_file()]
    return sorted(files, key=lambda file: (file.stat().st_size, str(file)))


@pytest.fixture(scope="module")
def fuzzed(original, tmp_path_factory, other):
    """A checkpoint to damage, its content, another model and the checkpoint of that."""
    path = shutil.copytree(original, tmp_path_factory.mktemp("fuzzed") / "0")
    undamaged = checkpoint.save(tmp_path_factory.mktemp("other"), *other[0])
    return path, contents(*make(seed=0)), other, undamaged.parent


@settings(max_examples=max_examples(60))
@given(data=st.data())
def test_any_damage(fuzzed, data):
    """A byte that differs, a file cut short, longer, missing or added, at any place."""
    path, wanted, (pair, before), undamaged = fuzzed
    file = data.draw(st.sampled_from(files_of(path)))
    content = file.read_bytes()
    damage = data.draw(st.sampled_from(["flip", "cut", "append", "remove", "add", "zero"]))
    place = data.draw(st.integers(0, max(0, len(content) - 1)))
    added = None
    if damage == "flip":
        change = data.draw(st.integers(1, 255))
        file.write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
    elif damage == "cut":
        file.write_bytes(content[:place])
    elif damage == "append":
        file.write_bytes(content + content[place:])
    elif damage == "zero":
        file.write_bytes(content[:place] + bytes(len(content) - place))
    elif damage == "remove":
        file.unlink()
    else:
        added = file.with_name(f"{file.name}.added")
        added.write_bytes(content[:place])
    harmed = added or file
    try:
        # Orbax keeps times in the other files that are directly in the folder.
        holds_times = harmed.parent == path and harmed.name != CHECKSUMS_FILE
        is_same = added is None and file.exists() and file.read_bytes() == content
        if holds_times or is_same:
            checkpoint.restore(pair[0], path.parent, pair[1])
            assert_same(contents(*pair), wanted)
            checkpoint.restore(pair[0], undamaged, pair[1])
        else:
            assert_refused(path, pair, before, harmed.relative_to(path).as_posix())
    finally:
        if added is not None:
            added.unlink()
        file.write_bytes(content)


def damage_of(path, name):
    """Removes the largest file of the data, or writes zeros over a part of it, and names it."""
    file = files_of(path / "state")[-1]
    content = file.read_bytes()
    middle = len(content) // 2
    if name == "missing":
        file.unlink()
    elif name == "cut":
        file.write_bytes(content[:middle])
    else:
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    return file.relative_to(path).as_posix()


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_data_files(saved, other, damage):
    file = damage_of(saved, damage)
    said = {"flipped": "does not have the bytes", "cut": "bytes", "missing": "is missing"}[damage]
    assert_refused(saved, *other, f"{file} ", said, "there is no older one")


def test_the_older_checkpoint_is_named(saved, other):
    newer = shutil.copytree(saved, saved.with_name("7"))
    damage_of(newer, "flipped")
    assert_refused(newer, *other, "remove it to go on from step 0")


@pytest.mark.parametrize("folder", ["state", "run", "tables"])
def test_folders_that_are_missing(saved, other, folder):
    shutil.rmtree(saved / folder)
    assert_refused(saved, *other, f"{folder}/", "is missing")


def test_checksums_cover_large_files_in_parts(saved, monkeypatch):
    monkeypatch.setattr(jaxrec.files.manifest, "_SEGMENT_BYTES", 1000)
    monkeypatch.setattr(jaxrec.files.manifest, "_BUFFER_BYTES", 300)
    files.write_checksums(saved)
    assert files.find_damage(saved) == ""
    largest = damage_of(saved, "flipped")
    assert files.find_damage(saved) == f"{largest} does not have the bytes that were saved"


def test_unreadable_files(saved, other, monkeypatch):
    def readinto(self, directory):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(jaxrec.files.manifest.Segment, "checksum", readinto)
    assert_refused(saved, *other, "cannot be read: Input/output error")


def without_checksums(path):
    """Makes a checkpoint what older versions wrote."""
    (path / CHECKSUMS_FILE).unlink()
    run = json.loads((path / "run" / "metadata").read_text())
    del run["has_checksums"]
    (path / "run" / "metadata").write_text(json.dumps(run))


def test_checkpoints_of_older_versions_load_with_a_warning(saved):
    without_checksums(saved)
    model, optimizer = make(seed=1)
    with pytest.warns(UserWarning, match=r"saved without checksums by an older jaxrec.*anew"):
        checkpoint.restore(model, saved.parent, optimizer)
    assert_same(contents(model, optimizer), contents(*make(seed=0)))


# Restores what an older version wrote, some of it cut or missing.
RESTORE = """
import sys, warnings
import jaxrec
from flax import nnx
warnings.simplefilter("ignore")
bags = jaxrec.EmbeddingBagCollection([jaxrec.EmbeddingBagConfig("a", 600, 4)], rngs=nnx.Rngs(1))
for directory in sys.argv[1:]:
    try:
        jaxrec.train.restore(directory, bags)
    except jaxrec.train.CheckpointError as error:
        print(error)
"""


@pytest.mark.slow
def test_older_checkpoints_without_data_files(tmp_path):
    """One sentence each, and nothing of the threads that read."""
    tables = [jaxrec.EmbeddingBagConfig("a", 600, 4)]
    bags = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    paths = []
    for damage in ("cut", "missing"):
        optimizer = jaxrec.Optimizer(bags, optax.sgd(0.1))
        paths.append(checkpoint.save(tmp_path / damage, bags, optimizer))
        without_checksums(paths[-1])
        damage_of(paths[-1], damage)
    # -P: the installed package, and not the checkout.
    command = [sys.executable, "-P", "-c", RESTORE, *(str(path.parent) for path in paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    for line, path in zip(lines, paths, strict=True):
        assert line.startswith(f"{path}: the checkpoint is damaged (")
    assert done.stderr == ""


def test_the_disk_fails_between_tables(saved, monkeypatch):
    """The error says which tables are loaded; what is checked first cannot foresee it."""
    reads = []

    def read_tables(*arguments, **options):
        reads.append(arguments)
        if len(reads) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return read(*arguments, **options)

    read = loading.read_tables
    monkeypatch.setattr(loading, "read_tables", read_tables)
    model, optimizer = make(seed=1)
    before = contents(model, optimizer)
    with pytest.raises(OSError, match="Input/output error") as raised:
        checkpoint.restore(model, saved.parent, optimizer)
    assert raised.value.__notes__ == [
        f"{saved}: tables 'a', 'b', 'c' of the model are loaded, others not"
    ]
    for key, value in contents(model, optimizer).items():
        if key[0] != "bags":
            np.testing.assert_array_equal(value, before[key], err_msg=str(key))


def test_a_trainer_restores_all_or_nothing(saved, other):
    pair, before = other
    model, optimizer = pair
    trainer = Trainer(model=model, optimizer=optimizer, loss=lambda m, x: (x, {}))
    with pytest.raises(CheckpointError, match=r"arrays of \[\(3,\)\], but here it has \[\]"):
        trainer.restore(saved.parent)
    assert_same(contents(*pair), before)


OTHER_MODELS = {
    "parameter": (dict(width=4), "'over/kernel' was saved with shape (3, 1), but the model's has"),
    "table": (dict(order=("a", "b")), "has tables 'c' that the model lacks"),
    "row optimizer": (
        dict(optimizer=jaxrec.optim.adam(0.1)),
        "the optimizer of table 'c' keeps 'first_moment[2]', 'second_moment[2]'",
    ),
}


@pytest.mark.parametrize(("options", "message"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_other_models_stay_as_they_are(saved, options, message):
    pair = make(seed=1, **options)
    before = contents(*pair)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoint.restore(pair[0], saved.parent, pair[1])
    assert_same(contents(*pair), before)
