"""Tiles of rows: what one program of a Mosaic kernel loads at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from jaxrec.embed.kernels.mosaic.indexing import keep_rolled
from jaxrec.embed.kernels.mosaic.lanes import FLAT, Lanes
from jaxrec.embed.kernels.mosaic.programs import PROGRAMS, interpreted, program, program_on_gpu

# Vectors that a thread loads in a turn of a loop, if rows are not wider.
LOADS = 2

Terms: TypeAlias = tuple[Array, ...]
Find: TypeAlias = Callable[[Array], Any]  # loads the indices of each group's row at a position
LoadTerms: TypeAlias = Callable[[Array, Any], Terms]  # loads these rows, given the position too


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
        inputs: Any,
        outputs: Any,
        num_groups: int,
        *,
        interpret: bool,
    ) -> Any:
        """Run a kernel with one program for each tile of ``num_groups`` groups.

        Arguments:
            kernel: Function of references to the inputs and outputs, in this order.
            inputs: Tuple of trees of arrays.
            outputs: Tree of `jax.ShapeDtypeStruct` for new arrays, and of arrays to change in
                place.
            num_groups: Number of groups.
            interpret: Whether to run the kernel without a GPU.
        """
        programs = -(-num_groups // self.groups)
        arrays, tree = jax.tree.flatten(inputs)
        targets, output_tree = jax.tree.flatten(outputs)

        def body(*refs: Any) -> None:
            of_inputs = jax.tree.unflatten(tree, refs[: len(arrays)])
            of_outputs = jax.tree.unflatten(output_tree, refs[len(arrays) :])
            several = isinstance(of_outputs, tuple)
            kernel(*of_inputs, *(of_outputs if several else (of_outputs,)))

        launch = _interpret if interpret else _launch
        results = launch(body, kernel.func.__name__.strip("_"), programs, arrays, targets)
        return jax.tree.unflatten(output_tree, results)

    @property
    def output_lanes(self) -> Lanes:
        """Lanes of rows in an array that has nothing besides them."""
        return dataclasses.replace(self.lanes, first=0)

    def group_ids(self) -> Int32[Array, " groups"]:
        """Return the indices of the groups of this program's tile."""
        place = self.lanes.cast(jnp.arange(self.groups, dtype=jnp.int32))
        return program() * self.groups + place

    def sum_rows(
        self, lengths: Int32[Array, " groups"], find: Find, load: LoadTerms, zeros: Terms
    ) -> Terms:
        """Sum the terms of each group's rows, given the groups' numbers of rows.

        The longest group decides how often `find` and ``load`` are called; they must mask
        positions behind their group's end.
        """

        # While the rows of a turn are on their way, the indices of the next turn are loaded.
        def add(carry: tuple[Array, Terms, list[Any]]) -> tuple[Array, Terms, list[Any]]:
            first, totals, found = carry
            keep_rolled()
            following = [find(first + self.depth + i) for i in range(self.depth)]
            rows = [load(first + i, each) for i, each in enumerate(found)]
            for terms in rows:
                totals = tuple(map(jnp.add, totals, terms))
            return first + self.depth, totals, following

        # The first indices are on their way while the threads agree on the longest group.
        carry = jnp.int32(0), zeros, [find(jnp.int32(i)) for i in range(self.depth)]
        longest = jnp.max(lengths)
        return jax.lax.while_loop(lambda carry: carry[0] < longest, add, carry)[1]


# Tile of the kernels that go over all bags, positions or lookups: eight a thread.
BLOCK = Tile(FLAT, groups=1024)


def cdiv(dividend: Array, divisor: int) -> Array:
    """Divide int32 numbers, rounding up; `pl.cdiv` fails if JAX has int64 enabled."""
    return jax.lax.div(dividend + (divisor - 1), jnp.int32(divisor))


def _launch(
    body: Callable[..., None],
    name: str,
    programs: int,
    inputs: list[Array],
    targets: list[Any],
    interpreter: Any = None,
) -> list[Array]:
    """Run a kernel on a GPU, or by Mosaic's interpreter, given its parameters."""
    is_new = [isinstance(each, jax.ShapeDtypeStruct) for each in targets]
    # Mosaic changes an array in place if it gets a reference to it.
    changed = [jax.new_ref(each) for each, new in zip(targets, is_new, strict=True) if not new]

    def with_outputs(*refs: Any) -> None:
        first, last = len(inputs), len(inputs) + len(changed)
        in_place, new = iter(refs[first:last]), iter(refs[last:])
        with contextlib.nullcontext() if interpreter is None else interpreted(program_on_gpu):
            body(*refs[:first], *(next(new if each else in_place) for each in is_new))

    made = plgpu.kernel(
        with_outputs,
        out_type=[each for each, new in zip(targets, is_new, strict=True) if new],
        grid=(programs,),
        grid_names=(PROGRAMS,),
        kernel_name=name,
        interpret=interpreter,
    )(*inputs, *changed)
    new, in_place = iter(made), (each[...] for each in changed)
    return [next(new if each else in_place) for each in is_new]


def _interpret(
    body: Callable[..., None], name: str, programs: int, inputs: list[Array], targets: list[Any]
) -> list[Array]:
    """Run a kernel by Pallas' interpreter, with the functions of `stand_ins`."""
    is_new = [isinstance(each, jax.ShapeDtypeStruct) for each in targets]
    changed = [each for each, new in zip(targets, is_new, strict=True) if not new]
    places = [i for i, new in enumerate(is_new) if not new]

    def with_outputs(*refs: Any) -> None:
        with interpreted(functools.partial(pl.program_id, 0)):
            body(*refs[: len(inputs)], *refs[len(inputs) + len(changed) :])

    whole = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        with_outputs,
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in targets],
        grid=(programs,),
        in_specs=[whole] * (len(inputs) + len(changed)),
        out_specs=[whole] * len(targets),
        input_output_aliases={len(inputs) + i: place for i, place in enumerate(places)},
        interpret=True,
        name=name,
    )(*inputs, *changed)
    return list(results)
