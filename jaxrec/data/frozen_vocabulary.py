"""Vocabularies of open tables at the moment of their export."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int

from jaxrec.atomic import write_atomically
from jaxrec.data.criteo.text import DataError
from jaxrec.data.parquet import read_checked


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenVocabulary:
    """Raw ids that had a row of an open table, which change no more.

    Row 0 of the table is for all other ids, and the rows of known ids follow in their order.

    Attributes:
        ids: int64 ``[size]`` raw ids, ascending: integers themselves, and 64-bit hashes of strings.
    """

    ids: Int[np.ndarray, " size"]

    def __len__(self) -> int:
        """Number of known ids."""
        return self.ids.size

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the table."""
        return 1 + self.ids.size

    def __call__(self, ids: pa.Array) -> pa.Array:
        """Look up the row indices of raw ids.

        Args:
            ids: int64 raw ids.

        Returns:
            int32 row indices; nulls stay null.
        """
        wanted = ids.fill_null(0).to_numpy()
        places = np.searchsorted(self.ids, wanted)
        known = np.zeros(wanted.size, bool)
        inside = places < self.ids.size
        known[inside] = self.ids[places[inside]] == wanted[inside]
        rows = np.where(known, places + 1, 0).astype(np.int32)
        return pa.array(rows, mask=np.asarray(ids.is_null()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file with the column ``id``, complete or not at all.

        Raises:
            OSError: The file cannot be written.
        """
        with write_atomically(path) as unfinished:
            pq.write_table(pa.table({"id": self.ids}), unfinished, write_page_checksum=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FrozenVocabulary:
        """Read a file that `save` wrote.

        Raises:
            OSError: The file cannot be read.
            DataError: The file holds no such vocabulary.
        """
        table = read_checked(path)
        if table.column_names != ["id"] or table["id"].type != pa.int64():
            raise DataError(f"{path} holds no frozen vocabulary")
        ids = table["id"].to_numpy()
        if table["id"].null_count or not (ids[1:] > ids[:-1]).all():
            raise DataError(f"{path} holds ids that do not ascend")
        return cls(ids)
