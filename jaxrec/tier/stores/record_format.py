"""Formats of the records of row stores, and ids as keys of databases."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """Format of a store's records.

    Attributes:
        width: Number of bytes of a record.
        description: Fields of a record, such as ``"user rows float32[64], user sum float32"``.
            Two formats with the same width and different fields are different.
        num_ids: Ids are 0 to ``num_ids`` - 1; None: any 64-bit ids but -1.

    Raises:
        ValueError: ``width`` or ``num_ids`` is less than 1.

    Example:
        >>> print(RecordFormat(260, "user rows float32[64], user sum float32", 1_000_000))
        260 bytes (user rows float32[64], user sum float32), ids 0 to 999,999
    """

    width: int
    description: str
    num_ids: int | None = None

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a record has 1 byte or more, got a width of {self.width}")
        if self.num_ids is not None and self.num_ids < 1:
            raise ValueError(f"a format has 1 id or more, got num_ids={self.num_ids}")

    def __str__(self) -> str:
        ids = "any ids" if self.num_ids is None else f"ids 0 to {self.num_ids - 1:,}"
        return f"{self.width:,} bytes ({self.description}), {ids}"

    def to_json(self) -> str:
        """Return the format as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RecordFormat:
        """Return the format that `to_json` wrote.

        Raises:
            ValueError: The text is no format.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"no format of records: {text[:200]!r}") from error

    def check_same(self, stored: RecordFormat, place: str) -> None:
        """Raise a ValueError if the records at a place have another format than this one."""
        if stored != self:
            raise ValueError(
                f"{place} has records of {stored}, and the table's records are {self}; give the "
                "table another store, or remove this one's records"
            )

    def check_ids(self, ids: np.ndarray) -> None:
        """Raise a ValueError if one of the ids, int64 ``[n]``, is outside of the format's range."""
        if self.num_ids is None:
            is_wrong = ids == -1
        else:
            # As unsigned integers, negative ids are the largest: one comparison finds both ends.
            is_wrong = ids.view(np.uint64) >= np.uint64(self.num_ids)
        if is_wrong.any():
            position = int(is_wrong.argmax())
            allowed = "any id but -1" if self.num_ids is None else f"0 to {self.num_ids - 1:,}"
            raise ValueError(f"id {ids[position]} at position {position}: the store has {allowed}")


KEY_BYTES = 8


def keys_of(ids: np.ndarray) -> list[bytes]:
    """Return int64 ids ``[n]`` as keys of 8 bytes, big-endian, as a database sorts them."""
    whole = ids.astype(">i8").tobytes()
    return [whole[start : start + KEY_BYTES] for start in range(0, len(whole), KEY_BYTES)]


def ids_of(keys: Iterable[bytes]) -> np.ndarray:
    """Return the ids of keys, int64 ``[n]``: reverses `keys_of`."""
    return np.frombuffer(b"".join(keys), ">i8").astype(np.int64)
