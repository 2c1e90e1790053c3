"""Formats of stored rows: how a row of floats becomes bytes and back."""

from jaxrec.embed.formats.base import RowFormat as RowFormat
from jaxrec.embed.formats.float8 import Float8Rows
from jaxrec.embed.formats.integers import IntegerRows
from jaxrec.embed.formats.plain import PlainRows

FORMATS: dict[str, RowFormat] = {
    row_format.name: row_format
    for row_format in (
        IntegerRows(bits=8),
        IntegerRows(bits=4),
        IntegerRows(bits=2),
        Float8Rows(),
        PlainRows("float16"),
        PlainRows("bfloat16"),
        PlainRows("float32"),
    )
}
"""The formats of a quantized table, by name."""
