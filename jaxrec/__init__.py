"""Recommender models with very large embedding tables, in JAX.

The names here are what most programs need: batches (`KeyedJaggedArray`, `Packer`), tables
(`EmbeddingBagCollection`, `EmbeddingCollection`), the training step (`value_and_grad`, `Optimizer`)
and `shard`. The packages, from the bottom up:

* `files`: atomic writes, locks, manifests with checksums, files of rows
* `ragged`: ragged batches as padded arrays, and operations on them
* `optim`: row optimizers, which change the rows of tables
* `embed`: tables, lookup and fused update on one device
* `mesh`: tables over many devices: placements, shards, exchanges
* `plan`: which placement for which table
* `nn`: modules and models of recommender systems
* `metrics`: streaming metrics of predictions
* `data`: readers of data sets, vocabularies, generated logs
* `tier`: open vocabularies, and tables beyond device memory
* `train`: compiled steps, the training loop, checkpoints
* `serve`: quantization, export, prediction and the server
* `tune`: the fastest kernels for a model's shapes
* `commands`: the commands of `jaxrec` on the command line
"""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrec import data as data
    from jaxrec import embed as embed
    from jaxrec import mesh as mesh
    from jaxrec import metrics as metrics
    from jaxrec import nn as nn
    from jaxrec import optim as optim
    from jaxrec import plan as plan
    from jaxrec import ragged as ragged
    from jaxrec import serve as serve
    from jaxrec import tier as tier
    from jaxrec import train as train
    from jaxrec import tune as tune
    from jaxrec.embed import EmbeddingBagCollection as EmbeddingBagCollection
    from jaxrec.embed import EmbeddingBagConfig as EmbeddingBagConfig
    from jaxrec.embed import EmbeddingCollection as EmbeddingCollection
    from jaxrec.embed import EmbeddingConfig as EmbeddingConfig
    from jaxrec.embed import Optimizer as Optimizer
    from jaxrec.embed import mean_gradients as mean_gradients
    from jaxrec.embed import value_and_grad as value_and_grad
    from jaxrec.memory import keep_freed_memory as keep_freed_memory
    from jaxrec.mesh.sharding import shard as shard
    from jaxrec.ragged import JaggedArray as JaggedArray
    from jaxrec.ragged import KeyedArray as KeyedArray
    from jaxrec.ragged import KeyedJaggedArray as KeyedJaggedArray
    from jaxrec.ragged import Packer as Packer

    __version__: str

# Module of each name of `jaxrec` itself, which is loaded when the name is first used.
_MODULES = {
    "EmbeddingBagCollection": "jaxrec.embed",
    "EmbeddingBagConfig": "jaxrec.embed",
    "EmbeddingCollection": "jaxrec.embed",
    "EmbeddingConfig": "jaxrec.embed",
    "JaggedArray": "jaxrec.ragged",
    "KeyedArray": "jaxrec.ragged",
    "KeyedJaggedArray": "jaxrec.ragged",
    "Optimizer": "jaxrec.embed",
    "Packer": "jaxrec.ragged",
    "keep_freed_memory": "jaxrec.memory",  # loads nothing else, since it must come first
    "mean_gradients": "jaxrec.embed",
    "shard": "jaxrec.mesh.sharding",
    "value_and_grad": "jaxrec.embed",
}


def __getattr__(name: str) -> Any:
    """Load a package or a name on first use, so that ``jaxrec --help`` does not wait for JAX."""
    if name == "__version__":
        return importlib.metadata.version("jaxrec")
    if name in _MODULES:
        module = importlib.import_module(_MODULES[name])
        # As a global, Python finds the name the next time and does not call this function.
        return globals().setdefault(name, getattr(module, name))
    # Tools ask every module for names such as `__wrapped__`: do not search the disk for these.
    if not name.startswith("_") and importlib.util.find_spec(f"jaxrec.{name}") is not None:
        return importlib.import_module(f"jaxrec.{name}")
    raise AttributeError(f"module 'jaxrec' has no attribute {name!r}")


def __dir__() -> list[str]:
    modules = pkgutil.iter_modules(__spec__.submodule_search_locations)
    packages = {module.name for module in modules if module.ispkg}
    return sorted(packages | {*_MODULES, "__version__"})
