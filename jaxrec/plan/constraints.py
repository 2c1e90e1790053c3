"""Constraints of a table: a user's demands of the planner."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Collection, Sequence
from typing import Any

from jaxrec.embed.config import table_dtype
from jaxrec.mesh.placement import SHARDING_TYPES, Placement

STORAGES = ("device", "host", "store")
EXCHANGES = ("rows", "pooled")
# Names of credentials in the query of a URL.
_SECRETS = ("password", "passwd", "username", "user", "token", "secret", "auth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterConstraints:
    """Constraints of one table; by default there are none.

    Attributes:
        sharding_types: Sharding types to choose from: "data_parallel", "table_wise", "row_wise",
            "column_wise", "table_row_wise", "table_column_wise" and "grid", or the name of a type
            of your own (see `jaxrec.mesh.Placement`). None: all of these seven.
        storages: Where rows may be kept: "device", "host" (in host memory, with a cache on the
            devices) and "store" (in a row store, with the same cache). None: the planner's
            storages; with a fixed placement "device".
        exchanges: Exchanges to choose from: "rows" and "pooled" (see `jaxrec.mesh.row_wise`). None:
            all that `jaxrec.shard` supports for the table.
        devices: Devices that may hold a shard of the table. None: all.
        min_column_width: Smallest number of columns of a shard.
        pooling_factors: Mean number of ids in a sample, for each feature of the table in order, or
            one number for all. None: from statistics, or 1.
        batch_sizes: Bags of each feature in the whole batch, or one number for all. None: the batch
            size.
        num_poolings: Bags of each feature for each of ``batch_sizes``, or one number for all.
            None: 1.
        is_weighted: Whether ids have weights. None: the collection's setting.
        cache_ratio: Fraction of the rows in the cache of "host" and "store". The cache has at least
            the rows of the batches under way. None: the planner chooses.
        store: URL of the row store of "store", as for `Planner`. None: the planner's.
        dtype: Type of the table, for planning from configurations; a model's tables have theirs.
        placement: A fixed placement, made by `jaxrec.mesh.row_wise` and its siblings.

    Raises:
        ValueError, TypeError: If a value does not fit its description.

    Example:
        >>> ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[20]).pooling_factors
        (20.0,)
    """

    sharding_types: Sequence[str] | None = None
    storages: Sequence[str] | None = None
    exchanges: Sequence[str] | None = None
    devices: Sequence[int] | None = None
    min_column_width: int = 32
    pooling_factors: Sequence[float] | float | None = None
    batch_sizes: Sequence[int] | int | None = None
    num_poolings: Sequence[float] | float | None = None
    is_weighted: bool | None = None
    cache_ratio: float | None = None
    store: str | None = None
    dtype: str | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        self._set("sharding_types", self._names("sharding_types", SHARDING_TYPES))
        self._set("storages", self._names("storages", STORAGES))
        self._set("exchanges", self._names("exchanges", EXCHANGES))
        if self.devices is not None:
            devices = tuple(self.devices)
            if not devices or len(set(devices)) < len(devices) or min(devices) < 0:
                raise ValueError(f"devices are different numbers from 0, got {devices}")
            self._set("devices", devices)
        self._set("pooling_factors", self._numbers("pooling_factors"))
        self._set("batch_sizes", self._numbers("batch_sizes"))
        self._set("num_poolings", self._numbers("num_poolings"))
        if self.min_column_width < 1:
            raise ValueError(f"min_column_width is 1 or more, got {self.min_column_width}")
        if self.cache_ratio is not None and not 0 < self.cache_ratio <= 1:
            raise ValueError(f"cache_ratio is above 0 and at most 1, got {self.cache_ratio}")
        if self.store is not None:
            check_store(self.store)
        if self.dtype is not None:
            self._set("dtype", table_dtype(self.dtype))
        if self.placement is not None and not isinstance(self.placement, Placement):
            raise TypeError(
                "placement is made by jaxrec.mesh.row_wise() and its siblings, got "
                f"{self.placement!r}"
            )

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _names(self, field: str, known: Collection[str]) -> tuple[str, ...] | None:
        names = getattr(self, field)
        if names is None:
            return None
        if isinstance(names, str) or not names or set(names) - set(known):
            raise ValueError(f"{field} are some of {', '.join(known)}, got {names!r}")
        # In the order of ``known``, so that equal constraints compare equal and options come in one
        # order.
        return tuple(name for name in known if name in names)

    def _numbers(self, field: str) -> tuple[float, ...] | float | None:
        value = getattr(self, field)
        if value is None:
            return None
        numbers = tuple(value) if isinstance(value, Sequence) else (value,)
        if not numbers or not all(0 < number < float("inf") for number in numbers):
            raise ValueError(f"{field} are numbers above 0, got {value!r}")
        return tuple(map(float, numbers)) if isinstance(value, Sequence) else float(value)


def check_store(url: Any) -> None:
    """Raise a TypeError or ValueError if ``url`` is no URL of a row store, or has credentials."""
    if not isinstance(url, str):
        raise TypeError(
            f"a row store is named by a URL such as 'file:///data/{{table}}', got {url!r}"
        )
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme:
        raise ValueError(
            f"a row store is named by a URL such as 'file:///data/{{table}}', got {url!r:.80}"
        )
    # Never the URL itself in this message: it would show the password that it refuses.
    place, _, query = rest.partition("?")
    names = [name.lower() for name, _ in urllib.parse.parse_qsl(query, keep_blank_values=True)]
    if "@" in place.partition("/")[0] or any(name in _SECRETS for name in names):
        raise ValueError(
            f"the URL {scheme}://... has credentials, and a plan is printed and written to files; "
            "leave them out, and give those of Redis by the environment variables REDIS_USERNAME "
            "and REDIS_PASSWORD"
        )
