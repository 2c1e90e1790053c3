"""Serving models: quantized and pruned tables, export and prediction."""

from jaxrec._public import public_names as _public_names
from jaxrec.serve.artifact.export import export as export
from jaxrec.serve.artifact.load import ServedModel as ServedModel
from jaxrec.serve.artifact.load import load as load
from jaxrec.serve.artifact.manifest import ArtifactError as ArtifactError
from jaxrec.serve.artifact.program_file import native_calls as native_calls
from jaxrec.serve.quantized.pruned_tables import PrunedTables as PrunedTables
from jaxrec.serve.quantized.pruning import Pruning as Pruning
from jaxrec.serve.quantized.pruning import by_frequency as by_frequency
from jaxrec.serve.quantized.pruning import by_norm as by_norm
from jaxrec.serve.quantized.pruning import count_ids as count_ids
from jaxrec.serve.quantized.quality_report import QualityReport as QualityReport
from jaxrec.serve.quantized.quality_report import Scores as Scores
from jaxrec.serve.quantized.quality_report import quality as quality
from jaxrec.serve.quantized.quantize import quantize as quantize
from jaxrec.serve.quantized.rows import pack_rows as pack_rows
from jaxrec.serve.quantized.rows import unpack_rows as unpack_rows
from jaxrec.serve.quantized.saved import load_quantized as load_quantized
from jaxrec.serve.quantized.saved import restore_quantized as restore_quantized
from jaxrec.serve.quantized.saved import save_quantized as save_quantized
from jaxrec.serve.quantized.table_quality import TableQuality as TableQuality
from jaxrec.serve.ranker.caches import CacheCounts as CacheCounts
from jaxrec.serve.ranker.export import export_ranker as export_ranker
from jaxrec.serve.ranker.served import ServedRanker as ServedRanker
from jaxrec.serve.ranker.served import load_ranker as load_ranker
from jaxrec.serve.retrieval import ItemIndex as ItemIndex
from jaxrec.serve.retrieval import Neighbours as Neighbours
from jaxrec.serve.retrieval import load_index as load_index
from jaxrec.serve.retrieval import write_index as write_index
from jaxrec.serve.swap import snapshot as snapshot
from jaxrec.serve.swap import swap_tables as swap_tables

__all__ = _public_names(globals())


def __dir__() -> list[str]:
    return __all__
