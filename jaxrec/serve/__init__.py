"""Serving models: quantized tables, export and prediction."""

from jaxrec.serve.export import export as export
from jaxrec.serve.files import ArtifactError as ArtifactError
from jaxrec.serve.load import ServedModel as ServedModel
from jaxrec.serve.load import load as load
from jaxrec.serve.quantize import quantize as quantize
from jaxrec.serve.quantized_tables import QuantizedTables as QuantizedTables
from jaxrec.serve.rows import pack_rows as pack_rows
from jaxrec.serve.rows import unpack_rows as unpack_rows
