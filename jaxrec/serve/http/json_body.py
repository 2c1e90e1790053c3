"""JSON bodies: columns by name, as lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from jaxrec.serve.http.errors import RequestError, invalid
from jaxrec.serve.http.input_columns import InputColumns
from jaxrec.serve.http.payload import Payload

MEDIA_TYPE = "application/json"

_PLACE = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL)


class JsonDecoder:
    """Decodes JSON bodies such as ``{"age": [31, 52], "tags": [["a"], []]}``.

    Columns that the model does not read are left out.

    Args:
        columns: The columns of the model.
        max_samples: Largest number of samples of a body.
    """

    def __init__(self, columns: InputColumns, max_samples: int) -> None:
        self._names, self._max_samples = columns.names, max_samples
        self._fields = [f"column{number}" for number in range(len(self._names))]
        fields = [
            (field, column.json_type)
            for field, column in zip(self._fields, columns.columns, strict=True)
        ]
        renamed = dict(zip(self._fields, self._names, strict=True))
        body = msgspec.defstruct("Body", fields, rename=renamed, kw_only=True)
        self._decoder = msgspec.json.Decoder(body)

    def decode(self, body: bytes | bytearray) -> Payload:
        """Return the columns of a body.

        Raises:
            RequestError: The body is not JSON, lacks a column, or has a value of another type; the
                message names the column and the sample.
        """
        try:
            decoded = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise invalid(self._explain(str(error))) from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not JSON: {error}") from None
        columns = {
            name: getattr(decoded, field)
            for name, field in zip(self._names, self._fields, strict=True)
        }
        return Payload(columns, count_samples(columns, self._max_samples), len(body))

    def _explain(self, message: str) -> str:
        if found := re.fullmatch(r"Object missing required field `(.*)`", message, re.DOTALL):
            return missing(found.group(1), self._names)
        if (found := _PLACE.fullmatch(message)) is not None:
            problem, place = found.groups()
            fitting = [name for name in self._names if place.startswith(name)]
            name = max(fitting, key=len, default=None)
            if name is not None:
                indices = re.findall(r"\[(\d+)\]", place[len(name) :])
                where = f", sample {indices[0]}" if indices else ""
                return f"column {name!r}{where}: {problem[0].lower()}{problem[1:]}"
        return f"the body must be an object of columns by name: {message}"


def missing(name: str, names: tuple[str, ...]) -> str:
    """Return the error of a body without a column."""
    return f"the request has no column {name!r}; the model reads {', '.join(map(repr, names))}"


def count_samples(columns: Mapping[str, Any], max_samples: int) -> int:
    """Return the number of samples of columns.

    Raises:
        RequestError: Columns have different numbers of samples, or too many.
    """
    sizes = {name: len(values) for name, values in columns.items()}
    (first, size), *_ = sizes.items() or [("", 0)]
    for name, other in sizes.items():
        if other != size:
            raise invalid(
                f"column {name!r} has {other} samples, but column {first!r} has {size}; give one "
                "value or list for each sample"
            )
    if size > max_samples:
        raise RequestError(
            413, f"the request has {size:,} samples, and the server takes {max_samples:,} at most"
        )
    return size


def encode(columns: Mapping[str, np.ndarray]) -> bytes:
    """Return a body of scores; a number that is not finite becomes null."""
    return msgspec.json.encode(
        {
            name: (array if array.dtype.kind in "fiub" else array.astype(np.float32)).tolist()
            for name, array in columns.items()
        }
    )
