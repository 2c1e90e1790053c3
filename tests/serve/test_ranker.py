"""Exported rankers: scores of one pass, caches of bounded bytes, and clear errors."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import shutil
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.serve import ArtifactError, export_ranker, load, load_ranker, quantize
from jaxrec.serve.ranker.caches import Cache, History, HistoryCaches
from jaxrec.serve.ranker.rows import RankerRequest
from tests.fuzz import max_examples
from tests.nn import rankers
from tests.serve.artifact.edited import write_manifest
from tests.serve.artifact.test_damage import edit
from tests.serve.rankers import HISTORY, OPTIONS, SIZES, TARGETS, expected, exported, model, row

pytestmark = pytest.mark.usefixtures("compiled_fast")

LENGTHS, COUNTS = [12, 3, 0, 7], [3, 5, 2, 0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return exported("start", tmp_path_factory.mktemp("rankers") / "start")


@pytest.fixture(scope="module")
def shared(path):
    """A ranker that the tests of a module share: its programs compile once."""
    return load_ranker(path, cache_bytes=1 << 20)


@pytest.fixture
def served(shared):
    """The shared ranker without caches and counts."""
    shared._caches = HistoryCaches(1 << 20, shared.variables)
    return shared


def predict(served, batch, keys=None):
    columns = {name: batch[name] for name in (*HISTORY, *TARGETS)}
    return served.predict(jaxrec.KeyedJaggedArray.from_lists(columns), keys)


def assert_scores(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5)


def outcomes(served):
    counts = served.cache_counts
    return counts.hits, counts.appends, counts.misses


@pytest.mark.slow
def test_scores_are_those_of_one_pass(served):
    """In micro-batches, by histories of both sizes; first encoded, then cached."""
    batch = rankers.lists(LENGTHS, COUNTS)
    wanted = expected(model("start"), batch)
    for number in range(2):
        assert_scores(predict(served, batch, ["a", "b", 3, "3"]), wanted)
        assert outcomes(served) == (4 * number, 0, 4)
    assert_scores(predict(served, batch), wanted)
    assert outcomes(served) == (4, 0, 8)


def extended(batch, events):
    """A row with more events at its end."""
    return {name: [[*batch[name][0], *events[name][0]]] for name in HISTORY[1:]} | {
        name: values for name, values in batch.items() if name not in HISTORY[1:]
    }


def test_histories_that_grow_and_change(served):
    """Against a dictionary of what each key's cache holds."""
    rng, kept, wanted = np.random.default_rng(0), {}, collections.Counter()
    for number in range(40):
        key = f"user {rng.integers(3)}"
        batch = row(rng, int(rng.integers(0, 6)), int(rng.integers(1, 6)))
        if key in kept and number % 5:
            new = row(rng, min(int(rng.integers(0, 5)), 12 - len(kept[key]["item"][0])), 1)
            batch = extended(kept[key] | {x: batch[x] for x in TARGETS}, new)
            if number % 7 == 6:
                batch["user"] = [[(batch["user"][0][0] + 1) % rankers.USERS]]
            if number % 7 == 5 and batch["item"][0]:
                batch["item"] = [[(batch["item"][0][0] + 1) % rankers.ITEMS, *batch["item"][0][1:]]]
        old = kept.get(key)
        is_prefix = old is not None and old["user"] == batch["user"]
        for name in HISTORY[1:]:
            if old is not None:
                is_prefix &= batch[name][0][: len(old[name][0])] == old[name][0]
        more = len(batch["item"][0]) - len(old["item"][0]) if old is not None else 0
        outcome = "hits" if not more else "appends" if more <= 3 else "misses"
        wanted[outcome if is_prefix else "misses"] += 1
        kept[key] = batch
        assert_scores(predict(served, batch, [key]), expected(model("start"), batch))
        assert outcomes(served) == tuple(wanted[x] for x in ("hits", "appends", "misses"))
    assert min(wanted.values()) >= 3, wanted
    assert len(wanted) == 3


def test_new_variables_drop_all_caches(served):
    batch = rankers.lists(LENGTHS, COUNTS)
    keys, before = ["a", "b", "c", "d"], served.variables
    predict(served, batch, keys)
    assert (served.cache_counts.caches, served.cache_counts.bytes > 0) == (4, True)
    name = "stack/units/0/inputs/kernel"
    changed = rankers.small(count_from="start")
    kernel = changed.stack.units[0].inputs.kernel
    kernel.set_value(kernel[...] * 1.5)
    try:
        served.replace({name: jnp.asarray(kernel[...])}, version=1)
        assert (served.cache_counts.caches, served.cache_counts.bytes) == (0, 0)
        assert_scores(predict(served, batch, keys), expected(changed, batch))
        assert served.cache_counts.misses == 8
    finally:
        served.replace(before.arrays, version=0)
    assert_scores(predict(served, batch, keys), expected(model("start"), batch))


def test_two_threads_replace_variables(served, monkeypatch):
    """Both replacements last, though each waits for the other to begin."""
    old, both = served.variables, threading.Barrier(2)
    names = list(old.arrays)[:2]
    take = served._take

    def wait_and_take(variables):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.1)
        take(variables)

    monkeypatch.setattr(served, "_take", wait_and_take)
    threads = [
        threading.Thread(target=served.replace, args=({name: old.arrays[name] + 1}, 1))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    new = served.variables.arrays
    monkeypatch.undo()
    served.replace(old.arrays, version=0)
    for name in names:
        np.testing.assert_array_equal(new[name], old.arrays[name] + 1)


def test_a_request_under_way_keeps_its_variables(served):
    """It neither reads caches of later variables nor leaves its own behind."""
    batch = rankers.lists([5], [2])
    columns = {name: batch[name] for name in (*HISTORY, *TARGETS)}
    request = RankerRequest.of_batch(
        served.ranker, served.manifest.batch, jaxrec.KeyedJaggedArray.from_lists(columns), ["a"]
    )
    old = served.variables
    served.replace({name: 2 * array for name, array in old.arrays.items()}, version=1)
    try:
        predict(served, batch, ["a"])
        assert_scores(served.predict_request(request, old), expected(model("start"), batch))
        assert served.cache_counts.caches == 1
        predict(served, batch, ["a"])
        assert outcomes(served) == (1, 0, 2)
    finally:
        served.replace(old.arrays, version=0)


def test_few_bytes_keep_the_last_caches(served):
    batch = rankers.lists([3, 3, 3], [1, 1, 1])
    predict(served, batch, ["a", "b", "c"])
    size = served.cache_counts.bytes // 3
    served._caches = HistoryCaches(2 * size, served.variables)
    predict(served, batch, ["a", "b", "c"])
    counts = served.cache_counts
    assert (counts.caches, counts.bytes, counts.evictions) == (2, 2 * size, 1)
    wanted = expected(model("start"), batch)
    assert_scores(predict(served, batch, ["a", "b", "c"]), wanted)
    served._caches = HistoryCaches(0, served.variables)
    for _ in range(2):
        assert_scores(predict(served, batch, ["a", "b", "c"]), wanted)
    assert served.cache_counts == jaxrec.serve.CacheCounts(misses=6)


def cache_of(size, marker):
    history = History((), np.full((1, size), marker, np.int32))
    return Cache(history, size, ())


def key_bytes(key):
    return {1: 1, 2: 1, 3: 1, 300: 2, "a": 1, "ü" * 9: 18}[key]


def total(caches):
    return sum(cache.nbytes + key_bytes(key) for key, cache in caches.items())


@settings(max_examples=max_examples(50))
@given(
    uses=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 300, "a", "ü" * 9]), st.integers(0, 12)), max_size=40
    ),
    bound=st.integers(0, 100),
)
def test_the_least_recently_used_caches_are_dropped(uses, bound):
    owner, oracle, evictions = object(), collections.OrderedDict(), 0
    caches = HistoryCaches(bound, owner)
    for number, (key, size) in enumerate(uses):
        found = caches.find(key, owner)
        if key in oracle:
            oracle.move_to_end(key)
        assert (None if found is None else found) is oracle.get(key)
        if size:
            cache = cache_of(size, number)
            caches.keep(key, cache, owner)
            oracle.pop(key, None)
            if 4 * size + key_bytes(key) <= bound:
                while total(oracle) + 4 * size + key_bytes(key) > bound:
                    oracle.popitem(last=False)
                    evictions += 1
                oracle[key] = cache
        counts = caches.counts()
        assert counts.bytes == total(oracle) <= bound
        assert (counts.caches, counts.evictions) == (len(oracle), evictions)


def test_bytes_stay_below_the_bound_in_threads():
    owner, bound = object(), 1000
    caches, seen, stop = HistoryCaches(bound, owner), [], threading.Event()

    def use(seed):
        rng = np.random.default_rng(seed)
        for number in range(300):
            key = int(rng.integers(1, 20))  # one byte
            if caches.find(key, owner) is None or number % 3 == 0:
                caches.keep(key, cache_of(int(rng.integers(1, 60)), number), owner)
            if number == 200 and seed == 0:
                caches.drop(owner)

    def watch():
        while not stop.is_set():
            seen.append(caches.counts().bytes)

    watcher = threading.Thread(target=watch)
    users = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in (watcher, *users):
        thread.start()
    for thread in users:
        thread.join()
    stop.set()
    watcher.join()
    assert max(seen) <= bound
    counts = caches.counts()
    assert counts.bytes == sum(cache.nbytes + 1 for cache in caches._caches.values()) <= bound


def test_a_request_ends_at_its_deadline(served, monkeypatch):
    """Here after two of its four rows."""
    columns = {name: rankers.lists(LENGTHS, COUNTS)[name] for name in (*HISTORY, *TARGETS)}
    batch, spec = jaxrec.KeyedJaggedArray.from_lists(columns), served.manifest.batch
    request = RankerRequest.of_batch(served.ranker, spec, batch, None)
    clock = types.SimpleNamespace(monotonic=iter([1.0, 2.0, 3.0]).__next__)
    monkeypatch.setattr("jaxrec.serve.ranker.served.time", clock)
    with pytest.raises(TimeoutError, match="2 of 4 rows were scored in time"):
        served.predict_request(request, deadline=2.0)
    assert outcomes(served) == (0, 0, 2)


@pytest.mark.jax_version
def test_nothing_compiles_after_the_warm_up(path, caplog):
    """Whether a cache was just encoded, appended to, or grown to the larger size."""
    served = load_ranker(path)
    served.warm_up()
    rows = rankers.lists([12], [3])
    with jax.log_compiles():
        caplog.clear()
        for length in (2, 4, 6, 8):
            part = {name: [values[0][:length]] for name, values in rows.items()}
            predict(served, rows | {name: part[name] for name in HISTORY}, ["a"])
    assert outcomes(served) == (0, 3, 1)
    assert [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()] == []


def test_histories_of_the_time_of_a_request(tmp_path):
    """A model that counts from the end: its caches serve requests of one time alone."""
    served = load_ranker(exported("end", tmp_path / "end"))
    assert served.ranker.request_time == "c_time"
    assert served.ranker.append_sizes == ()
    batch = rankers.lists([9], [5])
    later = batch | {"c_time": [[time + 4000 for time in batch["c_time"][0]]]}
    for each, counts in ((batch, (0, 0, 1)), (batch, (1, 0, 1)), (later, (1, 0, 2))):
        assert_scores(predict(served, each, ["a"]), expected(model("end"), each))
        assert outcomes(served) == counts
    # Candidates of several times: a history is encoded for that of the last one.
    mixed = batch | {"c_time": [[time + 60 * i for i, time in enumerate(batch["c_time"][0])]]}
    assert_scores(predict(served, mixed, ["a"]), expected(model("end"), mixed))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize(
    "options",
    [
        {"form": "interleaved", "count_from": "start", "max_length": 60},
        {"truncation": (1, 5), "output": "time"},
        {"max_attention_length": 4, "count_from": "start", "norm": "group"},
    ],
    ids=["interleaved", "truncation", "window"],
)
def test_other_rankers(tmp_path, options, dtype):
    ranker = rankers.small(**options)
    ranker = ranker if dtype is None else quantize(ranker, dtype)
    ranker.eval()
    can_append = options.get("count_from") == "start"
    export_ranker(
        ranker,
        tmp_path / "ranker",
        history_sizes=(5, 12) if can_append else (12,),
        candidate_sizes=(4,),
        append_sizes=(3,) if can_append else (),
        platforms=("cpu",),
    )
    served = load_ranker(tmp_path / "ranker")
    batch = rankers.lists([4, 12], [6, 2])
    assert_scores(predict(served, batch, ["a", "b"]), expected(ranker, batch))
    more = extended({name: values[:1] for name, values in batch.items()}, rankers.lists([3], [1]))
    assert_scores(predict(served, more, ["a"]), expected(ranker, more))
    assert outcomes(served) == ((0, 1, 2) if can_append else (0, 0, 3))


@pytest.mark.slow
def test_a_ranker_over_a_mesh_with_programs_for_gpus(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    placements = {name: jaxrec.mesh.row_wise() for name in ("item", "user")}
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    sharded = jaxrec.shard(rankers.small(**OPTIONS["small"]), plan, mesh)
    export_ranker(sharded, tmp_path / "ranker", candidate_sizes=(4,), history_sizes=(12,))
    served = load_ranker(tmp_path / "ranker")
    assert served.manifest.platforms() == ("cpu", "cuda")
    batch = rankers.lists([9], [5])
    assert_scores(predict(served, batch), expected(model("small"), batch))


def short(**columns):
    return rankers.lists([3, 2], [2, 1]) | columns


WRONG = {
    "unknown item": (
        short(item=[[1, 2, 3], [4, 50]]),
        r"feature 'item', sample 1: id 50 is outside \[0, 50\), the ids of its table",
    ),
    "unknown candidate": (
        short(c_item=[[1, -1], [4]]),
        r"feature 'c_item', sample 0: id -1 is negative",
    ),
    "negative time": (short(time=[[1, 2, -3], [4, 5]]), "feature 'time', sample 0: id -3"),
    "events of other lengths": (
        short(action=[[1, 2, 3], [0]]),
        "feature 'action', sample 1: 1 values, but 2 of feature 'item'; the features of events",
    ),
    "candidates of other lengths": (
        short(c_time=[[1], [5]]),
        "feature 'c_time', sample 0: 1 values, but 2 of feature 'c_item'; the features of cand",
    ),
    "too long history": (
        rankers.lists([13], [1]),
        "feature 'item', sample 0: 13 events, and the ranker takes 12 at most; send the newest",
    ),
    "too many candidates": (
        rankers.lists([2, 2], [1, 21]),
        "feature 'c_item', sample 1: 21 candidates, and the ranker takes 20 at most",
    ),
    "too much context": (
        short(user=[[1, 2], [3]]),
        "feature 'user', sample 0: 2 ids, and the ranker takes 1 at most",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows(served, name):
    batch, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        predict(served, batch)
    assert served.cache_counts.misses == 0


def test_wrong_keys(served):
    batch = short()
    for wrong in (1.5, True, b"a"):
        with pytest.raises(TypeError, match=f"keys are integers or strings, got {wrong!r}"):
            predict(served, batch, ["a", wrong])
    for keys in ([3, 4], ["a", "b"]):
        predict(served, batch, np.array(keys))
        predict(served, batch, keys)
    assert outcomes(served) == (4, 0, 4)
    with pytest.raises(ValueError, match="a key for each row; got 1 for 2 rows"):
        predict(served, batch, ["a"])
    lacking = jaxrec.KeyedJaggedArray.from_lists({name: batch[name] for name in HISTORY})
    with pytest.raises(KeyError, match="lacks feature 'c_item'"):
        served.predict(lacking)


def test_each_history_has_its_candidates(served):
    """A batch whose features have different numbers of rows, of which none is left out silently."""
    history, candidates = (
        jaxrec.KeyedJaggedArray.from_lists({name: batch[name] for name in names})
        for batch, names in ((short(), HISTORY), (rankers.lists([1], [1]), TARGETS))
    )
    both = jaxrec.KeyedJaggedArray.from_dict(history.to_dict() | candidates.to_dict())
    with pytest.raises(ValueError, match="got 2 histories and the candidates of 1 rows"):
        served.predict(both)


def test_wrong_exports(tmp_path, path):
    ranker, target = model("end"), tmp_path / "ranker"
    for wrong in (
        {"history_sizes": ()},
        {"history_sizes": [64, "a"]},
        {"candidate_sizes": (0,)},
        {"candidate_sizes": [[64]]},
        {"max_candidates": 1.5},
    ):
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))} are whole numbers"):
            export_ranker(ranker, target, **wrong)
    with pytest.raises(ValueError, match="new events change the encoding of older ones"):
        export_ranker(ranker, target, append_sizes=(4,))
    with pytest.raises(ValueError, match="make the model with max_length="):
        export_ranker(rankers.small(max_length=None), target, platforms=("cpu",))
    with pytest.raises(TypeError, match=r"takes a jaxrec\.nn\.HSTURanker, got Linear"):
        export_ranker(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), target)
    with pytest.raises(ArtifactError, match=r"read it by jaxrec\.serve\.load_ranker"):
        load(path)
    copy = pathlib.Path(shutil.copytree(path, tmp_path / "two kinds"))
    names = ("platform", "file", "targets", "stablehlo")
    write_manifest(
        copy,
        lambda content: content["programs"].append(
            {"samples": 1} | {name: content["ranker"]["programs"][0][name] for name in names}
        ),
    )
    with pytest.raises(ArtifactError, match="programs beside those of its ranker"):
        load_ranker(copy)
    with pytest.raises(ValueError, match="cache_bytes is 0 or more, got -1"):
        load_ranker(path, cache_bytes=-1)
    assert not target.exists()


@settings(max_examples=max_examples(8), deadline=None)
@given(data=st.data())
def test_edited_manifests(path, tmp_path_factory, data):
    copy = pathlib.Path(shutil.copytree(path, tmp_path_factory.mktemp("edited") / "ranker"))
    write_manifest(copy, lambda manifest: edit(manifest["ranker"], data))
    served, said = None, f"{copy}: it was loaded"
    try:
        served = load_ranker(copy)
    except ArtifactError as error:
        said = str(error)
    finally:
        shutil.rmtree(copy.parent, ignore_errors=True)
    assert str(copy) in said
    assert "\n" not in said
    if served is not None:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            predict(served, short(), ["a", "b"])


def test_sizes(served):
    assert [size.events for size in served.ranker.caches] == list(SIZES["start"]["history_sizes"])
    assert served.manifest.platforms() == ("cpu",)
    steps = [(each.step, each.events, each.count) for each in served.ranker.programs]
    assert steps == served.ranker.steps()
