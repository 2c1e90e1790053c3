"""Edited exported models, checksums included: each is refused by an error that names a file."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.serve import ArtifactError, load
from tests.fuzz import max_examples
from tests.serve.artifact.edited import write_checksums, write_manifest
from tests.serve.http.models import raw_model, raw_table

pytestmark = pytest.mark.every_case

VALUES = (
    None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 1.5, float("nan"), "", "x", "../x", "float64",
    "object", [], [-1], [2**40, 2**40], {}, {"a": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """An exported model of raw columns, to be edited."""
    path = tmp_path_factory.mktemp("damage") / "model"
    raw_model(path)
    return path


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, part in items:
        found.append((*path, key))
        if isinstance(part, dict | list):
            found += places(part, (*path, key))
    return found


def edit(content: Any, data: st.DataObject) -> None:
    """Change, remove or repeat a value at any place of a JSON value."""
    *path, last = data.draw(st.sampled_from(places(content)))
    for key in path:
        content = content[key]
    action = data.draw(st.sampled_from(["set", "set", "number", "remove", "repeat"]))
    if action == "number" and isinstance(content[last], int):
        content[last] += data.draw(st.integers(-3, 3))
    elif action == "remove":
        del content[last]
    elif action == "repeat" and isinstance(content, list):
        content.append(content[last])
    else:
        content[last] = data.draw(st.sampled_from(VALUES))


def damage(content: bytes, data: st.DataObject) -> bytes:
    """Change some bytes, or cut bytes out or repeat them."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        if not changed:
            break
        start = data.draw(st.integers(0, len(changed) - 1))
        stop = start + data.draw(st.integers(0, 16))
        action = data.draw(st.sampled_from(["set", "set", "cut", "repeat", "zero"]))
        if action == "set":
            changed[start] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del changed[start:stop]
        elif action == "repeat":
            changed[start:start] = changed[start:stop]
        else:
            changed[start:stop] = bytes(stop - start)
    return bytes(changed)


@settings(max_examples=max_examples(20), deadline=None)
@given(data=st.data())
def test_edited_models(model, tmp_path_factory, data):
    path = pathlib.Path(shutil.copytree(model, tmp_path_factory.mktemp("edited") / "model"))
    files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    file = data.draw(st.sampled_from(["manifest.json"] * len(files) + files))
    if file == "manifest.json":
        write_manifest(path, lambda manifest: edit(manifest, data))
    elif file.endswith(".json"):
        content = json.loads((path / file).read_text())
        edit(content, data)
        (path / file).write_text(json.dumps(content))
        write_checksums(path)
    else:
        (path / file).write_bytes(damage((path / file).read_bytes(), data))
        write_checksums(path)
    served, said = None, f"{path}: it was loaded"
    try:
        served = load(path)
    except ArtifactError as error:
        said = str(error)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
    assert str(path) in said
    assert "\n" not in said
    # Damage of code may do what code does.
    if served is not None and not file.startswith("programs/"):
        with contextlib.suppress(ValueError, TypeError):
            served.predict_columns(raw_table(3).drop_columns("label"))
