"""Placements: the sharding types, and how each cuts a table into shards."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

from jaxrec.embed.config import TableConfig
from jaxrec.mesh.exchange import EXCHANGES, REPLICATED, Exchange, ExchangeLike, find_exchange
from jaxrec.mesh.shards import MeshShape, Shard
from jaxrec.ragged.columns import is_integer, is_real

Owner = TypeVar("Owner", int, tuple[int, ...])

_OVER_HOSTS = ("table_row_wise", "table_column_wise", "grid")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a table lies on a mesh; made by `row_wise` and its siblings.

    Attributes:
        kind: Name of the sharding type.
        places: Devices or hosts, as the type takes them; empty: all of the mesh.
        exchange: How rows travel, by the name of an exchange or as an object. None: "bags" for
            pooled tables whose rows are on one device, else "rows".
        shares: Relative number of rows of each device; empty: equal.
        buckets: Number of equal runs of rows of which none is cut; None: a run is a row.

    Raises:
        TypeError: A place is not a number.
        ValueError: The exchange, the shares or the buckets do not fit the type.
    """

    kind: str
    places: tuple[int, ...] = ()
    exchange: ExchangeLike | None = None
    shares: tuple[float, ...] = ()
    buckets: int | None = None

    def __post_init__(self) -> None:
        what = "host" if self.kind in _OVER_HOSTS else "device"
        if wrong := [place for place in self.places if not is_integer(type(place))]:
            raise TypeError(
                f"{self.kind}: a {what} is named by its number on the mesh, from 0, got "
                f"{wrong[0]!r} ({type(wrong[0]).__name__})"
            )
        object.__setattr__(self, "places", tuple(map(int, self.places)))
        is_replicated = self.kind == "data_parallel"
        if self.exchange is None:
            allowed = not is_replicated
        else:
            known = isinstance(self.exchange, Exchange) or self.exchange in EXCHANGES
            allowed = known and find_exchange(self.exchange).is_replicated == is_replicated
        if not allowed:
            names = [n for n, each in EXCHANGES.items() if each.is_replicated == is_replicated]
            raise ValueError(
                f"{self.kind}: exchange={self.exchange!r} is not one of "
                f"{', '.join(map(repr, names))}"
            )
        self._check_rows()

    def _check_rows(self) -> None:
        """Raise a ValueError where the shares or buckets of rows are not possible."""
        if self.kind != "row_wise" and (self.shares or self.buckets is not None):
            raise ValueError(f"{self.kind}: shares and buckets of rows are for row_wise()")
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

    @property
    def is_replicated(self) -> bool:
        """Whether the table lies whole on every device."""
        return self.kind == "data_parallel"

    def cut(self, table: TableConfig, mesh: MeshShape) -> tuple[Shard, ...]:
        """Return the table's shards, by column and then by row.

        A replicated table is one shard on device 0. Devices beyond the number of rows or columns
        have no shard.

        Raises:
            ValueError: The mesh lacks a device or host; it has another number of devices than there
                are shares; the rows do not divide into the buckets.
        """
        match self.kind:
            case "data_parallel":
                return _grid(table, [(0,)])
            case "table_wise":
                return _grid(table, [self._devices(table, mesh)])
            case "row_wise":
                return self._cut_rows(table, self._devices(table, mesh))
            case "column_wise":
                return _grid(table, [(device,) for device in self._devices(table, mesh)])
            case "table_row_wise":
                (host,) = self._hosts(table, mesh)
                return _grid(table, [mesh.devices_of(host)])
            case "table_column_wise":
                (host,) = self._hosts(table, mesh)
                return _grid(table, [(device,) for device in mesh.devices_of(host)])
            case "grid":
                return _grid(table, [mesh.devices_of(host) for host in self._hosts(table, mesh)])
        raise ValueError(f"table {table.name!r}: no sharding type is named {self.kind!r}")

    def _cut_rows(self, table: TableConfig, devices: tuple[int, ...]) -> tuple[Shard, ...]:
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
            for device, (start, stop) in _parts(devices, buckets, self.shares)
        )

    def _devices(self, table: TableConfig, mesh: MeshShape) -> tuple[int, ...]:
        return self._places(table, "device", mesh.num_devices)

    def _hosts(self, table: TableConfig, mesh: MeshShape) -> tuple[int, ...]:
        return self._places(table, "host", mesh.hosts)

    def _places(self, table: TableConfig, what: str, count: int) -> tuple[int, ...]:
        places = self.places or tuple(range(count))
        if missing := [place for place in places if not 0 <= place < count]:
            raise ValueError(
                f"table {table.name!r} is placed {self.kind} on {what} {missing[0]}, but the mesh "
                f"has {count} {what}s, numbered from 0"
            )
        return places


def _grid(table: TableConfig, owners: Sequence[tuple[int, ...]]) -> tuple[Shard, ...]:
    """Cut columns evenly among ``owners``, and the rows of each part among its devices."""
    return tuple(
        Shard(rows, columns, device)
        for devices, columns in _parts(owners, table.embedding_dim)
        for device, rows in _parts(devices, table.num_embeddings)
    )


def _several(kind: str, places: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(places, Sequence | np.ndarray):
        raise TypeError(f"{kind}: expected a sequence of numbers, such as (0, 1), got {places!r}")
    return tuple(places)


def _parts(
    owners: Sequence[Owner], count: int, shares: Sequence[float] = ()
) -> Iterator[tuple[Owner, tuple[int, int]]]:
    """Iterate over owners with the first of their part of a count, and the one after its last.

    Owners whose part is empty are left out; for ``shares`` see `part_sizes`.
    """
    sizes = part_sizes(count, len(owners), shares).tolist()
    bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    for owner, (start, stop) in zip(owners, bounds, strict=True):
        if start < stop:
            yield owner, (start, stop)


def part_sizes(count: int, parts: int, shares: Sequence[float] = ()) -> np.ndarray:
    """Return the sizes of the parts of a count, ``[parts]``.

    Args:
        count: The count.
        parts: Number of parts.
        shares: Relative size of each part; empty: equal sizes, the first parts may have one more.
    """
    if not shares:
        size, more = divmod(count, parts)
        return size + (np.arange(parts) < more)
    sums = list(itertools.accumulate(map(Fraction, shares), initial=Fraction(0)))
    return np.diff([math.floor(count * each / sums[-1] + Fraction(1, 2)) for each in sums])


def data_parallel() -> Placement:
    """Place the whole table on every device; lookups need no communication. For small tables."""
    return Placement("data_parallel", exchange=REPLICATED.name)


def table_wise(device: int = 0, *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the whole table on one device; for ``exchange`` see `row_wise`."""
    return Placement("table_wise", (device,), exchange)


def row_wise(
    devices: Sequence[int] = (),
    *,
    shares: Sequence[float] = (),
    buckets: int | None = None,
    exchange: ExchangeLike | None = None,
) -> Placement:
    """Place the rows over ``devices``, all of the mesh if none are named.

    A table of fewer rows lies on the first of the devices, one row on each.

    Args:
        devices: The devices, by number.
        shares: Relative number of rows of each device, such as ``(2, 1, 1)``; empty: equal parts.
        buckets: Number of equal runs of rows, each of which is on one device, as TorchRec's
            ``total_num_buckets``; None: rows are cut anywhere. It divides the number of rows.
        exchange: "rows" moves each distinct row once to each device that needs it: best for short
            bags of skewed ids. "pooled" moves bags that are pooled at the rows' owners: best for
            long bags. Where the rows are cut over devices, each owner sends its sum of every bag
            of the whole batch; where one device has them all, whole bags travel instead ("bags").
            `jaxrec.plan` computes the cost of each. Only pooled tables can use the latter two.
            None: "bags" for pooled tables whose rows are on one device, else "rows". An object of
            your own class derived from `jaxrec.mesh.Exchange` is used as it is.

    Raises:
        TypeError: The devices are not numbers.
        ValueError: The exchange, the shares or the buckets are not possible.

    Example:
        >>> from jaxrec import EmbeddingBagConfig
        >>> from jaxrec.mesh.shards import MeshShape
        >>> table = EmbeddingBagConfig("user", num_embeddings=40, embedding_dim=8)
        >>> shards = row_wise(shares=(2, 1, 1), buckets=4).cut(table, MeshShape(1, 3))
        >>> [shard.rows for shard in shards]
        [(0, 20), (20, 30), (30, 40)]
    """
    places = _several("row_wise", devices)
    return Placement("row_wise", places, exchange, tuple(shares), buckets)


def column_wise(devices: Sequence[int] = (), *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the columns in equal parts over ``devices``, all of the mesh if none are named.

    For ``exchange`` see `row_wise`.
    """
    return Placement("column_wise", _several("column_wise", devices), exchange)


def table_row_wise(host: int = 0, *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the rows in equal parts over one host's devices; for ``exchange`` see `row_wise`."""
    return Placement("table_row_wise", (host,), exchange)


def table_column_wise(host: int = 0, *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the columns in equal parts over one host's devices; for ``exchange`` see `row_wise`."""
    return Placement("table_column_wise", (host,), exchange)


def grid(hosts: Sequence[int] = (), *, exchange: ExchangeLike | None = None) -> Placement:
    """Place the columns in equal parts over ``hosts``, and the rows of each over its devices.

    For ``exchange`` see `row_wise`.
    """
    return Placement("grid", _several("grid", hosts), exchange)
