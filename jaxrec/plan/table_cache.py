"""Caches of tables: rows on the devices over a row store with all rows."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any

# The row store in the memory of the host.
HOST_STORE = "memory://"
# Names of credentials in the query of a URL.
_SECRETS = ("password", "passwd", "username", "user", "token", "secret", "auth")


@dataclasses.dataclass(frozen=True)
class TableCache:
    """A table with some rows on the devices and all rows in a row store.

    `jaxrec.shard` makes such a table by `jaxrec.tier.Cached`.

    Attributes:
        rows: Number of rows on the devices together.
        store: URL of the row store (`jaxrec.tier.stores.open_store`), without credentials;
            ``{table}`` stands for the table's name.

    Raises:
        TypeError: A field has another type.
        ValueError: A field does not fit its description.

    Example:
        >>> TableCache(rows=5000).storage, TableCache(5000, "file:///data/{table}").storage
        ('host', 'store')
    """

    rows: int
    store: str = HOST_STORE

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int):
            raise TypeError(f"a cache's rows are an integer, got {self.rows!r}")
        if self.rows < 1:
            raise ValueError(f"a cache has 1 row or more, got {self.rows}")
        check_store(self.store)

    @property
    def storage(self) -> str:
        """Storage of the table: "host" for the memory of the host, else "store"."""
        return "host" if self.store == HOST_STORE else "store"

    def to_dict(self) -> dict[str, Any]:
        """Return the cache as JSON has it."""
        return {"storage": self.storage, "rows": self.rows, "store": self.store}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TableCache:
        """Make a cache from what `to_dict` returned."""
        return cls(fields["rows"], fields["store"])


def check_store(url: Any) -> None:
    """Check that a text is the URL of a row store, and has no credentials.

    The message of an error does not show what may be a password.

    Raises:
        TypeError: It is not a string.
        ValueError: The text is not a URL, or has credentials.
    """
    if not isinstance(url, str):
        raise TypeError(
            f"a row store is named by a URL such as 'file:///data/{{table}}', got {url!r}"
        )
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme:
        raise ValueError(
            f"a row store is named by a URL such as 'file:///data/{{table}}', got {url!r:.80}"
        )
    place, _, query = rest.partition("?")
    names = [name.lower() for name, _ in urllib.parse.parse_qsl(query, keep_blank_values=True)]
    if "@" in place.partition("/")[0] or any(name in _SECRETS for name in names):
        raise ValueError(
            f"the URL {scheme}://... has credentials, and a plan is printed and written to files; "
            "leave them out, and give those of Redis by the environment variables REDIS_USERNAME "
            "and REDIS_PASSWORD"
        )
