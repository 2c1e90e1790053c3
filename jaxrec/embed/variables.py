"""The variables of models: by path, as arrays that files can hold, and in shards over a mesh."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrec.embed.collection import TableVariable


def variables(node: Any, wanted: Any = ...) -> dict[str, nnx.Variable]:
    """Return the variables of a module or an optimizer by their paths."""
    state = nnx.state(node, wanted)
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def dense_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Return all variables of a model except its tables."""
    return variables(model, nnx.Not(TableVariable))


def plain(value: Array) -> Array:
    """Return the data of a random key, and any other array as it is."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def value_like(value: np.ndarray, old: Array) -> Array:
    """Return an array of a file in the place of another, with its type and on its devices."""
    if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
        new = put_like(value, jax.random.key_data(old))
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
    return put_like(value.astype(old.dtype), old)


def put_like(value: np.ndarray, old: Any) -> Array:
    """Put a value on the devices of another array."""
    if not isinstance(old, jax.Array) or len(old.sharding.device_set) == 1:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])


_PLACEMENT = "dense_placement"


@dataclasses.dataclass(frozen=True)
class DensePlacement:
    """Where a dense array lies, and how it is read; here it is read as it lies.

    Attributes:
        sharding: Sharding of the array.
    """

    sharding: NamedSharding

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of the whole array on every device."""
        return NamedSharding(self.sharding.mesh, PartitionSpec())

    def read(self, array: Array) -> Array:
        """Return the array as layers use it."""
        return array


class PlacedVariable(nnx.Variable):
    """A variable whose array lies over a mesh as its `DensePlacement` says.

    Reads by ``variable[...]`` and ``get_value`` go through the placement, which gathers the array
    as a rule. ``get_raw_value`` returns the array as it lies.
    """

    @property
    def placement(self) -> DensePlacement:
        """Where the array lies."""
        return self.get_metadata(_PLACEMENT)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.get_raw_value().shape

    def whole(self) -> Array:
        """Return the whole array, on every device."""
        return put(self.get_raw_value(), self.placement.replicated)

    def get_value(self, *, index: Any = ...) -> Any:
        array = self.placement.read(super().get_value())
        return array if index is ... else array[index]


def place_variable(variable: nnx.Variable, placement: DensePlacement) -> None:
    """Make a variable a `PlacedVariable`, in every module that has it; its array stays.

    The kind of the variable stays, too: a placed `nnx.Param` is an `nnx.Param`.
    """
    release_variable(variable)
    variable.__class__ = _placed_kind(type(variable))
    variable.set_metadata(_PLACEMENT, placement)


def release_variable(variable: nnx.Variable) -> None:
    """Make a `PlacedVariable` what it was before `place_variable`; its array stays."""
    if isinstance(variable, PlacedVariable):
        variable.__class__ = _kind(variable)  # type: ignore[assignment]  # a base
        variable.del_metadata(_PLACEMENT)


def gather_variables(node: Any) -> None:
    """Make all placed variables of a module ordinary ones, whole on every device."""
    for _, variable in nnx.to_flat_state(nnx.state(node)):
        if isinstance(variable, PlacedVariable):
            variable.set_raw_value(variable.whole())
            release_variable(variable)


def without_placements(state: Any) -> Any:
    """Return a state with its placed variables as ordinary ones, whose arrays lie as before."""

    def ordinary(variable: Any) -> Any:
        if not isinstance(variable, PlacedVariable):
            return variable
        metadata = variable.get_metadata()
        del metadata[_PLACEMENT]
        return _kind(variable).from_metadata(variable.get_raw_value(), metadata)

    return jax.tree.map(ordinary, state, is_leaf=_is_variable)


def update_shardings(
    parameters: nnx.State, state: nnx.State
) -> list[tuple[nnx.Variable, NamedSharding]]:
    """Return where parameters and their optimizer state lie, if a parameter is placed.

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
        if isinstance(variable, PlacedVariable)
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


@functools.cache
def _placed_kind(kind: type[nnx.Variable]) -> type[nnx.Variable]:
    return types.new_class(f"Placed{kind.__name__}", (PlacedVariable, kind))


def _kind(variable: PlacedVariable) -> type[nnx.Variable]:
    return type(variable).__bases__[1]


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
