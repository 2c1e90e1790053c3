"""Recommender models with very large embedding tables, in JAX."""

import importlib
import types

from jaxrec import mesh as mesh
from jaxrec import nn as nn
from jaxrec import optim as optim
from jaxrec import plan as plan
from jaxrec.embed import EmbeddingBagCollection as EmbeddingBagCollection
from jaxrec.embed import EmbeddingBagConfig as EmbeddingBagConfig
from jaxrec.embed import EmbeddingCollection as EmbeddingCollection
from jaxrec.embed import EmbeddingConfig as EmbeddingConfig
from jaxrec.embed import Optimizer as Optimizer
from jaxrec.embed import mean_gradients as mean_gradients
from jaxrec.embed import value_and_grad as value_and_grad
from jaxrec.mesh import shard as shard
from jaxrec.ragged import JaggedArray as JaggedArray
from jaxrec.ragged import KeyedArray as KeyedArray
from jaxrec.ragged import KeyedJaggedArray as KeyedJaggedArray

# These need more than JAX, Flax, optax and NumPy, and load when they are first used.
_ON_USE = ("data", "metrics", "train")


def __getattr__(name: str) -> types.ModuleType:
    if name in _ON_USE:
        return importlib.import_module(f"jaxrec.{name}")
    raise AttributeError(f"module 'jaxrec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_USE])
