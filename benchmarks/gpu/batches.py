"""Batches to check and to time kernels on."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrec.embed.formats import FORMATS, TABLE_FORMATS, RowFormat, TableArray, as_table
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.kernels import BagLayout

# Formats of packed rows: quantized ones, and those of tables that are trained.
PACKED: dict[str, RowFormat] = {
    **{name: FORMATS[name] for name in ("int8", "int4", "int2", "float8")},
    "trained int8": TABLE_FORMATS["int8"],
    **{name: TABLE_FORMATS[name] for name in ("float8_e4m3", "float8_e5m2")},
}
# Those that are trained, and so updated.
TRAINED = ("trained int8", "float8_e4m3", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tables of equal size and a batch for them.

    Attributes:
        name: Name in the results.
        tables: Tables, with a feature each.
        rows: Rows of each.
        dim: Width of a row.
        batch: Bags of each feature.
        bag: Ids of each bag; its mean where ``ragged``.
        ids: "uniform", or "powerlaw": ``floor(rows**u)`` of uniform u, log-uniform.
        dtype: Type of table, output and gradient.
        packed: Format of packed rows, of `PACKED`; None: rows are of the dtype.
        ragged: Whether bags differ in length, some empty and one far too long.
        weighted: Whether ids have weights.
        mean: Whether bags are averaged.
    """

    name: str
    tables: int
    rows: int
    dim: int
    batch: int
    bag: int
    ids: str = "uniform"
    dtype: str = "float32"
    ragged: bool = False
    weighted: bool = False
    mean: bool = False
    packed: str | None = None

    @property
    def row_format(self) -> RowFormat:
        return PlainRows(self.dtype) if self.packed is None else PACKED[self.packed]

    def table(self) -> TableArray:
        """A table of normal elements."""
        rows = jax.random.normal(jax.random.key(0), self.table_shape)
        return as_table(self.row_format.pack(rows), self.row_format, self.dim)

    @property
    def num_ids(self) -> int:
        return self.tables * self.batch * self.bag

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.tables * self.rows, self.dim

    @property
    def layout(self) -> BagLayout:
        capacity = self.batch * self.bag
        each = range(self.tables)
        return BagLayout(
            id_starts=tuple(i * capacity for i in each),
            capacities=(capacity,) * self.tables,
            length_starts=tuple(i * self.batch for i in each),
            strides=(self.batch,) * self.tables,
            row_offsets=tuple(i * self.rows for i in each),
            row_counts=(self.rows,) * self.tables,
            means=(self.mean,) * self.tables,
        )

    def batch_arrays(self) -> tuple[Array, Array, Array | None]:
        """Ids, lengths and weights."""
        rng = np.random.default_rng(0)
        if self.ids == "uniform":
            ids = rng.integers(0, self.rows, self.num_ids)
        else:
            ids = np.minimum(self.rows ** rng.random(self.num_ids) - 1, self.rows - 1)
        lengths = np.full((self.tables, self.batch), self.bag)
        if self.ragged:
            # Half of a feature's ids in its first bag; the second half of the bags is empty.
            lengths[:, self.batch // 2 :] = 0
            lengths[:, 0] = self.batch * self.bag // 2
            lengths[:, 1 : self.batch // 2] = self.bag - 1
        weights = rng.standard_normal(self.num_ids, dtype=np.float32)
        return (
            jnp.asarray(ids.astype(np.int32)),
            jnp.asarray(lengths.reshape(-1).astype(np.int32)),
            jnp.asarray(weights) if self.weighted else None,
        )


def read_shapes(path: pathlib.Path) -> list[Shape]:
    """Return the shapes of a file."""
    return [
        Shape(
            each["name"], *(each[key] for key in "TVDBL"), each["ids"],
            each.get("dtype", "float32"), packed=each.get("packed"),
        )
        for each in json.loads(path.read_text())["shapes"]
    ]  # fmt: skip


def bags_of(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Position, row, output row and scale of each id that is looked up, for the oracle."""
    ids, lengths, weights = (None if x is None else np.asarray(x) for x in shape.batch_arrays())
    assert ids is not None
    assert lengths is not None
    lengths = lengths.reshape(shape.tables, shape.batch)
    capacity = shape.batch * shape.bag
    positions, bags = [], []
    for table, counts in enumerate(lengths):
        positions.append(table * capacity + np.arange(counts.sum()))
        bags.append(np.repeat(np.arange(shape.batch), counts) * shape.tables + table)
    position, bag = np.concatenate(positions), np.concatenate(bags)
    rows = ids[position] + position // capacity * shape.rows
    scales = np.ones(position.size) if weights is None else weights[position].astype(np.float64)
    if shape.mean:
        scales = scales / np.bincount(bag, minlength=shape.batch * shape.tables)[bag]
    return position, rows, bag, scales
