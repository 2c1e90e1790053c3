"""Serving models: quantized and pruned tables."""

from jaxrec.serve.pruned_tables import PrunedTables as PrunedTables
from jaxrec.serve.pruning import Pruning as Pruning
from jaxrec.serve.pruning import by_frequency as by_frequency
from jaxrec.serve.pruning import by_norm as by_norm
from jaxrec.serve.pruning import count_ids as count_ids
from jaxrec.serve.quality import QualityReport as QualityReport
from jaxrec.serve.quality import Scores as Scores
from jaxrec.serve.quality import quality as quality
from jaxrec.serve.quantize import quantize as quantize
from jaxrec.serve.quantized_tables import QuantizedTables as QuantizedTables
from jaxrec.serve.rows import pack_rows as pack_rows
from jaxrec.serve.rows import unpack_rows as unpack_rows
from jaxrec.serve.table_quality import TableQuality as TableQuality
