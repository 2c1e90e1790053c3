"""The ways to place a table, and what each asks of which devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np

from jaxrec.embed.config import MAX_ROWS
from jaxrec.mesh import placement as placements
from jaxrec.mesh.layout import choose_exchange
from jaxrec.mesh.placement import Block, Exchange, MeshShape, Placement
from jaxrec.plan.constraints import EXCHANGES, SHARDING_TYPES, ParameterConstraints
from jaxrec.plan.cost import (
    BAGS,
    COPIES,
    ROWS,
    SUMS,
    GroupKey,
    exchange_bytes,
    exchanged_at_least,
    exchanged_rows,
    home_seconds,
    kept_bytes,
)
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWork

CACHE_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)

# What `Option.load` counts. What takes time comes first.
EXCHANGED, UPDATED, FETCHED, PLACED, POOLED, HELD = range(6)
TIMED = slice(0, HELD)


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """One way to place a table, except for where: that is a choice of sites.

    An option has one or more equal *parts*, which go to as many different *sites*: devices, hosts,
    or the one site that is all of the mesh.

    Attributes:
        table: Name of the table.
        sharding_type: One of `jaxrec.plan.constraints.SHARDING_TYPES`.
        storage: "device", "host" or "disk".
        cache_ratio: Part of the rows that the device holds; 1 where it holds all.
        key: The group that the parts belong to.
        parts: Number of parts.
        sites: The sites, each as its devices in the order of the part's blocks.
        home: Seconds on every device, for all parts, by phase.
        kept: Bytes on every device, for all parts, from the forward to the backward pass.
        temporary: Bytes on every device, for all parts, while the group is exchanged.
        at_least: Rows through the exchange, for all parts, wherever they are.
        load: For one part ``[6, devices of a site]``: rows exchanged, updated and fetched, places
            for ids and for bags at their owner, and rows held.
        stored_bytes: For one part ``[devices of a site]``: bytes in host memory or on disk.
    """

    table: str
    sharding_type: str
    storage: str
    cache_ratio: float
    key: GroupKey
    parts: int
    sites: tuple[tuple[int, ...], ...]
    home: np.ndarray
    kept: float
    temporary: float
    at_least: float
    load: np.ndarray
    stored_bytes: np.ndarray

    @property
    def exchange(self) -> str:
        """How rows travel, as placements have it: "copies", "rows" or "sums"."""
        return SUMS if self.key.way == BAGS else self.key.way


def to_placement(option: Option, sites: Sequence[int], topology: Topology) -> Placement:
    """The placement of an option whose parts are on the given sites.

    Args:
        option: The option.
        sites: For each part the index of its site.
        topology: The devices.
    """
    devices = tuple(option.sites[site][0] for site in sites)
    hosts = tuple(device // topology.devices_per_host for device in devices)
    exchange = cast(Exchange, option.exchange)
    match option.sharding_type:
        case "data_parallel":
            return placements.data_parallel()
        case "table_wise":
            return placements.table_wise(devices[0], exchange=exchange)
        case "row_wise":
            all_devices = tuple(range(topology.num_devices))
            named = option.sites[sites[0]]
            return placements.row_wise(() if named == all_devices else named, exchange=exchange)
        case "column_wise":
            return placements.column_wise(devices, exchange=exchange)
        case "table_row_wise":
            return placements.table_row_wise(hosts[0], exchange=exchange)
        case "table_column_wise":
            return placements.table_column_wise(hosts[0], exchange=exchange)
        case _:
            return placements.grid(hosts, exchange=exchange)


def enumerate_options(
    work: TableWork,
    topology: Topology,
    constraints: ParameterConstraints,
    *,
    storages: Sequence[str],
) -> tuple[Option, ...]:
    """All ways to place a table that its constraints and the devices allow.

    Args:
        work: The table and what a step asks of it.
        topology: The devices.
        constraints: What is said of the table.
        storages: Where rows may be kept, if the constraints do not say.

    Raises:
        ValueError: If there is none.
    """
    where = _Where.of(work, topology, constraints)
    options: list[Option] = []
    reasons: list[str] = []
    for sharding_type in constraints.sharding_types or SHARDING_TYPES:
        found = _shapes(sharding_type, work, where, constraints)
        if isinstance(found, str):
            reasons.append(f"{sharding_type}: {found}")
            continue
        for shape in found:
            ways = _ways(shape, work, topology.num_devices, constraints)
            if isinstance(ways, str):
                reasons.append(f"{sharding_type}: {ways}")
                continue
            for storage in constraints.storages or storages:
                if sharding_type == "data_parallel" and storage != "device":
                    reasons.append(f"{sharding_type}: copies are kept on devices")
                    continue
                for way in ways:
                    for ratio in _ratios(storage, constraints):
                        options.append(_option(work, topology, shape, way, storage, ratio))
    if not options:
        raise ValueError(
            f"table {work.name!r} ({work.rows} rows, {work.dim} columns) can be placed in none of "
            f"the ways that its constraints leave: {'; '.join(dict.fromkeys(reasons))}"
        )
    return tuple(options)


@dataclasses.dataclass(frozen=True)
class _Where:
    """The devices and hosts that may hold a part of a table."""

    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    mesh: MeshShape

    @classmethod
    def of(cls, work: TableWork, topology: Topology, said: ParameterConstraints) -> _Where:
        mesh = MeshShape(topology.hosts, topology.devices_per_host)
        devices = tuple(range(topology.num_devices)) if said.devices is None else said.devices
        if missing := [device for device in devices if device >= topology.num_devices]:
            raise ValueError(
                f"table {work.name!r} may be on device {missing[0]}, but there are "
                f"{topology.num_devices}, numbered from 0"
            )
        allowed = set(devices)
        hosts = tuple(h for h in range(mesh.hosts) if allowed.issuperset(mesh.devices_of(h)))
        return cls(tuple(sorted(devices)), hosts, mesh)

    @property
    def is_everywhere(self) -> bool:
        return len(self.devices) == self.mesh.num_devices


@dataclasses.dataclass(frozen=True)
class _Shape:
    """How a sharding type cuts a table.

    Attributes:
        sharding_type: The type.
        parts: Parts that are placed.
        columns: Pieces that the columns are cut into, over all parts.
        row_parts: Devices that the rows of a piece are cut over.
        sites: Where a part may go.
    """

    sharding_type: str
    parts: int
    columns: int
    row_parts: int
    sites: tuple[tuple[int, ...], ...]


def _shapes(
    sharding_type: str, work: TableWork, where: _Where, said: ParameterConstraints
) -> list[_Shape] | str:
    """The ways of a type, or why there are none."""
    devices = tuple((device,) for device in where.devices)
    hosts = tuple(where.mesh.devices_of(host) for host in where.hosts)
    each = where.mesh.devices_per_host

    def cuts(most: int) -> list[int]:
        return [
            count
            for count in range(2, most + 1)
            if work.dim % count == 0 and work.dim // count >= said.min_column_width
        ]

    narrow = f"{work.dim} columns do not divide into equal parts of {said.min_column_width} or more"
    match sharding_type:
        case "data_parallel":
            if not where.is_everywhere:
                return "it takes all devices, and only some are allowed"
            return [_Shape(sharding_type, 1, 1, 1, (where.devices,))]
        case "table_wise":
            return [_Shape(sharding_type, 1, 1, 1, devices)]
        case "row_wise":
            count = len(where.devices)
            if work.rows < count:
                return f"{work.rows} rows are fewer than the {count} devices"
            if count == 1 and said.sharding_types is None:
                return "one device: the same as table_wise"
            return [_Shape(sharding_type, 1, 1, count, _rotations(work, where.devices))]
        case "column_wise":
            found = cuts(len(devices))
            return [_Shape(sharding_type, k, k, 1, devices) for k in found] or narrow
        case "table_row_wise" | "table_column_wise" | "grid" if not hosts:
            return "it takes whole hosts, and none is allowed"
        case "table_row_wise":
            if where.mesh.hosts == 1 and said.sharding_types is None:
                return "one host: the same as row_wise"
            if work.rows < each:
                return f"{work.rows} rows are fewer than the {each} devices of a host"
            return [_Shape(sharding_type, 1, 1, each, hosts)]
        case "table_column_wise":
            if where.mesh.hosts == 1 and said.sharding_types is None:
                return "one host: the same as column_wise"
            if each > 1 and each not in cuts(each):
                return f"{work.dim} columns do not divide by {each} devices of a host, each " + (
                    f"with {said.min_column_width} or more"
                )
            return [_Shape(sharding_type, 1, each, 1, hosts)]
        case _:
            if work.rows < each:
                return f"{work.rows} rows are fewer than the {each} devices of a host"
            found = [1] * (said.sharding_types is not None) + cuts(len(hosts))
            return [_Shape(sharding_type, k, k, each, hosts) for k in found] or narrow


def _rotations(work: TableWork, devices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices in orders that put the hottest run of rows on different ones."""
    count = len(devices)
    shares = work.shares(count, of_rows=True)
    if shares.max() < 1.05 / count:
        return (devices,)
    step = max(1, count // 8)
    return tuple(devices[-k:] + devices[:-k] for k in range(0, count, step))


def _ways(
    shape: _Shape, work: TableWork, devices: int, said: ParameterConstraints
) -> tuple[str, ...] | str:
    """How rows may travel, of what `jaxrec.mesh` carries out, or why the table cannot be so cut."""
    if shape.sharding_type == "data_parallel":
        return (COPIES,)
    optimizer = work.optimizer
    # Arrays have one shape on all devices.
    held = -(-work.rows // shape.row_parts)
    if held * devices > MAX_ROWS:
        return (
            f"{held:,} rows on a device x {devices} devices = {held * devices:,}, more row numbers "
            f"than the {MAX_ROWS:,} of int32; a sharding type that cuts rows takes fewer"
        )
    joins = shape.columns > 1 and (optimizer.needs_whole_rows or optimizer.clip_norm is not None)
    if joins and not optimizer.can_cut_rows:
        return f"its optimizer {type(optimizer).__name__} needs whole rows"
    ways = tuple(said.exchanges or EXCHANGES)
    cuts_both = shape.columns > 1 and shape.row_parts > 1
    if (cuts_both and optimizer.needs_whole_rows) or not work.is_pooled:
        ways = tuple(way for way in ways if way != SUMS)
    if shape.row_parts == 1:
        ways = tuple(BAGS if way == SUMS else way for way in ways)
    if not ways:
        why = "its optimizer needs whole rows" if work.is_pooled else "its rows are not pooled"
        return f"exchange 'sums' is not possible, since {why}"
    return ways


def _ratios(storage: str, said: ParameterConstraints) -> tuple[float, ...]:
    if storage == "device":
        return (1.0,)
    return CACHE_RATIOS if said.cache_ratio is None else (said.cache_ratio,)


def _option(
    work: TableWork, topology: Topology, shape: _Shape, way: str, storage: str, ratio: float
) -> Option:
    width = work.dim // shape.columns
    key = GroupKey.of(work, width, way, storage)
    pieces = shape.columns // shape.parts
    size = len(shape.sites[0])
    if way == COPIES:
        blocks = [(work.rows, 1.0)] * size
    elif shape.row_parts > 1:
        rows, left = divmod(work.rows, shape.row_parts)
        shares = work.shares(shape.row_parts, of_rows=way == ROWS)
        blocks = [(rows + (i < left), share) for i, share in enumerate(shares)]
    else:
        # Each device of the site has whole columns: the only one, or as many as there are pieces.
        blocks = [(work.rows, 1.0)] * size
        pieces = pieces // size or 1
    load, stored = _load(work, topology, key, blocks, ratio)
    return Option(
        table=work.name,
        sharding_type=shape.sharding_type,
        storage=storage,
        cache_ratio=ratio,
        key=key,
        parts=shape.parts,
        sites=shape.sites,
        home=shape.columns * home_seconds(work, key, topology),
        kept=shape.columns * kept_bytes(work, key, topology.num_devices),
        temporary=shape.columns * exchange_bytes(work, key, topology),
        at_least=shape.columns * exchanged_at_least(work, key),
        load=pieces * load,
        stored_bytes=pieces * stored,
    )


def _load(
    work: TableWork,
    topology: Topology,
    key: GroupKey,
    blocks: Sequence[tuple[int, float]],
    ratio: float,
) -> tuple[np.ndarray, np.ndarray]:
    """What blocks of a piece ask of their devices: see `Option.load` and `Option.stored_bytes`.

    Args:
        work: The table.
        topology: The devices.
        key: The group.
        blocks: Rows of each block, and its share of the lookups.
        ratio: Part of the rows that devices hold.
    """
    rows, shares = np.array([b[0] for b in blocks]), np.array([b[1] for b in blocks])
    load = np.zeros((HELD + 1, len(blocks)))
    load[HELD] = np.ceil(rows * ratio)
    if key.way != COPIES:
        load[EXCHANGED] = exchanged_rows(work, key, topology) * shares
        load[UPDATED] = work.distinct(topology.num_devices) * shares
    if key.way == BAGS:
        load[PLACED] = topology.num_devices * work.capacity
        load[POOLED] = topology.num_devices * work.bags
    stored = np.zeros(len(blocks))
    if key.storage != "device":
        load[FETCHED] = work.distinct(topology.num_devices, cached=ratio) * shares
        stored = rows * float(key.row_bytes)
    return load, stored


def placed_options(work: TableWork, topology: Topology, placement: Placement) -> tuple[Option, ...]:
    """A decided placement as options with one part and one site, one for each piece of columns.

    Raises:
        ValueError: If it does not fit the table or the devices.
    """
    mesh = MeshShape(topology.hosts, topology.devices_per_host)
    by_columns: dict[tuple[int, int], list[Block]] = {}
    for block in placement.cut(work.table, mesh):
        by_columns.setdefault(block.columns, []).append(block)
    exchange = choose_exchange(placement, work.table, work.optimizer, by_columns)
    placement = dataclasses.replace(placement, exchange=exchange)
    return tuple(
        _placed_piece(work, topology, placement, stop - start, blocks)
        for (start, stop), blocks in by_columns.items()
    )


def _placed_piece(
    work: TableWork,
    topology: Topology,
    placement: Placement,
    width: int,
    cut: Sequence[Block],
) -> Option:
    assert placement.exchange is not None
    way = BAGS if placement.exchange == SUMS and len(cut) == 1 else placement.exchange
    key = GroupKey.of(work, width, way, "device")
    devices = tuple(block.device for block in cut)
    rows = [block.rows[1] - block.rows[0] for block in cut]
    shares = work.shares(len(cut), of_rows=way == ROWS)
    if way == COPIES:
        devices = tuple(range(topology.num_devices))
        rows, shares = rows * len(devices), np.ones(len(devices))
    load, stored = _load(work, topology, key, list(zip(rows, shares, strict=True)), 1.0)
    return Option(
        table=work.name,
        sharding_type=placement.kind,
        storage="device",
        cache_ratio=1.0,
        key=key,
        parts=1,
        sites=(devices,),
        home=home_seconds(work, key, topology),
        kept=kept_bytes(work, key, topology.num_devices),
        temporary=exchange_bytes(work, key, topology),
        at_least=exchanged_at_least(work, key),
        load=load,
        stored_bytes=stored,
    )
