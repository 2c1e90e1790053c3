"""The interface of placements: how a sharding type cuts tables, and its choices for the planner."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from jaxrec.embed.config import TableConfig
from jaxrec.mesh.exchange import EXCHANGES, Exchange, ExchangeLike, find_exchange
from jaxrec.mesh.shards import MeshShape, Shard
from jaxrec.ragged.columns import is_integer

Owner = TypeVar("Owner", int, tuple[int, ...])

SHARDING_TYPES: dict[str, type[Placement]] = {}
"""Sharding types by name: the classes derived from `Placement`, in the order of definition."""


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to cut a table, before the planner assigns its parts to sites.

    A site is a tuple of devices. A part's shards go to the devices of its site, in order.

    Attributes:
        sites: Possible sites of a part.
        parts: Number of parts, of equal size.
        column_parts: Number of column slices of the table.
        row_parts: Number of shards that the rows of each slice are cut into.
        shares: Relative number of rows of each of these shards; empty: equal.
    """

    sites: tuple[tuple[int, ...], ...]
    parts: int = 1
    column_parts: int = 1
    row_parts: int = 1
    shares: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A table for which the planner asks sharding types for splits.

    Attributes:
        rows: Number of rows on the devices.
        dim: Number of columns.
        is_cached: Whether these rows are a cache.
        devices: Devices that may store shards.
        host_sites: Devices of each host whose devices may all store shards.
        mesh: All devices.
        min_column_width: Smallest number of columns of a shard.
        is_asked: Whether the user named the sharding types. A type then gives its splits even if
            another type has the same.
        speeds: Relative speed of each device of the mesh.
        heat: Function of ``n`` that returns how a batch's distinct ids spread over ``n`` equal runs
            of rows: their shares, ``[n]``.
    """

    rows: int
    dim: int
    is_cached: bool
    devices: tuple[int, ...]
    host_sites: tuple[tuple[int, ...], ...]
    mesh: MeshShape
    min_column_width: int
    is_asked: bool
    speeds: tuple[float, ...]
    heat: Callable[[int], np.ndarray]

    @property
    def device_sites(self) -> tuple[tuple[int, ...], ...]:
        """A site for each device."""
        return tuple((device,) for device in self.devices)

    def column_counts(self, most: int) -> list[int]:
        """Return the numbers of equal parts that the columns divide into, from 2 to ``most``."""
        least = self.min_column_width
        counts = range(2, most + 1)
        return [k for k in counts if self.dim % k == 0 and self.dim // k >= least]

    @property
    def too_narrow(self) -> str:
        """Reason why the columns are not cut."""
        least = self.min_column_width
        return f"{self.dim} columns do not divide into equal parts of {least} or more"


@dataclasses.dataclass(frozen=True)
class Placement(abc.ABC):
    """Location of a table on a mesh. `jaxrec.mesh.row_wise` and its siblings make placements.

    To write a sharding type, in one file here or in another package:

    1. Derive a frozen dataclass. Set `kind` and `abbreviation`. Set `place` if places are hosts,
       and `num_places` if their number is fixed.
    2. Implement `cut`. Lookups, updates, reads and writes follow from the shards.
    3. Implement `options`. Override `at` if the first device of each site does not tell the place.
       The planner considers the type for tables whose constraints name it.

    Attributes:
        places: Numbers of the devices or hosts that store the table; empty: all of the mesh.
        exchange: Name of an exchange, or an `Exchange`. None: "bags" for pooled tables whose rows
            are on one device, else "rows".
        kind: Name of the sharding type.
        abbreviation: Short name in reports, as in TorchRec.
        place: Whether places are devices or hosts.
        num_places: Number of places that the type needs; None: any number will do.
        is_replicated: Whether the whole table is on every device.

    Raises:
        TypeError: A place is not a number.
        ValueError: The exchange or the number of places does not fit the type.
    """

    places: tuple[int, ...] = ()
    exchange: ExchangeLike | None = None

    kind: ClassVar[str]
    abbreviation: ClassVar[str]
    place: ClassVar[Literal["device", "host"]] = "device"
    num_places: ClassVar[int | None] = None
    is_replicated: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Plans in files and constraints name sharding types, so a class must be found by its name
        # as soon as it is defined. A class that is defined again, as in a notebook, replaces the
        # first.
        if "kind" in vars(cls):
            SHARDING_TYPES[cls.kind] = cls

    def __post_init__(self) -> None:
        if wrong := [place for place in self.places if not is_integer(type(place))]:
            raise TypeError(
                f"{self.kind}: a {self.place} is named by its number on the mesh, from 0, got "
                f"{wrong[0]!r} ({type(wrong[0]).__name__})"
            )
        # Plain integers, since NumPy's are not JSON and print their type in reports.
        object.__setattr__(self, "places", tuple(map(int, self.places)))
        if self.num_places not in (None, len(self.places)):
            raise ValueError(f"{self.kind}: it takes one {self.place}, got {self.places}")
        if self.exchange is None:
            allowed = not self.is_replicated
        else:
            known = isinstance(self.exchange, Exchange) or self.exchange in EXCHANGES
            allowed = known and find_exchange(self.exchange).is_replicated == self.is_replicated
        if not allowed:
            names = [n for n, x in EXCHANGES.items() if x.is_replicated == self.is_replicated]
            raise ValueError(
                f"{self.kind}: exchange={self.exchange!r} is not one of "
                f"{', '.join(map(repr, names))}"
            )

    @abc.abstractmethod
    def cut(self, table: TableConfig, mesh: MeshShape) -> tuple[Shard, ...]:
        """Return the table's shards, ordered by column and then by row.

        A replicated table is one shard, on device 0. If a table has fewer rows or columns than
        there are devices, the last devices have no shard.

        Raises:
            ValueError: The mesh lacks a device or host; the placement does not fit the table.
        """

    @classmethod
    @abc.abstractmethod
    def options(cls, table: Candidate) -> list[Split] | str:
        """Return the splits of a table that the planner may choose, or the reason for none.

        If places are hosts, the planner calls it only if at least one host may store shards.
        """

    @classmethod
    def at(
        cls,
        sites: Sequence[tuple[int, ...]],
        mesh: MeshShape,
        exchange: ExchangeLike,
        shares: tuple[float, ...] = (),
    ) -> Placement:
        """Return the placement of a split whose parts are at the given sites.

        Args:
            sites: Site of each part.
            mesh: The devices.
            exchange: The exchange.
            shares: `Split.shares`.
        """
        count = mesh.devices_per_host if cls.place == "host" else 1
        return cls(tuple(site[0] // count for site in sites), exchange)

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and the fields for JSON; a type's own fields only if not the default."""
        name = None if self.exchange is None else find_exchange(self.exchange).name
        fields = {"kind": self.kind, "places": self.places, "exchange": name}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in fields and value != field.default:
                fields[field.name] = value
        return fields

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Placement:
        """Make a placement from the result of `to_dict`.

        Raises:
            KeyError: The kind or the places are missing.
            ValueError: No sharding type has that name, or a value does not fit the type.
        """
        values: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()
        }
        kind, places = values.pop("kind"), values.pop("places")
        if kind not in SHARDING_TYPES:
            raise ValueError(
                f"no sharding type is named {kind!r}; there are {', '.join(SHARDING_TYPES)}"
            )
        return SHARDING_TYPES[kind](places, **values)

    def __str__(self) -> str:
        where = f" on {', '.join(map(str, self.places))}" if self.places else ""
        exchange = self.to_dict()["exchange"]
        how = f" by {exchange}" if exchange and not self.is_replicated else ""
        return f"{self.kind}{where}{self._details}{how}"

    @property
    def _details(self) -> str:
        """Text for `str` on a type's own fields, such as `` in shares 2:1``."""
        return ""

    def _devices(self, table: TableConfig, mesh: MeshShape) -> tuple[int, ...]:
        """Return the placement's devices; raise a ValueError if the mesh lacks one."""
        return self._on_mesh(table, mesh.num_devices)

    def _hosts(self, table: TableConfig, mesh: MeshShape) -> list[tuple[int, ...]]:
        """Return the devices of each of the placement's hosts, which the mesh must have."""
        return [mesh.devices_of(host) for host in self._on_mesh(table, mesh.hosts)]

    def _on_mesh(self, table: TableConfig, count: int) -> tuple[int, ...]:
        """Return the places, by default all ``count`` of the mesh; raise if the mesh lacks one."""
        places = self.places or tuple(range(count))
        if missing := [place for place in places if not 0 <= place < count]:
            raise ValueError(
                f"table {table.name!r} is placed {self.kind} on {self.place} {missing[0]}, but "
                f"the mesh has {count} {self.place}s, numbered from 0"
            )
        return places


def cut_evenly(table: TableConfig, owners: Sequence[tuple[int, ...]]) -> tuple[Shard, ...]:
    """Cut the columns evenly among the owners, and each slice's rows among its owner's devices."""
    return tuple(
        Shard(rows, columns, device)
        for devices, columns in parts_of(owners, table.embedding_dim)
        for device, rows in parts_of(devices, table.num_embeddings)
    )


def parts_of(
    owners: Sequence[Owner], count: int, shares: Sequence[float] = ()
) -> Iterator[tuple[Owner, tuple[int, int]]]:
    """Cut ``range(count)`` into one part for each owner; iterate over (owner, (start, stop)).

    Owners with an empty part are left out. The parts have the sizes of `part_sizes`.
    """
    sizes = part_sizes(count, len(owners), shares).tolist()
    bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    for owner, (start, stop) in zip(owners, bounds, strict=True):
        if start < stop:
            yield owner, (start, stop)


def part_sizes(count: int, parts: int, shares: Sequence[float] = ()) -> np.ndarray:
    """Cut ``count`` into parts in proportion to ``shares``; return their sizes, ``[parts]``.

    Without shares, 7 is cut into 3 parts of 3, 2 and 2.
    """
    if not shares:
        size, more = divmod(count, parts)
        return size + (np.arange(parts) < more)
    # Exact fractions, since all processes must cut alike and the sizes must add up to the count.
    sums = list(itertools.accumulate(map(Fraction, shares), initial=Fraction(0)))
    return np.diff([math.floor(count * each / sums[-1] + Fraction(1, 2)) for each in sums])
