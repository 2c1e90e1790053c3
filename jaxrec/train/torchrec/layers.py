"""Dense layers of a model and the names of the same layers in TorchRec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from flax import nnx
from jaxtyping import Shaped

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.nn import DLRM, DLRM_DCN, SimpleDeepFMNN

Path: TypeAlias = tuple[Any, ...]
Layers: TypeAlias = Mapping[str, str]

Collection = EmbeddingBagCollection | EmbeddingCollection

_DLRM_COLLECTION = "sparse_arch.embedding_bag_collection"


@dataclasses.dataclass(frozen=True)
class DenseArray:
    """A dense variable of a model and its name in a state dict.

    Attributes:
        path: The variable's path in the model.
        variable: The variable.
        name: Name of the array of PyTorch.
        order: Axes of PyTorch's array in the order of the variable's; None: they are the same.
    """

    path: Path
    variable: nnx.Variable
    name: str
    order: tuple[int, ...] | None = None

    def from_torch(self, array: Any) -> Shaped[np.ndarray, "..."]:
        """Return an array of PyTorch in the variable's order of axes."""
        array = np.asarray(array)
        return array if self.order is None else array.transpose(self.order)

    def to_torch(self, array: Any) -> Shaped[np.ndarray, "..."]:
        """Return an array in PyTorch's order of axes."""
        array = np.asarray(array)
        if self.order is None:
            return array
        return np.ascontiguousarray(array.transpose(np.argsort(self.order)))


# PyTorch's names of the variables of Flax's layers.
_NAMES: dict[type[nnx.Module], dict[str, str]] = {
    nnx.Linear: {"kernel": "weight", "bias": "bias"},
    nnx.Conv: {"kernel": "weight", "bias": "bias"},
    nnx.Embed: {"embedding": "weight"},
    nnx.LayerNorm: {"scale": "weight", "bias": "bias"},
    nnx.RMSNorm: {"scale": "weight"},
    nnx.GroupNorm: {"scale": "weight", "bias": "bias"},
    nnx.BatchNorm: {
        "scale": "weight",
        "bias": "bias",
        "mean": "running_mean",
        "var": "running_var",
    },
}


def torchrec_layers(model: nnx.Module) -> dict[str, str]:
    """Return the names that a model's dense layers and collections have in TorchRec.

    For the argument ``layers`` of `load_torchrec` and `save_torchrec`: paths in the model to the
    beginnings of names in a state dict. The layers of `jaxrec.nn.DLRM`, `DLRM_DCN` and
    `SimpleDeepFMNN` have the names of TorchRec's models. Every other layer has its path in the
    model, as a model has that names its layers in Flax as in PyTorch; change what differs.

    Args:
        model: The model.

    Example:
        >>> class Ranker(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.over = nnx.Linear(4, 1, rngs=rngs)
        >>> torchrec_layers(Ranker(nnx.Rngs(0)))
        {'over': 'over'}
    """
    layers: dict[str, str] = {}
    covered: list[Path] = []
    for path, module in nnx.iter_modules(model):
        for kind, names in _MODELS.items():
            if type(module) is kind:
                prefix = "".join(f"{part}." for part in path)
                layers |= {prefix + ours: prefix + theirs for ours, theirs in names(module)}
                covered.append(path)
    for path, module in nnx.iter_modules(model):
        if any(path[: len(each)] == each for each in covered):
            continue
        if isinstance(module, Collection) or _own_variables(module):
            layers[dotted(path)] = dotted(path)
    return layers


def dense_arrays(model: nnx.Module, layers: Layers) -> list[DenseArray]:
    """Return the dense variables of some layers, with their names in PyTorch.

    Args:
        model: The model.
        layers: For layers, beginnings of names; for single variables, their names; by path.
            Collections are left out.

    Raises:
        KeyError: The model has no layer or variable of a path.
    """
    modules = {dotted(path): (path, module) for path, module in nnx.iter_modules(model)}
    arrays: list[DenseArray] = []
    for path, name in layers.items():
        if path in modules:
            where, module = modules[path]
            if isinstance(module, Collection):
                continue
            names = next((n for kind, n in _NAMES.items() if isinstance(module, kind)), {})
            prefix = f"{name}." if name else ""
            for attribute, variable in _own_variables(module).items():
                own = f"{prefix}{names.get(attribute, attribute)}"
                order = _order(module, attribute, variable)
                arrays.append(DenseArray((*where, attribute), variable, own, order))
            continue
        owner, _, attribute = path.rpartition(".")
        if owner not in modules or attribute not in _own_variables(modules[owner][1]):
            raise KeyError(
                f"layers names {path!r}, which the model does not have; "
                "jaxrec.train.torchrec_layers(model) returns its paths"
            )
        where, module = modules[owner]
        variable = _own_variables(module)[attribute]
        order = _order(module, attribute, variable)
        arrays.append(DenseArray((*where, attribute), variable, name, order))
    return arrays


def dotted(path: Path) -> str:
    """Return a path as text, its parts separated by dots."""
    return ".".join(map(str, path))


def _own_variables(module: Any) -> dict[str, nnx.Variable]:
    """Return the parameters and statistics of a module itself, by attribute."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param | nnx.BatchStat)
    }


def _order(module: Any, attribute: str, variable: nnx.Variable) -> tuple[int, ...] | None:
    """Return PyTorch's axes in the order of a variable's: kernels have inputs and outputs last."""
    if attribute != "kernel" or not isinstance(module, nnx.Linear | nnx.Conv):
        return None
    count = variable.get_value().ndim
    return (*range(2, count), 1, 0)


def _dlrm(model: Any) -> Iterator[tuple[str, str]]:
    yield "embeddings", _DLRM_COLLECTION
    for i in range(len(model.bottom.layers)):
        yield f"bottom.layers.{i}", f"dense_arch.model._mlp.{i}._linear"
    last = len(model.top.layers) - 1
    for i in range(last):
        yield f"top.layers.{i}", f"over_arch.model.0._mlp.{i}._linear"
    yield f"top.layers.{last}", "over_arch.model.1"


def _dlrm_dcn(model: Any) -> Iterator[tuple[str, str]]:
    yield from _dlrm(model)
    ours, theirs = "interaction.crossnet", "inter_arch.crossnet"
    for i in range(len(model.interaction.crossnet.down)):
        yield f"{ours}.down.{i}.kernel", f"{theirs}.V_kernels.{i}"
        yield f"{ours}.up.{i}.kernel", f"{theirs}.W_kernels.{i}"
        yield f"{ours}.up.{i}.bias", f"{theirs}.bias.{i}"


def _simple_deepfm(model: Any) -> Iterator[tuple[str, str]]:
    yield "embeddings", _DLRM_COLLECTION
    yield "dense_arch.layers.0", "dense_arch.model.0"
    yield "dense_arch.layers.1", "dense_arch.model.2"
    yield "interaction.deep.layers.0", "inter_arch.deep_fm.dense_module.0"
    yield "head", "over_arch.model.0"


_MODELS: dict[type, Callable[[Any], Iterator[tuple[str, str]]]] = {
    DLRM: _dlrm,
    DLRM_DCN: _dlrm_dcn,
    SimpleDeepFMNN: _simple_deepfm,
}
