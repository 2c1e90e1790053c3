"""Copies take versions over whole, or not at all."""

from __future__ import annotations

import json
import zlib

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.tier import (
    ChangeTracker,
    Subscriber,
    VersionError,
    ahead,
    publish,
)
from jaxrec.tier.deltas.folder import VersionFolder
from tests.fuzz import max_examples
from tests.tier import models
from tests.tier.deltas import models as deltas
from tests.tier.deltas.models import (
    ROWS,
    Fixed,
    assert_same,
    bits,
    draw_fixed,
    draw_open,
    fixed_model,
    open_model,
    publish_and_train,
    trained_model,
)

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")


def data_files(directory):
    """The files of each version by its number, with its manifest."""
    found = {}
    for name in VersionFolder(directory).names():
        paths = sorted((directory / str(name)).iterdir())
        found[name.version] = [*paths, directory / f"{name}.json"]
    return found


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << position % 8
    path.write_bytes(content)


def cut(path, position):
    content = path.read_bytes()
    path.write_bytes(content[: position % len(content)])


def remove(path, position):
    path.unlink()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Versions 1 (full), 2, 3 (full), 4; the model at the end, and a copy that examples share."""
    directory = tmp_path_factory.mktemp("published")
    model = trained_model("default")
    list(publish_and_train(model, directory, draw_open, rounds=3, full_every=2))
    return directory, model, open_model("default", "sgd")


@pytest.mark.parametrize("damage", [flip, cut, remove])
@given(data=st.data())
@settings(max_examples=max_examples(4))
def test_damage_is_found_before_anything_changes(tmp_path_factory, published, damage, data):
    source, model, copy = published
    directory = tmp_path_factory.mktemp("damaged") / "versions"
    deltas.copy_tree(source, directory)
    subscriber = Subscriber(copy, directory)
    files = data_files(directory)
    number = data.draw(st.sampled_from([1, 2, 3, 4]))
    path = data.draw(st.sampled_from(files[number]))
    damage(path, data.draw(st.integers(0, 10**6)))
    before = deltas.contents(copy)
    message = ""
    try:
        subscriber.update()
    except VersionError as error:
        message = str(error)
    if message:
        # Version 3 is full: the ones before are not needed.
        assert number in (3, 4)
        assert "full_every=1" in message
        assert path.name in message or number == 3
        assert subscriber.version in (0, 2, 3)
        if subscriber.version == 0:
            deltas.assert_contents(copy, before)
    elif damage is remove and path.suffix == ".json" and number == 4:
        assert subscriber.version == 3  # version 4 was never there
    else:
        assert subscriber.version == 4
        assert_same(copy, model)
    publish(model, directory, full_every=1)
    subscriber.update()
    assert_same(copy, model)


def test_a_damaged_full_version_is_passed_by(tmp_path, published):
    source, model, copy = published
    deltas.copy_tree(source, tmp_path / "versions")
    for path in data_files(tmp_path / "versions")[3]:
        if path.name.startswith("full"):
            flip(path, 500)
    assert Subscriber(copy, tmp_path / "versions").update() == 4
    assert_same(copy, model)


# Copies that cannot take a version over, and the errors' words.
MISMATCHES = {
    "fewer_rows": (
        lambda: open_model("lost", rows=17),
        "does not fit the copy: table 'embeddings/.*num_emb",
    ),
    "unknown": (lambda: open_model("stored"), r"unknown=\('zeros', 1\).*\('shared', 3\)"),
    "plain": (lambda: models.Ranker(ROWS, "sgd"), "is_open=True"),
    "other_tables": (lambda: fixed_model("plain"), "embeddings/item' the copy has not"),
}


@pytest.fixture(scope="module")
def versions_of_lost(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lost")
    list(publish_and_train(trained_model("lost"), directory, draw_open, rounds=1, number=4))
    return directory


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_copies_of_another_form_are_refused(versions_of_lost, mismatch):
    made, words = MISMATCHES[mismatch]
    copy = made()
    before = deltas.contents(copy)
    with pytest.raises(ValueError, match=words):
        Subscriber(copy, versions_of_lost).update()
    deltas.assert_contents(copy, before)


def test_fixed_tables_of_another_form_are_refused(tmp_path):
    publish(fixed_model("cached"), tmp_path / "cached")
    with pytest.raises(ValueError, match="without its optimizer state"):
        Subscriber(fixed_model("cached"), tmp_path / "cached", with_state=True).update()
    publish(fixed_model("plain"), tmp_path / "plain", with_state=True)
    with pytest.raises(ValueError, match="state="):
        Subscriber(fixed_model("plain", "sgd"), tmp_path / "plain", with_state=True).update()
    copy = fixed_model("plain")
    copy.more = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'more/bias' was not published"):
        Subscriber(copy, tmp_path / "plain").update()
    copy = fixed_model("plain")
    copy.over = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"float32\[1\], but the copy has float32\[2\]"):
        Subscriber(copy, tmp_path / "plain").update()


def test_versions_of_the_earlier_first_values_are_refused(tmp_path):
    """They left out ids that began by a seed of the tier, in another way than now."""
    publish(fixed_model("cached"), tmp_path)
    (path,) = tmp_path.glob("**/*.json")
    content = json.loads(path.read_text())
    del content["crc32"]
    content["tables"]["embeddings/user"]["seed"] = 3
    content["crc32"] = zlib.crc32(json.dumps(content).encode())
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"'embeddings/user' was published by an earlier .*seed=3"):
        Subscriber(fixed_model("cached"), tmp_path).update()


def test_planned_requests_read_the_rows_of_their_ids_after_an_update(tmp_path):
    model, copy = trained_model("lost"), open_model("lost")
    subscriber = Subscriber(copy, tmp_path)
    versions = publish_and_train(model, tmp_path, draw_open, number=6, full_every=9)
    next(versions)
    next(versions)
    subscriber.update()
    requests = [draw_open(np.random.default_rng(9)) for _ in range(4)]
    serving = ahead(copy, requests, look_ahead=3, is_training=False)
    next(serving)
    for _ in versions:
        pass
    assert subscriber.update() == 3
    for (x, _), (own, _) in zip(
        serving, list(ahead(model, requests[1:], is_training=False)), strict=True
    ):
        np.testing.assert_array_equal(bits(copy(x)), bits(model(own)))


def test_a_copy_whose_version_is_gone_begins_with_a_full_one(tmp_path):
    model, copy = trained_model("plain"), fixed_model("plain")
    subscriber = Subscriber(copy, tmp_path)
    for version in publish_and_train(model, tmp_path, draw_fixed, full_every=2, keep=1, rounds=6):
        if version.version == 2:
            subscriber.update()
    assert [name.version for name in VersionFolder(tmp_path).names()] == [7]
    assert subscriber.update() == 1
    assert_same(copy, model)


def test_to_a_mesh(tmp_path):
    plan = jaxrec.plan.ShardingPlan.from_dict(
        {"user": jaxrec.mesh.row_wise(), "age": jaxrec.mesh.data_parallel()}
    )
    copy = jaxrec.shard(lambda: Fixed("adam"), plan, jax.make_mesh((8,), ("data",)))
    model, subscriber = trained_model("plain"), Subscriber(copy, tmp_path)
    for _ in publish_and_train(model, tmp_path, draw_fixed, rounds=2, full_every=9):
        subscriber.update()
        assert_same(copy, model)


def test_a_version_that_is_removed_while_it_is_taken_over(tmp_path, monkeypatch):
    """After its files were compared with their checksums: a newer full version takes its place."""
    model, copy = deltas.Numbered(), deltas.Numbered()
    tracker = ChangeTracker(model, ["publisher"])

    def publish_next(version, **options):
        model.set_version(version, deltas.batch_of(version))
        tracker.mark("item", deltas.batch_of(version))
        publish(model, tmp_path, tracker=tracker, **options)

    publish_next(1)
    subscriber = Subscriber(copy, tmp_path)
    subscriber.update()
    publish_next(2)
    checked = subscriber._checked

    def check_too_slowly(*arguments):
        incoming = checked(*arguments)
        if incoming.manifest.version == 2:
            publish_next(3, full_every=1, keep=1)
        return incoming

    monkeypatch.setattr(subscriber, "_checked", check_too_slowly)
    assert subscriber.update() == 1
    assert [name.version for name in VersionFolder(tmp_path).names()] == [3]
    assert subscriber.version == 3
    copy.assert_version(3)
