"""Formats of stored rows: how a row of floats becomes bytes and back."""

from jaxrec.embed.formats.base import RowFormat as RowFormat
from jaxrec.embed.formats.base import check_rows as check_rows
from jaxrec.embed.formats.floats import Float8Rows, PlainRows, ScaledFloat8Rows
from jaxrec.embed.formats.integers import IntegerRows, TrainedInt8Rows
from jaxrec.embed.formats.packed_rows import PackedRows as PackedRows
from jaxrec.embed.formats.packed_rows import TableArray as TableArray
from jaxrec.embed.formats.packed_rows import as_bits as as_bits
from jaxrec.embed.formats.packed_rows import as_table as as_table
from jaxrec.embed.formats.packed_rows import is_packed as is_packed
from jaxrec.embed.formats.packed_rows import of_bits as of_bits
from jaxrec.embed.formats.row_gather import gather_rows as gather_rows


def _by_name(*formats: RowFormat) -> dict[str, RowFormat]:
    return {row_format.name: row_format for row_format in formats}


# "int8" is in both: a trained table has float32 scales, a quantized one float16 scales.
TABLE_FORMATS = _by_name(
    PlainRows("float32"),
    PlainRows("bfloat16"),
    PlainRows("float16"),
    TrainedInt8Rows(),
    ScaledFloat8Rows("float8_e4m3fn"),
    ScaledFloat8Rows("float8_e5m2"),
)
"""Formats of tables that are trained, by the ``dtype`` of their configuration."""

FORMATS = _by_name(
    IntegerRows(bits=8),
    IntegerRows(bits=4),
    IntegerRows(bits=2),
    Float8Rows(),
    PlainRows("float16"),
    PlainRows("bfloat16"),
    PlainRows("float32"),
)
"""Formats of tables that are quantized for inference, by name."""
