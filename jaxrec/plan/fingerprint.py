"""The fingerprint of a plan: its tables, machine and version, to compare with a saved plan's."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# Fields of a context's tables that batches do not change.
_TABLE_FIELDS = ("rows", "dim", "dtype", "collection", "optimizer", "state_bytes", "is_pooled")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Tables, machine and versions that a plan was made for.

    Attributes:
        tables: Beginning of the SHA-256 of each table's definition, by name; {}: unknown.
        machine: The devices, such as "h200, 2 hosts of 8"; "": unknown.
        version: Versions of jaxrec and JAX.
    """

    tables: Mapping[str, str]
    machine: str
    version: str

    @classmethod
    def of(cls, context: Mapping[str, Any] | None) -> Fingerprint:
        """Return the fingerprint of a plan for a `Context`'s fields; None: made by hand."""
        version = f"jaxrec {_jaxrec_version()}, JAX {jax.__version__}"
        if context is None:
            return cls({}, "", version)
        topology = context["topology"]
        hosts, each = topology["hosts"], topology["devices_per_host"]
        count = "1 host" if hosts == 1 else f"{hosts} hosts"
        tables = {name: _hash(table) for name, table in context["tables"].items()}
        return cls(tables, f"{topology['name']}, {count} of {each}", version)

    @classmethod
    def read(cls, text: str) -> Fingerprint | None:
        """Return the fingerprint in the JSON of a plan; None: it has none, as in older plans."""
        try:
            fields = json.loads(text)["fingerprint"]
            tables, machine, version = fields["tables"], fields["machine"], fields["version"]
            return cls({str(k): str(v) for k, v in tables.items()}, str(machine), str(version))
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return the fingerprint as a dictionary for JSON."""
        return dataclasses.asdict(self)

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the differences of another fingerprint, each in words; unknown parts are equal."""
        return list(self._differences(other))

    def _differences(self, other: Fingerprint) -> Iterator[str]:
        if self.tables and other.tables:
            for name in {**self.tables, **other.tables}:
                if name not in other.tables:
                    yield f"table {name!r} is gone"
                elif name not in self.tables:
                    yield f"table {name!r} is new"
                elif self.tables[name] != other.tables[name]:
                    yield f"table {name!r} is another"
        if self.machine and other.machine and self.machine != other.machine:
            yield f"machine: {self.machine}; now {other.machine}"
        if self.version != other.version:
            yield f"version: {self.version}; now {other.version}"


def _jaxrec_version() -> str:
    try:
        return importlib.metadata.version("jaxrec")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return "of a folder"


def _hash(table: Mapping[str, Any]) -> str:
    definition = {name: table[name] for name in _TABLE_FIELDS}
    definition["features"] = sorted(table["features"])
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]
