"""Earlier names of `jaxrec.tier.export_rows` and `jaxrec.tier.import_rows`."""

from __future__ import annotations

import os
import warnings

from jaxrec.embed.collection import Collection
from jaxrec.tier.row_file import export_rows, import_rows


def export_table(collection: Collection, name: str, path: str | os.PathLike[str]) -> None:
    """Write the rows of a table; the earlier name of `jaxrec.tier.export_rows`."""
    _warn("export_table", "export_rows")
    export_rows(collection, name, path)


def import_table(collection: Collection, name: str, path: str | os.PathLike[str]) -> None:
    """Set the rows of a table; the earlier name of `jaxrec.tier.import_rows`."""
    _warn("import_table", "import_rows")
    import_rows(collection, name, path)


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"jaxrec.train.{old} is jaxrec.tier.{new} now; the old name goes with the next version",
        DeprecationWarning,
        stacklevel=3,
    )
