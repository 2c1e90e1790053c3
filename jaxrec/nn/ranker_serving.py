"""Serving of an HSTU ranker: histories are encoded once, and candidates scored against them."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrec.nn.history_cache import (
    HistoryCache,
    attend_itself,
    attend_rows,
    rows_of,
    write_rows,
)
from jaxrec.nn.ranker_features import look_up, read_events
from jaxrec.nn.row_pieces import join_rows
from jaxrec.nn.transduction import Projections, TransductionUnit
from jaxrec.ragged import KeyedJaggedArray, complete_cumsum, segment_ids
from jaxrec.ragged.arrays import AnyArray, each_device, take
from jaxrec.ragged.fbgemm import dense_to_jagged

# An `HSTURanker`. Its module imports this one, so that this one cannot name its class.
Ranker: TypeAlias = Any


def encode_histories(
    model: Ranker,
    features: KeyedJaggedArray,
    capacity: int | None,
    request_times: AnyArray | None,
) -> HistoryCache:
    """Return the keys and values of histories; `HSTURanker.encode` without a cache."""
    capacity = _checked_capacity(model, capacity)
    embedded = look_up(model.embeddings, features)
    history = read_events(model.features, "history", features, embedded, with_actions=True)
    parts, lengths = (
        [model.history_tokens(history)],
        [history.lengths * model.tokens.tokens_per_event],
    )
    if model.context is not None:
        parts.insert(0, model.context_tokens(features, embedded, history.lengths))
        lengths.insert(0, jnp.full_like(history.lengths, model.num_context))
    states, times = join_rows(lengths, parts)
    total, zeros = sum(lengths[1:], lengths[0]), jnp.zeros_like(history.lengths)
    newest = (
        zeros if history.times is None else each_device(_newest, history.lengths, history.times)
    )
    request = _request(model, request_times, newest)
    states = model.positions(states, total, times, last_times=request)
    _check_bound("tokens", total, capacity, "capacity")
    current, keys, values = total, [], []
    for layer, unit in enumerate(model.stack.units):
        states, current = model.stack.truncate(layer, states, current, zeros, 0)
        projected = unit.project(states)
        size = model.stack.capacity_of(layer, capacity)
        keys.append(_padded(current, projected.key, size))
        values.append(_padded(current, projected.value, size))
        if layer + 1 < len(model.stack.units):
            states = unit.finish(states, projected, unit.attend(projected, current, None))
    return HistoryCache(tuple(keys), tuple(values), total, newest, request)


def append_events(
    model: Ranker, features: KeyedJaggedArray, cache: HistoryCache, longest: int | None
) -> HistoryCache:
    """Return a cache with new events behind the old ones; `HSTURanker.encode` with a cache."""
    check_growth(model)
    embedded = look_up(model.embeddings, features)
    history = read_events(model.features, "history", features, embedded, with_actions=True)
    _require_rows("new events", history.lengths, cache)
    states, times = model.history_tokens(history)
    per_event = model.tokens.tokens_per_event
    counts = history.lengths * per_event
    size = states.shape[-2] if longest is None else longest * per_event
    _check_bound("new tokens", counts, size, "longest")
    starts, capacity = cache.lengths, cache.keys[0].shape[-3]
    total = starts + counts
    _check_bound("tokens", total, capacity, "the cache's capacity")
    states = _padded(counts, states, size)
    places = starts[..., None] + jnp.arange(size, dtype=jnp.int32).reshape(
        (1,) * starts.ndim + (-1,)
    )
    elapsed, newest = None, cache.newest
    if times is not None:
        of_rows = _padded(counts, times, size)
        # The event before the first new one is the newest of the cache, if there is one.
        before = jnp.concatenate([cache.newest[..., None], of_rows[..., :-1]], axis=-1)
        elapsed = jnp.where(places > model.num_context, of_rows - before, 0)
        last = each_device(_newest, history.lengths, history.times)
        newest = jnp.where(history.lengths > 0, last, cache.newest)
    states = model.positions.add(states, places, elapsed)
    keys, values = [], []
    for layer, unit in enumerate(model.stack.units):
        projected = unit.project(states)
        keys.append(each_device(write_rows, starts, counts, cache.keys[layer], projected.key))
        values.append(each_device(write_rows, starts, counts, cache.values[layer], projected.value))
        if layer + 1 < len(model.stack.units):
            key_places = jnp.arange(capacity, dtype=jnp.int32).reshape((1,) * places.ndim + (-1,))
            back = places[..., None] - key_places
            mask = (back >= 0) & (back <= (unit.max_attention_length or capacity))
            # Rows of padding see no keys, which may not have been written.
            mask &= key_places < total[..., None, None]
            attended = _attend(unit, total, projected.query, keys[-1], values[-1], mask)
            states = unit.finish(states, projected, attended)
    # A row that did not fit, or had more new events than `longest`, is marked by its length.
    total = jnp.where(counts > size, capacity + 1, total)
    return HistoryCache(tuple(keys), tuple(values), total, newest, newest)


def score_candidates(
    model: Ranker, cache: HistoryCache, features: KeyedJaggedArray, longest: int | None
) -> Float[Array, "*devices capacity tasks"]:
    """Return the logits of candidates; `HSTURanker.score`."""
    embedded = look_up(model.embeddings, features)
    targets = read_events(model.features, "targets", features, embedded, with_actions=False)
    _require_rows("candidates", targets.lengths, cache)
    size = targets.capacity if longest is None else longest
    capacity = cache.keys[0].shape[-3]
    _check_bound("candidates", targets.lengths, size, "longest")
    _check_bound("tokens", cache.lengths, capacity, "the cache's capacity")
    tokens, times = model.target_tokens(targets, with_actions=model.tokens.form == "sum")
    states = _padded(targets.lengths, tokens, size)
    from_start = model.positions.count_from == "start"
    place = cache.lengths if from_start else jnp.full_like(cache.lengths, model.num_context)
    places = jnp.broadcast_to(place[..., None], states.shape[:-1])
    elapsed = None
    if times is not None:
        of_rows = _padded(targets.lengths, times, size)
        if from_start:
            has_events = (cache.lengths > model.num_context)[..., None]
            elapsed = jnp.where(has_events, of_rows - cache.newest[..., None], 0)
        else:
            elapsed = cache.request[..., None] - of_rows
    states = model.positions.add(states, places, elapsed)
    # A row that is marked as too long for its cache ends in NaN, whatever it sees.
    for layer, unit in enumerate(model.stack.units):
        lengths = jnp.minimum(cache.lengths, model.stack.capacity_of(layer, capacity))
        projected = unit.project(states)
        mask = _seen_by_targets(unit, lengths, cache.keys[layer].shape[-3], size)
        keys, values = cache.keys[layer], cache.values[layer]
        attended = _attend(unit, lengths, projected.query, keys, values, mask)
        own = _attend_itself(unit, lengths, projected)
        states = unit.finish(states, projected, attended + own)
    fits = (targets.lengths <= size) & (cache.lengths <= capacity)

    def ragged(lengths: Array, fits: Array, states: Array) -> Array:
        offsets = complete_cumsum(lengths)
        is_wrong = take(~fits, segment_ids(offsets, targets.capacity))
        flat = dense_to_jagged(states, offsets, targets.capacity)
        return jnp.where(is_wrong[:, None], jnp.nan, flat)

    states = each_device(ragged, targets.lengths, fits, states)
    return model.tasks(model.output(states, targets.times), model.item_embeddings(targets))


def _attend_itself(unit: TransductionUnit, lengths: Array, projected: Projections) -> Array:
    """Return the part of each target's attention that comes from the target itself."""

    def attend(_: Array, *arrays: Array) -> Array:
        return attend_itself(*arrays, alpha=unit.alpha, scale=unit.scale())

    return each_device(attend, lengths, projected.query, projected.key, projected.value)


def _attend(
    unit: TransductionUnit, lengths: Array, query: Array, keys: Array, values: Array, mask: Array
) -> Array:
    """Return the attention of some tokens of each row to the cached ones that they see."""

    def attend(_: Array, *arrays: Array) -> Array:
        return attend_rows(*arrays, alpha=unit.alpha, scale=unit.scale())

    return each_device(attend, lengths, query, keys, values, mask)


def _seen_by_targets(unit: TransductionUnit, lengths: Array, capacity: int, size: int) -> Array:
    """Return which cached tokens targets see, ``[*devices, rows, size, capacity]``."""
    place = jnp.arange(capacity, dtype=jnp.int32).reshape((1,) * lengths.ndim + (-1,))
    mask = place < lengths[..., None]
    if unit.max_attention_length and not unit.min_full_attention_length:
        # All context that the mask joins counts as one place. Targets look back from the end.
        joined = max(unit.contextual_length - 1, 0)
        rank = jnp.maximum(place - joined, 0)
        mask &= lengths[..., None] - joined - rank <= unit.max_attention_length
    return jnp.broadcast_to(mask[..., None, :], (*lengths.shape, size, capacity))


def _padded(lengths: Array, values: Array, size: int) -> Array:
    return each_device(lambda lengths, values: rows_of(lengths, values, size), lengths, values)


def _newest(lengths: Array, times: Array) -> Array:
    ends = jnp.cumsum(lengths, dtype=jnp.int32) - 1
    return jnp.where(lengths > 0, jnp.take(times, ends, mode="clip"), 0)


def _request(model: Ranker, request_times: AnyArray | None, newest: Array) -> Array:
    """Return the time from which a row's tokens count back, ``[rows]``."""
    if model.features.times is None or model.positions.count_from == "start":
        if request_times is not None:
            raise ValueError("request_times are read by models with times that count from the end")
        return newest
    if request_times is None:
        raise ValueError(
            "the model's times count to the last candidate's; give request_times=, or make the "
            "model with count_from='start'"
        )
    return jnp.broadcast_to(jnp.asarray(request_times, jnp.int32), newest.shape)


def _checked_capacity(model: Ranker, capacity: int | None) -> int:
    if model.max_length is None:
        raise ValueError(
            "the attention of a model without max_length is divided by the longest row of its "
            "batch, candidates included; make the model with max_length= to encode histories"
        )
    if model.features.min_lengths:
        raise ValueError(
            f"the context features {list(model.features.min_lengths)} have a minimum length, which "
            "counts candidates; histories cannot be encoded without them"
        )
    return model.max_length if capacity is None else capacity


def _require_rows(what: str, lengths: Array, cache: HistoryCache) -> None:
    """Refuse a batch of other users than the cache's, which would be broadcast."""
    if lengths.shape != cache.lengths.shape:
        raise ValueError(
            f"the cache has rows {cache.lengths.shape} and the {what} {lengths.shape}; row b of "
            "both is one user"
        )


def check_growth(model: Ranker) -> None:
    """Require that new events leave the tokens of older ones as they are."""
    reasons = []
    if model.positions.count_from == "end":
        reasons.append("count_from='end' counts positions and times from the newest event")
    if any(unit.contextual_length for unit in model.stack.units):
        reasons.append("contextual_mask shows new events to the context")
    if model.stack.truncation is not None:
        reasons.append("truncation drops the oldest events")
    if any(unit.min_full_attention_length for unit in model.stack.units):
        reasons.append("min_full_attention_length frees the newest events from the window")
    if reasons:
        raise ValueError(
            f"new events change the encoding of older ones: {'; '.join(reasons)}. Encode the whole "
            "history, or make the model without these"
        )


def _check_bound(what: str, counts: Array, most: int, name: str) -> None:
    """Refuse rows that exceed a static bound, where their counts are known."""
    if isinstance(counts, jax.core.Tracer):
        return
    largest = int(np.max(np.asarray(counts), initial=0))
    if largest > most:
        raise ValueError(f"a row has {largest} {what}, but {name} is {most}; give a larger one")
