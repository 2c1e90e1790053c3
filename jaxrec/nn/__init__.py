"""Modules and models of recommender systems, as Flax NNX modules."""

from jaxrec.nn.dlrm import DLRM as DLRM
from jaxrec.nn.interaction import DotInteraction as DotInteraction
from jaxrec.nn.interaction import pairwise_dots as pairwise_dots
from jaxrec.nn.mlp import MLP as MLP
