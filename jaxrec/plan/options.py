"""Sharding options of a table: each way to cut and exchange it, and its load on devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrec.embed.config import MAX_ROWS
from jaxrec.embed.stash import Stash
from jaxrec.mesh.exchange import (
    ALONE,
    BAGS,
    POOLED,
    POOLED_BY_HOST,
    REPLICATED,
    ROWS,
    Cut,
    Exchange,
    choose_exchange,
)
from jaxrec.mesh.layout import cut_of, is_large, slice_widths
from jaxrec.mesh.placement import SHARDING_TYPES, Candidate, Placement, Split, part_sizes
from jaxrec.mesh.precision import ExchangePrecision
from jaxrec.mesh.sharding_types import BUILT_IN
from jaxrec.mesh.shards import MeshShape, Shard
from jaxrec.plan.caches import TableCache, TableStorage, possible_caches
from jaxrec.plan.constraints import EXCHANGES, ParameterConstraints
from jaxrec.plan.costs import Group, make_costs
from jaxrec.plan.quantities import Load, Perf
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload

# Users ask for pooled bags; where the rows of a bag lie together, this is the exchange of bags. On
# one device "rows" and "pooled" give the same program; plans say "rows".
_USER_EXCHANGES: dict[Exchange, Exchange] = {BAGS: POOLED, POOLED_BY_HOST: POOLED, ALONE: ROWS}


@dataclasses.dataclass(frozen=True, eq=False)
class ShardingOption:
    """One way to shard a table, before its shards are assigned to devices.

    An option has one or more equal *parts*, which go to different *sites*: devices, hosts, or the
    one site that is the whole mesh. A part is one shard on each device of its site.

    Attributes:
        table: Name of the table.
        kind: Class of the sharding type.
        rows: Rows of the table.
        cache: Cache of the table's rows; None where devices hold all rows.
        group: Group that the shards belong to.
        parts: Number of parts.
        sites: Sites to choose from. Each is a tuple of its devices, in the order of a part's
            shards.
        home: Seconds that all parts take on every device alike, wherever they are, with the time of
            the cache.
        kept: Bytes on every device, for all parts, from the forward to the backward pass.
        temporary: Bytes on every device, for all parts, while the group is exchanged.
        round_capacity: Positions in a round of the exchange, for all parts.
        load: Load of one part's shards, ``[devices of a site]``.
        stored_bytes: Bytes that each host keeps in the row store: all rows of the table.
        shares: Relative number of rows on each device of a site; empty: equal.
    """

    table: str
    kind: type[Placement]
    rows: int
    cache: TableCache | None
    group: Group
    parts: int
    sites: tuple[tuple[int, ...], ...]
    home: Perf
    kept: float
    temporary: float
    round_capacity: float
    load: Load
    stored_bytes: float
    shares: tuple[float, ...] = ()

    @property
    def sharding_type(self) -> str:
        return self.kind.kind

    @property
    def storage(self) -> str:
        """Storage of the rows, one of `jaxrec.plan.constraints.STORAGES`."""
        return "device" if self.cache is None else self.cache.storage

    @property
    def cache_ratio(self) -> float:
        """Fraction of the rows that devices hold."""
        return 1.0 if self.cache is None else self.cache.rows / self.rows

    @property
    def exchange(self) -> str:
        """Exchange as users name it, in constraints and placements."""
        return _USER_EXCHANGES.get(self.group.exchange, self.group.exchange).name


def to_placement(option: ShardingOption, sites: Sequence[int], topology: Topology) -> Placement:
    """Return the placement of an option whose parts are on the sites of the given indices."""
    mesh = MeshShape(topology.hosts, topology.devices_per_host)
    placed = [option.sites[site] for site in sites]
    return option.kind.at(placed, mesh, option.exchange, option.shares)


def enumerate_options(
    workload: TableWorkload, topology: Topology, constraint: ParameterConstraints, **settings: Any
) -> tuple[ShardingOption, ...]:
    """Return the options of `consider_options`; a ValueError gives the reasons if it has none."""
    options, reasons = consider_options(workload, topology, constraint, **settings)
    if not options:
        raise ValueError(
            f"table {workload.name!r} ({workload.rows} rows, {workload.dim} columns) can be placed "
            "in none of the ways that its constraints leave: "
            f"{'; '.join(dict.fromkeys(reasons))}"
        )
    return tuple(options)


def consider_options(
    workload: TableWorkload,
    topology: Topology,
    constraint: ParameterConstraints,
    *,
    storages: Sequence[str],
    store: str | None = None,
    precision: ExchangePrecision = ExchangePrecision(),  # noqa: B008 (frozen)
    stash: Stash | None = None,
) -> tuple[list[ShardingOption], list[str]]:
    """Return the options of a table, and the reasons why other ways are left out.

    The table's constraints take precedence over ``storages`` and ``store``.
    """
    candidate = _candidate(workload, topology, constraint)
    places = constraint.storages or storages
    caches = possible_caches(workload, constraint, places, store, topology.num_devices)
    possible = [TableStorage.of(workload, cache, topology) for cache in caches]
    # A cache of 5 % is sharded as a table of 5 % of the rows; so sharding types see the held rows.
    candidates = [
        dataclasses.replace(candidate, rows=each.held_rows, is_cached=each.cache is not None)
        for each in possible
    ]
    options: list[ShardingOption] = []
    reasons: list[str] = []
    for sharding_type in constraint.sharding_types or BUILT_IN:
        kind = SHARDING_TYPES[sharding_type]
        for storage, table in zip(possible, candidates, strict=True):
            splits: list[Split] | str = "it takes whole hosts, and none is allowed"
            if kind.place != "host" or table.host_sites:
                splits = kind.options(table)
            if isinstance(splits, str):
                reasons.append(f"{sharding_type}: {splits}")
                continue
            for split in splits:
                exchanges = _exchanges(kind, split, workload, table, constraint)
                if isinstance(exchanges, str):
                    reasons.append(f"{sharding_type}: {exchanges}")
                    continue
                for exchange in exchanges:
                    group = Group.of(
                        workload, workload.dim // split.column_parts, exchange, precision
                    )
                    rows = part_sizes(table.rows, split.row_parts, split.shares)
                    options.append(
                        _option(workload, topology, kind, split, group, storage, rows, stash)
                    )
    return options, reasons


def _candidate(
    workload: TableWorkload, topology: Topology, constraint: ParameterConstraints
) -> Candidate:
    """Describe a table to sharding types: its size, and the devices and hosts that it may have."""
    mesh = MeshShape(topology.hosts, topology.devices_per_host)
    devices = constraint.devices
    devices = tuple(range(topology.num_devices)) if devices is None else devices
    if missing := [device for device in devices if device >= topology.num_devices]:
        raise ValueError(
            f"table {workload.name!r} may be on device {missing[0]}, but there are "
            f"{topology.num_devices}, numbered from 0"
        )
    allowed, hosts = set(devices), map(mesh.devices_of, range(mesh.hosts))
    return Candidate(
        rows=workload.rows,
        dim=workload.dim,
        is_cached=False,
        devices=tuple(sorted(devices)),
        host_sites=tuple(host for host in hosts if allowed.issuperset(host)),
        mesh=mesh,
        min_column_width=constraint.min_column_width,
        is_asked=constraint.sharding_types is not None,
        speeds=tuple(topology.relative_speeds),
        heat=lambda count: workload.shares(np.ones(count), of_rows=True),
    )


def _exchanges(
    kind: type[Placement],
    split: Split,
    workload: TableWorkload,
    table: Candidate,
    constraint: ParameterConstraints,
) -> tuple[Exchange, ...] | str:
    """Return the exchanges that `jaxrec.shard` supports for a split of a table, or why none."""
    held_rows, mesh = table.rows, table.mesh
    if kind.is_replicated and held_rows <= MAX_ROWS:
        return (REPLICATED,)
    optimizer = workload.optimizer
    # Arrays have one shape on all devices, so the largest part decides.
    rows = int(part_sizes(held_rows, split.row_parts, split.shares).max())
    if rows > MAX_ROWS:
        return (
            f"{rows:,} rows on a device, more than the {MAX_ROWS:,} that int32 can number; a "
            "sharding type that cuts rows takes fewer"
        )
    large = is_large(held_rows, rows, mesh)
    if large and split.column_parts > 1 and optimizer.needs_whole_rows:
        return f"its optimizer {type(optimizer).__name__} needs whole rows of a table this large"
    joins = split.column_parts > 1 and (
        optimizer.needs_whole_rows or optimizer.clip_norm is not None
    )
    if joins and not optimizer.can_cut_rows:
        return f"its optimizer {type(optimizer).__name__} needs whole rows"
    hosts = {device // mesh.devices_per_host for device in split.sites[0][: split.row_parts]}
    cut = Cut(
        workload.is_pooled,
        optimizer,
        split.column_parts,
        split.row_parts,
        len(hosts),
        mesh.hosts,
        is_large=large,
        is_alone=mesh.num_devices == 1,
        takes_max=workload.takes_max,
    )
    eligible: list[Exchange] = []
    reasons = []
    for name in constraint.exchanges or EXCHANGES:
        try:
            eligible.append(choose_exchange(name, cut))
        except ValueError as error:
            reasons.append(str(error))
    return tuple(dict.fromkeys(eligible)) or "; ".join(reasons)


def placed_options(
    workload: TableWorkload,
    topology: Topology,
    placement: Placement,
    cache: TableCache | None = None,
    precision: ExchangePrecision = ExchangePrecision(),  # noqa: B008 (frozen)
    stash: Stash | None = None,
) -> tuple[ShardingOption, ...]:
    """Return a fixed placement as options with one part and one site: one for each column slice."""
    mesh = MeshShape(topology.hosts, topology.devices_per_host)
    by_columns: dict[tuple[int, int], list[Shard]] = {}
    storage = TableStorage.of(workload, cache, topology)
    held = dataclasses.replace(workload.table, num_embeddings=storage.held_rows)
    shards = placement.cut(held, mesh)
    for shard in shards:
        by_columns.setdefault(shard.columns, []).append(shard)
    cut = cut_of(workload.table, workload.optimizer, shards, mesh)
    exchange = choose_exchange(placement.exchange, cut)
    options = []
    # Columns may be cut unevenly by hand, and parts of an option are equal; so each column slice is
    # an option of its own.
    for columns, width in slice_widths(workload.table, workload.optimizer, by_columns).items():
        group, of_columns = Group.of(workload, width, exchange, precision), by_columns[columns]
        devices = tuple(shard.device for shard in of_columns)
        site = tuple(range(topology.num_devices)) if placement.is_replicated else devices
        split, kind = Split((site,), row_parts=len(of_columns)), type(placement)
        rows = np.array([shard.num_rows for shard in of_columns])
        options.append(_option(workload, topology, kind, split, group, storage, rows, stash))
        # The columns of a row are moved together, so only the first slice bears the cache's costs.
        storage = dataclasses.replace(storage, perf=Perf(), stored_bytes=0.0)
    return tuple(options)


def _option(
    workload: TableWorkload,
    topology: Topology,
    kind: type[Placement],
    split: Split,
    group: Group,
    storage: TableStorage,
    rows: np.ndarray,
    stash: Stash | None,
) -> ShardingOption:
    """Return an option, given the cut of a table, the group of its shards and their rows."""
    costs, columns = make_costs(group, topology), split.column_parts
    load = costs.load(workload, rows, is_cache=storage.cache is not None)
    # Where a site has more devices than row parts, each device has all rows, of its own columns.
    shards = len(split.sites[0]) // split.row_parts
    home, kept = costs.home(workload) + costs.restore(workload, stash), costs.kept_bytes(workload)
    temporary = costs.temporary_bytes(workload)
    if stash is not None:
        # Stashed residuals are on the device while their group is exchanged.
        kept -= costs.residual_bytes(workload)
        temporary += costs.residual_bytes(workload)
    return ShardingOption(
        table=workload.name,
        kind=kind,
        rows=workload.rows,
        cache=storage.cache,
        group=group,
        parts=split.parts,
        sites=split.sites,
        home=home * columns + storage.perf,
        kept=columns * kept,
        temporary=columns * temporary,
        round_capacity=columns * costs.round_capacity(workload),
        load=load if shards == 1 else Load.unstack(load.stacked.repeat(shards, axis=1)),
        stored_bytes=storage.stored_bytes,
        shares=split.shares,
    )


@dataclasses.dataclass(frozen=True)
class Considered:
    """The ways to place a table.

    Attributes:
        ways: Ways that are considered, such as ``"column_wise in 2 parts by pooled"``.
        left_out: Sharding types that are left out, all or in part, with the reason.

    Example:
        >>> print(Considered(("table_wise by rows",), ("grid: it takes whole hosts",)))
        considered: table_wise by rows
        left out: grid: it takes whole hosts
    """

    ways: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, options: Sequence[ShardingOption], reasons: Sequence[str]) -> Considered:
        """Describe the options of a table in words, each way once."""
        ways = dict.fromkeys(map(_way, options))
        return cls(tuple(ways), tuple(dict.fromkeys(reasons)))

    def __str__(self) -> str:
        lines = [f"considered: {', '.join(self.ways) or 'none'}"]
        lines += [f"left out: {reason}" for reason in self.left_out]
        return "\n".join(lines)


def _way(option: ShardingOption) -> str:
    parts = f" in {option.parts} parts" if option.parts > 1 else ""
    parts += " in uneven shares" if option.shares else ""
    how = "" if option.kind.is_replicated else f" by {option.exchange}"
    storage = "" if option.storage == "device" else f", rows in storage {option.storage}"
    return f"{option.sharding_type}{parts}{how}{storage}"
