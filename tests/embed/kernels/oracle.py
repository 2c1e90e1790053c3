"""What the primitives compute, lookup by lookup in NumPy float64: independent of all kernels."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from jaxrec import optim
from jaxrec.embed.kernels import BagLayout


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One id of a bag.

    Attributes:
        position: Where it stands among the features' segments.
        bag: Row of the output.
        row: Row of the group; None if the id is outside its table.
        scale: What the row is multiplied by.
    """

    position: int
    bag: int
    row: int | None
    scale: float


def lookups(ids, lengths, weights, layout: BagLayout) -> list[Lookup]:
    found, segment = [], 0
    for f, stride in enumerate(layout.strides):
        rows = range(layout.num_bags)[layout.bag_rows(f)]
        used = 0
        for b in range(stride):
            length = lengths[layout.length_starts[f] + b]
            for i in range(used, used + length):
                raw = int(ids[layout.id_starts[f] + i])
                inside = 0 <= raw < layout.row_counts[f]
                weight = 1.0 if weights is None else float(weights[layout.id_starts[f] + i])
                scale = weight / length if layout.means[f] else weight
                row = layout.row_offsets[f] + raw if inside else None
                found.append(Lookup(segment + i, rows[b], row, scale))
            used += length
        segment += layout.capacities[f]
    return found


def pooled(table, found: list[Lookup], num_bags: int):
    table = np.asarray(table, np.float64)
    out = np.zeros((num_bags, table.shape[1]))
    for each in found:
        out[each.bag] += np.nan if each.row is None else each.scale * table[each.row]
    return out


def gradient(shape, found: list[Lookup], cotangent, clip_value=None):
    """Gradient of a table and which of its rows occur."""
    cotangent = np.asarray(cotangent, np.float64)
    if clip_value is not None:
        cotangent = np.clip(cotangent, -clip_value, clip_value)
    out, occurs = np.zeros(shape), np.zeros(shape[0], bool)
    for each in found:
        if each.row is not None:
            out[each.row] += each.scale * cotangent[each.bag]
            occurs[each.row] = True
    return out, occurs


def updated(table, state, slope, occurs, optimizer: optim.RowOptimizer, step: int):
    """The table and its state after a step of one of the optimizers that kernels fuse."""
    w, state = np.array(table, np.float64), {k: np.array(v, np.float64) for k, v in state.items()}
    w_old, g = w[occurs], slope[occurs]
    rows = {name: array[occurs] for name, array in state.items()}
    lr = optimizer.learning_rate
    lr = lr(step) if callable(lr) else lr
    if isinstance(optimizer, optim.sgd):
        new = w_old - lr * g
    elif isinstance(optimizer, optim.adagrad):
        rows["accumulator"] += g**2
        new = w_old - lr * g / (np.sqrt(rows["accumulator"]) + optimizer.eps)
    elif isinstance(optimizer, optim.rowwise_adagrad):
        if optimizer.weight_decay_mode == "l2":
            g = g + optimizer.weight_decay * w_old
        rows["accumulator"] += (g**2).mean(1)
        rate = lr / (np.sqrt(rows["accumulator"]) + optimizer.eps)
        keep = 1 - lr * optimizer.weight_decay * (optimizer.weight_decay_mode == "decoupled")
        new = keep * w_old - rate[:, None] * g
    else:
        squares = g**2
        if isinstance(optimizer, optim.partial_rowwise_adam):
            squares = squares.mean(1)
        b1, b2 = optimizer.b1, optimizer.b2
        rows["first_moment"] = b1 * rows["first_moment"] + (1 - b1) * g
        rows["second_moment"] = b2 * rows["second_moment"] + (1 - b2) * squares
        count = np.full(len(g), step + 1.0)
        if "count" in rows:
            rows["count"] += 1
            count = rows["count"]
        m = rows["first_moment"] / (1 - b1 ** count[:, None])
        v = rows["second_moment"].reshape(len(g), -1) / (1 - b2 ** count[:, None])
        decay = optimizer.weight_decay * w_old
        new = w_old - lr * (m / (np.sqrt(v) + optimizer.eps) + decay)
    if optimizer.max_norm is not None:
        norms = np.linalg.norm(new, axis=1, keepdims=True)
        new = np.where(norms > optimizer.max_norm, new * optimizer.max_norm / norms, new)
    w[occurs] = new
    for name, array in state.items():
        array[occurs] = rows[name]
    return w, state


def pairs(vectors, gradient):
    """The dot products of all pairs of a sample's vectors, and the gradients of the vectors.

    ``gradient`` has those of the products.
    """
    vectors = vectors.astype(np.float64)
    products, gradients = np.zeros(gradient.shape), np.zeros(vectors.shape)
    for pair, (i, j) in enumerate(itertools.combinations(range(vectors.shape[1]), 2)):
        products[:, pair] = (vectors[:, i] * vectors[:, j]).sum(axis=1)
        gradients[:, i] += gradient[:, pair, None] * vectors[:, j]
        gradients[:, j] += gradient[:, pair, None] * vectors[:, i]
    return products, gradients
