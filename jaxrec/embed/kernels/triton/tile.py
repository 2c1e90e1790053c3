"""Tiles of rows: what one program of a Triton kernel loads at once."""

from __future__ import annotations

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

LANES = 32  # of a warp
ELEMENTS = 16  # of a lane, in a tile that sums groups
RUN_ELEMENTS = 8  # of a lane, in a tile that updates rows

Found: TypeAlias = tuple[Any, Array]  # what tells rows, and whether there is each of them
Find: TypeAlias = Callable[[Array | int], Found]
LoadTerms: TypeAlias = Callable[[Any, Array], tuple[Array, ...]]


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of rows that `Tile.sum_while` sums.

    Attributes:
        find: ``find(turn)`` loads the numbers that tell a turn's rows, and returns them as they
            are: a computation with one would wait for it before the rows of the turn before.
        is_used: Returns whether there is each of a turn's rows, given its numbers.
        load: Loads them, ``[groups, depth, columns]``.
    """

    find: Callable[[Array | int], Any]
    is_used: Callable[[Any], Array]
    load: Callable[[Any], Array]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Shape of the rows that one program loads at once.

    Attributes:
        dim: Width of a row.
        columns: Width padded to a power of two.
        groups: Number of groups of rows (bags, runs) side by side.
        depth: Number of rows of each group.
        warps: Number of warps of the program.
        fold: Number of rows of a group that a lane adds up as it loads them.
    """

    dim: int
    columns: int
    groups: int
    depth: int
    warps: int
    fold: int = 1

    @classmethod
    def of(
        cls,
        dim: int,
        mean_length: float,
        elements: int = ELEMENTS,
        warps: int | None = None,
        depth: int = LANES,
    ) -> Tile:
        """Return the tile that sums groups of a mean length.

        Args:
            dim: Width of a row.
            mean_length: Mean number of rows of a group.
            elements: Elements of a lane; more where a row has more.
            warps: Number of warps; None: 2, 4 for rows of 256 columns or of more than 512, and 8
                of more than 1024.
            depth: Most rows of a group, of groups of up to 32; more of longer ones. With fewer rows
                of more groups, a tile waits less often for what tells its rows.
        """
        columns = pl.next_power_of_2(dim)
        # Two warps load one row of 256 float32 at once. All threads then have the same id, and
        # ptxas of JAX 0.12 keeps it in a uniform register, which waits for each id by itself.
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
        """Return the tile that sums groups of rows of bytes.

        A lane loads four times as many bytes as it has sums, where groups are that long, so that as
        many bytes are under way as of rows of floats.

        Args:
            dim: Bytes of a row.
            mean_length: Mean number of rows of a group.
            sums: Number of sums that take a byte's columns.
            vector: Bytes that a lane loads at once, by their alignment.
            elements: Number of sums of a lane.
            warps: Number of warps; None: 2, or more for rows of more than 512 bytes.
        """
        columns = pl.next_power_of_2(dim)
        fold = min(pl.next_power_of_2(max(math.ceil(mean_length), 1)), 4)
        loaded = elements * fold // sums
        if loaded < columns:
            # With fewer rows than lanes, each lane loads its ids and its scales and offsets itself.
            loaded = min(loaded // 2, 4 * vector)
        loaded = min(max(loaded, vector), max(2 * columns, 4))
        warps = warps or min(max(columns // 256, 2), 8)
        return cls.of(dim, mean_length, loaded, warps).folded(vector, most=fold)

    @classmethod
    def of_copies(cls, dim: int, elements: int, warps: int | None) -> Tile:
        """Return the tile that copies rows, one of a group; see `of` for the arguments."""
        # A lane has at most four rows, each of which takes loads of its own.
        return cls.of(dim, 1, min(elements, 4 * pl.next_power_of_2(dim)), warps)

    @classmethod
    def of_runs(cls, dim: int, elements: int = RUN_ELEMENTS, warps: int | None = None) -> Tile:
        """Return the tile that updates rows; see `of` for the arguments.

        A lane holds elements of the row and its state beside those of the gradient. Most runs are
        short, so that a tile has as many as fit, and one lookup of each at a time.
        """
        columns = pl.next_power_of_2(dim)
        warps = warps or min(max(columns // 256, 2), 8)
        groups = max(LANES * elements * warps // columns, 1)
        return cls(dim, columns, groups, 1, warps)

    def folded(self, vector: int, most: int = 4) -> Tile:
        """Return the tile in which a lane adds up the rows of a group that it loads itself.

        A lane then has one sum of them and not one of each, which leaves registers to have all of
        them under way at once. Rows that other lanes load are added up once, at the end.

        Args:
            vector: Elements that a lane loads at once.
            most: Most rows to add up.
        """
        loaded = self.groups * self.depth * self.columns // (LANES * self.warps)
        fold = max(min(most, loaded // (self.groups * vector), self.depth), 1)
        return dataclasses.replace(self, fold=fold)

    def launch(
        self,
        kernel: functools.partial,
        inputs: Any,
        outputs: Any,
        num_groups: int,
        *,
        interpret: bool,
        in_place: bool = False,
    ) -> Any:
        """Run a kernel on tiles of groups, one for each program.

        Args:
            kernel: The kernel.
            inputs: Tree of its input arrays.
            outputs: Tree of arrays of the shapes and types of its outputs.
            num_groups: Most groups.
            interpret: Whether to run without a GPU.
            in_place: Whether the outputs take the memory of the first inputs.
        """
        whole = pl.BlockSpec(memory_space=pl.ANY)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)
        num_aliased = len(jax.tree.leaves(outputs)) if in_place else 0
        return pl.pallas_call(
            kernel,
            out_shape=shapes,
            grid=(pl.cdiv(num_groups, self.groups),),
            in_specs=jax.tree.map(lambda _: whole, inputs),
            out_specs=jax.tree.map(lambda _: whole, shapes),
            input_output_aliases={i: i for i in range(num_aliased)},
            compiler_params=pltriton.CompilerParams(num_warps=self.warps),
            interpret=interpret,
            name=kernel.func.__name__.strip("_"),
        )(*inputs)

    def group_ids(self) -> Int32[Array, " groups"]:
        """Return the groups of the program's tile."""
        return pl.program_id(0) * self.groups + jnp.arange(self.groups, dtype=jnp.int32)

    def lanes(self, turn: Array | int) -> Int32[Array, "1 depth"]:
        """Return the places of a turn's rows in their group."""
        return (turn * self.depth + jnp.arange(self.depth, dtype=jnp.int32))[None]

    def is_column(self) -> Bool[Array, " columns"] | None:
        """Return which columns belong to the row and are not padding; None: all do."""
        if self.columns == self.dim:
            return None
        return jnp.arange(self.columns, dtype=jnp.int32) < self.dim

    def elements(
        self, rows: Int32[Array, "*shape"], is_used: Array, dim: int, columns: int
    ) -> tuple[Array, Array, Array]:
        """Return the row and column of each element of ``rows``, and whether to touch it.

        Args:
            rows: The rows.
            is_used: Which of them to touch.
            dim: Width of a row.
            columns: Width padded to a power of two.
        """
        shape = (*rows.shape, columns)
        column = jax.lax.broadcasted_iota(jnp.int32, shape, rows.ndim)
        mask = jnp.broadcast_to(is_used[..., None], shape) & (column < dim)
        return jnp.broadcast_to(rows[..., None], shape), column, mask

    def load_rows(self, source: Any, rows: Int32[Array, "*shape"], is_used: Array) -> Array:
        """Load rows of ``source`` as float32, ``[*shape, columns]``; zeros where not ``used``."""
        rows, columns, mask = self.elements(rows, is_used, self.dim, self.columns)
        return pltriton.load(source.at[rows, columns], mask=mask, other=0).astype(jnp.float32)

    def store_rows(
        self, target: Any, rows: Int32[Array, " n"], is_used: Array, values: Array
    ) -> None:
        """Store rows, padded to a power of two columns; they may be wider than the tile's."""
        rows, columns, mask = self.elements(rows, is_used, target.shape[1], values.shape[1])
        pltriton.store(target.at[rows, columns], values.astype(target.dtype), mask=mask)

    def sum_turns(
        self, turns: Array, find: Find, load: LoadTerms, zeros: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """Sum terms of each group over a number of turns of `depth` rows.

        Args:
            turns: Number of turns.
            find: ``find(turn)`` loads what tells a turn's rows, and whether there is each of them;
                that of the next turn is called before the rows of a turn are loaded.
            load: ``load(found, is_used)`` loads the terms, arrays ``[groups, depth, ...]``.
            zeros: Zeros of their shapes after `fold_rows`.

        Returns:
            The sums, ``[groups, ...]``.
        """

        def add(i: Array, carry: tuple[tuple[Array, ...], Found]) -> Any:
            totals, found = carry
            following = find(i + 1)
            terms = map(self.fold_rows, load(*found))
            return tuple(map(jnp.add, totals, terms)), following

        totals, _ = jax.lax.fori_loop(0, turns, add, (zeros, find(0)))
        return tuple(jnp.sum(total, axis=1) for total in totals)

    def fold_rows(self, terms: Float[Array, "groups depth *n"]) -> Float[Array, "groups rows *n"]:
        """Add up every `fold` terms of each group."""
        if self.fold == 1:
            return terms
        groups, depth, *shape = terms.shape
        return jnp.sum(terms.reshape(groups, self.fold, depth // self.fold, *shape), axis=1)

    def sum_while(
        self, source: Source, turn: int = 0, total: Array | None = None
    ) -> Float[Array, "groups columns"]:
        """Sum rows of each group, `depth` of them in a turn, until a turn has no row.

        Args:
            source: Source of the rows.
            turn: The first turn.
            total: Sums of the rows of the turns before, ``[groups, depth, columns]``; None: zeros.
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
    """Return the quotient of int32 numbers, rounded up; `pl.cdiv` fails where JAX has int64."""
    divisor = jnp.broadcast_to(jnp.asarray(divisor, jnp.int32), dividend.shape)
    return jax.lax.div(dividend + (divisor - 1), divisor)
