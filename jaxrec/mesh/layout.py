"""Where the blocks of tables live in the arrays of a mesh's devices."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxrec.embed import kernels
from jaxrec.embed.config import MAX_ROWS, EmbeddingBagConfig, TableConfig
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
        num_devices: Devices of the mesh; 1 if every device has all rows.
        exchange: How rows travel: "copies" (not at all), "rows" or "sums", see `Placement`; or
            "bags", which are sums where all rows of a piece are on one device.
        whole_dim: Columns of the whole rows, of which the pieces are parts; the group's own width
            where rows are not cut.
    """

    group: Group
    blocks: tuple[PlacedBlock, ...]
    local_rows: int
    num_devices: int
    exchange: str
    whole_dim: int

    @property
    def is_replicated(self) -> bool:
        """Whether every device has all rows."""
        return self.exchange == "copies"

    @property
    def is_cut(self) -> bool:
        """Whether a row's columns lie apart."""
        return self.whole_dim != self.group.dim

    @property
    def joins_pieces(self) -> bool:
        """Whether the pieces of a row must be updated together."""
        return self.is_cut and self.group.optimizer.needs_whole_rows

    @property
    def num_slots(self) -> int:
        return self.num_devices * self.local_rows

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables whose pieces are here."""
        return tuple(dict.fromkeys(block.table for block in self.blocks))

    def slots(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """The slot of each row; `num_slots` where the row is none of the group's."""
        starts = tuple(block.first_row for block in self.blocks)
        shifts = tuple(self._slot(block) - block.first_row for block in self.blocks)
        return kernels.shift_rows(rows, starts, shifts, self.group.num_rows, self.num_slots)

    def whole_rows(self, slots: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """A number for each slot's whole row, the same for all its pieces.

        On a device the numbers ascend with the slots. `group.num_rows` past the last slot.
        """
        first_piece: dict[str, int] = {}
        for block in self.blocks:
            first_piece.setdefault(block.table, block.first_row - block.block.rows[0])
        blocks = sorted(self.blocks, key=self._slot)
        starts = tuple(self._slot(block) for block in blocks)
        shifts = tuple(
            first_piece[block.table] + block.block.rows[0] - self._slot(block) for block in blocks
        )
        # The first stretch begins at slot 0, even where the first device has no block.
        starts, shifts = (0, *starts), (0, *shifts)
        return kernels.shift_rows(slots, starts, shifts, self.num_slots, self.group.num_rows)

    def tables_of(
        self, local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Int32[Array, " n"]:
        """The index in `tables` of the table of each row of a device's array.

        Any where the row is no table's.
        """
        blocks = sorted(self.blocks, key=self._slot)
        starts = np.array([self._slot(block) for block in blocks], np.int32)
        tables = np.array([self.tables.index(block.table) for block in blocks], np.int32)
        slots = device * self.local_rows + local_rows
        index = jnp.searchsorted(starts, slots, side="right") - 1
        return jnp.asarray(tables)[jnp.maximum(index, 0)]

    def _slot(self, block: PlacedBlock) -> int:
        """The first slot of a block."""
        return block.block.device * self.local_rows + block.local_row


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
    def configs(self) -> tuple[TableConfig, ...]:
        """See `TableLayout.configs`."""
        return self.tables.configs

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
        exchange: How its rows travel.
        whole_dim: Columns of the table.
    """

    table: str
    config: TableConfig
    blocks: tuple[Block, ...]
    exchange: str
    whole_dim: int


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
    arrays = _number_arrays(pieces, mesh)
    layout = layout_tables(
        [piece.config for piece in pieces.values()],
        tables.groups[0].optimizer,
        apart=lambda config: (_apart(pieces[config.name]), arrays[config.name]),
    )
    layout = dataclasses.replace(layout, outputs=_outputs(tables, layout, pieces))
    groups = tuple(_place(group, pieces, mesh) for group in layout.groups)
    _check_together(groups)
    return MeshLayout(
        tables, layout, groups, tuple(placements[table.name] for table in tables.tables), mesh
    )


def _pieces(
    table: TableConfig, optimizer: RowOptimizer, placement: Placement, mesh: MeshShape
) -> list[_Piece]:
    by_columns: dict[tuple[int, int], list[Block]] = {}
    for block in placement.cut(table, mesh):
        by_columns.setdefault(block.columns, []).append(block)
    exchange = choose_exchange(placement, table, optimizer, by_columns)
    _check_cut(table, optimizer, placement, by_columns)
    is_whole = all(len(blocks) == 1 for blocks in by_columns.values())
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
            "bags" if exchange == "sums" and is_whole else exchange,
            table.embedding_dim,
        )
        for (start, stop), blocks in by_columns.items()
    ]


def _apart(piece: _Piece) -> tuple[str, int | None]:
    """Pieces for which this differs do not share a group."""
    optimizer = piece.config.optimizer
    joins_pieces = optimizer is not None and optimizer.needs_whole_rows
    return piece.exchange, piece.whole_dim if joins_pieces else None


def _number_arrays(pieces: Mapping[str, _Piece], mesh: MeshShape) -> dict[str, int]:
    """For each piece the number of its array, of those that pieces of its kind share.

    There are several where the slots of one would be more than int32 can number. Pieces take the
    first that has room, and those of a table that are alike take it together.
    """
    alike: dict[tuple[Hashable, str], list[_Piece]] = {}
    for piece in pieces.values():
        config = piece.config
        kind: Hashable = (config.dtype, config.embedding_dim, config.optimizer, _apart(piece))
        alike.setdefault((kind, piece.table), []).append(piece)
    filled: dict[Hashable, list[Counter[int]]] = {}
    numbers: dict[str, int] = {}
    for (kind, _), parts in alike.items():
        rows: Counter[int] = Counter()
        for block in (block for part in parts for block in part.blocks):
            rows[block.device] += block.rows[1] - block.rows[0]
        most = MAX_ROWS // (1 if parts[0].exchange == "copies" else mesh.num_devices)
        arrays = filled.setdefault(kind, [])
        room = (i for i, array in enumerate(arrays) if max((array + rows).values()) <= most)
        number = next(room, len(arrays))
        if number == len(arrays):
            arrays.append(Counter())
        arrays[number] += rows
        numbers |= {part.config.name: number for part in parts}
    return numbers


def choose_exchange(
    placement: Placement,
    table: TableConfig,
    optimizer: RowOptimizer,
    columns: Mapping[tuple[int, int], Sequence[Block]],
) -> str:
    """How a table's rows travel.

    Args:
        placement: The placement, which may say it.
        table: The table.
        optimizer: How its rows change.
        columns: The blocks of each part of its columns.

    Raises:
        ValueError: If the placement says what the table cannot do.
    """
    is_pooled = isinstance(table, EmbeddingBagConfig)
    is_whole = all(len(blocks) == 1 for blocks in columns.values())
    if placement.exchange is None:
        return "sums" if is_pooled and is_whole else "rows"
    if placement.exchange == "sums" and not is_pooled:
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind} with exchange='sums', but its rows "
            "are not pooled; use exchange='rows'"
        )
    is_cut = len(columns) > 1 and not is_whole
    if placement.exchange == "sums" and is_cut and optimizer.needs_whole_rows:
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind} with exchange='sums', and its "
            f"optimizer {type(optimizer).__name__} with these settings looks at whole rows, which "
            "it cuts by rows and by columns; use exchange='rows'"
        )
    return placement.exchange


def _joins(optimizer: RowOptimizer, columns: Mapping[tuple[int, int], Sequence[Block]]) -> bool:
    """Whether parts of the columns must be updated together."""
    return len(columns) > 1 and (optimizer.needs_whole_rows or optimizer.clip_norm is not None)


def _check_cut(
    table: TableConfig,
    optimizer: RowOptimizer,
    placement: Placement,
    columns: Mapping[tuple[int, int], list[Block]],
) -> None:
    """That the optimizer can do with pieces of rows."""
    if not _joins(optimizer, columns):
        return
    name = type(optimizer).__name__
    if not optimizer.can_cut_rows:
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind}, which cuts its rows, but its "
            f"optimizer {name} needs whole rows; use row_wise() or table_wise(), or let the "
            "optimizer take its sums over rows from jaxrec.optim.mean_squares and row_norms and "
            "say so with sums_rows = True"
        )
    if len({stop - start for start, stop in columns}) > 1:
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind}, which cuts its "
            f"{table.embedding_dim} columns into {len(columns)} unequal parts, but its optimizer "
            f"{name} with these settings needs equal ones; name places whose number divides them"
        )
    devices = [device for blocks in columns.values() for device in {b.device for b in blocks}]
    if twice := [device for device, count in Counter(devices).items() if count > 1]:
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind} with two parts of its columns on "
            f"device {twice[0]}, but its optimizer {name} with these settings needs them apart; "
            "name each place once"
        )


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


def _check_together(groups: tuple[PlacedGroup, ...]) -> None:
    """That tables whose pieces are updated together lie in one group."""
    seen: set[str] = set()
    for placed in groups:
        clips = placed.is_cut and placed.group.optimizer.clip_norm is not None
        if not placed.joins_pieces and not clips:
            continue
        if parted := seen.intersection(placed.tables):
            raise ValueError(
                f"table {min(parted)!r}: its pieces have more rows together than int32 can number "
                f"({MAX_ROWS}), and its optimizer needs them together; cut it into fewer columns"
            )
        seen.update(placed.tables)


def _place(group: Group, pieces: Mapping[str, _Piece], mesh: MeshShape) -> PlacedGroup:
    """Stacks the group's blocks on each device in the order of the pieces."""
    first = pieces[group.tables[0].name]
    filled = [0] * mesh.num_devices
    blocks = []
    for config, offset in zip(group.tables, group.row_offsets, strict=True):
        for block in pieces[config.name].blocks:
            first_row = offset + block.rows[0]
            table = pieces[config.name].table
            blocks.append(PlacedBlock(table, block, first_row, filled[block.device]))
            filled[block.device] += block.rows[1] - block.rows[0]
    num_devices = 1 if first.exchange == "copies" else mesh.num_devices
    placed = PlacedGroup(
        group, tuple(blocks), max(filled), num_devices, first.exchange, first.whole_dim
    )
    if placed.num_slots > MAX_ROWS:
        raise ValueError(
            f"tables {', '.join(config.name for config in group.tables)} take {placed.num_slots} "
            f"rows over the mesh, more than int32 can number ({MAX_ROWS}); place them more evenly"
        )
    return placed
