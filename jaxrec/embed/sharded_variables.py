"""Dense variables of which each device of a mesh stores a shard."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

_PLACEMENT = "dense_placement"


@dataclasses.dataclass(frozen=True)
class DensePlacement:
    """Where the shards of a dense array lie, and how the array is read.

    Attributes:
        sharding: Sharding of the array.
        ndim: Number of axes of the array.
        is_gathered: Whether a read returns the whole array on every device. False: it returns the
            array as it lies, and XLA or the model says how layers use it.
    """

    sharding: NamedSharding
    ndim: int
    is_gathered: bool = True

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of the whole array on every device."""
        return NamedSharding(self.sharding.mesh, PartitionSpec())


class ShardedVariable(nnx.Variable):
    """A variable of which each device stores a shard.

    A read by ``variable[...]`` or ``get_value`` gathers the array, and the gradient with respect to
    the variable is scattered to the shards. ``get_raw_value`` returns the array as it lies.
    """

    @property
    def placement(self) -> DensePlacement:
        """Where the shards lie."""
        return self.get_metadata(_PLACEMENT)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.get_raw_value().shape

    def whole(self) -> Array:
        """Return the whole array, on every device."""
        return put(self.get_raw_value(), self.placement.replicated)

    def get_value(self, *, index: Any = ...) -> Any:
        array = super().get_value()
        if self.placement.is_gathered:
            array = _read(array, self.placement)
        return array if index is ... else array[index]


def shard_variable(variable: nnx.Variable, placement: DensePlacement) -> None:
    """Make a variable a `ShardedVariable`, in every module that has it; its array stays.

    The kind of the variable stays, too: a sharded `nnx.Param` is an `nnx.Param`.
    """
    unshard_variable(variable)
    variable.__class__ = _sharded_kind(type(variable))
    variable.set_metadata(_PLACEMENT, placement)


def unshard_variable(variable: nnx.Variable) -> None:
    """Make a `ShardedVariable` what it was before `shard_variable`; its array stays."""
    if isinstance(variable, ShardedVariable):
        variable.__class__ = _kind(variable)  # type: ignore[assignment]  # a base
        variable.del_metadata(_PLACEMENT)


def gather_variables(node: Any) -> None:
    """Make all sharded variables of a module ordinary ones, whole on every device."""
    for _, variable in nnx.to_flat_state(nnx.state(node)):
        if isinstance(variable, ShardedVariable):
            variable.set_raw_value(variable.whole())
            unshard_variable(variable)


def without_placements(state: Any) -> Any:
    """Return a state with its sharded variables as ordinary ones, whose arrays lie as before."""

    def ordinary(variable: Any) -> Any:
        if not isinstance(variable, ShardedVariable):
            return variable
        metadata = variable.get_metadata()
        del metadata[_PLACEMENT]
        return _kind(variable).from_metadata(variable.get_raw_value(), metadata)

    return jax.tree.map(ordinary, state, is_leaf=_is_variable)


def update_shardings(
    parameters: nnx.State, state: nnx.State
) -> list[tuple[nnx.Variable, NamedSharding]]:
    """Return where parameters and their optimizer state lie, if a parameter is sharded.

    Optimizer state lies as the parameter whose path its own path ends with, if it has the
    parameter's shape. Everything else lies on every device, whole.

    Args:
        parameters: State of the parameters.
        state: State of the optax transformation.
    """
    flat = dict(nnx.to_flat_state(parameters))
    placements = {
        path: variable.placement
        for path, variable in flat.items()
        if isinstance(variable, ShardedVariable)
    }
    if not placements:
        return []
    replicated = next(iter(placements.values())).replicated

    def sharding(path: tuple[Any, ...], variable: nnx.Variable) -> NamedSharding:
        for start in range(len(path)):
            if (owner := flat.get(path[start:])) is not None:
                same = owner.get_raw_value().shape == jax.numpy.shape(variable.get_raw_value())
                placement = placements.get(path[start:]) if same else None
                return replicated if placement is None else placement.sharding
        return replicated

    both = [*flat.items(), *nnx.to_flat_state(state)]
    return [(variable, sharding(path, variable)) for path, variable in both]


def put(array: Array, sharding: NamedSharding) -> Array:
    """Put an array over a mesh, within a compiled function or outside."""
    if not isinstance(array, jax.core.Tracer):
        return array if array.sharding == sharding else jax.device_put(array, sharding)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)


def _read(array: Array, placement: DensePlacement) -> Array:
    if array.ndim != placement.ndim:  # within nnx.scan or nnx.vmap over the array's first axis
        return put(array, placement.replicated)
    return _gather(array, placement)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(array: Array, placement: DensePlacement) -> Array:
    """Gather an array; its gradient is scattered to the shards."""
    return put(array, placement.replicated)


def _gather_forward(array: Array, placement: DensePlacement) -> tuple[Array, None]:
    return _gather(array, placement), None


def _gather_backward(placement: DensePlacement, _: None, gradient: Array) -> tuple[Array]:
    return (put(gradient, placement.sharding),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.cache
def _sharded_kind(kind: type[nnx.Variable]) -> type[nnx.Variable]:
    return types.new_class(f"Sharded{kind.__name__}", (ShardedVariable, kind))


def _kind(variable: ShardedVariable) -> type[nnx.Variable]:
    return type(variable).__bases__[1]


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
