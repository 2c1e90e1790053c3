"""Where a table goes: the sharding types, and how each cuts a table into blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from jaxrec.embed.config import TableConfig
from jaxrec.ragged.columns import is_integer

Exchange: TypeAlias = Literal["rows", "sums"]


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices of a mesh, numbered host by host.

    Attributes:
        hosts: Hosts; 1 on a mesh of one axis.
        devices_per_host: Devices of each, joined by fast links.
    """

    hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    def devices_of(self, host: int) -> tuple[int, ...]:
        start = host * self.devices_per_host
        return tuple(range(start, start + self.devices_per_host))


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a table on one device.

    Attributes:
        rows: First row and the row after the last.
        columns: First column and the column after the last.
        device: The device that holds it.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    device: int


_OVER_HOSTS = ("table_row_wise", "table_column_wise", "grid")


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a table lies on a mesh; made by `row_wise` and its siblings.

    Attributes:
        kind: Name of the sharding type.
        places: Devices or hosts, as the type takes them; empty: all of the mesh.
        exchange: How rows travel. "rows": repeats are removed, rows come to the samples and are
            pooled there. "sums": ids go to the rows, are pooled there, and what devices have of a
            bag comes back, added up on the way. "copies": not at all. None: "sums" where all rows
            are on one device and pooling needs no more, else "rows".
    """

    kind: str
    places: tuple[int, ...] = ()
    exchange: str | None = None

    def __post_init__(self) -> None:
        what = "host" if self.kind in _OVER_HOSTS else "device"
        if wrong := [place for place in self.places if not is_integer(type(place))]:
            raise TypeError(
                f"{self.kind}: a {what} is named by its number on the mesh, from 0, got "
                f"{wrong[0]!r} ({type(wrong[0]).__name__})"
            )
        object.__setattr__(self, "places", tuple(map(int, self.places)))
        wanted = ("copies",) if self.kind == "data_parallel" else (None, "rows", "sums")
        if self.exchange not in wanted:
            raise ValueError(
                f"{self.kind}: exchange={self.exchange!r} is none of {', '.join(map(repr, wanted))}"
            )

    @property
    def is_replicated(self) -> bool:
        return self.exchange == "copies"

    def cut(self, table: TableConfig, mesh: MeshShape) -> tuple[Block, ...]:
        """The table's blocks, by column and then by row; a replicated table is one on device 0.

        Raises:
            ValueError: If the mesh lacks a device or host, or the table has fewer rows or columns
                than the blocks it is to be cut into.
        """
        match self.kind:
            case "data_parallel":
                return _grid(table, [(0,)])
            case "table_wise" | "row_wise":
                return _grid(table, [self._devices(table, mesh)])
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


def _grid(table: TableConfig, owners: Sequence[tuple[int, ...]]) -> tuple[Block, ...]:
    """Cuts columns evenly among ``owners``, and the rows of each part among its devices."""
    rows, dim = table.num_embeddings, table.embedding_dim
    if dim < len(owners):
        raise ValueError(
            f"table {table.name!r} has {dim} columns, fewer than the {len(owners)} parts it is to "
            "be cut into; name fewer devices or use row_wise()"
        )
    blocks = []
    for devices, columns in zip(owners, _even(dim, len(owners)), strict=True):
        if rows < len(devices):
            raise ValueError(
                f"table {table.name!r} has {rows} rows, fewer than the {len(devices)} devices it "
                "is to be cut over; use table_wise() or data_parallel()"
            )
        parts = _even(rows, len(devices))
        blocks += [Block(part, columns, d) for d, part in zip(devices, parts, strict=True)]
    return tuple(blocks)


def _several(kind: str, places: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(places, Sequence | np.ndarray):
        raise TypeError(f"{kind}: expected a sequence of numbers, such as (0, 1), got {places!r}")
    return tuple(places)


def _even(count: int, parts: int) -> list[tuple[int, int]]:
    """First and past the last of each part, the first parts having one more where needed."""
    size, more = divmod(count, parts)
    starts = [part * size + min(part, more) for part in range(parts + 1)]
    return list(itertools.pairwise(starts))


def data_parallel() -> Placement:
    """A copy on every device; lookups need no communication. For small tables."""
    return Placement("data_parallel", exchange="copies")


def table_wise(device: int = 0, *, exchange: Exchange | None = None) -> Placement:
    """The whole table on one device; for ``exchange`` see `row_wise`."""
    return Placement("table_wise", (device,), exchange)


def row_wise(devices: Sequence[int] = (), *, exchange: Exchange | None = None) -> Placement:
    """The rows in equal parts over ``devices``, all of the mesh if none are named.

    Args:
        devices: The devices, by number.
        exchange: "rows" moves each distinct row once to each device that needs it: best for short
            bags of skewed ids. "sums" moves bags that are pooled where the rows are: best for long
            bags. Of tables whose rows are cut over devices each device adds its part to every bag
            of the whole batch; where one device has them all, bags go straight home.
            `jaxrec.plan` costs both. Only tables that are pooled can use "sums". None: "rows", but
            "sums" for pooled tables all of whose rows are on one device.
    """
    return Placement("row_wise", _several("row_wise", devices), exchange)


def column_wise(devices: Sequence[int] = (), *, exchange: Exchange | None = None) -> Placement:
    """The columns in equal parts over ``devices``, all of the mesh if none are named.

    For ``exchange`` see `row_wise`.
    """
    return Placement("column_wise", _several("column_wise", devices), exchange)


def table_row_wise(host: int = 0, *, exchange: Exchange | None = None) -> Placement:
    """The rows in equal parts over the devices of one host; for ``exchange`` see `row_wise`."""
    return Placement("table_row_wise", (host,), exchange)


def table_column_wise(host: int = 0, *, exchange: Exchange | None = None) -> Placement:
    """The columns in equal parts over the devices of one host; for ``exchange`` see `row_wise`."""
    return Placement("table_column_wise", (host,), exchange)


def grid(hosts: Sequence[int] = (), *, exchange: Exchange | None = None) -> Placement:
    """The columns in equal parts over ``hosts``, and the rows of each over its devices.

    For ``exchange`` see `row_wise`.
    """
    return Placement("grid", _several("grid", hosts), exchange)
