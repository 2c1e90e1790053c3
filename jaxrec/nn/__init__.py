"""Modules and models of recommender systems, as Flax NNX modules."""

from jaxrec.nn.crossnet import CrossNet as CrossNet
from jaxrec.nn.crossnet import LowRankCrossNet as LowRankCrossNet
from jaxrec.nn.crossnet import LowRankMixtureCrossNet as LowRankMixtureCrossNet
from jaxrec.nn.crossnet import VectorCrossNet as VectorCrossNet
from jaxrec.nn.dcn import DCNv2 as DCNv2
from jaxrec.nn.deepfm import DeepFM as DeepFM
from jaxrec.nn.deepfm import FMInteractionArch as FMInteractionArch
from jaxrec.nn.deepfm import SimpleDeepFMNN as SimpleDeepFMNN
from jaxrec.nn.dlrm import DLRM as DLRM
from jaxrec.nn.dlrm import DLRM_DCN as DLRM_DCN
from jaxrec.nn.dlrm import DLRM_Projection as DLRM_Projection
from jaxrec.nn.factorization import FactorizationMachine as FactorizationMachine
from jaxrec.nn.factorization import flatten_embeddings as flatten_embeddings
from jaxrec.nn.interaction import DotInteraction as DotInteraction
from jaxrec.nn.interaction import InteractionArch as InteractionArch
from jaxrec.nn.interaction import InteractionDCNArch as InteractionDCNArch
from jaxrec.nn.interaction import InteractionProjectionArch as InteractionProjectionArch
from jaxrec.nn.interaction import pairwise_dots as pairwise_dots
from jaxrec.nn.linear import LinearPart as LinearPart
from jaxrec.nn.mlp import MLP as MLP
from jaxrec.nn.mlp import Perceptron as Perceptron
from jaxrec.nn.positions import (
    FeatureProcessedEmbeddingBagCollection as FeatureProcessedEmbeddingBagCollection,
)
from jaxrec.nn.positions import PositionWeightedModule as PositionWeightedModule
from jaxrec.nn.positions import PositionWeightedModuleCollection as PositionWeightedModuleCollection
from jaxrec.nn.positions import positions_in_rows as positions_in_rows
from jaxrec.nn.swish import SwishLayerNorm as SwishLayerNorm
from jaxrec.nn.towers import EmbeddingTower as EmbeddingTower
from jaxrec.nn.towers import EmbeddingTowerCollection as EmbeddingTowerCollection
from jaxrec.nn.wide_deep import WideDeep as WideDeep
