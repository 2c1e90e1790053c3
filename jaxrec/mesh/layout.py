"""Layout of a collection's tables over a mesh: their shards, groups, and positions in the arrays.

`layout_mesh` makes it of the tables' placements. Everything here is static; no arrays are made.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from jaxrec.embed.config import MAX_ROWS, EmbeddingBagConfig, TableConfig
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.layout import Group, Output, TableLayout, layout_tables
from jaxrec.embed.state import state_bytes
from jaxrec.mesh.exchange import ROWS, Cut, Exchange, choose_exchange
from jaxrec.mesh.placed_group import PlacedGroup, PlacedShard
from jaxrec.mesh.placement import Placement
from jaxrec.mesh.shards import MeshShape, Shard
from jaxrec.optim import RowOptimizer


@dataclasses.dataclass(frozen=True, repr=False)
class MeshLayout:
    """A collection's tables over a mesh.

    A lookup sees a table that is cut by columns as several tables, its *column slices*.

    Attributes:
        whole: The tables as they are on one device.
        slices: Layout of the column slices. Their outputs are in the order of the tables' outputs.
        groups: Groups of the column slices, with the positions of their rows.
        exchanges: Exchange of each group.
        placements: Placement of each table.
        mesh: The devices.
        wide: Names of the tables with more rows than int32 can number. Their ids have 64 bits.
    """

    whole: TableLayout
    slices: TableLayout
    groups: tuple[PlacedGroup, ...]
    exchanges: tuple[Exchange, ...]
    placements: tuple[Placement, ...]
    mesh: MeshShape
    wide: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"{self.mesh.num_devices} devices"]
        for placed, exchange in self:
            lines.append(f"{placed.name}: {placed.local_rows} rows a device, {exchange.name}")
            lines += [
                f"  {p.table}[{p.shard.rows[0]}:{p.shard.rows[1]}, "
                f"{p.shard.columns[0]}:{p.shard.columns[1]}] "
                + ("everywhere" if placed.is_replicated else f"device {p.shard.device}")
                + f" row {p.local_row}"
                for p in placed.shards
            ]
        return "\n".join(lines)

    def __iter__(self) -> Iterator[tuple[PlacedGroup, Exchange]]:
        """Iterate over the groups with their exchanges."""
        return iter(zip(self.groups, self.exchanges, strict=True))

    @property
    def is_pooled(self) -> bool:
        """See `TableLayout.is_pooled`."""
        return self.whole.is_pooled

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        """See `TableLayout.configs`."""
        return self.whole.configs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `TableLayout.outputs`."""
        return self.whole.outputs

    @property
    def bounds(self) -> dict[str, int]:
        """See `TableLayout.bounds`."""
        return self.whole.bounds

    def slice_keys(self) -> dict[str, list[str]]:
        """Return the keys of the column slices of each output: ``{"user": ["user[0:]", ...]}``."""
        keys: dict[str, list[str]] = {}
        for output in self.slices.outputs:
            keys.setdefault(output.key[: output.key.rindex("[")], []).append(output.key)
        return keys

    def shards(self, table: str) -> list[tuple[PlacedGroup, PlacedShard]]:
        """Return all shards of a table with their groups."""
        self.whole.find(table)
        return [(g, placed) for g in self.groups for placed in g.shards if placed.table == table]

    def column_slices(
        self, table: str
    ) -> Iterator[tuple[PlacedGroup, tuple[int, int], list[PlacedShard]]]:
        """Iterate over a table's column slices: (group, (first column, after the last), shards)."""
        slices: dict[tuple[int, int], tuple[PlacedGroup, list[PlacedShard]]] = {}
        for group, placed in self.shards(table):
            slices.setdefault(placed.shard.columns, (group, []))[1].append(placed)
        for columns, (group, shards) in slices.items():
            yield group, columns, shards


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A column slice of a table, as a table of its own.

    Attributes:
        table: Name of the whole table.
        config: Configuration of the slice. Its ``embedding_dim`` is the stored width.
        shards: Shards of the slice, by row.
        exchange: Exchange of the slice.
        whole_dim: Number of columns of the whole table.
    """

    table: str
    config: TableConfig
    shards: tuple[Shard, ...]
    exchange: Exchange
    whole_dim: int


def layout_mesh(
    tables: TableLayout, placements: Mapping[str, Placement], mesh: MeshShape
) -> MeshLayout:
    """Cut tables as their placements say, and give each shard a position in its owner's array."""
    for table in tables.configs:
        if table.name not in placements:
            raise ValueError(
                f"the plan has no placement for table {table.name!r}; it has "
                f"{', '.join(map(repr, placements)) or 'none'}"
            )
    slices = {
        each.config.name: each
        for group in tables.groups
        for table in group.tables
        for each in _slices(table, group.optimizer, placements[table.name], mesh)
    }
    arrays = _number_arrays(slices, mesh)
    layout = layout_tables(
        [each.config for each in slices.values()],
        tables.groups[0].optimizer,
        apart=lambda config: (_apart(slices[config.name]), arrays[config.name]),
    )
    layout = dataclasses.replace(layout, outputs=_outputs(tables, layout, slices))
    groups = tuple(_place(group, slices, mesh) for group in layout.groups)
    _check_together(groups)
    return MeshLayout(
        tables,
        layout,
        groups,
        tuple(slices[group.tables[0].name].exchange for group in layout.groups),
        tuple(placements[table.name] for table in tables.configs),
        mesh,
        tuple(table.name for table in tables.configs if table.num_embeddings > MAX_ROWS),
    )


def cut_of(
    table: TableConfig, optimizer: RowOptimizer, shards: Sequence[Shard], mesh: MeshShape
) -> Cut:
    """Describe a table's shards for `Exchange.refuse`."""
    parts: dict[tuple[int, int], list[int]] = {}
    for shard in shards:
        parts.setdefault(shard.columns, []).append(shard.device)
    hosts = [{device // mesh.devices_per_host for device in part} for part in parts.values()]
    devices = [device for part in parts.values() for device in set(part)]
    rows = _count_rows(shards)
    return Cut(
        isinstance(table, EmbeddingBagConfig),
        optimizer,
        column_parts=len(parts),
        row_parts=max(map(len, parts.values())),
        row_hosts=max(map(len, hosts)),
        hosts=mesh.hosts,
        shares_devices=len(set(devices)) < len(devices),
        is_large=is_large(table.num_embeddings, max(rows.values()), mesh),
        is_alone=mesh.num_devices == 1,
        takes_max=getattr(table, "pooling", None) == "max",
    )


def _count_rows(shards: Iterable[Shard]) -> Counter[int]:
    """Return the number of rows on each device that has some of the shards."""
    rows: Counter[int] = Counter()
    for shard in shards:
        rows[shard.device] += shard.num_rows
    return rows


def is_large(num_rows: int, local_rows: int, mesh: MeshShape) -> bool:
    """Return whether int32 cannot number a table's rows, or the slots of its array.

    ``local_rows`` is the number of rows on the fullest device. All devices' arrays are as long.
    """
    return max(num_rows, local_rows * mesh.num_devices) > MAX_ROWS


def _slices(
    table: TableConfig, optimizer: RowOptimizer, placement: Placement, mesh: MeshShape
) -> list[_Slice]:
    """Cut a table into its column slices; raise a ValueError if its placement does not fit."""
    shards = placement.cut(table, mesh)
    by_columns: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        by_columns.setdefault(shard.columns, []).append(shard)
    cut = cut_of(table, optimizer, shards, mesh)
    try:
        exchange = choose_exchange(placement.exchange, cut)
    except ValueError as error:
        hint = "" if ROWS.refuse(cut) else "; use exchange='rows'"
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind}, and {error}{hint}"
        ) from None
    _check_cut(table, optimizer, placement, by_columns)
    return [
        _Slice(
            table.name,
            dataclasses.replace(
                table,
                name=f"{table.name}[{start}:{stop}]",
                embedding_dim=width,
                optimizer=optimizer,
            ),
            tuple(by_columns[start, stop]),
            exchange,
            table.embedding_dim,
        )
        for (start, stop), width in slice_widths(table, optimizer, by_columns).items()
    ]


def slice_widths(
    table: TableConfig, optimizer: RowOptimizer, columns: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """Return the stored width of each column slice.

    It is the slice's own width, or that of the widest slice if the slices are updated together.
    ``columns`` has the slices' (first column, column after the last).
    """
    # Slices that are updated together must be one group, and a group has one width. Zeros fill the
    # narrow ones up; packed rows have no place for them (`_check_cut`).
    widths = {(start, stop): stop - start for start, stop in columns}
    if _joins(optimizer, widths) and isinstance(table.row_format, PlainRows):
        return dict.fromkeys(widths, max(widths.values()))
    return widths


def _apart(part: _Slice) -> tuple[Exchange, int | None]:
    """Return a key that slices of one group share, besides width, type and optimizer."""
    optimizer = part.config.optimizer
    joins_slices = optimizer is not None and optimizer.needs_whole_rows
    return part.exchange, part.whole_dim if joins_slices else None


def _number_arrays(slices: Mapping[str, _Slice], mesh: MeshShape) -> dict[str, int]:
    """Give each slice the number of an array, from 0, among the arrays for slices of its kind.

    A second array begins where int32 cannot number the slots of one.
    """
    # First fit. Equal slices of a table go into one array together, since they may have to be
    # updated together.
    alike: dict[tuple[Hashable, str], list[_Slice]] = {}
    for each in slices.values():
        config = each.config
        kind: Hashable = (config.row_format, config.embedding_dim, config.optimizer, _apart(each))
        alike.setdefault((kind, each.table), []).append(each)
    filled: dict[Hashable, list[Counter[int]]] = {}
    numbers: dict[str, int] = {}
    for (kind, _), parts in alike.items():
        rows = _count_rows(shard for part in parts for shard in part.shards)
        # Each device's array is as long as the fullest one, so this bounds the fullest.
        limit = MAX_ROWS // (1 if parts[0].exchange.is_replicated else mesh.num_devices)
        arrays = filled.setdefault(kind, [])
        fitting = (i for i, array in enumerate(arrays) if max((array + rows).values()) <= limit)
        number = next(fitting, len(arrays))
        if number == len(arrays):
            arrays.append(Counter())
        arrays[number] += rows
        numbers |= {part.config.name: number for part in parts}
    return numbers


def _joins(optimizer: RowOptimizer, columns: Collection[tuple[int, int]]) -> bool:
    """Return whether column slices must be updated together."""
    # Sums over whole rows, and the norm of a table's gradient, need all of a row's slices.
    return len(columns) > 1 and (optimizer.needs_whole_rows or optimizer.clip_norm is not None)


def _check_cut(
    table: TableConfig,
    optimizer: RowOptimizer,
    placement: Placement,
    columns: Mapping[tuple[int, int], list[Shard]],
) -> None:
    """Raise a ValueError if a placement cuts rows that the optimizer needs whole."""
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
    if len(set(slice_widths(table, optimizer, columns).values())) > 1:
        raise ValueError(
            f"table {table.name!r} is placed {placement.kind}, which cuts its "
            f"{table.embedding_dim} columns into {len(columns)} unequal parts, but its optimizer "
            f"{name} with these settings needs equal ones where rows are stored as "
            f"{table.row_format.name}; name places whose number divides them"
        )


def _outputs(
    tables: TableLayout, layout: TableLayout, slices: Mapping[str, _Slice]
) -> tuple[Output, ...]:
    """Return the slices' outputs in the order of the tables' outputs, then by column."""
    by_output: dict[tuple[str, str], list[tuple[int, Output]]] = {}
    for g, group in enumerate(layout.groups):
        for position, (feature, index) in enumerate(group.features):
            part = slices[group.tables[index].name]
            start, stop = part.shards[0].columns
            output = Output("", feature, g, position, stop - start)
            by_output.setdefault((part.table, feature), []).append((start, output))

    ordered = []
    for output in tables.outputs:
        group = tables.groups[output.group]
        table = group.tables[group.features[output.position][1]].name
        for start, each in sorted(by_output[table, output.feature], key=lambda pair: pair[0]):
            ordered.append(dataclasses.replace(each, key=f"{output.key}[{start}:]"))
    return tuple(ordered)


def _check_together(groups: tuple[PlacedGroup, ...]) -> None:
    """Raise a ValueError if slices that are updated together lie in several groups."""
    # `layout_tables` parts a group whose rows int32 cannot number.
    seen: set[str] = set()
    for placed in groups:
        clips = placed.is_sliced and placed.group.optimizer.clip_norm is not None
        if not placed.joins_slices and not clips:
            continue
        if parted := seen.intersection(placed.tables):
            raise ValueError(
                f"table {min(parted)!r}: its column slices have more rows together than int32 can "
                f"number ({MAX_ROWS}), and its optimizer needs them together; cut it into fewer "
                "columns"
            )
        seen.update(placed.tables)


def _place(group: Group, slices: Mapping[str, _Slice], mesh: MeshShape) -> PlacedGroup:
    """Give a group's shards positions in their devices' arrays, in the order of the slices."""
    first = slices[group.tables[0].name]
    filled = [0] * mesh.num_devices
    shards = []
    for config, offset in zip(group.tables, group.row_offsets, strict=True):
        for shard in slices[config.name].shards:
            first_row = offset + shard.rows[0]
            table = slices[config.name].table
            shards.append(PlacedShard(table, shard, first_row, filled[shard.device]))
            filled[shard.device] += shard.num_rows
    is_replicated = first.exchange.is_replicated
    num_devices = 1 if is_replicated else mesh.num_devices
    if max(filled) > MAX_ROWS:
        raise ValueError(
            f"table {first.table!r} takes {max(filled)} rows on device "
            f"{filled.index(max(filled))}, more than int32 can number ({MAX_ROWS}); cut its rows "
            "over more devices, as row_wise() does"
        )
    large = max(group.num_rows, max(filled) * num_devices) > MAX_ROWS
    placed = PlacedGroup(
        group, tuple(shards), max(filled), num_devices, is_replicated, first.whole_dim, large
    )
    if large and placed.joins_slices:
        raise ValueError(
            f"table {first.table!r} has more rows over the mesh than int32 can number "
            f"({MAX_ROWS}), its columns are cut, and its optimizer "
            f"{type(group.optimizer).__name__} needs whole rows; use row_wise()"
        )
    return placed


# Fewest unused bytes to warn of; they must also be more than the group uses.
_MIN_WASTE = 64 << 20


def warn_of_unused_memory(layout: MeshLayout) -> None:
    """Warn of groups whose arrays are mostly empty."""
    # JAX's arrays over a mesh have equal parts on all devices. So each device allocates as much for
    # a group of tables as the fullest device needs.
    for placed in layout.groups:
        if placed.is_replicated:
            continue
        used = rows_by_device(placed)
        allocated = placed.local_rows * placed.num_devices
        unused = (allocated - sum(used)) * row_bytes(placed)
        if unused < _MIN_WASTE or allocated < 2 * sum(used):
            continue
        empty = used.count(0)
        warnings.warn(
            f"tables {', '.join(placed.tables)} take {_size(sum(used) * row_bytes(placed))} with "
            f"their optimizer state, but {_size(allocated * row_bytes(placed))} are allocated: "
            f"tables of one width, type and optimizer are one array with equal parts on all "
            f"{placed.num_devices} devices, of which {empty} hold none of these tables. Spread "
            "them over the devices: place single tables with row_wise(), several with table_wise() "
            "on a device each, or let jaxrec.plan.Planner place them",
            stacklevel=2,
        )


def rows_by_device(placed: PlacedGroup) -> list[int]:
    """Return the number of the group's rows on each device."""
    rows = _count_rows(each.shard for each in placed.shards)
    return [rows[device] for device in range(placed.num_devices)]


def row_bytes(placed: PlacedGroup) -> int:
    """Return the bytes of a row of the group and of its optimizer state."""
    group = placed.group
    return group.row_format.row_bytes(group.dim) + state_bytes(group.optimizer, group.dim)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
