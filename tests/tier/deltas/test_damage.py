"""Edited versions, checksums included: each is refused by an error that names a file."""

from __future__ import annotations

import json
import pathlib
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.files.rows import RowWriter
from jaxrec.tier import Subscriber, VersionError, publish
from tests.fuzz import max_examples
from tests.serve.artifact.test_damage import damage, edit


def make_model(seed: int = 0) -> nnx.Module:
    config = jaxrec.EmbeddingBagConfig("item", 50, 4, initializer="normal")
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(seed))
    model.scale = nnx.Param(jnp.ones(3))
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> pathlib.Path:
    """A folder with a full version and a delta."""
    folder, model = tmp_path_factory.mktemp("published"), make_model()
    tracker = jaxrec.tier.ChangeTracker(model, consumers=["publisher"])
    publish(model, folder, tracker=tracker, full_every=9)
    model.load_rows("item", [7, 3], np.ones((2, 4)))
    tracker.mark("item", [7, 3])
    publish(model, folder, tracker=tracker, full_every=9)
    return folder


def write_manifest(path: pathlib.Path, change) -> None:
    content = json.loads(path.read_text())
    content.pop("crc32")
    change(content)
    crc = zlib.crc32(json.dumps(content).encode())
    path.write_text(json.dumps({**content, "crc32": crc}))


def files_of(manifest: dict) -> list[dict]:
    parts = [part for kind in ("delta", "full") for part in (manifest[kind] or {}).values()]
    return [manifest["dense"], *(file for part in parts for file in part.values())]


OUTSIDE = ["../x", "/etc/passwd", "{}/../../x", "{}/a/b", "{}/..", "{}", "{}/", "x/rows.arrow", ""]


@pytest.mark.every_case
@pytest.mark.parametrize("name", OUTSIDE)
def test_names_stay_in_the_folder_of_their_version(published, tmp_path, name):
    folder = shutil.copytree(published, tmp_path / "versions")
    newest = sorted(folder.glob("*.json"))[-1]
    outside = name.format(newest.stem)
    write_manifest(newest, lambda manifest: files_of(manifest)[-1].update(name=outside))
    copy = make_model(1)
    before = np.asarray(copy.table("item"))
    with pytest.raises(VersionError, match=rf"{newest.name} is damaged .*outside of the version"):
        Subscriber(copy, folder).update()
    assert sorted(folder.glob("*.json"))[0].exists()
    # The full version before it was taken over.
    assert (np.asarray(copy.table("item")) != before).any()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("ids", "message"),
    [([7, 50], "ids from 7 to 50"), ([-1, 7], "ids from -1 to 7"), ([7, 7], "an id twice")],
)
def test_ids_that_a_table_cannot_have(published, tmp_path, ids, message):
    folder = shutil.copytree(published, tmp_path / "versions")
    newest = sorted(folder.glob("*.json"))[-1]
    file = files_of(json.loads(newest.read_text()))[-1]
    with (folder / file["name"]).open("wb") as stream:
        rows = RowWriter(stream, {"rows": jax.ShapeDtypeStruct((0, 4), jnp.float32)})
        rows.write(np.array(ids), {"rows": np.zeros((2, 4), np.float32)})
        rows.close()
    write_checksums(folder, newest)
    with pytest.raises(VersionError, match=message):
        Subscriber(make_model(1), folder).update()


def write_checksums(folder: pathlib.Path, path: pathlib.Path) -> None:
    def change(manifest: dict) -> None:
        for file in files_of(manifest):
            content = (folder / file["name"]).read_bytes()
            file.update(bytes=len(content), crc32=zlib.crc32(content))

    write_manifest(path, change)


def test_a_version_that_does_not_fit_is_named(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "versions")
    newest = sorted(folder.glob("*.json"))[-1]
    # Before jaxrec had one rule of first values, a number stood here.
    write_manifest(newest, lambda manifest: manifest["tables"]["item"].update(seed=-1))
    message = (
        rf"{folder}: version 2 does not fit the copy: table 'item' was published by an earlier"
    )
    with pytest.raises(ValueError, match=message):
        Subscriber(make_model(1), folder).update()


@settings(max_examples=max_examples(30), deadline=None)
@given(data=st.data())
def test_edited_versions(published, tmp_path_factory, data):
    folder = shutil.copytree(published, tmp_path_factory.mktemp("edited") / "versions")
    manifests = sorted(folder.glob("*.json"))
    path = data.draw(st.sampled_from(manifests))
    if data.draw(st.booleans()):
        write_manifest(path, lambda manifest: edit(manifest, data))
    else:
        file = data.draw(st.sampled_from(files_of(json.loads(path.read_text()))))
        content = (folder / file["name"]).read_bytes()
        (folder / file["name"]).write_bytes(damage(content, data))
        write_checksums(folder, path)
    said = f"{folder}: it was taken over"
    try:
        Subscriber(make_model(1), folder).update()
    except ValueError as error:
        said = str(error)
    finally:
        shutil.rmtree(folder.parent)
    assert str(folder) in said
    assert "\n" not in said
