"""Pooled lookups and their gradients in NumPy float64, sample by sample: the independent oracle."""

from __future__ import annotations

import numpy as np

import jaxrec

Lists = dict[str, list[list[int]]]


def random_lists(rng, rows: dict[str, int], batch: int, longest: int = 4) -> Lists:
    """Bags of 0 to ``longest`` ids below ``rows[feature]``."""
    return {
        feature: [
            rng.integers(0, bound, rng.integers(0, longest + 1)).tolist() for _ in range(batch)
        ]
        for feature, bound in rows.items()
    }


def random_weights(rng, lists: Lists) -> dict[str, list[list[float]]]:
    """A weight for each id."""
    return {
        key: [rng.normal(size=len(bag)).tolist() for bag in bags] for key, bags in lists.items()
    }


def pooled(table, bags, weights=None, mean=False):
    """``[batch, dim]`` sums or means of each bag's rows."""
    table = np.asarray(table, np.float64)
    out = np.zeros((len(bags), table.shape[1]))
    for b, bag in enumerate(bags):
        for i, row in enumerate(bag):
            out[b] += table[row] * scale(bag, weights and weights[b][i], mean)
    return out


def table_gradient(shape, bags, cotangent, weights=None, mean=False):
    """Dense gradient of a table, given that of its pooled output."""
    out = np.zeros(shape)
    for b, bag in enumerate(bags):
        for i, row in enumerate(bag):
            out[row] += cotangent[b] * scale(bag, weights and weights[b][i], mean)
    return out


def scale(bag, weight, mean):
    return (1.0 if weight is None else weight) / (len(bag) if mean else 1)


def keyed(lists: Lists, weights=None) -> jaxrec.KeyedJaggedArray:
    """The batch as the library takes it."""
    return jaxrec.KeyedJaggedArray.from_lists(lists, weights=weights)
