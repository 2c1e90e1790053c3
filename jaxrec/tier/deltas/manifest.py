"""Content of a version's manifest, a JSON file."""

from __future__ import annotations

from typing import Annotated

import msgspec

from jaxrec.files.manifest import seal, unseal

FORMAT = "jaxrec version 1"

# Contents of a table's file: rows by id, ids that lost their rows, and rows that unknown ids read.
ROWS, REMOVED, UNKNOWN = "rows", "removed", "unknown"

# Half of a random key's data.
_Word = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class TableFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a table for its readers.

    Attributes:
        num_embeddings: Number of rows; with a fixed vocabulary, the number of ids.
        embedding_dim: Number of columns.
        dtype: Type of the rows, such as "float32".
        is_open: Whether any 64-bit integers are ids, which get and lose rows; otherwise ids are 0
            to ``num_embeddings`` - 1.
        unknown: Rows that ids without a row read: "zeros", "default" or "shared", and their number;
            ("none", 0) if each id has a row.
        seed: Data of the random key for first values of ids that a full version leaves out
            (`jaxrec.tier.Cached`); None: a full version has all ids. An int is the seed of an
            earlier jaxrec, whose first values differ.
        initializer: Name of the initializer of these values; empty for a function.
        state: Type and width of each array of the optimizer state; None: it is not published.
    """

    num_embeddings: int
    embedding_dim: int
    dtype: str
    is_open: bool = False
    unknown: tuple[str, int] = ("none", 0)
    seed: tuple[_Word, _Word] | int | None = None
    initializer: str = ""
    state: dict[str, tuple[str, int | None]] | None = None


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a version; ``name`` is its path in the folder of versions."""

    name: str
    bytes: int
    crc32: int
    rows: int


Files = dict[str, dict[str, File]]
"""Files by table and content (`ROWS`, `REMOVED`, `UNKNOWN`); tables without files do not change."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Manifest of a version, in the file ``NAME.json`` beside the version's folder ``NAME``.

    Attributes:
        version: Number of the version, from 1.
        token: Random text that identifies this version.
        step: Number of training steps, if the publisher gave it.
        seconds: Time of publication, in seconds since 1970.
        tables: The tables, by "collection path/table name".
        dense: File of the variables outside the tables.
        delta: Changes since the version before; None: unknown.
        base: Token of the version before, which ``delta`` follows.
        full: All rows; None: this version has only changes.
        full_versions: Numbers of the full versions that are kept, ascending.
        delta_bytes: Bytes of the deltas since the last full version.
        full_bytes: Bytes of the tables of that version.
        deltas: Number of deltas since that version.
    """

    version: int
    token: str
    step: int | None
    seconds: float
    tables: dict[str, TableFacts]
    dense: File
    delta: Files | None
    base: str | None
    full: Files | None
    full_versions: list[int]
    delta_bytes: int
    full_bytes: int
    deltas: int

    def to_json(self) -> bytes:
        """Return the content of the file, which holds a checksum of itself."""
        return seal({"format": FORMAT, **msgspec.to_builtins(self)})

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read the content of the file; raise a ValueError if it is not a manifest."""
        try:
            manifest = msgspec.convert(unseal(text, FORMAT), cls)
        except (TypeError, RecursionError, msgspec.MsgspecError) as error:
            raise ValueError(f"it has other entries: {error!r}") from None
        manifest.check()
        return manifest

    @property
    def folder(self) -> str:
        """Name of the folder of the version's files."""
        return f"{self.version:012d}-{self.token}"

    def check(self) -> None:
        """Raise a ValueError if a file is outside of the version's folder, or a number is wrong."""
        files = [self.dense]
        for of_kind in (self.delta, self.full):
            for table, of_table in (of_kind or {}).items():
                if table not in self.tables:
                    raise ValueError(f"it has files of table {table!r}, which is not listed")
                files += of_table.values()
        # A folder from elsewhere must not make a reader open files outside of it.
        for file in files:
            folder, _, name = file.name.partition("/")
            if folder != self.folder or "/" in name or "\0" in name or name in ("", ".", ".."):
                raise ValueError(
                    f"it names the file {file.name!r}, outside of the version's folder "
                    f"{self.folder}"
                )
            if file.bytes < 0 or file.rows < 0:
                raise ValueError(f"file {file.name!r} has {file.bytes} bytes and {file.rows} rows")
        for name, facts in self.tables.items():
            if not (0 < facts.num_embeddings < 2**63 and 0 < facts.embedding_dim < 2**31):
                raise ValueError(
                    f"table {name!r} has {facts.num_embeddings} rows of {facts.embedding_dim}"
                )


def num_bytes(files: Files) -> int:
    """Return the sum of the sizes of all files, in bytes."""
    return sum(file.bytes for of_table in files.values() for file in of_table.values())
