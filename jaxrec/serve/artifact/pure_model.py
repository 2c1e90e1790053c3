"""A model as a pure function of named arrays and a batch, from which a program is exported."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.collection import TableVariable
from jaxrec.embed.formats import TABLE_FORMATS
from jaxrec.embed.layout import inference_layout
from jaxrec.embed.rows import rows_per_part
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import Tables
from jaxrec.embed.taps import tapped_modules
from jaxrec.embed.variables import PlacedVariable, dense_variables, is_variable
from jaxrec.serve.artifact.manifest import StoredTable
from jaxrec.serve.quantized.models import is_quantized, one_copy, shared_copy, stores_of


@dataclasses.dataclass(frozen=True, eq=False)
class PureModel:
    """A model in evaluation mode as a function of its arrays.

    Trained tables become tables for inference on one device with the same rows: the function has
    neither optimizer state nor a placement. Quantized tables stay quantized.

    Attributes:
        function: Function of the model and the arguments of a batch.
        dense: Arrays outside of the tables, on the host, by the path of the variable.
        stores: Inference tables of each collection, by its path, with `jax.ShapeDtypeStruct`s in
            place of arrays.
        sources: The model's own stores by the same paths, which have the rows.
        state: The model as `nnx.split` takes it apart: graph, state of the table variables, and
            all other state.
    """

    function: Callable[..., Any]
    dense: dict[str, np.ndarray]
    stores: dict[str, TableStore]
    sources: dict[str, TableStore]
    state: tuple[Any, Any, Any]

    @classmethod
    def of(cls, model: nnx.Module, function: Callable[..., Any]) -> PureModel:
        """Split a model into its arrays and a function of them."""
        if not isinstance(model, nnx.Module):
            raise TypeError(f"export takes a flax.nnx.Module, got {type(model).__name__}")
        if any(isinstance(each, PlacedVariable) for each in dense_variables(model).values()):
            model = shared_copy(model)  # with whole arrays
        sources = stores_of(model)
        for path, store in sources.items():
            _check_store(path, store)
        parts: tuple[Any, ...] = nnx.split(model, TableVariable, ...)
        # Random keys stay in the model's state: npy files have no type for them, and evaluation
        # draws no numbers.
        leaves = _named_leaves(parts[2])
        dense = {name: np.asarray(one_copy(leaf)) for name, leaf in leaves if not _is_key(leaf)}
        stores = {path: _inference_store(store) for path, store in sources.items()}
        return cls(function, dense, stores, sources, parts)

    @functools.cached_property
    def table_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the tables' arrays, by ``COLLECTION/ARRAY``."""
        return {
            f"{path}/{name}": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, store in self.stores.items()
            for name, leaf in _named_leaves(store)
        }

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of all arrays by name: those of tables, then the dense ones."""
        dense = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self.dense.items()
        }
        return self.table_shapes | dense

    def __call__(self, arrays: Mapping[str, Array], batch: Sequence[Any]) -> Any:
        """Return the function's outputs for arrays by the names of `shapes` and a batch; traced."""
        graph, tables, rest = self.state
        rest = _with_leaves(
            rest, [x if _is_key(x) else arrays[name] for name, x in _named_leaves(rest)]
        )
        # Maps to new variables: those of the split are the model's own, and setting them here would
        # leave tracers in the user's model.
        tables = jax.tree.map(lambda leaf: leaf, tables)
        model = nnx.merge(graph, tables, rest)
        for path, module in tapped_modules(model).items():
            store = self.stores[path]
            leaves = [arrays[f"{path}/{name}"] for name, _ in _named_leaves(store)]
            module.tables.set_value(_with_leaves(store, leaves))
            module.is_trainable = False
        model.eval()
        return self.function(model, *batch)

    def table_parts(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a table array's rows on the host in parts: the first row's index, and the rows.

        ``name`` is a key of `table_shapes`.
        """
        path, array = next(
            (path, array)
            for path, store in self.stores.items()
            for array, _ in _named_leaves(store)
            if f"{path}/{array}" == name
        )
        source = self.sources[path]
        if _is_packed(source):
            yield from _array_parts(dict(_named_leaves(source))[array])
            return
        group = self.stores[path].groups[array.rpartition("/")[2]]
        pack = jax.jit(group.row_format.pack)
        for table, first in zip(group.tables, group.row_offsets, strict=True):
            for start, rows in source.parts(table.name):
                yield first + start, np.asarray(pack(rows))

    def tables(self) -> Iterator[StoredTable]:
        """Yield the manifest's entry of each table, which says where in an array its rows are."""
        for path, store in self.stores.items():
            # Tables that wrap others, such as pruned ones, keep the rows in the inner tables.
            inner: Any = getattr(store, "inner", store)
            prefix = "" if inner is store else "inner/"
            formats = store.formats()
            for config in store.configs:
                group, index = inner.layout.find(config.name)
                yield StoredTable(
                    name=config.name,
                    collection=path,
                    array=f"{path}/{prefix}rows/{group.name}",
                    first_row=group.row_offsets[index],
                    num_embeddings=config.num_embeddings,
                    embedding_dim=config.embedding_dim,
                    row_format=formats[config.name].name,
                    pooling=getattr(config, "pooling", None),
                    feature_names=tuple(config.feature_names),
                )


def _check_store(path: str, store: TableStore) -> None:
    if store.placed is not store:
        names = ", ".join(repr(config.name) for config in store.configs)
        raise TypeError(
            f"tables {names} of {path or 'the model'} are kept by {type(store).__name__}, which "
            "moves rows between the table and elsewhere; export takes tables that have all of "
            "their rows, on one device or over a mesh"
        )


def _is_packed(store: TableStore) -> bool:
    """Return whether a store's arrays are exported as they are: quantized, on one device."""
    return is_quantized(store) and store.devices.mesh is None


def _inference_store(store: TableStore) -> TableStore:
    """Return inference tables for a store, with `jax.ShapeDtypeStruct`s in place of arrays."""
    if _is_packed(store):
        return jax.eval_shape(lambda: store)
    formats = {config.name: TABLE_FORMATS[str(config.dtype)] for config in store.configs}
    return jax.eval_shape(Tables({}, {}, inference_layout(store.configs, formats)).zeros)


def _array_parts(array: Array) -> Iterator[tuple[int, np.ndarray]]:
    """Yield an array on the host in parts of about 16 MiB: the first row's index, and the rows."""
    row_bytes = array.dtype.itemsize * max(1, math.prod(array.shape[1:]))
    step = rows_per_part(-(-row_bytes // 4))
    for start in range(0, array.shape[0], step):
        yield start, np.asarray(array[start : start + step])


def _with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _named_leaves(state: Any) -> list[tuple[str, Any]]:
    """Return pairs of the path of an array in a state, such as ``over/kernel``, and the array."""
    # A variable has its own name, and one that holds a pytree those of `dense_variables`.
    nodes = jax.tree.leaves_with_path(state, is_leaf=is_variable)
    named = [
        (jax.tree_util.keystr((*path, *inner), simple=True, separator="/"), leaf)
        for path, node in nodes
        for inner, leaf in jax.tree.leaves_with_path(
            node.get_raw_value() if is_variable(node) else node
        )
    ]
    return [(name.removesuffix("/stored"), leaf) for name, leaf in named]


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
