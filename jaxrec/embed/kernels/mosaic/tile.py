"""Tiles of rows: what one program of a Mosaic kernel loads at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxrec.embed.kernels.mosaic import programs
from jaxrec.embed.kernels.mosaic.indexing import keep_rolled
from jaxrec.embed.kernels.mosaic.lanes import FLAT, Lanes

# Vectors that a thread loads in a turn of a loop, if rows are not wider.
LOADS = 2

Terms: TypeAlias = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows that one program loads at once: ``depth`` rows of each of ``groups`` groups.

    Groups are bags or runs. Rows ``[groups, columns]`` are one row of each group.
    """

    lanes: Lanes
    groups: int
    depth: int = 1

    @classmethod
    def of(cls, lanes: Lanes, loads: int | None = None, depth: int | None = None) -> Tile:
        """Return the tile in which each thread loads ``loads`` vectors, or more of wide rows."""
        depth = depth or 1
        passes = max((loads or LOADS) // (lanes.steps * depth), 1)
        return cls(lanes, passes * lanes.height, depth)

    def launch(
        self,
        kernel: functools.partial,
        inputs: tuple[Any, ...],
        outputs: tuple[Any, ...],
        num_groups: int,
        *,
        interpret: bool,
    ) -> tuple[Any, ...]:
        """Run a kernel with one program for each tile of ``num_groups`` groups.

        ``kernel`` is a function of references to the inputs and outputs, tuples of trees. Outputs
        are `jax.ShapeDtypeStruct` for new arrays, or arrays that are changed in place.
        """
        arrays, tree = jax.tree.flatten(inputs)
        targets, output_tree = jax.tree.flatten(outputs)

        def body(*refs: Any) -> None:
            of_inputs, of_outputs = refs[: len(arrays)], refs[len(arrays) :]
            kernel(
                *jax.tree.unflatten(tree, of_inputs), *jax.tree.unflatten(output_tree, of_outputs)
            )

        run = programs.interpret if interpret else programs.launch
        name, count = kernel.func.__name__.strip("_"), -(-num_groups // self.groups)
        return jax.tree.unflatten(output_tree, run(body, name, count, arrays, targets))

    @property
    def output_lanes(self) -> Lanes:
        """Lanes of rows in an array that has nothing besides them."""
        return dataclasses.replace(self.lanes, first=0)

    def group_ids(self) -> Int32[Array, " groups"]:
        """Return the indices of the groups of this program's tile."""
        return self.ids_of(programs.program())

    def ids_of(self, number: Int32[Array, ""]) -> Int32[Array, " groups"]:
        """Return the indices of the groups of tile ``number``."""
        return number * self.groups + self.lanes.numbers(self.groups)

    def sum_rows(
        self,
        lengths: Int32[Array, " groups"],
        find: Callable[[Array], Any],
        load: Callable[[Array, Any], Terms],
        zeros: Terms,
    ) -> Terms:
        """Sum the terms of each group's rows, given the groups' numbers of rows.

        ``find(position)`` loads the indices of each group's row at a position, and
        ``load(position, found)`` these rows. The longest group decides how often they are called;
        they must mask positions behind their group's end.
        """

        def find_turn(first: Array) -> list[Any]:
            return [find(first + i) for i in range(self.depth)]

        def add(first: Array, totals: Terms, found: list[Any]) -> Terms:
            for terms in [load(first + i, each) for i, each in enumerate(found)]:
                totals = tuple(map(jnp.add, totals, terms))
            return totals

        # The first indices are on their way while the threads agree on the longest group.
        found = find_turn(jnp.int32(0))
        longest = jnp.max(lengths)
        carry = jnp.int32(0), zeros, found
        return loop(carry, find_turn, add, lambda first, _: first < longest, self.depth)


def loop(
    carry: tuple[Array, Any, Any],
    find: Callable[[Array], Any],
    add: Callable[[Array, Any, Any], Any],
    goes_on: Callable[[Array, Any], Bool[Array, ""]],
    step: int = 1,
) -> Any:
    """Return the totals after a loop, given the first turn, the totals, and ``find(turn)``.

    ``find(turn)`` loads the indices of a turn's rows, and ``add(turn, totals, found)`` the rows.
    """

    # While the rows of a turn are on their way, the indices of the next turn are loaded.
    def go_on(carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        turn, totals, found = carry
        keep_rolled()
        following = find(turn + step)
        return turn + step, add(turn, totals, found), following

    return jax.lax.while_loop(lambda carry: goes_on(carry[0], carry[2]), go_on, carry)[1]


# Tile of the kernels that go over all bags, positions or lookups: eight a thread.
BLOCK = Tile(FLAT, groups=1024)


def cdiv(dividend: Array, divisor: int) -> Array:
    """Divide int32 numbers, rounding up; `pl.cdiv` fails if JAX has int64 enabled."""
    return jax.lax.div(dividend + (divisor - 1), jnp.int32(divisor))
