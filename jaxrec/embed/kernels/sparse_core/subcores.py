"""A SparseCore's vector subcores: the launch of a kernel on them, and their copies of rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jaxtyping import Array, DTypeLike, Float, Int32

# Numbers of a subcore's vector. Loads and stores of numbers from its memory are vectors.
LANES = 8
# Index of a row that is neither read nor written.
IGNORED = -1

# The mesh's axes. Users' meshes have axes of other names.
_CORE, _SUBCORE = "jaxrec_core", "jaxrec_subcore"
# Numbers in each of a subcore's buffers of rows: 32 KiB of 256 KiB or more.
_BUFFER = 8192
MOST_COLUMNS = _BUFFER // LANES


def refuse_chip() -> str | None:
    """Return why the kernels do not run on the chip that programs are traced for; None: they do."""
    try:
        lanes = plsc.get_sparse_core_info().num_lanes
    except (RuntimeError, ValueError):  # a chip without SparseCores, or no TPU
        return "it needs a TPU with SparseCores"
    if lanes != LANES:
        return f"its SparseCores have vectors of {LANES} numbers, and these of {lanes}"
    return None


def block_size(dim: int) -> int:
    """Return the number of rows of ``dim`` columns that a subcore holds in a buffer."""
    return _BUFFER // dim // LANES * LANES


def rows_buffer(size: int, *dim: int) -> Any:
    """Return the type of a buffer in a subcore's memory: ``[size, dim]``, or ``[size]``."""
    return pltpu.VMEM((size, *dim), jnp.float32)


def list_buffer(size: int, dtype: DTypeLike = jnp.int32) -> Any:
    """Return the type of a list of numbers in a subcore's memory; see `entries`."""
    # Room for the vector that begins at the last number.
    return pltpu.VMEM((size + LANES,), jnp.dtype(dtype))


def entries(numbers: Any) -> Any:
    """Return the part of a `list_buffer` that has its numbers."""
    return numbers.at[pl.ds(0, numbers.shape[0] - LANES)]


@dataclasses.dataclass(frozen=True)
class Subcores:
    """The subcores that run a kernel.

    Attributes:
        mesh: Mesh of the subcores.
        interpret: Whether JAX's interpreter runs the kernel. The mesh then has one subcore, since
            each subcore of a larger one would take itself for the first.
    """

    mesh: plsc.VectorSubcoreMesh
    interpret: bool

    @classmethod
    def of(cls, *, interpret: bool) -> Subcores:
        """Return all subcores of the chip, or the one of the interpreter."""
        make_mesh = functools.partial(
            plsc.VectorSubcoreMesh, core_axis_name=_CORE, subcore_axis_name=_SUBCORE
        )
        if not interpret:
            return cls(make_mesh(), interpret)
        # A mesh is checked against a chip, which need not exist.
        device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
        chip = AbstractMesh((1,), ("chip",), axis_types=(AxisType.Auto,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(chip):
            return cls(make_mesh(num_cores=1, num_subcores=1), interpret)

    def launch(
        self,
        kernel: Callable[..., None],
        inputs: Any,
        outputs: Sequence[jax.ShapeDtypeStruct] = (),
        changed: Any = (),
        scratch: Any = (),
    ) -> tuple[Sequence[Array], Any]:
        """Run ``kernel(inputs, changed, outputs, scratch)`` on each subcore.

        The kernel gets trees of references: to arrays in the chip's memory, and to the subcore's
        own memory for ``scratch``, a tree of `rows_buffer` and `list_buffer`. Arrays of ``changed``
        are changed in place.
        Returns the outputs and the changed arrays.
        """
        refs = jax.tree.map(jax.new_ref, changed)
        buffers, structure = jax.tree.flatten(scratch)

        def body(inputs: Any, changed: Any, *others: Any) -> None:
            new, own = others[: len(outputs)], others[len(outputs) :]
            kernel(inputs, changed, new, jax.tree.unflatten(structure, own))

        run = pl.kernel(
            body,
            out_type=tuple(outputs),
            mesh=self.mesh,
            scratch_types=buffers,
            interpret=pltpu.InterpretParams() if self.interpret else False,
        )
        return run(inputs, refs), jax.tree.map(jax.freeze, refs)

    def each_block(self, count: int, run: Callable[[Int32[Array, ""]], None]) -> None:
        """Run a function of the block's number for each block, on one subcore each."""
        # Neighbouring blocks go to different subcores, so that all have work if only the first
        # blocks have any.
        subcore = jax.lax.axis_index(_SUBCORE) * self.mesh.num_cores + jax.lax.axis_index(_CORE)

        @pl.loop(0, pl.cdiv(count, self.mesh.size))
        def _(turn: Array) -> None:
            block = turn * self.mesh.size + subcore
            pl.when(block < count)(lambda: run(block))

    def read_rows(self, array: Any, indices: Any, rows: Any) -> None:
        """Copy rows of the chip's memory into a buffer; those of ignored indices stay undefined."""
        if self.interpret:
            each_row(indices, lambda i, index: pltpu.sync_copy(_row(array, index), _row(rows, i)))
        else:
            pltpu.sync_copy(array.at[_indirect(indices)], rows)

    def write_rows(self, rows: Any, array: Any, indices: Any) -> None:
        """Copy rows of a buffer into the chip's memory, except to ignored indices."""
        if self.interpret:
            each_row(indices, lambda i, index: pltpu.sync_copy(_row(rows, i), _row(array, index)))
        else:
            pltpu.sync_copy(rows, array.at[_indirect(indices)])


def each_vector(numbers: Any, run: Callable[[Any], None]) -> None:
    """Run a function of a slice for each vector of a `list_buffer`."""

    @pl.loop(0, numbers.shape[0] // LANES - 1)
    def _(i: Array) -> None:
        run(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))


def each_row(indices: Any, run: Callable[..., None], *others: Any) -> None:
    """Run ``run(i, indices[i], *others[i])`` for each row whose index is not ignored.

    ``indices`` and ``others`` are of type `list_buffer`.
    """
    # Turns are not unrolled, since the compiler aborts the process if a program is too long.

    @pl.loop(0, indices.shape[0] - LANES)
    def _(i: Array) -> None:
        numbers = [each[pl.ds(i, LANES)][0] for each in (indices, *others)]
        pl.when(numbers[0] != IGNORED)(lambda: run(i, *numbers))


def _indirect(indices: Any) -> plsc.Indices:
    return plsc.Indices(entries(indices), ignored_value=IGNORED)


def _row(array: Any, index: Any) -> Any:
    return array.at[pl.ds(index, 1)]


def sum_columns(rows: Float[Array, "1 dim"]) -> Float[Array, "1"]:
    """Return the sum of a row."""
    # SparseCores have no sum over the columns of an array, so the row's vectors are added, and then
    # the lanes of their sum.
    vector = rows[:, :LANES]
    for start in range(LANES, rows.shape[1], LANES):
        vector += rows[:, start : start + LANES]
    total = vector[0, 0]
    for lane in range(1, LANES):
        total += vector[0, lane]
    return jnp.full((1,), total)
