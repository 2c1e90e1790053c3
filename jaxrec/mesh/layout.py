"""Where the blocks of tables live in the arrays of a mesh's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxrec.embed.config import MAX_ROWS, TableConfig
from jaxrec.embed.layout import Group, Output, TableLayout, layout_tables
from jaxrec.mesh.placement import Block, MeshShape, Placement
from jaxrec.optim import RowOptimizer


@dataclasses.dataclass(frozen=True)
class PlacedBlock:
    """A block of a table and its place.

    Attributes:
        table: The table.
        block: Which part of the table, and the device.
        first_row: Row of the group, as lookups number them, that the block starts with.
        local_row: Row of the device's array that the block starts at.
    """

    table: str
    block: Block
    first_row: int
    local_row: int


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """Pieces of tables of equal width, type and optimizer, cut into blocks over the devices.

    The rows of the pieces, one after the other, are the group's rows; that is what lookups know. A
    *slot* is a row of the group's global array ``[num_devices * local_rows, dim]``, whose first
    axis lies over the devices.

    Attributes:
        group: The pieces, as `jaxrec.embed` sees a group of tables.
        blocks: All blocks by first row.
        local_rows: Rows of each device's array.
        num_devices: Devices of the mesh; 1 if replicated.
        is_replicated: Whether every device has all rows.
    """

    group: Group
    blocks: tuple[PlacedBlock, ...]
    local_rows: int
    num_devices: int
    is_replicated: bool

    @property
    def num_slots(self) -> int:
        return self.num_devices * self.local_rows

    def slots(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """The slot of each row; `num_slots` where the row is none of the group's."""
        first = np.array([block.first_row for block in self.blocks], np.int32)
        slot = np.array(
            [block.block.device * self.local_rows + block.local_row for block in self.blocks],
            np.int32,
        )
        index = jnp.searchsorted(first, rows, side="right", method="scan_unrolled") - 1
        shift = jnp.asarray(slot - first)[jnp.maximum(index, 0)]
        is_row = (rows >= 0) & (rows < self.group.num_rows)
        return jnp.where(is_row, rows + shift, self.num_slots).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, repr=False)
class MeshLayout:
    """A collection's tables over a mesh.

    A table cut by columns is several *pieces*, each a table of its own to the lookups.

    Attributes:
        tables: The collection's tables, as on one device.
        pieces: The pieces, grouped, with the outputs in the order of the tables' outputs.
        groups: Where the groups of pieces lie.
        placements: Placement of each table.
        mesh: The devices.
    """

    tables: TableLayout
    pieces: TableLayout
    groups: tuple[PlacedGroup, ...]
    placements: tuple[Placement, ...]
    mesh: MeshShape

    def __repr__(self) -> str:
        lines = [f"{self.mesh.num_devices} devices"]
        for placed in self.groups:
            lines.append(f"{placed.group.name}: {placed.local_rows} rows a device")
            lines += [
                f"  {p.table}[{p.block.rows[0]}:{p.block.rows[1]}, "
                f"{p.block.columns[0]}:{p.block.columns[1]}] "
                + ("everywhere" if placed.is_replicated else f"device {p.block.device}")
                + f" row {p.local_row}"
                for p in placed.blocks
            ]
        return "\n".join(lines)

    @property
    def is_pooled(self) -> bool:
        return self.tables.is_pooled

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `TableLayout.outputs`."""
        return self.tables.outputs

    @property
    def bounds(self) -> dict[str, int]:
        """See `TableLayout.bounds`."""
        return self.tables.bounds

    def piece_keys(self) -> dict[str, list[str]]:
        """For each output of the tables the outputs of its pieces, by column."""
        keys: dict[str, list[str]] = {}
        for piece in self.pieces.outputs:
            keys.setdefault(piece.key[: piece.key.rindex("[")], []).append(piece.key)
        return keys

    def places(self, table: str) -> list[tuple[PlacedGroup, PlacedBlock]]:
        """All blocks of a table.

        Raises:
            KeyError: If there is no table of that name.
        """
        self.tables.find(table)
        return [(g, block) for g in self.groups for block in g.blocks if block.table == table]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Columns of a table, as a table of their own.

    Attributes:
        table: The table.
        config: What lookups know of the piece.
        blocks: The blocks that its rows are cut into, by row.
        is_replicated: Whether every device has it.
    """

    table: str
    config: TableConfig
    blocks: tuple[Block, ...]
    is_replicated: bool


def layout_mesh(
    tables: TableLayout, placements: Mapping[str, Placement], mesh: MeshShape
) -> MeshLayout:
    """Cuts tables as their placements say and finds each block a place.

    Raises:
        ValueError: If a table has no placement, its placement does not fit the mesh, or its
            optimizer needs whole rows and the placement cuts them.
    """
    for table in tables.tables:
        if table.name not in placements:
            raise ValueError(
                f"the plan has no placement for table {table.name!r}; it has "
                f"{', '.join(map(repr, placements)) or 'none'}"
            )
    pieces = {
        piece.config.name: piece
        for group in tables.groups
        for table in group.tables
        for piece in _pieces(table, group.optimizer, placements[table.name], mesh)
    }
    layout = layout_tables(
        [piece.config for piece in pieces.values()],
        tables.groups[0].optimizer,
        apart=lambda config: pieces[config.name].is_replicated,
    )
    layout = dataclasses.replace(layout, outputs=_outputs(tables, layout, pieces))
    groups = tuple(_place(group, pieces, mesh) for group in layout.groups)
    return MeshLayout(
        tables, layout, groups, tuple(placements[table.name] for table in tables.tables), mesh
    )


def _pieces(
    table: TableConfig, optimizer: RowOptimizer, placement: Placement, mesh: MeshShape
) -> list[_Piece]:
    by_columns: dict[tuple[int, int], list[Block]] = {}
    for block in placement.cut(table, mesh):
        by_columns.setdefault(block.columns, []).append(block)
    if len(by_columns) > 1 and optimizer.needs_whole_rows:
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind}, which cuts its rows, but its "
            f"optimizer {type(optimizer).__name__} needs whole rows; use row_wise() or "
            "table_wise(), or an optimizer that treats every element by itself (sgd, adagrad, adam)"
        )
    if optimizer.clip_norm is not None:
        raise ValueError(
            f"table {table.name!r}: clip_norm needs the whole table's gradient, which no device of "
            "a mesh has; use clip_value instead"
        )
    return [
        _Piece(
            table.name,
            dataclasses.replace(
                table,
                name=f"{table.name}[{start}:{stop}]",
                embedding_dim=stop - start,
                optimizer=optimizer,
            ),
            tuple(blocks),
            placement.is_replicated,
        )
        for (start, stop), blocks in by_columns.items()
    ]


def _outputs(
    tables: TableLayout, layout: TableLayout, pieces: Mapping[str, _Piece]
) -> tuple[Output, ...]:
    """The pieces' outputs in the order of the tables' own: by table, feature and column."""
    found: dict[tuple[str, str], list[Output]] = {}
    for g, group in enumerate(layout.groups):
        for position, (feature, index) in enumerate(group.features):
            table = pieces[group.tables[index].name].table
            found.setdefault((table, feature), []).append(Output("", feature, g, position))

    def first_column(output: Output) -> int:
        group = layout.groups[output.group]
        config = group.tables[group.features[output.position][1]]
        return pieces[config.name].blocks[0].columns[0]

    ordered = []
    for output in tables.outputs:
        group = tables.groups[output.group]
        table = group.tables[group.features[output.position][1]].name
        for piece in sorted(found[table, output.feature], key=first_column):
            key = f"{output.key}[{first_column(piece)}:]"
            ordered.append(dataclasses.replace(piece, key=key))
    return tuple(ordered)


def _place(group: Group, pieces: Mapping[str, _Piece], mesh: MeshShape) -> PlacedGroup:
    """Stacks the group's blocks on each device in the order of the pieces."""
    is_replicated = pieces[group.tables[0].name].is_replicated
    filled = [0] * mesh.num_devices
    blocks = []
    for config, offset in zip(group.tables, group.row_offsets, strict=True):
        for block in pieces[config.name].blocks:
            first_row = offset + block.rows[0]
            table = pieces[config.name].table
            blocks.append(PlacedBlock(table, block, first_row, filled[block.device]))
            filled[block.device] += block.rows[1] - block.rows[0]
    num_devices = 1 if is_replicated else mesh.num_devices
    placed = PlacedGroup(group, tuple(blocks), max(filled), num_devices, is_replicated)
    if placed.num_slots > MAX_ROWS:
        raise ValueError(
            f"tables {', '.join(config.name for config in group.tables)} take {placed.num_slots} "
            f"rows over the mesh, more than int32 can number ({MAX_ROWS}); place them more evenly"
        )
    return placed
