"""Variables of models: found by path, written to files, and sharded over a mesh."""

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
    """Return the variables of a module or an optimizer by path, such as "over/kernel"."""
    state = nnx.state(node, wanted)
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


class VariableLeaf:
    """One array of a variable that holds a pytree, with the methods of a variable."""

    def __init__(self, variable: nnx.Variable, index: int) -> None:
        self._variable, self._index = variable, index

    def get_value(self) -> Array:
        """Return the array."""
        return jax.tree.leaves(self._variable.get_value())[self._index]

    get_raw_value = get_value

    def set_value(self, value: Array) -> None:
        """Replace the array; the others of the pytree stay."""
        leaves, structure = jax.tree.flatten(self._variable.get_value())
        leaves[self._index] = value
        self._variable.set_value(jax.tree.unflatten(structure, leaves))


ArrayVariable = nnx.Variable | VariableLeaf


def dense_variables(model: nnx.Module) -> dict[str, ArrayVariable]:
    """Return all variables of a model except its tables, each with one array.

    A variable that holds a pytree has an entry for each array, such as "trie/codes/0".
    """
    named: dict[str, ArrayVariable] = {}
    for name, variable in variables(model, nnx.Not(TableVariable)).items():
        for index, (path, _) in enumerate(jax.tree.leaves_with_path(variable.get_raw_value())):
            if not path:
                named[name] = variable
                continue
            leaf = jax.tree_util.keystr(path, simple=True, separator="/")
            named[f"{name}/{leaf}"] = VariableLeaf(variable, index)
    return named


def plain(value: Array) -> Array:
    """Return an array for a file: the data of a random key, or any other array unchanged."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def value_like(value: np.ndarray, old: Array) -> Array:
    """Return an array from a file with the type and on the devices of the array it replaces."""
    if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
        new = put_like(value, jax.random.key_data(old))
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
    return put_like(value.astype(old.dtype), old)


def put_like(value: np.ndarray, old: Any) -> Array:
    """Put a value on the devices of another array."""
    if not isinstance(old, jax.Array) or len(old.sharding.device_set) == 1:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])


def is_variable(node: Any) -> bool:
    """Return whether a node of a pytree is an `nnx.Variable`; also for ``is_leaf``."""
    return isinstance(node, nnx.Variable)


_PLACEMENT = "dense_placement"


@dataclasses.dataclass(frozen=True)
class DensePlacement:
    """Sharding of a dense parameter. Layers read its shards; a subclass may gather them first."""

    sharding: NamedSharding

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of the whole array on every device."""
        return NamedSharding(self.sharding.mesh, PartitionSpec())

    def read(self, array: Array) -> Array:
        """Return the array in the form that layers use."""
        return array


class PlacedVariable(nnx.Variable):
    """A variable whose array is sharded over a mesh by its `DensePlacement`."""

    # Layers read `variable[...]` or `get_value()`, which go through the placement: mostly it
    # gathers the array. `get_raw_value()` returns the shards, for optax and for checkpoints.

    @property
    def placement(self) -> DensePlacement:
        """Sharding of the array, and how layers read it."""
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
    """Make a variable a `PlacedVariable`, in every module that shares it; its array stays."""
    # We change the class of the object, since modules share variables by identity. The new class
    # derives from the old one, so that filters such as `nnx.Param` still find the variable.
    release_variable(variable)
    variable.__class__ = _placed_kind(type(variable))
    variable.set_metadata(_PLACEMENT, placement)


def release_variable(variable: nnx.Variable) -> None:
    """Undo `place_variable`; the array stays."""
    # `place_variable` begins with this: a placed kind must not derive from a placed kind.
    if isinstance(variable, PlacedVariable):
        variable.__class__ = _kind(variable)  # type: ignore[assignment]  # a base
        variable.del_metadata(_PLACEMENT)


def gather_variables(node: Any) -> None:
    """Turn a module's placed variables into ordinary ones, whole on every device."""
    for _, variable in nnx.to_flat_state(nnx.state(node)):
        if isinstance(variable, PlacedVariable):
            variable.set_raw_value(variable.whole())
            release_variable(variable)


def without_placements(state: Any) -> Any:
    """Return a state in which placed variables are ordinary ones; arrays stay sharded."""

    def ordinary(variable: Any) -> Any:
        if not isinstance(variable, PlacedVariable):
            return variable
        metadata = variable.get_metadata()
        del metadata[_PLACEMENT]
        return _kind(variable).from_metadata(variable.get_raw_value(), metadata)

    return jax.tree.map(ordinary, state, is_leaf=is_variable)


def update_shardings(
    parameters: nnx.State, state: nnx.State
) -> list[tuple[nnx.Variable, NamedSharding]]:
    """Return all variables of both states with their shardings; none if no parameter is placed.

    ``state`` is optax's state of the parameters.
    """
    # optax's state repeats the tree of parameters, so its paths end in theirs: ("0", "mu", "over",
    # "kernel"). An array of its parameter's shape is sharded alike. All others are replicated.
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
    """Put an array over a mesh, inside a compiled function or outside."""
    if not isinstance(array, jax.core.Tracer):
        return array if array.sharding == sharding else jax.device_put(array, sharding)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)


# Cached: variables of one kind must get one class, or Flax takes equal models for different ones.
@functools.cache
def _placed_kind(kind: type[nnx.Variable]) -> type[nnx.Variable]:
    return types.new_class(f"Placed{kind.__name__}", (PlacedVariable, kind))


def _kind(variable: PlacedVariable) -> type[nnx.Variable]:
    return type(variable).__bases__[1]
