"""The built-in sharding types, and the functions that make their placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrec.mesh.exchange import DEFAULT_CAPACITY_FACTOR, REPLICATED, ExchangeLike
from jaxrec.mesh.placement import (
    SHARDING_TYPES,
    Candidate,
    Placement,
    Split,
    cut_evenly,
    parts_of,
)
from jaxrec.mesh.shards import Shard
from jaxrec.ragged.columns import is_integer, is_real


@dataclasses.dataclass(frozen=True)
class DataParallel(Placement):
    """The whole table on every device."""

    exchange: ExchangeLike | None = REPLICATED.name

    kind, abbreviation, is_replicated = "data_parallel", "DP", True

    def cut(self, table, mesh):
        return cut_evenly(table, [(0,)])

    @classmethod
    def options(cls, table):
        if table.is_cached:
            return "copies are kept on devices"
        if len(table.devices) < table.mesh.num_devices:
            return "it takes all devices, and only some are allowed"
        return [Split((table.devices,))]

    @classmethod
    def at(cls, sites, mesh, exchange, shares=()):
        return cls()


@dataclasses.dataclass(frozen=True)
class TableWise(Placement):
    """The whole table on one device."""

    kind, abbreviation, num_places = "table_wise", "TW", 1

    def cut(self, table, mesh):
        return cut_evenly(table, [self._devices(table, mesh)])

    @classmethod
    def options(cls, table):
        return [Split(table.device_sites)]


@dataclasses.dataclass(frozen=True)
class RowWise(Placement):
    """The rows spread over devices; for ``shares`` and ``buckets`` see `row_wise`."""

    shares: tuple[float, ...] = ()
    buckets: int | None = None

    kind, abbreviation = "row_wise", "RW"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(is_real(type(share)) and 0 < share < math.inf for share in self.shares):
            raise ValueError(f"{self.kind}: shares are numbers above 0, got {self.shares}")
        if self.places and len(self.shares) not in (0, len(self.places)):
            raise ValueError(
                f"{self.kind}: there are {len(self.shares)} shares for {len(self.places)} devices"
            )
        object.__setattr__(self, "shares", tuple(map(float, self.shares)))
        if self.buckets is None:
            return
        if not is_integer(type(self.buckets)) or self.buckets < 1:
            raise ValueError(
                f"{self.kind}: buckets is an integer of 1 or more, got {self.buckets!r}"
            )
        object.__setattr__(self, "buckets", int(self.buckets))

    def cut(self, table, mesh):
        devices = self._devices(table, mesh)
        rows, buckets = table.num_embeddings, self.buckets or table.num_embeddings
        if rows % buckets:
            raise ValueError(
                f"table {table.name!r} has {rows} rows, which do not divide into {buckets} "
                "buckets; give a number that divides them"
            )
        if len(self.shares) not in (0, len(devices)):
            raise ValueError(
                f"table {table.name!r} is placed row_wise with {len(self.shares)} shares, but the "
                f"mesh has {len(devices)} devices; give a share for each, or name the devices"
            )
        size = rows // buckets
        return tuple(
            Shard((start * size, stop * size), (0, table.embedding_dim), device)
            for device, (start, stop) in parts_of(devices, buckets, self.shares)
        )

    @property
    def _details(self) -> str:
        shares = ":".join(f"{share:g}" for share in self.shares)
        buckets = "" if self.buckets is None else f" in {self.buckets} buckets"
        return (f" in shares {shares}" if shares else "") + buckets

    @classmethod
    def options(cls, table):
        count = len(table.devices)
        # Over many hosts a table of fewer rows than devices still goes with larger ones: their
        # exchange takes its rows, too, and one of its own would cost more.
        if table.rows < min(count, table.mesh.devices_per_host) and not table.is_asked:
            return f"{table.rows} rows are fewer than the {count} devices"
        if count == 1 and not table.is_asked:
            return "one device: the same as table_wise"
        even = Split(_rotations(table), row_parts=count)
        return [even] if table.is_cached else [even, *_uneven(even, table)]

    @classmethod
    def at(cls, sites, mesh, exchange, shares=()):
        (site,) = sites
        places = () if site == tuple(range(mesh.num_devices)) else site
        return cls(places, exchange, shares)


def _rotations(table: Candidate) -> tuple[tuple[int, ...], ...]:
    """Return orders of the devices that put the hottest rows on different devices."""
    # If several tables have their hot rows first, the planner can give each table another order, so
    # that no device has them all. Some 8 orders are enough, and one if lookups are even.
    devices, count = table.devices, len(table.devices)
    if table.heat(count).max() < 1.05 / count:
        return (devices,)
    step = max(1, count // 8)
    return tuple(devices[-k:] + devices[:-k] for k in range(0, count, step))


def _uneven(split: Split, table: Candidate) -> list[Split]:
    """Return splits that give faster devices more of a table's rows; none if all are as fast."""
    # The first split has rows in proportion to the speeds. It may ask more of a device than the
    # capacity of one round of the exchange of rows. So the second moves the shares towards even
    # ones until the largest fits.
    speeds = np.array(table.speeds)[list(split.sites[0])]
    shares = speeds / speeds.sum()
    if speeds.max() == speeds.min():
        return []
    even, most = 1 / len(shares), 0.999 * DEFAULT_CAPACITY_FACTOR / table.mesh.num_devices
    every = [speeds]
    if even < most < shares.max():
        every.append(even + (shares - even) * (most - even) / (shares.max() - even))
    return [
        dataclasses.replace(
            split,
            sites=split.sites[:1],
            # Rounded, so that the report and the plan's file stay readable.
            shares=tuple(round(float(share / each.min()), 3) for share in each),
        )
        for each in every
    ]


@dataclasses.dataclass(frozen=True)
class ColumnWise(Placement):
    """The columns spread over devices."""

    kind, abbreviation = "column_wise", "CW"

    def cut(self, table, mesh):
        return cut_evenly(table, [(device,) for device in self._devices(table, mesh)])

    @classmethod
    def options(cls, table):
        sites = table.device_sites
        counts = table.column_counts(len(sites))
        return [Split(sites, parts=k, column_parts=k) for k in counts] or table.too_narrow


@dataclasses.dataclass(frozen=True)
class TableRowWise(Placement):
    """The rows spread over one host's devices."""

    kind, abbreviation, place, num_places = "table_row_wise", "TWRW", "host", 1

    def cut(self, table, mesh):
        return cut_evenly(table, self._hosts(table, mesh))

    @classmethod
    def options(cls, table):
        sites, per_host = table.host_sites, table.mesh.devices_per_host
        if table.mesh.hosts == 1 and not table.is_asked:
            return "one host: the same as row_wise"
        if table.rows < per_host and not table.is_asked:
            return f"{table.rows} rows are fewer than the {per_host} devices of a host"
        return [Split(sites, row_parts=per_host)]


@dataclasses.dataclass(frozen=True)
class TableColumnWise(Placement):
    """The columns spread over one host's devices."""

    kind, abbreviation, place, num_places = "table_column_wise", "TWCW", "host", 1

    def cut(self, table, mesh):
        (devices,) = self._hosts(table, mesh)
        return cut_evenly(table, [(device,) for device in devices])

    @classmethod
    def options(cls, table):
        sites, per_host = table.host_sites, table.mesh.devices_per_host
        if table.mesh.hosts == 1 and not table.is_asked:
            return "one host: the same as column_wise"
        if per_host > 1 and per_host not in table.column_counts(per_host):
            return (
                f"{table.dim} columns do not divide by {per_host} devices of a host, each "
                f"with {table.min_column_width} or more"
            )
        return [Split(sites, column_parts=per_host)]


@dataclasses.dataclass(frozen=True)
class Grid(Placement):
    """The columns spread over hosts, and the rows of each column slice over its host's devices."""

    kind, abbreviation, place = "grid", "GRID", "host"

    def cut(self, table, mesh):
        return cut_evenly(table, self._hosts(table, mesh))

    @classmethod
    def options(cls, table):
        sites, per_host = table.host_sites, table.mesh.devices_per_host
        if table.rows < per_host and not table.is_asked:
            return f"{table.rows} rows are fewer than the {per_host} devices of a host"
        counts = [1] * table.is_asked + table.column_counts(len(sites))
        splits = [Split(sites, parts=k, column_parts=k, row_parts=per_host) for k in counts]
        return splits or table.too_narrow


BUILT_IN = tuple(SHARDING_TYPES)
"""Names of the types above. The planner considers them for tables whose constraints name none."""


def data_parallel() -> Placement:
    """Place the whole table on every device, which suits small tables.

    Lookups then need no communication.
    """
    return DataParallel()


def table_wise(device: int = 0, *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the whole table on one device. For ``exchange`` see `row_wise`."""
    return TableWise((device,), exchange)


def row_wise(
    devices: Sequence[int] = (),
    *,
    shares: Sequence[float] = (),
    buckets: int | None = None,
    exchange: ExchangeLike | None = None,
) -> Placement:
    """Place the rows over ``devices``, by default over all devices of the mesh.

    A table with fewer rows than devices has one row on each of the first devices.

    Args:
        devices: Numbers of the devices on the mesh.
        shares: Relative number of rows of each device, such as ``(2, 1, 1)``; empty: equal.
        buckets: Number of equal runs of rows that must not be cut, as TorchRec's
            ``total_num_buckets``. It has to divide the number of rows. None: cut anywhere.
        exchange: How rows travel. The planner of `jaxrec.plan` computes the cost of each.

            - "rows" sends each distinct row once to each device that needs it. It is best for
              short bags of skewed ids.
            - "pooled" pools bags at the rows' owners, and is best for long bags. Each owner sends
              its sum of every bag of the whole batch. If one device has all rows, it becomes
              "bags".
            - "bags" sends whole bags from the one device that has all rows.
            - An `jaxrec.mesh.Exchange` of your own is used as it is.
            - None is "bags" for pooled tables whose rows are on one device, else "rows".

            "pooled" and "bags" are for pooled tables alone.

    Raises:
        TypeError: ``devices`` is not a sequence of numbers.
        ValueError: The exchange, the shares or the buckets are invalid.

    Example:
        >>> from jaxrec import EmbeddingBagConfig
        >>> from jaxrec.mesh.shards import MeshShape
        >>> table = EmbeddingBagConfig("user", num_embeddings=40, embedding_dim=8)
        >>> shards = row_wise(shares=(2, 1, 1), buckets=4).cut(table, MeshShape(1, 3))
        >>> [shard.rows for shard in shards]
        [(0, 20), (20, 30), (30, 40)]
    """
    return RowWise(_several("row_wise", devices), exchange, tuple(shares), buckets)


def column_wise(devices: Sequence[int] = (), *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the columns in equal parts over ``devices``, by default over all of the mesh.

    For ``exchange`` see `row_wise`.
    """
    return ColumnWise(_several("column_wise", devices), exchange)


def table_row_wise(host: int = 0, *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the rows in equal parts over one host's devices. For ``exchange`` see `row_wise`."""
    return TableRowWise((host,), exchange)


def table_column_wise(host: int = 0, *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the columns in equal parts over one host's devices. For ``exchange`` see `row_wise`."""
    return TableColumnWise((host,), exchange)


def grid(hosts: Sequence[int] = (), *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the columns in equal parts over ``hosts``, by default over all of the mesh.

    The rows of each part lie over its host's devices. For ``exchange`` see `row_wise`.
    """
    return Grid(_several("grid", hosts), exchange)


def _several(kind: str, places: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(places, Sequence | np.ndarray):
        raise TypeError(f"{kind}: expected a sequence of numbers, such as (0, 1), got {places!r}")
    return tuple(places)
