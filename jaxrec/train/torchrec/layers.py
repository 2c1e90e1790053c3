"""Names of a model's dense layers, and of optimizer state, in TorchRec and PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from flax import nnx
from jaxtyping import Shaped

from jaxrec.embed.collection import Collection
from jaxrec.nn import (
    DLRM,
    DLRM_DCN,
    MLP,
    CrossNet,
    DLRM_Projection,
    InteractionProjectionArch,
    LowRankCrossNet,
    Perceptron,
    SimpleDeepFMNN,
    SwishLayerNorm,
    VectorCrossNet,
)

Path: TypeAlias = tuple[Any, ...]
Layers: TypeAlias = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class DenseArray:
    """A dense variable of a model and its array in a state dict.

    Attributes:
        path: The variable's path in the model.
        variable: The variable.
        name: Name of PyTorch's array in the state dict.
        order: For each axis of the variable, the axis of PyTorch's array; None: the same.
        is_column: Whether PyTorch has ``[n, 1]`` where the variable has ``[n]``.
    """

    path: Path
    variable: nnx.Variable
    name: str
    order: tuple[int, ...] | None = None
    is_column: bool = False

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """Shape of PyTorch's array."""
        shape = self.variable.get_value().shape
        if self.is_column:
            return (*shape, 1)
        return shape if self.order is None else tuple(shape[i] for i in np.argsort(self.order))

    def from_torch(self, array: Any) -> Shaped[np.ndarray, "..."]:
        """Return PyTorch's array with the variable's axes."""
        array = np.asarray(array)
        if self.is_column:
            return array[:, 0]
        return array if self.order is None else array.transpose(self.order)

    def to_torch(self, array: Any) -> Shaped[np.ndarray, "..."]:
        """Return the variable's array with PyTorch's axes."""
        array = np.asarray(array)
        if self.is_column:
            return array[:, None]
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

    The result is for the argument ``layers`` of `load_torchrec` and `save_torchrec`: paths in the
    model to the beginnings of names in a state dict. Models and modules of `jaxrec.nn` that
    TorchRec also has get TorchRec's names. Every other layer gets its path in the model; change the
    entry if your PyTorch model names the layer otherwise.

    Args:
        model: The model.

    Example:
        >>> import jaxrec
        >>> class Ranker(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.bottom = jaxrec.nn.MLP(3, (4,), rngs=rngs)
        ...         self.over = nnx.Linear(4, 1, rngs=rngs)
        >>> torchrec_layers(Ranker(nnx.Rngs(0)))
        {'bottom.layers.0': 'bottom._mlp.0._linear', 'over': 'over'}
    """
    modules = {path: module for path, module in nnx.iter_modules(model)}
    layers: dict[str, str] = {}
    # The names of an outer module come before those of its parts.
    for path in sorted(modules, key=len):
        prefix = f"{dotted(path)}." if path else ""
        names = _MODELS.get(type(modules[path]))
        for ours, theirs in names(modules[path]) if names is not None else ():
            layers.setdefault(prefix + ours, prefix + theirs)
    for path, module in modules.items():
        own = [dotted((*path, name)) for name in _own_variables(module)]
        has_names = dotted(path) in layers or any(name in layers for name in own)
        if not has_names and (own or isinstance(module, Collection)):
            layers[dotted(path)] = dotted(path)
    return layers


def dense_arrays(model: nnx.Module, layers: Layers) -> list[DenseArray]:
    """Return the dense variables of ``layers`` with their names in PyTorch, without collections.

    ``layers`` has, by path, a layer's beginning of names or a single variable's name.
    """
    modules = {dotted(path): (path, module) for path, module in nnx.iter_modules(model)}
    single = {
        dotted(path): (path, variable)
        for path, variable in nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    }
    with_columns = [
        f"{path}." if path else ""
        for path, (_, module) in modules.items()
        if isinstance(module, _WITH_COLUMNS)
    ]
    arrays: list[DenseArray] = []

    def add(path: Path, variable: nnx.Variable, name: str) -> None:
        owner = modules.get(dotted(path[:-1]), (path, None))[1]
        count = variable.get_value().ndim
        is_column = count == 1 and dotted(path).startswith(tuple(with_columns))
        order = _order(owner, path[-1], count)
        arrays.append(DenseArray(path, variable, name, order, is_column))

    for path, name in layers.items():
        if path in single:
            add(*single[path], name)
        elif path not in modules:
            raise KeyError(
                f"layers names {path!r}, which the model does not have; "
                "jaxrec.train.torchrec_layers(model) returns its paths"
            )
        elif not isinstance(modules[path][1], Collection):
            where, module = modules[path]
            names = next((n for kind, n in _NAMES.items() if isinstance(module, kind)), {})
            for attribute, variable in _own_variables(module).items():
                own = names.get(attribute, attribute)
                add((*where, attribute), variable, f"{name}.{own}" if name else own)
    return arrays


def dotted(path: Path) -> str:
    """Return a path as text, its parts separated by dots."""
    return ".".join(map(str, path))


def _own_variables(module: Any) -> dict[str, nnx.Variable]:
    """Return a module's own parameters and statistics, by attribute."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param | nnx.BatchStat)
    }


def _order(module: Any, attribute: Any, count: int) -> tuple[int, ...] | None:
    """Return `DenseArray.order` of a module's variable with ``count`` axes.

    Flax's kernels are ``[..., inputs, outputs]``, PyTorch's weights ``[outputs, inputs, ...]``.
    """
    if attribute != "kernel" or not isinstance(module, nnx.Linear | nnx.Conv):
        return None
    return (*range(2, count), 1, 0)


Names: TypeAlias = Iterator[tuple[str, str]]


def _within(ours: str, theirs: str, names: Names) -> Names:
    """Yield pairs of names of a submodule with its paths, ``ours`` and ``theirs``, in front."""
    for path, name in names:
        yield f"{ours}.{path}", f"{theirs}.{name}"


def _swish(module: Any) -> Names:
    yield "scale", "norm.0.weight"
    yield "bias", "norm.0.bias"


def _perceptron(module: Any) -> Names:
    yield "linear", "_linear"
    if isinstance(module.activation, SwishLayerNorm):
        yield from _within("activation", "_activation_fn", _swish(module.activation))


def _mlp(module: Any) -> Names:
    for i in range(len(module.layers)):
        yield f"layers.{i}", f"_mlp.{i}._linear"
    for i, activation in enumerate(module.activations):
        if isinstance(activation, SwishLayerNorm):
            yield from _within(f"activations.{i}", f"_mlp.{i}._activation_fn", _swish(activation))


def _cross_net(module: Any) -> Names:
    for i in range(len(module.layers)):
        yield f"layers.{i}.kernel", f"kernels.{i}"
        yield f"layers.{i}.bias", f"bias.{i}"


def _low_rank_cross_net(module: Any) -> Names:
    for i in range(len(module.down)):
        yield f"down.{i}.kernel", f"V_kernels.{i}"
        yield f"up.{i}.kernel", f"W_kernels.{i}"
        yield f"up.{i}.bias", f"bias.{i}"


def _vector_cross_net(module: Any) -> Names:
    for i in range(len(module.kernels)):
        yield f"kernels.{i}", f"kernels.{i}"
        yield f"biases.{i}", f"bias.{i}"


def _projection(module: Any) -> Names:
    for number in (1, 2):
        ours, theirs = f"branch{number}", f"interaction_branch{number}.model"
        yield from _within(ours, theirs, _mlp(getattr(module, ours)))


def _dlrm(model: Any) -> Names:
    yield "embeddings", "sparse_arch.embedding_bag_collection"
    yield from _within("bottom", "dense_arch.model", _mlp(model.bottom))
    last = f"layers.{len(model.top.layers) - 1}"
    for path, name in _mlp(model.top):
        # TorchRec's over arch is an MLP and, apart from it, the last layer.
        is_last = path == last
        yield f"top.{path}", "over_arch.model.1" if is_last else f"over_arch.model.0.{name}"


def _dlrm_dcn(model: Any) -> Names:
    yield from _dlrm(model)
    names = _low_rank_cross_net(model.interaction.crossnet)
    yield from _within("interaction.crossnet", "inter_arch.crossnet", names)


def _dlrm_projection(model: Any) -> Names:
    yield from _dlrm(model)
    yield from _within("interaction", "inter_arch", _projection(model.interaction))


def _simple_deepfm(model: Any) -> Names:
    yield "embeddings", "sparse_arch.embedding_bag_collection"
    for i in range(len(model.dense_arch.layers)):
        # TorchRec's Sequential has an activation between two layers, which counts as a module.
        yield f"dense_arch.layers.{i}", f"dense_arch.model.{2 * i}"
    yield "interaction.deep.layers.0", "inter_arch.deep_fm.dense_module.0"
    yield "head", "over_arch.model.0"


# Modules whose vectors are columns [n, 1] in TorchRec.
_WITH_COLUMNS = (CrossNet, VectorCrossNet)

_MODELS: dict[type, Callable[[Any], Names]] = {
    DLRM: _dlrm,
    DLRM_DCN: _dlrm_dcn,
    DLRM_Projection: _dlrm_projection,
    SimpleDeepFMNN: _simple_deepfm,
    MLP: _mlp,
    Perceptron: _perceptron,
    SwishLayerNorm: _swish,
    CrossNet: _cross_net,
    LowRankCrossNet: _low_rank_cross_net,
    VectorCrossNet: _vector_cross_net,
    InteractionProjectionArch: _projection,
}


# TorchRec's names of a row optimizer's states: as sharded modules write them now, as they wrote
# them before, as `FusedEmbeddingBagCollection` and as torchrec.optim's optimizers have them.
_FIRST = ("momentum1", "momentum_1")
TABLE_STATES: dict[str, tuple[str, ...]] = {
    "accumulator": (*_FIRST, "sum"),
    "first_moment": (*_FIRST, "exp_avg"),
    "second_moment": ("exp_avg_sq", "momentum2", "momentum_2"),
    "momentum": (*_FIRST, "momentum_buffer"),
    "count": ("row_counter",),
    "last_step": ("prev_iter",),
}

# For each state of optax, its names in PyTorch.
DENSE_STATES: dict[str, tuple[str, ...]] = {
    "mu": ("exp_avg",),
    "nu": ("exp_avg_sq", "square_avg"),
    "trace": ("momentum_buffer",),
    "sum_of_squares": ("sum",),
}


def table_state_names(kept: list[str], state: str) -> tuple[str, ...]:
    """Return TorchRec's names of a row optimizer's array ``state``; the first is the one to write.

    ``kept`` has the names of all arrays that the optimizer keeps.
    """
    if state == "second_moment" and "first_moment" not in kept:
        return _FIRST  # row-wise RMSprop has one state
    return TABLE_STATES.get(state, ())


def dense_states(
    optimizer: nnx.Optimizer, arrays: list[DenseArray]
) -> Iterator[tuple[DenseArray, nnx.Variable, tuple[str, ...]]]:
    """Yield each dense array, a variable of its state in optax, and PyTorch's names of that state.

    The first name is the one to write.
    """
    by_path = {array.path: array for array in arrays}
    for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
        # optax keeps a state as a tree of the parameters' paths, behind transformations of any
        # depth: "opt_state/0/mu/over/kernel".
        for position, part in enumerate(path):
            array = by_path.get(path[position + 1 :])
            if array is not None and part in DENSE_STATES:
                yield array, variable, DENSE_STATES[part]


def counters(optimizer: nnx.Optimizer) -> list[nnx.Variable]:
    """Return the variables that count an optimizer's updates, its own and those of optax."""
    found: list[Any] = [optimizer.step]
    for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
        if path[0] == "opt_state" and path[-1] == "count":
            found.append(variable)
    return found
