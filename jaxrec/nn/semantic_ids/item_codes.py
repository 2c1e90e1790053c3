"""Semantic ids of items: codes that tell every two items apart, their report and their file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int, Int32

from jaxrec.files.atomic import write_atomically

_METADATA = b"jaxrec.semantic_ids"


@dataclasses.dataclass(frozen=True)
class CodeReport:
    """Report on how well codes tell items apart, before the last code that resolves collisions.

    Attributes:
        num_items: Number of items.
        distinct_share: Number of different ids over the number of items.
        collisions: Number of items whose id an earlier item has, too.
        largest_collision: Largest number of items of one id.
        used: By level, the share of the codes that an item has.
        entropy: By level, the entropy of the codes' use in bits; at most ``log2(size)``.
    """

    num_items: int
    distinct_share: float
    collisions: int
    largest_collision: int
    used: tuple[float, ...]
    entropy: tuple[float, ...]

    def __str__(self) -> str:
        used = ", ".join(f"{share:.1%}" for share in self.used)
        entropy = ", ".join(f"{bits:.2f}" for bits in self.entropy)
        return (
            f"{self.num_items:,} items, {self.distinct_share:.2%} of ids distinct, "
            f"{self.collisions:,} collisions, at most {self.largest_collision} items of one id; "
            f"codes used by level: {used}; entropy by level: {entropy} bits"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class SemanticIds:
    """Items and their semantic ids, which are unique by a last code.

    Items of the same codes get the last codes 0, 1, 2, ... in their order. As in Rajput et al.
    2023, "Recommender systems with generative retrieval" (TIGER, arXiv:2305.05065), section 3.1;
    every item has the last code here, so that ids have one length.

    Attributes:
        items: ``[items]`` int64 ids or strings, different from each other.
        codes: ``[items, levels]`` int32; the last level resolves collisions.
        sizes: Number of codes of each level.

    Example:
        >>> ids = SemanticIds.of([[3, 1], [3, 1], [0, 2]], sizes=(4, 4), items=[70, 80, 90])
        >>> ids.codes.tolist()
        [[3, 1, 0], [3, 1, 1], [0, 2, 0]]
        >>> more = ids.append([[3, 1]], items=[95])
        >>> more.codes.tolist()[-1], more.rows([95, 70]).tolist()
        ([3, 1, 2], [3, 0])
        >>> round(ids.report().distinct_share, 3)
        0.667
    """

    items: np.ndarray
    codes: Int32[np.ndarray, "items levels"]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.shape != (len(self.items), len(self.sizes)):
            raise ValueError(
                f"codes must have the shape [{len(self.items)} items, {len(self.sizes)} levels], "
                f"got {list(self.codes.shape)}"
            )
        _check_codes(self.codes, self.sizes)
        values, counts = np.unique(self.items, return_counts=True)
        if len(values) < len(self.items):
            raise ValueError(f"item {values[counts > 1][0].item()!r} occurs {counts.max()} times")
        _, first, counts = np.unique(self.codes, axis=0, return_index=True, return_counts=True)
        if len(first) < len(self.codes):
            at = first[counts > 1][0]
            raise ValueError(
                f"several items have the codes {self.codes[at].tolist()}, one is "
                f"{self.items[at].item()!r}; SemanticIds.of resolves collisions"
            )

    @classmethod
    def of(
        cls,
        codes: Any,
        *,
        sizes: Sequence[int],
        items: Sequence[int] | Sequence[str] | np.ndarray | None = None,
        last_size: int | None = None,
    ) -> SemanticIds:
        """Give each item a last code, so that no two have the same codes.

        Args:
            codes: ``[items, levels]`` codes, as ``quantizer.encode(vectors)`` returns them.
            sizes: Number of codes of each level, ``quantizer.sizes``.
            items: Integers or strings; None: 0, 1, 2, ....
            last_size: Number of last codes: the largest number of items with the same codes,
                including those that are appended later. None: the largest of ``sizes``.

        Raises:
            ValueError: Shapes differ, a code is out of range, an item occurs twice, or more items
                than ``last_size`` have the same codes.
        """
        array = _as_codes(codes, len(sizes))
        every = (*map(int, sizes), max(sizes) if last_size is None else int(last_size))
        names = _as_items(np.arange(len(array)) if items is None else items, len(array))
        empty = cls(names[:0], np.zeros((0, len(every)), np.int32), every)
        return empty.append(array, items=names)

    def append(
        self,
        codes: Any,
        *,
        items: Sequence[int] | Sequence[str] | np.ndarray,
    ) -> SemanticIds:
        """Return the ids with new items behind the old ones, whose codes do not change.

        Args:
            codes: ``[new items, levels]`` codes without the last one.
            items: The new items.

        Raises:
            ValueError: As `of`.
        """
        array = _as_codes(codes, len(self.sizes) - 1)
        _check_codes(array, self.sizes[:-1])
        names = _as_items(items, len(array))
        if len(self.items) and names.dtype.kind != self.items.dtype.kind:
            raise ValueError(
                f"the items are {self.items.dtype}, the new ones {names.dtype}; give one type"
            )
        prefixes = np.concatenate([self.codes[:, :-1], array])
        last = np.concatenate([self.codes[:, -1], _ranks(prefixes)[len(self.codes) :]])
        if len(last) and last.max() >= self.sizes[-1]:
            at = int(np.argmax(last))
            same = int((prefixes == prefixes[at]).all(axis=1).sum())
            name = np.concatenate([self.items, names])[at]
            raise ValueError(
                f"{same} items have the codes {prefixes[at].tolist()}, one is {name.item()!r}, and "
                f"last_size={self.sizes[-1]} tells no more apart; give a larger last_size, more "
                "levels or larger codebooks"
            )
        every = np.concatenate([prefixes, last[:, None]], axis=1).astype(np.int32)
        return SemanticIds(np.concatenate([self.items, names]), every, self.sizes)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.items)

    def rows(self, items: Sequence[int] | Sequence[str] | np.ndarray) -> Int32[np.ndarray, " n"]:
        """Return the row of each item, by which `jaxrec.nn.SemanticIdDecoder` knows it.

        Raises:
            KeyError: An item has no semantic id.
            ValueError: The items are neither int64 numbers nor strings.
        """
        wanted = _as_items(items, len(items))
        if not len(wanted):
            return np.zeros(0, np.int32)
        order = np.argsort(self.items, kind="stable")
        places = np.searchsorted(self.items[order], wanted)
        found = order[np.minimum(places, len(order) - 1)] if len(order) else places
        is_known = self.items[found] == wanted if len(order) else np.zeros(len(wanted), bool)
        if not is_known.all():
            raise KeyError(
                f"item {wanted[~is_known][0].item()!r} has no semantic id; append it first"
            )
        return found.astype(np.int32)

    def report(self) -> CodeReport:
        """Return how well the codes before the last one tell items apart."""
        if not len(self.items):
            raise ValueError("there are no items to report on")
        levels = self.codes[:, :-1]
        _, counts = np.unique(levels, axis=0, return_counts=True)
        used, entropy = [], []
        for level, size in enumerate(self.sizes[:-1]):
            of_codes = np.bincount(levels[:, level], minlength=size)
            shares = of_codes[of_codes > 0] / len(levels)
            used.append(len(shares) / size)
            entropy.append(float(-(shares * np.log2(shares)).sum()))
        return CodeReport(
            len(levels),
            len(counts) / len(levels),
            len(levels) - len(counts),
            int(counts.max()),
            tuple(used),
            tuple(entropy),
        )

    def table(self) -> pa.Table:
        """Return a table with the columns ``item`` and ``codes``, a list of one length."""
        flat = pa.array(self.codes.ravel(), pa.int32())
        codes = pa.FixedSizeListArray.from_arrays(flat, len(self.sizes))
        table = pa.table({"item": pa.array(self.items), "codes": codes})
        return table.replace_schema_metadata({_METADATA: json.dumps({"sizes": self.sizes})})

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write `table` to a Parquet file, which appears when it is complete.

        Raises:
            OSError: The file cannot be written.
        """
        with write_atomically(path) as unfinished:
            pq.write_table(self.table(), unfinished)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SemanticIds:
        """Read a file of `write`.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no such file, or its codes are wrong.
        """
        try:
            table = pq.read_table(path)
            sizes = json.loads((table.schema.metadata or {})[_METADATA])["sizes"]
            codes = table["codes"].combine_chunks()
            flat = codes.flatten().to_numpy(zero_copy_only=False)
            names = table["item"].to_numpy()
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)} is not a file of SemanticIds.write ({error})"
            ) from None
        names = _as_items(names, len(table))
        return cls(names, flat.reshape(-1, len(sizes)).astype(np.int32), tuple(map(int, sizes)))


def _as_items(items: Any, count: int) -> np.ndarray:
    """Return items as int64 ids or strings; refuse other types and another number."""
    array = np.asarray(items)
    if array.dtype == object:  # strings of Arrow
        array = np.asarray(array.tolist())
    if array.size and array.dtype.kind not in "iuU":
        raise ValueError(f"items must be integers or strings, got {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"item {array.max().item()} is too large for an id of 64 bits with a sign")
    if array.shape != (count,):
        raise ValueError(f"{count} rows of codes need as many items, got {list(array.shape)}")
    return array if array.dtype.kind == "U" else array.astype(np.int64)


def _as_codes(codes: Any, levels: int) -> np.ndarray:
    array = np.asarray(codes)
    if array.ndim != 2 or array.shape[1] != levels:
        raise ValueError(f"codes must have the shape [items, {levels}], got {list(array.shape)}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"codes must be integers, got {array.dtype}")
    return array


def _check_codes(codes: np.ndarray, sizes: Sequence[int]) -> None:
    for level, size in enumerate(sizes):
        column = codes[:, level]
        is_outside = (column < 0) | (column >= size)
        if is_outside.any():
            at = int(np.argmax(is_outside))
            raise ValueError(
                f"row {at}, level {level}: code {column[at]} is outside of [0, {size})"
            )


def _ranks(rows: Int[np.ndarray, "n columns"]) -> Int[np.ndarray, " n"]:
    """Return the number of earlier rows that are equal to each row."""
    if not len(rows):
        return np.zeros(0, np.int64)
    _, group = np.unique(rows, axis=0, return_inverse=True)
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    starts = np.cumsum(counts) - counts
    ranks = np.empty(len(rows), np.int64)
    ranks[order] = np.arange(len(rows)) - np.repeat(starts, counts)
    return ranks
