"""Attention within rows and its gradients in NumPy float64, pair by pair of a row."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask by the arguments of `jaxrec.nn.hstu_attention`; lists have a number for each row."""

    causal: bool = True
    num_targets: tuple[int, ...] | None = None
    contextual_length: int | tuple[int, ...] = 0
    max_attention_length: int = 0
    min_full_attention_length: int = 0
    target_group_size: int = 1

    def arguments(self) -> dict[str, Any]:
        """The arguments, with arrays for tuples."""
        values = vars(self).items()
        return {k: np.array(v, np.int32) if isinstance(v, tuple) else v for k, v in values}

    def targets(self, row: int) -> int:
        return 0 if self.num_targets is None else self.num_targets[row]

    def context(self, row: int) -> int:
        counts = self.contextual_length
        return counts[row] if isinstance(counts, tuple) else counts

    def visible(self, row: int, length: int) -> np.ndarray:
        """``[length, length]`` whether a query (first axis) sees a key.

        By the ranks of places: all context has rank 0, history 1, 2, ..., all targets the last.
        """
        targets = self.targets(row)
        is_target = np.arange(length) >= length - targets
        group = (np.arange(length) - (length - targets)) // self.target_group_size
        earlier = np.tri(length, dtype=bool)
        same_group = is_target[:, None] & is_target & (group[:, None] == group) & earlier
        if not self.causal:
            return ~is_target[None, :].repeat(length, 0) | same_group
        context = self.context(row)
        joined = context - 1 if context else 0
        highest = length - joined - targets
        ranks = np.arange(length)
        if context:
            ranks = np.maximum(ranks - joined, 0)
        ranks = np.minimum(ranks, highest)
        query, key = ranks[:, None], ranks[None, :]
        mask = (query > key) | np.eye(length, dtype=bool)
        if self.max_attention_length:
            is_near = query - key <= self.max_attention_length
            is_free = np.zeros_like(is_near)
            if self.min_full_attention_length:
                is_free = is_free | (query >= highest - self.min_full_attention_length)
            mask = mask & (is_near | is_free)
        if context:
            mask = mask | ((query == 0) & (key < highest))
        return mask | same_group


@dataclasses.dataclass(frozen=True)
class Call:
    """Inputs of a call: arrays of elements without padding, and options.

    ``biases`` has ``position`` and ``time`` tables, ``times`` those of queries and of keys.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: np.ndarray
    mask: Mask
    alpha: float = 1.0
    scale: Any = 1.0
    biases: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    times: tuple[np.ndarray, np.ndarray] | None = None


def hstu(call: Call, cotangent: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Pointwise attention: the output, and the gradients of its product with a cotangent."""
    out, gradients = _empty(call, cotangent)
    scale = np.broadcast_to(np.asarray(call.scale, np.float64), len(call.q))
    gradients["scale"] = np.zeros(len(call.q))
    for part, mask in _rows(call):
        q, k, v, given = (wide(x[part]) for x in (call.q, call.k, call.v, cotangent))
        scores = call.alpha * np.einsum("ahd,bhd->hab", q, k)
        indices = {}
        if "position" in call.biases:
            places = np.arange(len(q))
            distance = np.clip(places[:, None] - places, 0, len(call.biases["position"]) - 1)
            indices["position"] = distance
        if "time" in call.biases:
            queries, keys = (times[part].astype(np.int64) for times in call.times)
            indices["time"] = bucket(queries[:, None] - keys, len(call.biases["time"]))
        for name, index in indices.items():
            scores = scores + np.moveaxis(wide(call.biases[name])[index], -1, 0)
        gate = 1 / (1 + np.exp(-scores))
        weights = np.where(mask, scores * gate, 0)
        plain = np.einsum("hab,bhe->ahe", weights, v)
        factor = scale[part][:, None, None]
        out[part] = plain * factor
        gradients["scale"][part] = (plain * given).sum((1, 2))
        given = given * factor
        of_scores = np.einsum("ahe,bhe->hab", given, v) * gate * (1 + scores * (1 - gate))
        of_scores = np.where(mask, of_scores, 0)
        gradients["v"][part] = np.einsum("hab,ahe->bhe", weights, given)
        gradients["q"][part] = call.alpha * np.einsum("hab,bhd->ahd", of_scores, k)
        gradients["k"][part] = call.alpha * np.einsum("hab,ahd->bhd", of_scores, q)
        for name, index in indices.items():
            np.add.at(gradients[name], index, np.moveaxis(of_scores, 0, -1))
    return out, gradients


def softmax(call: Call, cotangent: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The same of softmax attention, whose scores are divided by the root of the width."""
    out, gradients = _empty(call, cotangent)
    alpha = call.q.shape[-1] ** -0.5
    for part, mask in _rows(call):
        q, k, v, given = (wide(x[part]) for x in (call.q, call.k, call.v, cotangent))
        scores = np.where(mask, alpha * np.einsum("ahd,bhd->hab", q, k), -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
        weights = powers / powers.sum(-1, keepdims=True)
        out[part] = np.einsum("hab,bhe->ahe", weights, v)
        of_weights = np.einsum("ahe,bhe->hab", given, v)
        mean = (of_weights * weights).sum(-1, keepdims=True)
        of_scores = weights * (of_weights - mean)
        gradients["v"][part] = np.einsum("hab,ahe->bhe", weights, given)
        gradients["q"][part] = alpha * np.einsum("hab,bhd->ahd", of_scores, k)
        gradients["k"][part] = alpha * np.einsum("hab,ahd->bhd", of_scores, q)
    return out, gradients


def bucket(elapsed: np.ndarray, num_buckets: int) -> np.ndarray:
    """The bucket of time differences; callers avoid those within rounding of an edge."""
    size = np.maximum(np.abs(elapsed), 1)
    return np.minimum(np.log(size) / 0.301, num_buckets - 1).astype(int)


def wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64)


def _rows(call: Call) -> Any:
    """The elements of each row, and its mask."""
    ends = np.cumsum(call.lengths)
    for row, (end, length) in enumerate(zip(ends, call.lengths, strict=True)):
        yield slice(end - length, end), call.mask.visible(row, length)


def _empty(call: Call, cotangent: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    arrays = {"q": call.q, "k": call.k, "v": call.v} | call.biases
    gradients = {name: np.zeros(array.shape) for name, array in arrays.items()}
    return np.zeros(cotangent.shape), gradients
