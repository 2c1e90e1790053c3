"""Estimates of a kernel's share of what the card's memory allows, from figures of its machine code.

A program of a kernel works on a tile, whose loads wait for one another in some round trips to
memory. As many programs run at once as fit the multiprocessors. So a kernel takes

    tiles / (multiprocessors * resident blocks) * round trips of a tile * latency

and at least the time in which memory moves its bytes. The share is this bound over the longer of
the two. Starting kernels takes no time here, and caches serve no row of a table.

A simpler estimate looks at one stretch of the kernel alone. A lookup is a turn of its loop: the
share is the bytes under way over those that the latency asks for. An update is the stretch up to
its first store, each loop taken once, at `SHORT_LATENCY` a round trip.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.batches import Shape
from benchmarks.gpu.cards import Card
from benchmarks.gpu.machine_code import Kernel

# Kernels of Triton are imported where they are estimated: a later JAX may not have Triton.
if TYPE_CHECKING:
    from jaxrec.embed.kernels.triton.tile import Tile

# Seconds of a round trip to memory that is busy: from and to.
LATENCIES = (900e-9, 600e-9)
SHORT_LATENCY = 375e-9  # of a round trip where many follow one another
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
        turns: Turns of the loop over a tile's rows, on the average.
        num_bytes: Bytes that it must move: rows, their state, indices, and each bag once.
    """

    kernel: str
    tiles: int
    warps: int
    turns: float
    num_bytes: float

    @classmethod
    def of_pool(cls, shape: Shape, table: Any) -> Work:
        """Return the work of Triton's pooled lookup of a table, given by its shape."""
        from jaxrec.embed.kernels.triton.readers import reader_of

        tile = reader_of(table)[1].tile(shape.bag, None, None)
        bags = shape.layout.num_bags
        row = _sectors(shape.row_format.row_bytes(shape.dim))
        num_bytes = shape.num_ids * (row + _indices(shape)) + bags * (_bag(shape) + 2 * _INDEX)
        tiles, turns = -(-bags // tile.groups), -(-shape.bag // tile.depth)
        return cls("pool", tiles, tile.warps, turns, num_bytes)

    @classmethod
    def of_update(cls, shape: Shape, state: Mapping[str, Any]) -> Work:
        """Return the work of Triton's update of rows and their state, given by its shapes."""
        from jaxrec.embed.kernels.triton.tile import Tile
        from jaxrec.embed.kernels.triton.update import run_elements, run_warps

        warps = run_warps(shape.dim, shape.dtype)
        tile = Tile.of_runs(shape.dim, run_elements(shape.dim, state), warps)
        bytes_of = {1: _SECTOR, 2: _sectors(4 * shape.dim)}
        row = _sectors(shape.row_format.row_bytes(shape.dim))
        row += sum(bytes_of[array.ndim] for array in state.values())
        lookups, rows = shape.num_ids, shape.table_shape[0]
        distinct = rows * (1 - (1 - 1 / rows) ** lookups)
        gradients = shape.layout.num_bags * _bag(shape)
        # Of each run: its start, its end, its row, and the bag and the factor of its first lookup.
        runs = distinct * (3 * _INDEX + _indices(shape))
        num_bytes = 2 * distinct * row + gradients + runs + lookups * _indices(shape)
        turns = _further_turns(tile, lookups / rows)
        return cls("update", math.ceil(distinct / tile.groups), tile.warps, turns, num_bytes)

    def shares(self, card: Card, kernel: Kernel, resident_warps: int) -> tuple[float, float]:
        """Return the shares of the bound at the longest and the shortest latency.

        Args:
            card: The card.
            kernel: The machine code.
            resident_warps: Warps that a multiprocessor holds at once.
        """
        turn = max((each.round_trips for each in kernel.turns), default=0)
        trips = kernel.tile.round_trips + self.turns * turn
        longest, shortest = (
            self._share(card, resident_warps, trips * latency) for latency in LATENCIES
        )
        return longest, shortest

    def simple_shares(self, card: Card, kernel: Kernel, resident_warps: int) -> tuple[float, float]:
        """Return the shares by the simpler estimate; see `shares`."""
        if self.kernel == "update":
            trips = kernel.before_first_store.round_trips
            share = self._share(card, resident_warps, trips * SHORT_LATENCY)
            return share, share
        under_way = min(each.bytes_under_way(resident_warps) for each in kernel.turns)
        longest, shortest = (
            min(under_way * card.multiprocessors / (card.bandwidth * latency), 1)
            for latency in LATENCIES
        )
        return longest, shortest

    def _share(self, card: Card, resident_warps: int, tile_seconds: float) -> float:
        """Return the share of the bound, given the time of a tile."""
        at_once = card.multiprocessors * (resident_warps // self.warps)
        bound = self.num_bytes / (REACHED * card.bandwidth)
        return bound / max(bound, self.tiles / at_once * tile_seconds)


def _further_turns(tile: Tile, lookups: float) -> float:
    """Return the turns of an update's loop for a tile on the average, of uniform ids.

    Args:
        tile: The tile, whose first lookups of each run take no turn.
        lookups: Mean number of lookups of a row.
    """
    from jaxrec.embed.kernels.triton.update import CUT

    turns, most = 0.0, tile.depth
    while most < CUT:
        missed = sum(
            math.exp(i * math.log(lookups) - lookups - math.lgamma(i + 1))
            for i in range(1, most + 1)
        )
        longer = max(1 - missed / -math.expm1(-lookups), 0)
        turns += 1 - (1 - longer) ** tile.groups
        most += tile.depth
    return turns


def _sectors(num_bytes: int) -> int:
    return -(-num_bytes // _SECTOR) * _SECTOR


def _bag(shape: Shape) -> int:
    return shape.dim * (2 if shape.dtype in ("bfloat16", "float16") else 4)


def _indices(shape: Shape) -> int:
    """Return the bytes of an id, and of its weight."""
    return _INDEX * (2 if shape.weighted else 1)
