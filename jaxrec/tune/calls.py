"""The calls of primitives that a model's tables make, with arrays of their sizes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrec import optim
from jaxrec.embed.config import EmbeddingBagConfig, TableConfig
from jaxrec.embed.formats import TableArray, as_table
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.kernels import BagLayout, Lookups, reference
from jaxrec.embed.kernels.trial import Form, size_of
from jaxrec.embed.layout import Group, layout_tables
from jaxrec.embed.state import new_state, state_bytes
from jaxrec.plan.constraints import ParameterConstraints

Skew: TypeAlias = Literal["powerlaw", "uniform"]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a primitive, whose arrays are made when it is timed."""

    primitive: str
    tables: tuple[str, ...]  # names of the tables that it reads or updates
    # Makes the arrays by argument, on the default device. Each timing makes them anew, since an
    # update donates its tables.
    make: Callable[[], dict[str, Any]]
    static: Mapping[str, Any]  # the other arguments
    in_place: tuple[str, ...] = ()  # names of the arrays that it changes in place

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with `jax.ShapeDtypeStruct` in the place of arrays."""
        return {**jax.eval_shape(self.make), **self.static}

    @functools.cached_property
    def form(self) -> Form:
        return Form.of(self.primitive, self.arguments)

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Numbers of lookups and of bags."""
        return size_of(self.primitive, self.arguments)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch for which calls are made: its sizes, its ids and the type of its embeddings."""

    size: int  # samples of a device
    ids: float | None = None  # of each feature of a sample; None: pooling factors, or 1
    skew: Skew = "powerlaw"  # of ids: "uniform", or "powerlaw": (rows + 1)**u - 1, u uniform
    dtype: str = "float32"  # of the embeddings and their gradients
    # Largest number of bytes of a group's rows and state; larger tables are cut in proportion.
    max_bytes: float = 1e9
    is_sharded: bool = False  # whether rows also travel between devices


def calls_of(
    tables: Sequence[TableConfig], constraints: Mapping[str, ParameterConstraints], batch: Batch
) -> list[Call]:
    """Return the calls that a training step makes for tables, group by group.

    Each table names its optimizer. By table, ``constraints`` say how many ids a sample has of each
    feature (``pooling_factors``) and whether ids have weights.
    """
    # Weighted and unweighted tables are grouped apart here, since their calls have different forms.
    kinds = [
        [table for table in tables if isinstance(table, EmbeddingBagConfig) == is_pooled]
        for is_pooled in (True, False)
    ]
    groups = (
        group
        for kind in filter(None, kinds)
        for group in layout_tables(
            kind, optim.sgd(), apart=lambda table: bool(constraints[table.name].is_weighted)
        ).groups
    )
    return [call for group in groups for call in _calls_of_group(group, constraints, batch)]


def _calls_of_group(
    group: Group, constraints: Mapping[str, ParameterConstraints], batch: Batch
) -> Iterator[Call]:
    """Yield the calls that a step makes for one group of tables, first the lookups."""
    is_plain = isinstance(group.row_format, PlainRows)
    names = tuple(table.name for table in group.tables)
    counts = _row_counts(group, batch.max_bytes)
    layout = _layout(group, counts, constraints, batch)
    num_rows, dim = sum(counts), group.dim
    is_weighted = bool(constraints[names[0]].is_weighted)
    is_summed = group.is_pooled and not group.takes_max

    def rows() -> TableArray:
        # Rows repeat every seven. Sums of whole numbers are exact in any order, so that results can
        # be compared; packed rows have one sign, so that their sums are nearly exact.
        row = jnp.arange(7, dtype=jnp.int32)[:, None]
        column = jnp.arange(dim, dtype=jnp.int32)[None] % 3
        different = row - column - 2 if is_plain else row + column
        stored = group.row_format.pack(different.astype(jnp.float32))
        each = jnp.arange(num_rows, dtype=jnp.int32) % 7
        return as_table(stored[each], group.row_format, dim)

    def ids() -> Array:
        return _draw_ids(layout, batch.skew)

    def lengths() -> Array:
        each = zip(layout.capacities, layout.strides, strict=True)
        return jnp.concatenate([_lengths(capacity, stride) for capacity, stride in each])

    def weights() -> Array | None:
        if not is_weighted:
            return None
        return jnp.exp2(jnp.arange(layout.num_positions) % 3 - 1.0).astype(jnp.float32)

    def lookups() -> Lookups:
        flat = reference.flatten_bags(ids(), lengths(), weights(), layout, num_rows)
        return flat if is_summed else dataclasses.replace(flat, bags=None)

    def gradients() -> Array:
        count = layout.num_bags if is_summed else layout.num_positions
        bag = jnp.arange(count, dtype=jnp.int32)[:, None] % 5
        column = jnp.arange(dim, dtype=jnp.int32)[None] % 4
        return (bag - column).astype(batch.dtype)

    # Lookups with max pooling have one implementation on each platform, and gradients as if rows
    # were looked up one by one.
    if is_summed:

        def pooled() -> dict[str, Any]:
            return {"table": rows(), "ids": ids(), "lengths": lengths(), "weights": weights()}

        yield Call("pooled_lookup", names, pooled, {"layout": layout, "dtype": batch.dtype})
    if not group.is_pooled or batch.is_sharded:
        yield Call("row_lookup", names, lambda: {"table": rows(), "rows": lookups().rows}, {})
    if not group.optimizer.is_trained:
        return

    def equal_rows(row: np.ndarray) -> Array:
        return jnp.broadcast_to(row, (num_rows, *row.shape))

    def update() -> dict[str, Any]:
        return {
            "table": rows(),
            "state": new_state(group.optimizer, dim, equal_rows),
            "lookups": lookups(),
            "gradients": gradients(),
            "step": jnp.int32(0),
        }

    # No implementation has a kernel that updates packed rows: XLA applies the optimizer to them.
    if is_plain:
        starts = tuple(itertools.accumulate(counts, initial=0))[:-1]
        static = {"optimizer": group.optimizer, "table_starts": starts}
        yield Call("fused_update", names, update, static, in_place=("table", "state"))
    if batch.is_sharded:
        # A device sums the gradients of each row before it sends them: as many rows as lookups.
        size = min(layout.num_positions, num_rows)

        def sums() -> dict[str, Any]:
            flat = lookups()
            return {
                "lookups": dataclasses.replace(flat, rows=flat.rows % size),
                "gradients": gradients(),
            }

        bound = {"num_rows": size, "bound": group.optimizer.clip_value}
        yield Call("sum_rows", names, sums, bound)


def _row_counts(group: Group, max_bytes: float) -> tuple[int, ...]:
    """Return the rows of each table, cut in proportion to fit ``max_bytes``."""
    row_bytes = group.row_format.row_bytes(group.dim) + state_bytes(group.optimizer, group.dim)
    share = min(1.0, max_bytes / (row_bytes * group.num_rows))
    return tuple(max(1, int(table.num_embeddings * share)) for table in group.tables)


def _layout(
    group: Group,
    counts: Sequence[int],
    constraints: Mapping[str, ParameterConstraints],
    batch: Batch,
) -> BagLayout:
    """Return the layout of a batch that has the group's features only."""
    tables = [table for _, table in group.features]
    capacities = []
    for table in group.tables:
        factors: Any = constraints[table.name].pooling_factors
        factors = 1.0 if factors is None else factors
        if isinstance(factors, float):
            factors = (factors,) * len(table.feature_names)
        if len(factors) != len(table.feature_names):
            raise ValueError(
                f"table {table.name!r} has {len(table.feature_names)} features and "
                f"{len(factors)} pooling_factors"
            )
        means = factors if batch.ids is None else [batch.ids] * len(factors)
        capacities += [max(1, math.ceil(mean * batch.size)) for mean in means]
    starts = tuple(itertools.accumulate(counts, initial=0))
    return BagLayout(
        id_starts=tuple(itertools.accumulate(capacities, initial=0))[:-1],
        capacities=tuple(capacities),
        length_starts=tuple(i * batch.size for i in range(len(tables))),
        strides=(batch.size,) * len(tables),
        row_offsets=tuple(starts[table] for table in tables),
        row_counts=tuple(counts[table] for table in tables),
        means=tuple(getattr(group.tables[table], "pooling", "sum") == "mean" for table in tables),
    )


def _draw_ids(layout: BagLayout, skew: Skew) -> Array:
    keys = jax.random.split(jax.random.key(0), layout.num_features)
    ids = []
    for key, capacity, count in zip(keys, layout.capacities, layout.row_counts, strict=True):
        shares = jax.random.uniform(key, (capacity,))
        drawn = shares * count if skew == "uniform" else jnp.exp(shares * np.log(count + 1.0)) - 1
        ids.append(jnp.clip(drawn.astype(jnp.int32), 0, count - 1))
    return jnp.concatenate(ids)


def _lengths(capacity: int, bags: int) -> Array:
    """Return the lengths of bags, which sum to the capacity and differ by 0 or 1."""
    ends = (np.arange(1, bags + 1) * capacity) // bags
    return jnp.asarray(np.diff(ends, prepend=0), jnp.int32)
