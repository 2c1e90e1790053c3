"""Tiles of rows: what one program of a Triton kernel loads at once."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

LANES = 32  # threads of a warp
ELEMENTS = 16  # of a lane, in a tile that sums groups
# A lane that updates rows has fewer: it holds the row and its state beside the gradient.
RUN_ELEMENTS = 8

# Whether a kernel is traced for an interpreter.
_is_interpreted: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxrec_triton_is_interpreted", default=False
)

Found: TypeAlias = tuple[Any, Array]  # row indices (and weights) of a turn, and which are used
Find: TypeAlias = Callable[[Array | int], Found]
LoadTerms: TypeAlias = Callable[[Any, Array], tuple[Array, ...]]


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of rows that `Tile.sum_while` sums."""

    # Loads the indices of a turn's rows and returns them untouched. The GPU stops at the first use
    # of a number that is still on its way, so a computation here would wait for the indices of the
    # next turn before the rows of this turn are even requested.
    find: Callable[[Array | int], Any]
    is_used: Callable[[Any], Array]  # which of a turn's rows there are, given its indices
    load: Callable[[Any], Array]  # loads the rows, [groups, depth, columns]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Shape of the rows that one program loads at once: ``[groups, depth, columns]``."""

    dim: int  # width of a row
    columns: int  # width padded to a power of two
    groups: int  # bags or runs side by side
    depth: int  # rows of each group
    warps: int  # of the program
    fold: int = 1  # rows of a group that a lane adds up as it loads them; see `folded`

    @classmethod
    def of(
        cls,
        dim: int,
        mean_length: float,
        elements: int = ELEMENTS,
        warps: int | None = None,
        depth: int = LANES,
    ) -> Tile:
        """Return the tile that sums groups of ``mean_length`` rows of ``dim`` columns.

        A lane loads ``elements`` elements. The tile has up to ``depth`` rows of each group, more
        where groups are longer than 32 rows.
        """
        # Few rows of many groups, rather than many rows of few: then a tile waits less often for
        # the indices of its next rows.
        columns = pl.next_power_of_2(dim)
        # Two warps would load one row of 256 float32 at once. All threads then have the same id,
        # and ptxas of JAX 0.12 keeps it in a uniform register, which waits for each id by itself.
        warps = warps or (4 if columns == 256 else min(max(columns // 256, 2), 8))
        rows = max(LANES * elements * warps // columns, 1)
        length = pl.next_power_of_2(max(math.ceil(mean_length), 1))
        depth = min(max(length // LANES, 1) * depth, length, rows)
        return cls(dim, columns, rows // depth, depth, warps)

    @classmethod
    def of_bytes(
        cls,
        dim: int,
        mean_length: float,
        sums: int,
        vector: int,
        elements: int = ELEMENTS,
        warps: int | None = None,
    ) -> Tile:
        """Return the tile that sums groups of packed rows of ``dim`` bytes.

        Each byte holds ``sums`` columns (2 for 4-bit codes), and each column needs a sum. A lane
        keeps about ``elements`` sums. It loads ``vector`` bytes at once, the largest aligned load.
        """
        # A lane loads four times as many bytes as it has sums, if groups are that long. Then as
        # many bytes are on their way as with rows of floats.
        columns = pl.next_power_of_2(dim)
        fold = min(pl.next_power_of_2(max(math.ceil(mean_length), 1)), 4)
        loaded = elements * fold // sums
        if loaded < columns:
            # Fewer rows than lanes: the lanes of a row each load its id, scale and offset.
            loaded = min(loaded // 2, 4 * vector)
        loaded = min(max(loaded, vector), max(2 * columns, 4))
        warps = warps or min(max(columns // 256, 2), 8)
        return cls.of(dim, mean_length, loaded, warps).folded(vector, most=fold)

    @classmethod
    def of_copies(cls, dim: int, elements: int, warps: int | None) -> Tile:
        """Return the tile that copies rows, one of a group."""
        # A lane has up to four rows: each takes loads of its own.
        return cls.of(dim, 1, min(elements, 4 * pl.next_power_of_2(dim)), warps)

    @classmethod
    def of_runs(cls, dim: int, elements: int = RUN_ELEMENTS, warps: int | None = None) -> Tile:
        """Return the tile that updates rows: as many runs as fit, one lookup of each at a time."""
        # Most runs are short: with a second lookup at a time, it would mostly load nothing.
        columns = pl.next_power_of_2(dim)
        warps = warps or min(max(columns // 256, 2), 8)
        groups = max(LANES * elements * warps // columns, 1)
        return cls(dim, columns, groups, 1, warps)

    def folded(self, vector: int, most: int = 4) -> Tile:
        """Return this tile with lanes that sum ``most`` or fewer rows of a group as they load.

        A lane loads ``vector`` elements at once.
        """
        # One sum for its rows instead of one for each row leaves registers to have all of the rows
        # on their way at once. Sums of different lanes are added once, after the last turn.
        loaded = self.groups * self.depth * self.columns // (LANES * self.warps)
        fold = max(min(most, loaded // (self.groups * vector), self.depth), 1)
        return dataclasses.replace(self, fold=fold)

    def launch(
        self,
        kernel: functools.partial,
        inputs: tuple[Any, ...],
        outputs: Any,
        num_groups: int,
        *,
        interpret: bool,
    ) -> Any:
        """Run a kernel with one program for each tile of ``num_groups`` groups.

        ``outputs`` is a tree of `jax.ShapeDtypeStruct` for new arrays, and of arrays to change in
        place. ``interpret`` runs the kernel without a GPU.
        """
        # Kernels index whole arrays in the GPU's memory: Pallas' blocks are consecutive, and rows
        # of a batch lie anywhere.
        whole = pl.BlockSpec(memory_space=pl.ANY)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)
        targets, count = jax.tree.leaves(outputs), len(inputs)
        changed = [i for i, x in enumerate(targets) if not isinstance(x, jax.ShapeDtypeStruct)]
        # Arrays to change are inputs as well, which the kernel does not see.
        inputs = (*inputs, [targets[i] for i in changed])
        first = len(jax.tree.leaves(inputs)) - len(changed)

        def body(*refs: Any) -> None:
            token = _is_interpreted.set(interpret)
            try:
                kernel(*refs[:count], *refs[count + 1 :])
            finally:
                _is_interpreted.reset(token)

        return pl.pallas_call(
            body,
            out_shape=shapes,
            grid=(pl.cdiv(num_groups, self.groups),),
            in_specs=jax.tree.map(lambda _: whole, inputs),
            out_specs=jax.tree.map(lambda _: whole, shapes),
            input_output_aliases={first + i: place for i, place in enumerate(changed)},
            compiler_params=pltriton.CompilerParams(num_warps=self.warps),
            interpret=interpret,
            name=kernel.func.__name__.strip("_"),
        )(*inputs)

    def wait_for_loads(self) -> None:
        """Wait until all warps of the program have come here and have what they loaded."""
        if self.warps > 1 and not _is_interpreted.get():
            pltriton.debug_barrier()

    def group_ids(self) -> Int32[Array, " groups"]:
        """Return the indices of the groups of this program's tile."""
        return self.ids_of(pl.program_id(0))

    def ids_of(self, number: Array) -> Int32[Array, " groups"]:
        """Return the indices of the groups of tile ``number``."""
        return number * self.groups + jnp.arange(self.groups, dtype=jnp.int32)

    def lanes(self, turn: Array | int) -> Int32[Array, "1 depth"]:
        """Return the positions of a turn's rows within their group."""
        return (turn * self.depth + jnp.arange(self.depth, dtype=jnp.int32))[None]

    def is_column(self) -> Bool[Array, " columns"] | None:
        """Return which columns are not padding; None: all of them."""
        if self.columns == self.dim:
            return None
        return jnp.arange(self.columns, dtype=jnp.int32) < self.dim

    def elements(
        self, rows: Int32[Array, "*shape"], is_used: Array, dim: int, columns: int
    ) -> tuple[Array, Array, Array]:
        """Return each element's row and column, and whether to load or store it."""
        shape = (*rows.shape, columns)
        column = jax.lax.broadcasted_iota(jnp.int32, shape, rows.ndim)
        mask = jnp.broadcast_to(is_used[..., None], shape) & (column < dim)
        return jnp.broadcast_to(rows[..., None], shape), column, mask

    def load_rows(self, source: Any, rows: Int32[Array, "*shape"], is_used: Array) -> Array:
        """Load rows of ``source`` as float32, ``[*shape, columns]``; unused ones are zeros."""
        rows, columns, mask = self.elements(rows, is_used, self.dim, self.columns)
        return pltriton.load(source.at[rows, columns], mask=mask, other=0).astype(jnp.float32)

    def store_rows(
        self, target: Any, rows: Int32[Array, " n"], is_used: Array, values: Array
    ) -> None:
        """Store rows, padded to a power of two columns; they may be wider than the tile."""
        rows, columns, mask = self.elements(rows, is_used, target.shape[1], values.shape[1])
        pltriton.store(target.at[rows, columns], values.astype(target.dtype), mask=mask)

    def sum_turns(
        self, turns: Array, find: Find, load: LoadTerms, zeros: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """Sum the terms of each group over ``turns`` turns of `depth` rows: ``[groups, ...]``.

        ``find(turn)`` loads a turn's row indices, ``load`` their terms, ``[groups, depth, ...]``.
        ``zeros`` have the terms' shapes after `fold_rows`.
        """

        def add(i: Array, carry: tuple[tuple[Array, ...], Found]) -> Any:
            totals, found = carry
            # Before the rows, so that the next indices are on their way together with them.
            following = find(i + 1)
            terms = map(self.fold_rows, load(*found))
            return tuple(map(jnp.add, totals, terms)), following

        totals, _ = jax.lax.fori_loop(0, turns, add, (zeros, find(0)))
        return tuple(jnp.sum(total, axis=1) for total in totals)

    def fold_rows(self, terms: Float[Array, "groups depth *n"]) -> Float[Array, "groups rows *n"]:
        """Add up every `fold` terms of each group: ``depth`` rows become ``depth / fold``."""
        if self.fold == 1:
            return terms
        groups, depth, *shape = terms.shape
        return jnp.sum(terms.reshape(groups, self.fold, depth // self.fold, *shape), axis=1)

    def sum_while(
        self, source: Source, turn: int = 0, total: Array | None = None
    ) -> Float[Array, "groups columns"]:
        """Sum each group's rows, `depth` a turn from ``turn`` on, until a turn has no row.

        ``total``, ``[groups, depth, columns]``, has the sums of the turns before.
        """

        def add(carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
            i, total, found = carry
            following = source.find(i)
            return i + 1, total + source.load(found), following

        def goes_on(carry: tuple[Array, Array, Any]) -> Array:
            is_used = source.is_used(carry[2])
            # One axis at a time: JAX 0.12 cannot lower a maximum over two where a mesh is set.
            return jnp.max(jnp.max(is_used.astype(jnp.int32), axis=1)) > 0

        if total is None:
            total = jnp.zeros((self.groups, self.depth, self.columns), jnp.float32)
        carry = jnp.int32(turn + 1), total, source.find(turn)
        return jnp.sum(jax.lax.while_loop(goes_on, add, carry)[1], axis=1)


def cdiv(dividend: Array, divisor: Array | int) -> Array:
    """Divide int32 numbers, rounding up; `pl.cdiv` fails if JAX has int64 enabled."""
    divisor = jnp.broadcast_to(jnp.asarray(divisor, jnp.int32), dividend.shape)
    return jax.lax.div(dividend + (divisor - 1), divisor)
