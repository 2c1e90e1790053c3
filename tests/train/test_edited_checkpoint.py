"""Checkpoints whose files were edited under right checksums: loaded right, or refused."""

from __future__ import annotations

import gc
import json
import shutil
import warnings
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.train import CheckpointError, checkpoint, restore_state
from jaxrec.train.checkpoint.files import CHECKSUMS_FILE, write_checksums
from tests.damage import damaged, edited
from tests.fuzz import max_examples
from tests.train.test_checkpoint import contents, make
from tests.train.test_damage import STATE, assert_same, files_of, without_checksums

pytestmark = [
    pytest.mark.slow,
    pytest.mark.every_case,
    # Orbax does not await its other reads after one that failed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected():
    """Collect those reads here: later they would fail the test that runs then."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, its content, another model and the checkpoint of that."""
    directory = tmp_path_factory.mktemp("saved")
    path = checkpoint.save(directory, *make(), state=STATE, batches=3, metrics={"auc": 0.5})
    other = make(seed=1)
    undamaged = checkpoint.save(tmp_path_factory.mktemp("other"), *other)
    return path, contents(*make()), other, undamaged.parent


def rewrite(path, file, content):
    """Write a JSON file of a checkpoint and the checksums of all."""
    (path / file).write_text(json.dumps(content))
    write_checksums(path)


def restored(path, pair, before):
    """Return whether a checkpoint is loaded; else an error names it, the model is as before."""
    message, notes = None, []
    try:
        checkpoint.restore(pair[0], path.parent, pair[1])
        restore_state(STATE, path.parent)
    except CheckpointError as error:
        message, notes = str(error), getattr(error, "__notes__", [])
    if message is None:
        return True
    assert str(path.parent) in message
    assert "\n" not in message
    if not notes:
        assert_same(contents(*pair), before)
    return False


FILES = [
    "run/metadata",
    "tables/metadata",
    "state/_METADATA",
    "state/_sharding",
    "state/array_metadatas/process_0",
    "_CHECKPOINT_METADATA",
    CHECKSUMS_FILE,
]


@pytest.mark.parametrize("file", FILES)
@settings(max_examples=max_examples(3))
@given(data=st.data())
def test_edited_json(saved, tmp_path_factory, file, data):
    original, wanted, pair, undamaged = saved
    path = shutil.copytree(original, tmp_path_factory.mktemp("edited") / "0")
    before = contents(*pair)
    content = json.loads((path / file).read_text())
    if file == CHECKSUMS_FILE:
        files = data.draw(edited(content["files"]))
        crc = f"{zlib.crc32(json.dumps(files).encode()):08x}"
        (path / file).write_text(json.dumps({"files": files, "crc32_of_files": crc}, indent=1))
    else:
        rewrite(path, file, data.draw(edited(content)))
    if restored(path, pair, before):
        assert_same(contents(*pair), wanted)
    checkpoint.restore(pair[0], undamaged, pair[1])


@settings(max_examples=max_examples(3))
@given(data=st.data())
def test_damage_without_checksums(saved, tmp_path_factory, data):
    """As older versions wrote them: nothing but an error of ours, whatever Orbax raises."""
    original, _, pair, undamaged = saved
    path = shutil.copytree(original, tmp_path_factory.mktemp("older") / "0")
    before = contents(*pair)
    without_checksums(path)
    file = data.draw(st.sampled_from([each for each in files_of(path) if each.stat().st_size]))
    file.write_bytes(data.draw(damaged(file.read_bytes())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_restored = restored(path, pair, before)
    is_warned = any("saved without checksums" in str(warning.message) for warning in caught)
    # The facts of the run say whether there were checksums. Damage to them may be refused first.
    assert is_warned or (file == path / "run" / "metadata" and not is_restored)
    checkpoint.restore(pair[0], undamaged, pair[1])


RUN = {
    "another folder": ("link", {"token": "a", "base": "../../1", "base_token": ""}),
    "itself": ("link", {"token": "a", "base": 0, "base_token": "a"}),
    "a later one": ("link", {"token": "a", "base": 7, "base_token": "a"}),
    "no link": ("link", ["token"]),
    "unknown fields": ("link", {"token": "", "base": None, "base_token": "", "other": 1}),
    "step": ("step", "0"),
    "batches": ("batches", [3]),
    "metrics": ("metrics", {"auc": "0.5"}),
    "list of metrics": ("metrics", ["auc"]),
    "plan": ("plan", {"user": 1}),
    "capacities": ("capacities", {"collection": "bags"}),
    "factor": (
        "capacities",
        [{"collection": "", "group": "", "devices": 8, "exchange": "rows", "factor": "1"}],
    ),
    "negative factor": (
        "capacities",
        [{"collection": "", "group": "", "devices": 8, "exchange": "rows", "factor": -1.0}],
    ),
}


@pytest.mark.parametrize(("field", "value"), RUN.values(), ids=RUN)
def test_edited_facts_of_the_run(saved, tmp_path, field, value):
    original, _, pair, _ = saved
    path, before = shutil.copytree(original, tmp_path / "0"), contents(*pair)
    content = json.loads((path / "run/metadata").read_text())
    rewrite(path, "run/metadata", content | {field: value})
    with pytest.raises(CheckpointError, match=rf"{path}: the checkpoint is damaged \(run/metadata"):
        checkpoint.restore(pair[0], tmp_path, pair[1])
    assert_same(contents(*pair), before)


SHAPES = {
    "list": [["a", 5, 2]],
    "no tables": {"bags": [5, 2], "sequence": {"a": [6, 3]}},
    "one number": {"bags": {"a": [5]}},
    "text": {"bags": {"a": "52"}},
    "fractions": {"bags": {"a": [5.0, 2]}},
    "nested": None,
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_edited_shapes(saved, tmp_path, shapes):
    original, _, pair, _ = saved
    path = shutil.copytree(original, tmp_path / "0")
    rewrite(path, "tables/metadata", shapes)
    if shapes is None:
        (path / "tables/metadata").write_text("[" * 100_000)
        write_checksums(path)
    with pytest.raises(CheckpointError, match=rf"{path}: the checkpoint is damaged \(tables/meta"):
        checkpoint.restore(pair[0], tmp_path, pair[1])
