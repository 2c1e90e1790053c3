"""Versions bring copies to the model that was published, bit for bit, whatever happens."""

from __future__ import annotations

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.fs as pafs
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
    row_columns,
)
from jaxrec.tier.deltas import arrow_files, folder
from jaxrec.tier.deltas.folder import VersionFolder
from jaxrec.tier.tier import tier_of
from tests.fuzz import max_examples
from tests.tier import deltas, models
from tests.tier.deltas import (
    ROWS,
    Fixed,
    assert_same,
    bits,
    draw_fixed,
    draw_open,
    fixed_model,
    open_model,
    steps,
    trained_model,
)

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")


class Sequence(nnx.Module):
    """A model with dropout, batch statistics, a bfloat16 table, a frozen one and a nested one."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        config = jaxrec.EmbeddingConfig
        self.items = jaxrec.EmbeddingCollection(
            [
                config("item", 30, 8, dtype="bfloat16", initializer="normal"),
                config("fixed", 30, 4, ["item"], trainable=False),
            ],
            optimizer=jaxrec.optim.adam(0.1),
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(12, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.over = nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, features):
        found = self.items(features)
        values = jnp.concatenate([each.values for each in found.values()], 1)
        values = self.dropout(self.norm(values.astype(jnp.float32)))
        return self.over(values)[:4, 0]


# The model that is published, and two copies, of one form or of others.
PAIRS = {
    "lost": lambda: (trained_model("lost"), open_model("lost", seed=5)),
    "stored": lambda: (trained_model("stored"), open_model("stored", "sgd", seed=5)),
    "plain": lambda: (trained_model("plain"), fixed_model("cached", seed=3)),
    "cached": lambda: (fixed_model("cached", "sgd"), fixed_model("cached", "sgd")),
    "cached_to_plain": lambda: (trained_model("cached"), fixed_model("plain", "sgd")),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    """A model, its optimizer, a function that draws batches, and copies; examples share them."""
    model, copy = PAIRS[request.param]()
    draw = draw_open if request.param in ("lost", "stored") else draw_fixed
    return model, jaxrec.Optimizer(model, optax.sgd(0.1)), draw, copy


@given(data=st.data())
@settings(max_examples=max_examples(4))
def test_copies_are_equal_after_any_sequence(tmp_path_factory, pair, data):
    """Steps with evictions, publishing, failures of it, new publishers and copies that sleep."""
    directory = tmp_path_factory.mktemp("versions")
    model, optimizer, draw, copy = pair
    tracker, subscriber = ChangeTracker(model, ["publisher"]), Subscriber(copy, directory)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    full_every = data.draw(st.sampled_from([None, 1, 2, 100]))
    actions = st.sampled_from(["train", "train", "publish", "fail", "update", "restart"])
    for action in [*data.draw(st.lists(actions, max_size=8)), "train", "publish"]:
        if action == "train":
            steps(model, optimizer, tracker, [draw(rng) for _ in range(2)])
        elif action == "publish":
            publish(model, directory, tracker=tracker, full_every=full_every)
        elif action == "fail":
            fails_to_publish(model, directory, tracker=tracker, full_every=full_every)
        elif action == "update":
            subscriber.update()
        else:
            tracker = ChangeTracker(model, ["publisher"])
    subscriber.update()
    assert subscriber.update() == 0
    assert_same(copy, model)


def fails_to_publish(model, directory, failure="commit", **options):
    with pytest.MonkeyPatch.context() as patch:
        if failure == "move":
            patch.setattr(folder.pafs, "LocalFileSystem", deltas.NoMoves)
        else:
            patch.setattr(VersionFolder, failure, full_disk)
        with pytest.raises(OSError, match="disk is full"):
            publish(model, directory, **options)


def full_disk(*_, **__):
    raise OSError(28, "the disk is full")


def publish_and_train(model, directory, draw, rounds=4, number=3, **options):
    """Train and publish; yield after each version, with what was published."""
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker = ChangeTracker(model, ["publisher"])
    rng = np.random.default_rng(1)
    yield publish(model, directory, tracker=tracker, **options)
    for _ in range(rounds):
        steps(model, optimizer, tracker, [draw(rng) for _ in range(number)])
        yield publish(model, directory, tracker=tracker, **options)


@pytest.mark.parametrize("kind", ["lost", "stored"])
def test_deltas_hold_changed_rows_and_tombstones(tmp_path, kind):
    model, copy = trained_model(kind), open_model(kind)
    subscriber = Subscriber(copy, tmp_path, with_state=True)
    options = {"with_state": True, "full_every": 100, "step": 7}
    found = []
    for version in publish_and_train(model, tmp_path, draw_open, rounds=3, **options):
        found.append(version)
        assert subscriber.update() == 1
        assert subscriber.version == version.version
        assert subscriber.step == 7
        assert_same(copy, model, with_state=True)
    assert [each.version for each in found] == [1, 2, 3, 4]
    assert [each.is_full for each in found] == [True] + [False] * 3
    assert [each.is_delta for each in found] == [False] + [True] * 3
    assert sum(each.removed for each in found) > 0 or kind == "stored"
    assert all(0 < each.rows < 4 * ROWS for each in found[1:])
    assert tier_of(model).statistics()["query"]["evicted"] > 0


def test_all_kinds_of_variables(tmp_path):
    """bfloat16 rows, NaN, -0, batch statistics, random keys and a frozen table."""
    model, copy = Sequence(), Sequence(seed=1)
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))
    tracker = ChangeTracker(model, ["publisher"])
    subscriber = Subscriber(copy, tmp_path, with_state=True)
    publish(model, tmp_path, tracker=tracker, with_state=True)
    subscriber.update()
    assert_same(copy, model, with_state=True)
    for number in range(3):
        batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[number, 7], [], [29], [3]]})
        steps(model, optimizer, tracker, [(batch, np.ones(4, np.float32))])
        model.items.load_rows("item", [number], np.array([[np.nan, -0.0, *range(6)]]))
        tracker.mark("item", [number])
        model.items.load_rows("fixed", [number], np.full((1, 4), 0.5 + number))
        tracker.mark("fixed", [number])
        assert publish(model, tmp_path, tracker=tracker, with_state=True, full_every=9).rows == 5
        assert subscriber.update() == 1
        assert_same(copy, model, with_state=True)
    assert np.signbit(np.asarray(copy.items.rows("item", [2]), np.float32)[0, 1])


def test_to_a_mesh(tmp_path):
    plan = jaxrec.plan.ShardingPlan.from_dict(
        {"user": jaxrec.mesh.row_wise(), "age": jaxrec.mesh.data_parallel()}
    )
    copy = jaxrec.shard(lambda: Fixed("adam"), plan, jax.make_mesh((8,), ("data",)))
    model, subscriber = trained_model("plain"), Subscriber(copy, tmp_path)
    for _ in publish_and_train(model, tmp_path, draw_fixed, rounds=2, full_every=9):
        subscriber.update()
        assert_same(copy, model)


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


def test_full_versions_come_when_deltas_have_as_many_bytes(tmp_path):
    model = trained_model("plain")
    found = list(publish_and_train(model, tmp_path, draw_fixed, rounds=12, number=8))
    fulls = [each.version for each in found if each.is_full]
    assert len(fulls) > 2
    assert fulls[1] > 2
    names = [name.version for name in VersionFolder(tmp_path).names()]
    assert names == list(range(fulls[-2], 14))
    assert {path.name.split("-")[0] for path in tmp_path.iterdir() if path.is_dir()} == {
        f"{number:012d}" for number in names
    }
    copy = fixed_model("plain")
    assert Subscriber(copy, tmp_path).update() == 14 - fulls[-1]
    assert_same(copy, model)


def test_a_copy_whose_version_is_gone_begins_with_a_full_one(tmp_path):
    model, copy = trained_model("plain"), fixed_model("plain")
    subscriber = Subscriber(copy, tmp_path)
    for version in publish_and_train(model, tmp_path, draw_fixed, full_every=2, keep=1, rounds=6):
        if version.version == 2:
            subscriber.update()
    assert [name.version for name in VersionFolder(tmp_path).names()] == [7]
    assert subscriber.update() == 1
    assert_same(copy, model)


def test_a_folder_that_is_begun_anew(tmp_path):
    model, copy = trained_model("plain"), fixed_model("plain")
    subscriber = Subscriber(copy, tmp_path)
    list(publish_and_train(model, tmp_path, draw_fixed, full_every=9))
    assert subscriber.update() == 5
    for path in list(tmp_path.glob("0*.json")):
        path.unlink()
    model.embeddings.load_rows("user", [3], np.ones((1, 4)))
    assert publish(model, tmp_path).version == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1  # of all that were left
    assert subscriber.update() == 1
    assert_same(copy, model)


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


@pytest.mark.parametrize("failure", ["names", "begin", "writing", "commit", "move"])
def test_publishing_that_fails_loses_nothing(tmp_path, failure):
    model, copy = trained_model("plain"), fixed_model("plain")
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker, subscriber = ChangeTracker(model, ["publisher"]), Subscriber(copy, tmp_path)
    rng = np.random.default_rng(0)
    options = {"tracker": tracker, "full_every": 9}
    publish(model, tmp_path, **options)
    steps(model, optimizer, tracker, [draw_fixed(rng)])
    fails_to_publish(model, tmp_path, failure, **options)
    steps(model, optimizer, tracker, [draw_fixed(rng)])
    version = publish(model, tmp_path, **options)
    assert version.version == 2
    assert version.is_delta
    assert not version.is_full
    subscriber.update()
    assert_same(copy, model)


def test_old_versions_that_cannot_be_removed(tmp_path, monkeypatch):
    model, copy = trained_model("plain"), fixed_model("plain")
    tracker = ChangeTracker(model, ["publisher"])
    options = {"tracker": tracker, "full_every": 1, "keep": 1}
    with monkeypatch.context() as patch:
        patch.setattr(VersionFolder, "remove_before", full_disk)
        for _ in range(3):
            publish(model, tmp_path, **options)
    assert [name.version for name in VersionFolder(tmp_path).names()] == [1, 2, 3]
    assert publish(model, tmp_path, **options).is_delta
    assert [name.version for name in VersionFolder(tmp_path).names()] == [4]
    Subscriber(copy, tmp_path).update()
    assert_same(copy, model)


def test_other_readers_of_changes_make_the_next_version_full(tmp_path):
    model = trained_model("plain")
    tracker = ChangeTracker(model, ["publisher", "other"])
    options = {"tracker": tracker, "full_every": 9}
    assert not publish(model, tmp_path, **options).is_delta
    tracker.changes("other")
    assert publish(model, tmp_path, **options).is_delta
    tracker.changes("publisher")
    assert not publish(model, tmp_path, **options).is_delta
    tracker.load_state(tracker.state())
    assert not publish(model, tmp_path, **options).is_delta
    assert not publish(model, tmp_path, **options, with_state=True).is_delta
    assert publish(model, tmp_path, **options, with_state=True).is_delta
    publish(model, tmp_path)
    assert not publish(model, tmp_path, **options, with_state=True).is_delta
    assert publish(model, tmp_path / "second", **options).is_full


def test_a_model_that_is_restored(tmp_path):
    """Ids that the checkpoint has not lose their rows in the copy."""
    model, copy = trained_model("stored"), open_model("stored")
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker = ChangeTracker(model, ["publisher"])
    subscriber = Subscriber(copy, tmp_path / "versions")
    rng = np.random.default_rng(3)
    options = {"tracker": tracker, "full_every": 9}
    steps(model, optimizer, tracker, [draw_open(rng) for _ in range(2)])
    with jaxrec.train.CheckpointManager(tmp_path / "run") as manager:
        manager.save(model, optimizer, batches=2)
    steps(model, optimizer, tracker, [draw_open(rng) for _ in range(8)])
    publish(model, tmp_path / "versions", **options)
    subscriber.update()
    jaxrec.train.restore(tmp_path / "run", model, optimizer)
    version = publish(model, tmp_path / "versions", **options)
    assert version.is_delta
    assert version.removed > 0
    assert subscriber.update() == 1
    assert_same(copy, model)


def test_a_file_system_without_locks_and_sync(tmp_path, monkeypatch):
    """As of object stores: the folder is reached by PyArrow alone."""
    local = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    found = types.SimpleNamespace(from_uri=lambda url: (local, url.removeprefix("s3://")))
    monkeypatch.setattr(
        folder,
        "pafs",
        types.SimpleNamespace(FileSystem=found, FileSelector=pafs.FileSelector),
    )
    model, copy = trained_model("plain"), fixed_model("plain")
    subscriber = Subscriber(copy, "s3://bucket/versions")
    for _ in publish_and_train(model, "s3://bucket/versions", draw_fixed, full_every=2):
        subscriber.update()
        assert_same(copy, model)
    assert subscriber.version == 5
    assert (tmp_path / "bucket" / "versions").is_dir()


def test_the_files_by_pyarrow(tmp_path):
    """As the docs describe them, for readers without jaxrec."""
    model = trained_model("lost")
    *_, last = publish_and_train(model, tmp_path, draw_open, with_state=True, full_every=9)
    newest = sorted(tmp_path.glob("*.json"))[-1]
    manifest = json.loads(newest.read_text())
    assert manifest["version"] == last.version
    files = manifest["delta"]["embeddings/item"]
    with pa.memory_map(str(tmp_path / files["rows"]["name"])) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema.field("row").type == pa.list_(pa.float32(), 8)
    assert table.num_rows == files["rows"]["rows"] > 0
    assert table.column_names == ["id", "row", "state_first_moment", "state_second_moment"]
    ids = table["id"].to_numpy()
    rows = np.array(table["row"].to_pylist(), np.float32)
    np.testing.assert_array_equal(rows, model.embeddings.rows("item", ids))
    with pa.memory_map(str(tmp_path / manifest["dense"]["name"])) as source:
        dense = pa.ipc.open_file(source).read_all()
    kernel = dense["name"].to_pylist().index("over/kernel")
    assert dense["shape"].to_pylist()[kernel] == [32, 1]
    found = np.frombuffer(dense["bytes"][kernel].as_buffer(), dense["dtype"][kernel].as_py())
    np.testing.assert_array_equal(found, np.asarray(model.over.kernel[...])[:, 0])


def test_small_parts(tmp_path, monkeypatch):
    """Rows are read and written a few at a time."""
    monkeypatch.setattr(row_columns, "_ROWS", 7)
    model, copy = trained_model("stored"), open_model("stored", "sgd")
    subscriber = Subscriber(copy, tmp_path)
    for _ in publish_and_train(model, tmp_path, draw_open, rounds=2, full_every=2):
        subscriber.update()
        assert_same(copy, model)


ARRAYS = {
    "float32": np.array([[1.5, -0.0], [np.nan, 2]], np.float32),
    "bfloat16": np.asarray(jnp.array([[1.5, -0.0], [np.inf, 2]], jnp.bfloat16)),
    "float8": np.asarray(jnp.array([[1.5], [2]], jnp.float8_e4m3fn)),
    "bool": np.array([[True], [False]]),
    "uint32": np.array([1, 2**32 - 1], np.uint32),
    "scalar": np.float16(3),
    "empty": np.zeros((0, 3), np.int8),
}


def test_arrow_files_keep_bits(tmp_path):
    with (tmp_path / "arrays").open("wb") as file:
        arrow_files.write_arrays(file, ARRAYS)
    with pa.OSFile(str(tmp_path / "arrays")) as file:
        found = arrow_files.read_arrays(file)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    values = {k: x for k, x in ARRAYS.items() if np.ndim(x) and len(x) == 2}
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in values.items()}
    with (tmp_path / "rows").open("wb") as file:
        writer = arrow_files.RowFileWriter(file, shapes)
        writer.write(np.array([3, -5]), values)
        writer.write(np.array([4, 5]), values)
        writer.close()
    with pa.OSFile(str(tmp_path / "rows")) as file:
        for part in arrow_files.read_rows(file, {}):
            assert not part[1]
    with pa.OSFile(str(tmp_path / "rows")) as file:
        parts = list(arrow_files.read_rows(file, shapes))
        assert [ids.tolist() for ids, _ in parts] == [[3, -5], [4, 5]]
        for _, of_part in parts:
            for name, array in values.items():
                assert of_part[name].tobytes() == array.tobytes()
    other = {"float32": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    with (
        pa.OSFile(str(tmp_path / "rows")) as file,
        pytest.raises(ValueError, match="float32 of width 2, but the table has float32 of width 3"),
    ):
        list(arrow_files.read_rows(file, other))
    with (
        pa.OSFile(str(tmp_path / "arrays")) as file,
        pytest.raises(ValueError, match="no Arrow file of rows"),
    ):
        list(arrow_files.read_rows(file, shapes))


# Copies that cannot take a version over, and the errors' words.
MISMATCHES = {
    "fewer_rows": (lambda: open_model("lost", rows=17), "does not fit table 'embeddings/.*num_emb"),
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
    with pytest.raises(ValueError, match="seed=0, but the copy has 4"):
        Subscriber(fixed_model("cached", seed=4), tmp_path / "cached").update()
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


def test_arguments(tmp_path):
    model = trained_model("plain")
    with pytest.raises(ValueError, match="full_every is an integer of 1 or more, got 0"):
        publish(model, tmp_path, full_every=0)
    with pytest.raises(ValueError, match="keep is an integer of 1 or more, got True"):
        publish(model, tmp_path, keep=True)
    with pytest.raises(TypeError, match="tracker"):
        publish(model, tmp_path, tracker="publisher")
    with pytest.raises(ValueError, match="tracks another model"):
        publish(model, tmp_path, tracker=ChangeTracker(Sequence(), ["publisher"]))
    with pytest.raises(KeyError, match="no consumer is named 'publisher'"):
        publish(model, tmp_path, tracker=ChangeTracker(model, ["other"]))
    with pytest.raises(ValueError, match="three slashes"):
        publish(model, "file://data/versions")
    with pytest.raises(ValueError, match="no folder has the URL 'nothing://there'"):
        publish(model, "nothing://there")
    with pytest.raises(TypeError, match=r"[Mm]odule"):
        Subscriber({}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        publish(model, tmp_path / "file" / "versions")
    assert Subscriber(model, tmp_path / "none").update() == 0
    assert VersionFolder("file:///data/a%20b?c#d").local == pathlib.Path("/data/a b?c#d")


def test_one_publisher_at_a_time(tmp_path):
    with VersionFolder(tmp_path).locked(), pytest.raises(BlockingIOError):
        publish(fixed_model("plain"), tmp_path)


def test_rows_are_not_taken_away_in_a_training_loop(tmp_path):
    model, copy = trained_model("lost"), open_model("lost")
    rng = np.random.default_rng(4)
    list(ahead(copy, [draw_open(rng)]))
    publish(model, tmp_path)
    loop = ahead(copy, [draw_open(rng) for _ in range(6)], look_ahead=2)
    next(loop)
    with pytest.raises(RuntimeError, match="plans training batches"):
        Subscriber(copy, tmp_path).update()
    loop.close()
    assert Subscriber(copy, tmp_path).update() == 1
    assert_same(copy, model)


def test_killed_publishers(tmp_path):
    """Whenever a publisher is killed, a copy is one of the versions, whole."""
    assert deltas.kill_repeatedly(tmp_path, kills=3) >= 2
