"""A model as a pure function of named arrays and a batch, as a program is exported from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.collection import TableVariable
from jaxrec.embed.formats import FORMATS
from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import tapped_modules
from jaxrec.serve.packing import rows_per_part, table_parts
from jaxrec.serve.quantized_tables import QuantizedTables

Function = Callable[..., Any]
"""A function of a model and the arguments of a batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class PureModel:
    """A model in evaluation mode as a function of its arrays.

    Tables become `QuantizedTables` on one device, those of floats with rows as they are, so that
    neither optimizer state nor a placement is part of the function.

    Attributes:
        function: The function of the model and a batch.
        dense: The arrays beside the tables, on the host, by the path of the variable.
        tables: The tables of each collection, by its path, with shapes for rows.
        sources: The stores that hold their rows.
        state: The model without rows: its graph, its tables' state and its other state.
    """

    function: Function
    dense: dict[str, np.ndarray]
    tables: dict[str, QuantizedTables]
    sources: dict[str, TableStore]
    state: tuple[Any, Any, Any]

    @classmethod
    def of(cls, model: nnx.Module, function: Function) -> PureModel:
        """Take a model apart.

        Raises:
            TypeError: The model is no `nnx.Module`, or rows of a table are kept elsewhere.
        """
        if not isinstance(model, nnx.Module):
            raise TypeError(f"export takes a flax.nnx.Module, got {type(model).__name__}")
        modules = tapped_modules(model)
        sources = {path: module.tables.get_value() for path, module in modules.items()}
        for path, store in sources.items():
            _check_store(path, store)
        graph, tables, rest = nnx.split(model, TableVariable, ...)
        dense = {name: _on_host(leaf) for name, leaf in _named_leaves(rest) if not _is_key(leaf)}
        return cls(
            function,
            dense,
            {path: _inference_store(store) for path, store in sources.items()},
            sources,
            (graph, tables, rest),
        )

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the arrays by name: those of tables, then the dense ones."""
        shapes = {
            f"{path}/{group}": jax.ShapeDtypeStruct(rows.shape, rows.dtype)
            for path, store in self.tables.items()
            for group, rows in store.rows.items()
        }
        for name, array in self.dense.items():
            shapes[name] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return shapes

    def __call__(self, arrays: Mapping[str, Array], batch: Sequence[Any]) -> Any:
        """Return the outputs of a batch; traced."""
        graph, tables, rest = self.state
        leaves = [
            leaf if _is_key(leaf) else arrays[name] for name, leaf in _named_leaves(rest)
        ]
        rest = jax.tree.unflatten(jax.tree.structure(rest), leaves)
        # Variables of this trace, which may be set here.
        tables = jax.tree.map(lambda leaf: leaf, tables)
        model = nnx.merge(graph, tables, rest)
        for path, module in tapped_modules(model).items():
            store = self.tables[path]
            rows = {group: arrays[f"{path}/{group}"] for group in store.rows}
            module.tables.set_value(dataclasses.replace(store, rows=rows))
            module.is_trainable = False
        model.eval()
        return self.function(model, *batch)

    def row_parts(self, path: str, group: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the stored rows of a group on the host: the first row's index, and the rows."""
        source, store = self.sources[path], self.tables[path]
        if isinstance(source, QuantizedTables):
            rows = source.rows[group]
            step = rows_per_part(-(-rows.dtype.itemsize * rows.shape[1] // 4))
            for start in range(0, rows.shape[0], step):
                yield start, np.asarray(rows[start : start + step])
            return
        this = store.groups[group]
        for table, first in zip(this.tables, this.row_offsets, strict=True):
            for start, rows in table_parts(source, table.name):
                yield first + start, np.asarray(rows, this.dtype)


def _check_store(path: str, store: TableStore) -> None:
    if store.placed is not store:
        names = ", ".join(repr(config.name) for config in store.configs)
        raise TypeError(
            f"tables {names} of {path or 'the model'} are kept by {type(store).__name__}, which "
            "moves rows between the table and elsewhere; export takes tables that have all of "
            "their rows, on one device or over a mesh"
        )


def _inference_store(store: TableStore) -> QuantizedTables:
    """Return tables for inference in the place of a store's, with shapes for rows."""
    if isinstance(store, QuantizedTables):
        return jax.eval_shape(lambda: store)
    formats = {config.name: FORMATS[jax.numpy.dtype(config.dtype).name] for config in store.configs}
    return jax.eval_shape(lambda: QuantizedTables.zeros(store.configs, formats))


def _named_leaves(state: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a state with the paths of their variables."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"), leaf)
        for path, leaf in leaves
    ]


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_host(leaf: Any) -> np.ndarray:
    """Return an array that each device has, or that lies on one, in host memory."""
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)
