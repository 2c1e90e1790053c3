"""Long runs cut into parts, so that one row's many gradients are summed by many programs.

A run of at most ``size`` lookups is summed in one go. A longer one is cut every ``size`` lookups;
its parts are summed first, side by side, and then their sums. Where the cuts fall depends on the
run's length alone, so that sums come out the same on every run of the program, without atomics.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrec.embed.kernels.base import Runs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """Runs, and the parts of the long ones.

    Attributes:
        run_starts: Where each run begins among the sorted lookups, and where the last one ends.
            Runs past those of rows in the table are empty.
        first_parts: The first part of each run and, after it, the number of parts; a run of at
            most ``size`` lookups has none.
        starts: Where each part begins among the sorted lookups.
        ends: Where it ends; parts that are not needed are empty.
        size: Lookups of a part.
    """

    run_starts: Int32[Array, " lookups+1"]
    first_parts: Int32[Array, " lookups+1"]
    starts: Int32[Array, " parts"]
    ends: Int32[Array, " parts"]
    size: int = dataclasses.field(metadata={"static": True})


def split_runs(runs: Runs, num_rows: int) -> Parts:
    """Cuts the runs of rows in the table.

    The size of parts makes the two sums of a run that takes all lookups equally deep.
    """
    num_lookups = runs.order.size
    size = max(8, 1 << (math.isqrt(num_lookups).bit_length() - 1))

    positions = jnp.arange(num_lookups, dtype=jnp.int32)
    in_table = runs.unique[runs.segments] < num_rows
    end = jnp.sum(in_table, dtype=jnp.int32)
    is_start = jnp.diff(runs.segments, prepend=-1) > 0
    slot = jnp.where(is_start & in_table, runs.segments, num_lookups + 1)
    run_starts = jnp.full(num_lookups + 1, end).at[slot].set(positions, mode="drop")

    counts = jnp.diff(run_starts)
    num_parts = jnp.where(counts > size, -(-counts // size), 0)
    first_parts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_parts, dtype=jnp.int32)])
    # A run of c > size lookups has fewer than 2 c / size parts.
    part = jnp.arange(2 * num_lookups // size + 1, dtype=jnp.int32)
    run = jnp.searchsorted(first_parts[1:], part, side="right").astype(jnp.int32)
    begin = run_starts[run] + (part - first_parts[run]) * size
    stop = jnp.minimum(begin + size, run_starts[jnp.minimum(run + 1, num_lookups)])
    is_needed = part < first_parts[-1]
    starts, ends = jnp.where(is_needed, begin, 0), jnp.where(is_needed, stop, 0)
    return Parts(run_starts, first_parts, starts, ends, size)
