"""Layers, losses and models of recommender systems, as Flax NNX modules."""

from jaxrec._public import moved_names as _moved_names
from jaxrec._public import public_names as _public_names
from jaxrec.nn import semantic_ids as semantic_ids
from jaxrec.nn.chunks import sum_in_chunks as sum_in_chunks
from jaxrec.nn.crossnet import CrossNet as CrossNet
from jaxrec.nn.crossnet import DCNv2 as DCNv2
from jaxrec.nn.crossnet import LowRankCrossNet as LowRankCrossNet
from jaxrec.nn.crossnet import LowRankMixtureCrossNet as LowRankMixtureCrossNet
from jaxrec.nn.crossnet import VectorCrossNet as VectorCrossNet
from jaxrec.nn.deepfm import DeepFM as DeepFM
from jaxrec.nn.deepfm import FactorizationMachine as FactorizationMachine
from jaxrec.nn.deepfm import FMInteractionArch as FMInteractionArch
from jaxrec.nn.deepfm import SimpleDeepFMNN as SimpleDeepFMNN
from jaxrec.nn.deepfm import flatten_embeddings as flatten_embeddings
from jaxrec.nn.din import DIN as DIN
from jaxrec.nn.din import TargetAttention as TargetAttention
from jaxrec.nn.dlrm import DLRM as DLRM
from jaxrec.nn.dlrm import DLRM_DCN as DLRM_DCN
from jaxrec.nn.dlrm import DLRM_Projection as DLRM_Projection
from jaxrec.nn.dlrm import DotInteraction as DotInteraction
from jaxrec.nn.dlrm import InteractionArch as InteractionArch
from jaxrec.nn.dlrm import InteractionDCNArch as InteractionDCNArch
from jaxrec.nn.dlrm import InteractionProjectionArch as InteractionProjectionArch
from jaxrec.nn.event_positions import EventPositions as EventPositions
from jaxrec.nn.event_tokens import ActionEncoder as ActionEncoder
from jaxrec.nn.event_tokens import ContextTokens as ContextTokens
from jaxrec.nn.event_tokens import EventTokens as EventTokens
from jaxrec.nn.finalmlp import BilinearFusion as BilinearFusion
from jaxrec.nn.finalmlp import FinalMLP as FinalMLP
from jaxrec.nn.gdcn import GDCN as GDCN
from jaxrec.nn.gdcn import GatedCrossNet as GatedCrossNet
from jaxrec.nn.history_cache import HistoryCache as HistoryCache
from jaxrec.nn.history_sampling import stochastic_length as stochastic_length
from jaxrec.nn.hstu import HSTU as HSTU
from jaxrec.nn.hstu import HSTUBlock as HSTUBlock
from jaxrec.nn.hstu_ranker import HSTURanker as HSTURanker
from jaxrec.nn.longer import LONGER as LONGER
from jaxrec.nn.masknet import MaskBlock as MaskBlock
from jaxrec.nn.masknet import MaskNet as MaskNet
from jaxrec.nn.mlp import MLP as MLP
from jaxrec.nn.mlp import Activation as Activation
from jaxrec.nn.mlp import Dice as Dice
from jaxrec.nn.mlp import Perceptron as Perceptron
from jaxrec.nn.mlp import SwishLayerNorm as SwishLayerNorm
from jaxrec.nn.multitask import PLE as PLE
from jaxrec.nn.multitask import ExtractionLayer as ExtractionLayer
from jaxrec.nn.multitask import Gate as Gate
from jaxrec.nn.multitask import MMoE as MMoE
from jaxrec.nn.onetrans import OneTrans as OneTrans
from jaxrec.nn.pair_products import pairwise_dots as pairwise_dots
from jaxrec.nn.pepnet import GateNU as GateNU
from jaxrec.nn.pepnet import PEPNet as PEPNet
from jaxrec.nn.pools import KeyedJaggedTensorPool as KeyedJaggedTensorPool
from jaxrec.nn.pools import TensorPool as TensorPool
from jaxrec.nn.positions import (
    FeatureProcessedEmbeddingBagCollection as FeatureProcessedEmbeddingBagCollection,
)
from jaxrec.nn.positions import PositionWeightedModule as PositionWeightedModule
from jaxrec.nn.positions import PositionWeightedModuleCollection as PositionWeightedModuleCollection
from jaxrec.nn.positions import positions_in_rows as positions_in_rows
from jaxrec.nn.pruning import PrunedEmbeddings as PrunedEmbeddings
from jaxrec.nn.ranker_features import RankerFeatures as RankerFeatures
from jaxrec.nn.rankmixer import RankMixer as RankMixer
from jaxrec.nn.rankmixer import RankMixerBlock as RankMixerBlock
from jaxrec.nn.retrieval import TwoTower as TwoTower
from jaxrec.nn.retrieval import in_batch_softmax_loss as in_batch_softmax_loss
from jaxrec.nn.retrieval import sampled_softmax_loss as sampled_softmax_loss
from jaxrec.nn.semantic_id_decoder import SemanticIdDecoder as SemanticIdDecoder
from jaxrec.nn.sequence import JaggedSelfAttention as JaggedSelfAttention
from jaxrec.nn.sequence import PositionEmbedding as PositionEmbedding
from jaxrec.nn.sequence import SequenceOptions as SequenceOptions
from jaxrec.nn.sequence import candidate_scores as candidate_scores
from jaxrec.nn.sequence import last_states as last_states
from jaxrec.nn.target_tasks import TargetNorm as TargetNorm
from jaxrec.nn.target_tasks import TargetTask as TargetTask
from jaxrec.nn.target_tasks import TargetTasks as TargetTasks
from jaxrec.nn.tiled_attention import hstu_attention as hstu_attention
from jaxrec.nn.tiled_attention import jagged_attention as jagged_attention
from jaxrec.nn.tiled_attention import time_bucket as time_bucket
from jaxrec.nn.towers import DisaggregatedMultiTower as DisaggregatedMultiTower
from jaxrec.nn.towers import EmbeddingTower as EmbeddingTower
from jaxrec.nn.towers import EmbeddingTowerCollection as EmbeddingTowerCollection
from jaxrec.nn.transact import TransAct as TransAct
from jaxrec.nn.transduction import GatedNorm as GatedNorm
from jaxrec.nn.transduction import TransductionUnit as TransductionUnit
from jaxrec.nn.transduction_stack import TransductionStack as TransductionStack
from jaxrec.nn.transformers import BERT4Rec as BERT4Rec
from jaxrec.nn.transformers import BERT4RecBlock as BERT4RecBlock
from jaxrec.nn.transformers import SASRec as SASRec
from jaxrec.nn.transformers import SASRecBlock as SASRecBlock
from jaxrec.nn.wide_deep import LinearPart as LinearPart
from jaxrec.nn.wide_deep import WideDeep as WideDeep
from jaxrec.nn.wukong import Wukong as Wukong
from jaxrec.nn.wukong import WukongLayer as WukongLayer

__all__ = _public_names(globals(), "semantic_ids")

__getattr__ = _moved_names(__name__, {"Task": "jaxrec.nn.TargetTask"})


def __dir__() -> list[str]:
    return __all__
