"""Semantic ids: codes of items from their vectors, and the search for items by their codes."""

from jaxrec._public import public_names as _public_names
from jaxrec.nn.semantic_ids.beams import Beams as Beams
from jaxrec.nn.semantic_ids.beams import beam_search as beam_search
from jaxrec.nn.semantic_ids.item_codes import CodeReport as CodeReport
from jaxrec.nn.semantic_ids.item_codes import SemanticIds as SemanticIds
from jaxrec.nn.semantic_ids.item_trie import ItemTrie as ItemTrie
from jaxrec.nn.semantic_ids.quantizer import Quantizer as Quantizer
from jaxrec.nn.semantic_ids.residual_kmeans import ResidualKMeans as ResidualKMeans
from jaxrec.nn.semantic_ids.rqvae import RQVAE as RQVAE

__all__ = _public_names(globals())


def __dir__() -> list[str]:
    return __all__
