"""Candidates scored against a cache get the scores of one pass; caches grow and are pytrees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import HSTURanker
from jaxrec.nn.history_cache import attend_itself, attend_rows, rows_of
from tests.nn import ranker_cases, rankers
from tests.nn.ranker_cases import CASES, load
from tests.nn.test_transduction import Stack

pytestmark = pytest.mark.usefixtures("compiled_fast")

HISTORY = ["user", "item", "time", "action", "watch"]
EVENTS = ["item", "time", "action", "watch"]
TARGETS = ["c_item", "c_time"]
LENGTHS, COUNTS = [12, 3, 0, 7], [3, 1, 2, 0]


@pytest.mark.slow
def test_recorded_targets_against_a_cache():
    arrays, case = load("stack_2_cached"), CASES["stack_2_cached"]
    meta = case["meta"]
    stack = Stack(meta | {"max_seq_len": int(arrays["history_lengths"].max()) + meta["delta"]})
    places = {}
    for number, unit in enumerate(stack.units):
        places |= ranker_cases.unit(unit, f"_stu_layers__{number}__")
    ranker_cases.fill(places, arrays)
    history, count = jnp.asarray(arrays["history_lengths"]), len(arrays["history_lengths"])
    lengths, targets = history + meta["delta"], jnp.full(count, meta["delta"], jnp.int32)
    x = jnp.asarray(arrays["x"])
    first = Stack(meta)
    nnx.update(first, nnx.state(stack))
    np.testing.assert_allclose(first(x, lengths, targets), arrays["full_out"], **case["tolerance"])
    size = int(history.max())
    mask = (jnp.arange(size)[None] < history[:, None])[:, None, :]
    new = jnp.asarray(arrays["new_targets"]).reshape(count, meta["delta"], -1)
    mask = jnp.broadcast_to(mask, (count, meta["delta"], size))
    for unit, of_first in zip(stack.units, first.units, strict=True):
        cached, projected = of_first.project(x), unit.project(new)
        options = {"alpha": unit.alpha, "scale": unit.scale()}
        keys, values = (rows_of(lengths, array, size) for array in (cached.key, cached.value))
        own = attend_itself(projected.query, projected.key, projected.value, **options)
        attended = attend_rows(projected.query, keys, values, mask, **options) + own
        new = unit.finish(new, projected, attended)
        x = of_first(x, lengths, targets)
    np.testing.assert_allclose(new.reshape(arrays["out"].shape), arrays["out"], **case["tolerance"])


@nnx.jit
def one_pass(model, batch):
    return model(batch)


@nnx.jit(static_argnames=("capacity",))
def encode(model, batch, request_times=None, capacity=None):
    return model.encode(batch, request_times=request_times, capacity=capacity)


@nnx.jit
def append(model, batch, cache):
    return model.encode(batch, cache)


@nnx.jit(static_argnames=("longest",))
def score(model, cache, batch, longest=None):
    return model.score(cache, batch, longest=longest)


def request_times(model, batch):
    """The time of each row's candidates, where the model counts to it; rows without any have 0."""
    if model.positions.count_from == "start":
        return None
    return jnp.array([row[-1] if row else 0 for row in batch["c_time"]], jnp.int32)


OPTIONS = {
    "plain": {},
    "from_the_start": {"count_from": "start"},
    "interleaved": {"form": "interleaved", "max_length": 60},
    "context": {"contextual_mask": True},
    "window": {"max_attention_length": 4},
    "free_window": {"max_attention_length": 4, "min_full_attention_length": 2},
    "context_window": {"contextual_mask": True, "max_attention_length": 4},
    "truncation": {"truncation": (1, 5)},
    "all": {
        "truncation": (1, 6),
        "max_attention_length": 3,
        "form": "interleaved",
        "norm": "group",
        "output": "time",
        "contextual_mask": True,
        "watch_thresholds": ((30, 4),),
    },
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_are_those_of_one_pass(name):
    model = rankers.small(**OPTIONS[name])
    batch = rankers.lists(LENGTHS, COUNTS)
    expected = one_pass(model, rankers.pack(batch))[: sum(COUNTS)]
    cache = encode(model, rankers.pack(batch, HISTORY), request_times(model, batch))
    found = score(model, cache, rankers.pack(batch, TARGETS), longest=3)
    np.testing.assert_allclose(found[: sum(COUNTS)], expected, rtol=1e-5, atol=1e-5)
    # The attention has part in the scores.
    other = rankers.lists(LENGTHS, COUNTS, seed=1)
    other |= {key: batch[key] for key in ("user", *TARGETS)}
    cache = encode(model, rankers.pack(other, HISTORY), request_times(model, batch))
    moved = score(model, cache, rankers.pack(batch, TARGETS), longest=3)[:3] - expected[:3]
    assert float(jnp.abs(moved).max()) > 1e-3


@pytest.mark.slow
def test_candidates_in_micro_batches():
    model = rankers.small()
    batch = rankers.lists([15], [12])
    whole = one_pass(model, rankers.pack(batch))[:12]
    cache = encode(model, rankers.pack(batch, HISTORY), request_times(model, batch))
    parts = []
    for start in range(0, 12, 4):
        part = {key: [batch[key][0][start : start + 4]] for key in TARGETS}
        parts.append(score(model, cache, rankers.pack(part, c_item=4, c_time=4)))
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-5)


def split(batch, cuts):
    """A batch cut before some events of each row: what was known, and what is new."""
    old = {key: [row[:cut] for row, cut in zip(batch[key], cuts, strict=True)] for key in EVENTS}
    new = {key: [row[cut:] for row, cut in zip(batch[key], cuts, strict=True)] for key in EVENTS}
    return old | {"user": batch["user"]}, new


GROWING = {
    "plain": {},
    "interleaved": {"form": "interleaved", "max_length": 60},
    "window": {"max_attention_length": 4},
}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", GROWING)
def test_new_events_are_appended(name):
    """In several steps, of which some rows have none; equal to a cache of the whole history."""
    model = rankers.small(count_from="start", **GROWING[name])
    batch = rankers.lists(LENGTHS, COUNTS)
    old, new = split(batch, [5, 0, 0, 7])
    middle, last = split(new | {"user": batch["user"]}, [3, 2, 0, 0])
    cache = encode(model, rankers.pack(old, HISTORY))
    for events in (middle, last):
        cache = append(model, rankers.pack(events, EVENTS), cache)
    whole = encode(model, rankers.pack(batch, HISTORY))
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    expected = one_pass(model, rankers.pack(batch))[: sum(COUNTS)]
    found = score(model, cache, rankers.pack(batch, TARGETS))[: sum(COUNTS)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_cache_does_not_grow_by_events_of_other_users():
    model = rankers.small(count_from="start")
    batch = rankers.lists(LENGTHS, COUNTS)
    single = {key: batch[key][:1] for key in HISTORY}
    cache = encode(model, rankers.pack(single))
    with pytest.raises(ValueError, match=r"rows \(1,\) and the new events \(4,\)"):
        append(model, rankers.pack(batch, EVENTS), cache)


def test_caches_are_picked_and_stacked_as_pytrees():
    """A server keeps one cache a user and scores users together."""
    model = rankers.small()
    batch = rankers.lists(LENGTHS, COUNTS)
    times, alone = request_times(model, batch), []
    for row in range(len(LENGTHS)):
        single = {key: batch[key][row : row + 1] for key in HISTORY}
        alone.append(encode(model, rankers.pack(single), times[row : row + 1]))
    together = jax.tree.map(lambda *rows: jnp.concatenate(rows), *alone)
    whole = encode(model, rankers.pack(batch, HISTORY), times)
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count_from", ["start", "end"])
def test_over_eight_devices(count_from):
    model = rankers.small(count_from=count_from)
    batch = rankers.lists(LENGTHS * 4, COUNTS * 4)
    expected = one_pass(model, jax.device_put(jaxrec.KeyedJaggedArray.from_lists(batch)))
    mesh = jax.make_mesh((8,), ("data",))
    plan = jaxrec.plan.ShardingPlan.from_dict(
        {name: jaxrec.mesh.row_wise() for name in ("item", "user")}
    )
    sharded = jaxrec.shard(rankers.small(count_from=count_from), plan, mesh)

    def place(keys):
        chosen = jaxrec.KeyedJaggedArray.from_lists({key: batch[key] for key in keys})
        return jaxrec.mesh.shard_batch(chosen, mesh)

    times = request_times(model, batch)
    times = None if times is None else times.reshape(8, -1)
    cache = encode(sharded, place(HISTORY), times)
    if count_from == "start":
        nothing = {key: [[]] * len(batch[key]) for key in EVENTS}
        empty = jaxrec.KeyedJaggedArray.from_lists(nothing)
        cache = append(sharded, jaxrec.mesh.shard_batch(empty, mesh), cache)
    found = np.asarray(score(sharded, cache, place(TARGETS)))
    counts = np.reshape(COUNTS * 4, (8, -1)).sum(1)
    rows = [of_device[:count] for of_device, count in zip(found, counts, strict=True)]
    size = sum(COUNTS) * 4
    np.testing.assert_allclose(np.concatenate(rows), expected[:size], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_exceeds_a_bound_is_refused_or_nan():
    model = rankers.small(count_from="start")
    batch = rankers.lists([6, 2], [3, 1])
    history, targets = rankers.pack(batch, HISTORY), rankers.pack(batch, TARGETS)
    with pytest.raises(ValueError, match="a row has 7 tokens, but capacity is 5"):
        model.encode(history, capacity=5)
    small = encode(model, history, capacity=5)
    assert np.isfinite(model.score(model.encode(history), targets)[:4]).all()
    found = score(model, small, targets)
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3]).all()
    with pytest.raises(ValueError, match="a row has 7 tokens, but the cache's capacity is 5"):
        model.score(small, targets)
    cache = encode(model, history)
    with pytest.raises(ValueError, match="a row has 3 candidates, but longest is 2"):
        model.score(cache, targets, longest=2)
    found = score(model, cache, targets, longest=2)
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3]).all()
    new = rankers.pack(batch, EVENTS)
    with pytest.raises(ValueError, match="a row has 6 new tokens, but longest is 4"):
        model.encode(new, cache, longest=4)
    grown = nnx.jit(functools.partial(HSTURanker.encode, longest=4))(model, new, cache)
    found = score(model, grown, targets)
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3]).all()
    full = encode(model, history, capacity=9)
    found = score(model, append(model, new, full), targets)
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3]).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "count_from='end' counts positions and times from the newest event"),
        ({"count_from": "start", "contextual_mask": True}, "contextual_mask shows new events"),
        ({"count_from": "start", "truncation": (1, 4)}, "truncation drops the oldest events"),
        (
            {"count_from": "start", "max_attention_length": 3, "min_full_attention_length": 1},
            "min_full_attention_length frees the newest events",
        ),
    ],
)
@pytest.mark.slow
def test_caches_that_cannot_grow(options, reason):
    model = rankers.small(**options)
    batch = rankers.lists([6, 2], [3, 1])
    cache = model.encode(rankers.pack(batch, HISTORY), request_times=request_times(model, batch))
    with pytest.raises(ValueError, match=reason):
        model.encode(rankers.pack(batch, EVENTS), cache)


def test_histories_that_cannot_be_encoded_apart():
    batch = rankers.lists([6, 2], [3, 1])
    history = rankers.pack(batch, HISTORY)
    with pytest.raises(ValueError, match="make the model with max_length="):
        rankers.small(max_length=None).encode(history)
    with pytest.raises(ValueError, match="give request_times="):
        rankers.small().encode(history)
    model = rankers.small(count_from="start")
    with pytest.raises(ValueError, match="that count from the end"):
        model.encode(history, request_times=jnp.array([1, 2]))
    cache = model.encode(history)
    with pytest.raises(ValueError, match="are those of the cache"):
        model.encode(history, cache, capacity=9)
    with pytest.raises(ValueError, match="row b of both is one user"):
        model.score(cache, rankers.pack(rankers.lists([1], [1]), TARGETS))
