"""The named shapes of the embedding kernels: what is timed, and what every kernel is tested on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, Literal

import numpy as np

SHAPES = pathlib.Path(__file__).with_name("shapes.json")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A group of tables and a batch; the fields are described in shapes.json."""

    name: str
    T: int
    V: int
    D: int
    B: int
    L: int
    ids: Literal["uniform", "powerlaw", "half_one_row"]
    lengths: Literal["fixed", "random", "empty", "one_huge", "different"] = "fixed"
    dtype: str = "float32"
    weighted: bool = False
    mean: bool = False
    padding: int = 0

    def draw(self) -> Batch:
        """A batch of this shape, always the same."""
        rng = np.random.default_rng(0)
        lengths = [self._draw_lengths(rng, table) for table in range(self.T)]
        sizes = [int(each.sum()) for each in lengths]
        ids = self._draw_ids(rng, [size + self.padding for size in sizes])
        capacity = sum(map(len, ids))
        return Batch(
            self,
            ids=np.concatenate(ids).astype(np.int32),
            lengths=np.concatenate(lengths).astype(np.int32),
            weights=rng.standard_normal(capacity, dtype=np.float32) if self.weighted else None,
            capacities=tuple(map(len, ids)),
            strides=tuple(map(len, lengths)),
        )

    def _draw_lengths(self, rng: np.random.Generator, table: int) -> np.ndarray:
        if self.lengths == "random":
            return rng.integers(0, 2 * self.L + 1, self.B)
        if self.lengths == "empty":
            return np.zeros(self.B, np.int64)
        if self.lengths == "one_huge":
            return np.where(np.arange(self.B) == self.B // 2, self.B * self.L, 0)
        return np.full(self.B - table if self.lengths == "different" else self.B, self.L)

    def _draw_ids(self, rng: np.random.Generator, sizes: list[int]) -> list[np.ndarray]:
        if self.ids == "powerlaw":
            drawn = rng.random((self.T, max(sizes)))
            ids = np.minimum(self.V**drawn - 1, self.V - 1).astype(np.int64)
        else:
            ids = rng.integers(0, self.V, (self.T, max(sizes)))
        if self.ids == "half_one_row":
            ids[:, ::2] = self.V // 2
        return [ids[table, :size] for table, size in enumerate(sizes)]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of a batch, features one after the other, and where each lies in them.

    Attributes:
        shape: What it was drawn from.
        ids: Ids of all features; each feature's padding follows its ids.
        lengths: Lengths of all bags.
        weights: Weights of the ids, or None.
        capacities: Positions of each feature in ``ids``.
        strides: Bags of each feature.
    """

    shape: Shape
    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    capacities: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.shape.T * self.shape.V

    @property
    def num_bags(self) -> int:
        return sum(self.strides)

    def layout_fields(self) -> dict[str, tuple[Any, ...]]:
        """The fields of a `BagLayout`: table ``t`` is read by feature ``t`` alone."""
        count = self.shape.T
        return {
            "id_starts": _starts(self.capacities),
            "capacities": self.capacities,
            "length_starts": _starts(self.strides),
            "strides": self.strides,
            "row_offsets": tuple(table * self.shape.V for table in range(count)),
            "row_counts": (self.shape.V,) * count,
            "means": (self.shape.mean,) * count,
        }


def read_shapes(path: pathlib.Path = SHAPES, group: str = "shapes") -> list[Shape]:
    """The shapes of a file, by default those that are timed."""
    return [Shape(**fields) for fields in json.loads(path.read_text())[group]]


def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.cumsum((0, *sizes[:-1])).tolist())
