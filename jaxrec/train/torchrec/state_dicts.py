"""Reading a model's tables, layers and optimizer state from TorchRec's files, and writing them."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrec.embed.collection import Collection, EmbeddingBagCollection
from jaxrec.embed.variables import value_like
from jaxrec.files.atomic import write_atomically
from jaxrec.mesh.agree import on_process_zero
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.torchrec.files import open_state_dict
from jaxrec.train.torchrec.layers import (
    DenseArray,
    Layers,
    counters,
    dense_arrays,
    dense_states,
    dotted,
    table_state_names,
)
from jaxrec.train.torchrec.tensors import StateDict

# Names of tables in state dicts of TorchRec's EmbeddingBagCollection and EmbeddingCollection.
_TABLE = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.(?P<table>.+)\.weight")


def load_torchrec(
    model: nnx.Module,
    path: str | os.PathLike[str],
    *,
    layers: Layers | None = None,
    optimizer: nnx.Optimizer | None = None,
) -> list[str]:
    """Set a model from a TorchRec ``state_dict``: tables, dense layers and optimizer state.

    The entry of a table is named ``....embedding_bags.NAME.weight`` or
    ``....embeddings.NAME.weight``. If several entries name the table, the one under the
    collection's path in the model is read. Dense layers are found by ``layers``; kernels are
    transposed from PyTorch's order. All names and shapes are compared before the first variable
    changes, and arrays are read one at a time. PyTorch is not needed, and pickles are read without
    running their code.

    Args:
        model: The model, on one device or on a mesh.
        path: One of

            - a file ``.safetensors`` (needs the extra ``jaxrec[torchrec]``) or ``.npz``;
            - a file of `torch.save` (``.pt``, ``.pth``, ``.bin``) with nested dictionaries of
              tensors, such as ``{"model": model.state_dict(), "optim": optimizer.state_dict()}``;
            - a directory of `torch.distributed.checkpoint`, of any sharding.
        layers: Paths in the model to beginnings of names in the file, such as
            ``{"over": "over_arch.model.1"}``, or ``jaxrec.train.torchrec_layers(model)``. None:
            dense layers stay as they are.
        optimizer: The model's optimizer. With it, three kinds of state are read: that of row
            optimizers (``....state.....NAME.weight.NAME.momentum1`` and the like); that of optax
            for the layers in ``layers`` (``exp_avg``, ``exp_avg_sq``, ``square_avg``,
            ``momentum_buffer``, ``sum``); and the number of updates, where a layer has a ``step``.
            None: state stays as it is.

    Returns:
        Names of the entries that the model does not use.

    Raises:
        CheckpointError: An entry is missing in the file, ambiguous, or has another shape; or the
            file cannot be read.
        KeyError: ``layers`` names a path that the model does not have.
        ImportError: safetensors is not installed.
        OSError: The file cannot be read.
    """
    path = pathlib.Path(path)
    dense = dense_arrays(model, layers or {})
    with open_state_dict(path) as state:
        entries = _Entries.find(state, model, dense, optimizer)
        # Every check comes before the first variable changes.
        entries.check_shapes()
        step = entries.step()
        try:
            entries.load()
        except CheckpointError as error:
            error.add_note("Parts of the model may be loaded; make it anew, or load another file.")
            raise
        if optimizer is not None and step is not None:
            for variable in counters(optimizer):
                old = variable.get_value()
                variable.set_value(jax.device_put(jnp.asarray(step, old.dtype), old.sharding))
    return sorted(set(state.names) - entries.names)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A dense variable of a model or an optimizer, and its name in the file."""

    array: DenseArray
    variable: nnx.Variable
    name: str


@dataclasses.dataclass(frozen=True)
class _Entries:
    """The entries of a file that a model takes.

    Attributes:
        state: The file.
        collections: The model's collections by dotted path.
        dense: Entries of dense layers and of their optimizer state.
        tables: Names of the tables' entries, by collection path and table name.
        of_tables: Names of the entries of row optimizers' state, by the same key and by state.
        steps: Names of the entries with the number of updates.
    """

    state: StateDict
    collections: dict[str, Collection]
    dense: list[_Entry]
    tables: dict[tuple[str, str], str]
    of_tables: dict[tuple[str, str], dict[str, str]]
    steps: list[str]

    @classmethod
    def find(
        cls,
        state: StateDict,
        model: nnx.Module,
        arrays: list[DenseArray],
        optimizer: nnx.Optimizer | None,
    ) -> _Entries:
        """Find the entries of a model and its optimizer by their names."""
        names, collections = _Names(state), _collections(model)
        tables = {
            (where, config.name): names.table(where, config.name)
            for where, collection in collections.items()
            for config in collection.configs
        }
        dense = [_Entry(array, array.variable, names.find(array.name)) for array in arrays]
        if optimizer is None:
            return cls(state, collections, dense, tables, {}, [])
        of_tables = _state_entries(collections, tables, names)
        for array, variable, keys in dense_states(optimizer, arrays):
            dense.append(_Entry(array, variable, names.state(array.name, keys)))
        steps = [name for array in arrays for name in names.states(array.name, ("step",))]
        return cls(state, collections, dense, tables, of_tables, steps)

    @property
    def names(self) -> set[str]:
        """Names of all entries."""
        of_tables = {name for found in self.of_tables.values() for name in found.values()}
        return {*self.tables.values(), *self.steps, *(x.name for x in self.dense), *of_tables}

    def check_shapes(self) -> None:
        """Raise a CheckpointError if an array of the file has another shape than its variable."""

        def check(name: str, what: str, *wanted: tuple[int, ...]) -> None:
            if (found := self.state.shape(name)) not in wanted:
                raise CheckpointError(
                    f"{self.state.path}, {name}: {what} has shape {wanted[0]}, the file's {found}"
                )

        for entry in self.dense:
            what = f"PyTorch's array of {dotted(entry.array.path)}"
            check(entry.name, what, entry.array.torch_shape)
        for (where, table), name in self.tables.items():
            (config,) = [each for each in self.collections[where].configs if each.name == table]
            check(name, f"table {table!r}", (config.num_embeddings, config.embedding_dim))
        for (where, table), found in self.of_tables.items():
            shapes = _state_shapes(self.collections[where], table)
            for key, name in found.items():
                wanted = shapes[key]
                # One number a row is `[rows]` in FBGEMM and `[rows, 1]` in torchrec.optim.
                columns = [(*wanted, 1)] if len(wanted) == 1 else []
                check(name, f"{key} of table {table!r}", wanted, *columns)

    def step(self) -> int | None:
        """Return the number of updates, the same in all ``steps``; None if there are none."""
        numbers = set()
        for name in self.steps:
            where = f"{self.state.path}, {name}"
            if math.prod(shape := self.state.shape(name)) != 1:
                raise CheckpointError(f"{where}: a number of updates has shape {shape}")
            number = np.asarray(self.state.read(name)).reshape(()).item()
            if not 0 <= number < 1 << 31:
                raise CheckpointError(f"{where}: {number} is not a number of updates")
            numbers.add(int(number))
        if len(numbers) > 1:
            raise CheckpointError(
                f"{self.state.path}: layers had different numbers of steps: {sorted(numbers)}"
            )
        return next(iter(numbers), None)

    def load(self) -> None:
        """Set dense variables, tables and the state of row optimizers, one array at a time."""
        for entry in self.dense:
            value = entry.array.from_torch(self.state.read(entry.name))
            entry.variable.set_value(value_like(value, entry.variable.get_raw_value()))
        for (where, table), name in self.tables.items():
            self.collections[where].load_table(table, self.state.read(name))
        for (where, table), found in self.of_tables.items():
            shapes = _state_shapes(self.collections[where], table)
            arrays = {
                key: np.asarray(self.state.read(name)).astype(np.float32).reshape(shapes[key])
                for key, name in found.items()
            }
            self.collections[where].load_table_state(table, arrays)


class _Names:
    """Finds the entries of a file for a model's tables, layers and optimizer state."""

    def __init__(self, state: StateDict) -> None:
        self._state = state
        self._by_table: dict[str, list[str]] = {}
        for name in state.names:
            # The regular expression backtracks, which a damaged file's long names would make slow.
            if name.endswith(".weight") and (match := _TABLE.fullmatch(name)):
                self._by_table.setdefault(match["table"], []).append(name)

    def table(self, where: str, table: str) -> str:
        """Return the entry of a table in the collection at path ``where``."""
        found = self._by_table.get(table, [])
        if len(found) > 1:
            begins = [n for n in found if n.rsplit(f".{table}.weight")[0].startswith(f"{where}.")]
            found = begins if len(begins) == 1 else found
        if len(found) != 1:
            raise CheckpointError(
                f"{self._state.path}: table {table!r} of the model's {where or 'collection'} is "
                + (f"there {len(found)} times: {', '.join(found)}" if found else "not there")
            )
        return found[0]

    def find(self, name: str) -> str:
        """Return the entry with a name, or the only entry that ends with it."""
        if name in self._state.names:
            return name
        found = [
            each
            for each in self._state.names
            if each.endswith(f".{name}") and not _is_state(each, name)
        ]
        return self._only(found, name)

    def states(self, name: str, keys: Sequence[str]) -> list[str]:
        """Return the entries with a parameter's optimizer state, named ``keys``."""
        return [each for each in self._state.names if _is_state_of(each, name, keys)]

    def state(self, name: str, keys: Sequence[str]) -> str:
        """Return the only entry that `states` finds; none or several are a CheckpointError."""
        return self._only(self.states(name, keys), f"state.{name}.{' or '.join(keys)}")

    def _only(self, found: list[str], name: str) -> str:
        if len(found) != 1:
            there = f"there {len(found)} times: {', '.join(found)}" if found else "not there"
            raise CheckpointError(f"{self._state.path}: {name} is {there}")
        return found[0]


def _is_state_of(entry: str, name: str, keys: Sequence[str]) -> bool:
    """Return whether an entry is ``[...]state.[...]NAME.[...]KEY``."""
    begin, _, key = f".{entry}".rpartition(".")
    state, parameter = begin.find(".state."), f"{begin}.".rfind(f".{name}.")
    return key in keys and 0 <= state <= parameter - len(".state")


def _is_state(name: str, suffix: str) -> bool:
    return ".state." in f".{name.removesuffix(suffix)}"


def _collections(model: nnx.Module) -> dict[str, Collection]:
    """Return a model's collections by dotted path, as state dicts have it."""
    # By the parts of the path, whose names may have slashes of their own.
    modules = nnx.iter_modules(model)
    return {dotted(path): each for path, each in modules if isinstance(each, Collection)}


def _state_entries(
    collections: dict[str, Collection], tables: dict[tuple[str, str], str], names: _Names
) -> dict[tuple[str, str], dict[str, str]]:
    """Return the names of the entries of row optimizers' state, by table and by state."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for where, table in tables:
        store = collections[where].tables.get_value()
        kept = list(store.checkpoint_shapes(table).state)
        for state in kept:
            keys = table_state_names(kept, state)
            if not keys:
                raise CheckpointError(
                    f"table {table!r}: its optimizer keeps {state!r}, which TorchRec does not "
                    "have; load without optimizer="
                )
            name = tables[where, table]
            # The optimizer may have seen the model under another name.
            kind = "embedding_bags" if ".embedding_bags." in f".{name}" else "embeddings"
            endings = (name, name.removeprefix("model."), f"{kind}.{table}.weight")
            ending = next((each for each in endings if names.states(each, keys)), endings[1])
            found.setdefault((where, table), {})[state] = names.state(ending, keys)
    return found


def _state_shapes(collection: Collection, table: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a table's optimizer state."""
    (config,) = [each for each in collection.configs if each.name == table]
    stored = collection.tables.get_value().checkpoint_shapes(table).state
    return {key: (config.num_embeddings, *each.shape[1:]) for key, each in stored.items()}


def save_torchrec(
    model: nnx.Module,
    path: str | os.PathLike[str],
    *,
    layers: Layers | None = None,
    optimizer: nnx.Optimizer | None = None,
) -> list[str]:
    """Write a model's tables, dense layers and optimizer state under TorchRec's names.

    Tables have the names ``PATH.embedding_bags.TABLE.weight`` and ``PATH.embeddings.TABLE.weight``,
    where ``PATH`` is the collection's path in the model or its name in ``layers``. Load the file in
    PyTorch by ``model.load_state_dict(safetensors.torch.load_file(path))``; entries that begin with
    ``state.`` are for the optimizer's ``load_state_dict``. `load_torchrec` reads the file. Every
    process calls this, and process 0 writes.

    Args:
        model: The model, on one device or on a mesh.
        path: File ``.safetensors`` (needs the extra ``jaxrec[torchrec]``) or ``.npz``, which
            appears when it is complete. An npz file has bfloat16 numbers as float32.
        layers: As for `load_torchrec`. None: tables alone.
        optimizer: The model's optimizer, whose state is also written; None: no state is written.

    Returns:
        Names of the entries.

    Raises:
        ValueError: The file's name has another ending, or a row optimizer keeps state that TorchRec
            does not have.
        KeyError: ``layers`` names a path that the model does not have.
        ImportError: safetensors is not installed.
        OSError: The file cannot be written.

    Example:
        >>> import jaxrec, tempfile
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=2)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "model.npz")
        >>> save_torchrec(model, path)
        ['embedding_bags.user.weight']
        >>> jaxrec.train.load_torchrec(model, path)  # unused entries
        []
    """
    path = pathlib.Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"a state dict is written to .safetensors or .npz, got {path.name}")
    layers = layers or {}
    dense = dense_arrays(model, layers)
    arrays: dict[str, Any] = {}
    for where, collection in _collections(model).items():
        prefix = layers.get(where, where)
        arrays |= _table_arrays(collection, prefix, has_state=optimizer is not None)
    for array in dense:
        arrays[array.name] = array.to_torch(array.variable.get_value())
    if optimizer is not None:
        for array, variable, keys in dense_states(optimizer, dense):
            arrays[f"state.{array.name}.{keys[0]}"] = array.to_torch(variable.get_value())
        # PyTorch keeps `step` as a float32 tensor of each parameter.
        step = np.asarray(counters(optimizer)[0].get_value(), np.float32)
        arrays |= {
            f"state.{array.name}.step": step
            for array in dense
            if isinstance(array.variable, nnx.Param)
        }
    on_process_zero(lambda: _write(path, arrays))
    return sorted(arrays)


def _table_arrays(collection: Collection, prefix: str, *, has_state: bool) -> dict[str, Any]:
    """Return the rows of a collection's tables by entry, and their state if ``has_state``."""
    kind = "embedding_bags" if isinstance(collection, EmbeddingBagCollection) else "embeddings"
    begin = f"{prefix}.{kind}" if prefix else kind
    arrays: dict[str, Any] = {}
    for config in collection.configs:
        name = f"{begin}.{config.name}.weight"
        arrays[name] = collection.table(config.name)
        if not has_state:
            continue
        state = collection.table_state(config.name)
        for key, array in state.items():
            names = table_state_names(list(state), key)
            if not names:
                raise ValueError(
                    f"table {config.name!r}: its optimizer keeps {key!r}, which TorchRec does not "
                    "have; save without optimizer="
                )
            arrays[f"state.{name}.{config.name}.{names[0]}"] = array
    return arrays


def _write(path: pathlib.Path, arrays: dict[str, Any]) -> None:
    if path.suffix == ".npz":
        wide = {name: _as_numpy(array) for name, array in arrays.items()}
        with write_atomically(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, **wide)  # type: ignore[arg-type]  # the names are not arguments
        return
    try:
        from safetensors.flax import save_file
    except ImportError:
        raise ImportError(
            "writing .safetensors needs safetensors: pip install 'jaxrec[torchrec]'"
        ) from None
    with write_atomically(path) as unfinished:
        save_file({name: jnp.asarray(array) for name, array in arrays.items()}, unfinished)


def _as_numpy(array: Any) -> np.ndarray:
    host = np.asarray(array)
    return host if host.dtype.kind in "fiub" else host.astype(np.float32)
