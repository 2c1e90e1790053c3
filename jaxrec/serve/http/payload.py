"""Columns of a request as its body has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pyarrow as pa


@dataclasses.dataclass(frozen=True, eq=False)
class Payload:
    """The samples of a request.

    Attributes:
        columns: The columns by name: lists of a JSON body, or the table of an Arrow body.
        num_samples: Number of samples, the length of each column.
        num_bytes: Size of the body.
    """

    columns: Mapping[str, list[Any]] | pa.Table
    num_samples: int
    num_bytes: int = 0
