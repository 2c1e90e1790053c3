"""Serving models: quantized and pruned tables, export and prediction."""

from jaxrec.serve.export import export as export
from jaxrec.serve.files import ArtifactError as ArtifactError
from jaxrec.serve.load import ServedModel as ServedModel
from jaxrec.serve.load import load as load
from jaxrec.serve.pruned_tables import PrunedTables as PrunedTables
from jaxrec.serve.pruning import Pruning as Pruning
from jaxrec.serve.pruning import by_frequency as by_frequency
from jaxrec.serve.pruning import by_norm as by_norm
from jaxrec.serve.pruning import count_ids as count_ids
from jaxrec.serve.quality_report import QualityReport as QualityReport
from jaxrec.serve.quality_report import Scores as Scores
from jaxrec.serve.quality_report import quality as quality
from jaxrec.serve.quantize import quantize as quantize
from jaxrec.serve.quantized_tables import QuantizedTables as QuantizedTables
from jaxrec.serve.rows import pack_rows as pack_rows
from jaxrec.serve.rows import unpack_rows as unpack_rows
from jaxrec.serve.saved import restore_quantized as restore_quantized
from jaxrec.serve.saved import save_quantized as save_quantized
from jaxrec.serve.saved_run import load_quantized as load_quantized
from jaxrec.serve.swap import snapshot as snapshot
from jaxrec.serve.swap import swap_tables as swap_tables
from jaxrec.serve.table_quality import TableQuality as TableQuality
