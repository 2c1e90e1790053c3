"""Serving models: quantized tables."""

from jaxrec.serve.quantize import quantize as quantize
from jaxrec.serve.quantized_tables import QuantizedTables as QuantizedTables
from jaxrec.serve.rows import pack_rows as pack_rows
from jaxrec.serve.rows import unpack_rows as unpack_rows
