"""Estimates of a kernel's share of what the card's memory allows, from figures of its machine code.

A program of a kernel works on a tile, whose loads wait for one another in some round trips to
memory. As many programs run at once as fit the multiprocessors. So a kernel takes

    tiles / (multiprocessors * resident blocks) * round trips * latency

and at least the time in which memory moves its bytes. The share is this bound over the longer of
the two. Starting kernels takes no time here, and caches serve no row of a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.batches import Shape
from benchmarks.gpu.cards import Card
from jaxrec.embed.kernels.triton.readers import reader_of
from jaxrec.embed.kernels.triton.tile import Tile
from jaxrec.embed.kernels.triton.update import run_elements

# Seconds of a round trip to memory that is busy: from and to.
LATENCIES = (900e-9, 600e-9)
REACHED = 0.9  # of a card's bandwidth, by a plain copy
_SECTOR = 32  # bytes that memory moves at least
_INDEX = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """A kernel's work on a batch of uniform ids.

    Attributes:
        kernel: Name of the kernel.
        tiles: Number of its tiles.
        warps: Warps of a tile's program.
        turns: Turns of the loop over a tile's rows.
        num_bytes: Bytes that it must move: rows, their state, indices, and each bag once.
    """

    kernel: str
    tiles: int
    warps: int
    turns: int
    num_bytes: float

    @classmethod
    def of_pool(cls, shape: Shape, table: Any) -> Work:
        """Return the work of a pooled lookup of a table, given by its shape."""
        tile = reader_of(table)[1].tile(shape.bag, None, None)
        bags = shape.layout.num_bags
        row = _sectors(shape.row_format.row_bytes(shape.dim))
        num_bytes = shape.num_ids * (row + _indices(shape)) + bags * (_bag(shape) + 2 * _INDEX)
        tiles, turns = -(-bags // tile.groups), -(-shape.bag // tile.depth)
        return cls("pool", tiles, tile.warps, turns, num_bytes)

    @classmethod
    def of_update(cls, shape: Shape, state: Mapping[str, Any]) -> Work:
        """Return the work of an update of rows and their state, given by its shapes."""
        tile = Tile.of_runs(shape.dim, run_elements(shape.dim, state))
        bytes_of = {1: _SECTOR, 2: _sectors(4 * shape.dim)}
        row = _sectors(shape.row_format.row_bytes(shape.dim))
        row += sum(bytes_of[array.ndim] for array in state.values())
        lookups, rows = shape.num_ids, shape.table_shape[0]
        distinct = rows * (1 - (1 - 1 / rows) ** lookups)
        gradients = shape.layout.num_bags * _bag(shape)
        num_bytes = 2 * distinct * row + gradients + lookups * (_INDEX + _indices(shape))
        return cls("update", -(-lookups // tile.groups), tile.warps, 1, num_bytes)

    def shares(
        self, card: Card, resident_warps: int, before_store: float, turn: float
    ) -> tuple[float, float]:
        """Return the shares of the bound at the longest and the shortest latency.

        Args:
            card: The card.
            resident_warps: Warps that a multiprocessor holds at once.
            before_store: Round trips before the first store, each loop taken once.
            turn: Round trips of another turn of the loop.
        """
        at_once = card.multiprocessors * (resident_warps // self.warps)
        trips = self.tiles / at_once * (before_store + (self.turns - 1) * turn)
        bound = self.num_bytes / (REACHED * card.bandwidth)
        longest, shortest = (bound / max(bound, trips * latency) for latency in LATENCIES)
        return longest, shortest


def _sectors(num_bytes: int) -> int:
    return -(-num_bytes // _SECTOR) * _SECTOR


def _bag(shape: Shape) -> int:
    return shape.dim * (2 if shape.dtype in ("bfloat16", "float16") else 4)


def _indices(shape: Shape) -> int:
    """Return the bytes of an id, and of its weight."""
    return _INDEX * (2 if shape.weighted else 1)
