"""Tables, dense layers and optimizer state of a model from TorchRec's files."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrec.embed.variables import value_like
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.torchrec.files import StateDict, open_state_dict
from jaxrec.train.torchrec.layers import Collection, DenseArray, Layers, dense_arrays, dotted
from jaxrec.train.torchrec.states import counters, dense_states, table_state_names

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

    Tables are found by their names: the entry of a table is ``....embedding_bags.NAME.weight`` or
    ``....embeddings.NAME.weight``. If several entries name the table, the entry whose path is the
    collection's path in the model is read. Dense layers are found by ``layers``, kernels transposed
    from PyTorch's order. Arrays are read one at a time, and all names and shapes are compared
    before the first one is set. PyTorch is not needed; pickles are read without running their code.

    Args:
        model: The model, on one device or on a mesh.
        path: One of

            - a file ``.safetensors`` (needs the extra ``jaxrec[torchrec]``) or ``.npz``;
            - a file of `torch.save` (``.pt``, ``.pth``, ``.bin``) with nested dictionaries of
              tensors, such as ``{"model": model.state_dict(), "optim": optimizer.state_dict()}``;
            - a directory of `torch.distributed.checkpoint`, whatever its sharding.
        layers: Paths in the model to beginnings of names in the file, such as
            ``{"over": "over_arch.model.1"}``, or ``jaxrec.train.torchrec_layers(model)``. None:
            dense layers are left alone.
        optimizer: The model's optimizer. With it, the state of row optimizers is read
            (``....state.....NAME.weight.NAME.momentum1`` and the like), that of optax for the
            layers in ``layers`` (``exp_avg``, ``exp_avg_sq``, ``square_avg``, ``momentum_buffer``,
            ``sum``), and the number of updates, where a layer has a ``step``. None: state is left
            alone.

    Returns:
        Names of the unused entries.

    Raises:
        CheckpointError: An entry is missing in the file, ambiguous, or has another shape; or the
            file cannot be read.
        KeyError: ``layers`` names what the model does not have.
        ImportError: safetensors is not installed.
        OSError: The file cannot be read.
    """
    path = pathlib.Path(path)
    dense = dense_arrays(model, layers or {})
    with open_state_dict(path) as state:
        names = _Names(state)
        tables = {
            (where, config.name): names.table(where, config.name)
            for where, collection in _collections(model).items()
            for config in collection.configs
        }
        entries = [_Entry(array, array.variable, names.find(array.name)) for array in dense]
        of_tables: dict[tuple[str, str], dict[str, str]] = {}
        steps: list[str] = []
        if optimizer is not None:
            of_tables = _state_entries(model, tables, names)
            for array, variable, keys in dense_states(optimizer, dense):
                entries.append(_Entry(array, variable, names.state(array.name, keys)))
            steps = [name for array in dense for name in names.states(array.name, ("step",))]
        collections = _collections(model)
        _check_shapes(state, collections, entries, tables, of_tables)
        step = _step(state, steps)
        try:
            _load(state, collections, entries, tables, of_tables)
        except CheckpointError as error:
            error.add_note("Parts of the model may be loaded; make it anew, or load another file.")
            raise
        if optimizer is not None and step is not None:
            for variable in counters(optimizer):
                old = variable.get_value()
                variable.set_value(jax.device_put(jnp.asarray(step, old.dtype), old.sharding))
    used = {*tables.values(), *steps, *(entry.name for entry in entries)}
    used |= {name for found in of_tables.values() for name in found.values()}
    return sorted(set(state.names) - used)


def _load(
    state: StateDict,
    collections: dict[str, Collection],
    entries: list[_Entry],
    tables: dict[tuple[str, str], str],
    of_tables: dict[tuple[str, str], dict[str, str]],
) -> None:
    """Set dense variables, tables and the state of row optimizers, one after another."""
    for entry in entries:
        value = entry.array.from_torch(state.read(entry.name))
        entry.variable.set_value(value_like(value, entry.variable.get_raw_value()))
    for (where, table), name in tables.items():
        collections[where].load_table(table, state.read(name))
    for (where, table), found in of_tables.items():
        shapes = _state_shapes(collections[where], table)
        arrays = {
            key: np.asarray(state.read(name)).astype(np.float32).reshape(shapes[key])
            for key, name in found.items()
        }
        collections[where].load_table_state(table, arrays)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A dense variable of a model or an optimizer, and its name in the file."""

    array: DenseArray
    variable: nnx.Variable
    name: str


class _Names:
    """The names of a file, and which of them are meant."""

    def __init__(self, state: StateDict) -> None:
        self._state = state
        self._by_table: dict[str, list[str]] = {}
        for name in state.names:
            # Other names, of any length, would be searched for long.
            if name.endswith(".weight") and (match := _TABLE.fullmatch(name)):
                self._by_table.setdefault(match["table"], []).append(name)

    def table(self, where: str, table: str) -> str:
        """Return the entry of a table of the collection at a path."""
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
        """Return the entry of a name, or the only one that ends so."""
        if name in self._state.names:
            return name
        found = [
            each
            for each in self._state.names
            if each.endswith(f".{name}") and not _is_state(each, name)
        ]
        return self._only(found, name)

    def states(self, name: str, keys: Sequence[str]) -> list[str]:
        """Return the optimizer's entries of a parameter."""
        return [each for each in self._state.names if _is_state_of(each, name, keys)]

    def state(self, name: str, keys: Sequence[str]) -> str:
        """Return the optimizer's entry of a parameter."""
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
    return {
        dotted(where): module
        for where, module in nnx.iter_modules(model)
        if isinstance(module, Collection)
    }


def _state_entries(
    model: nnx.Module, tables: dict[tuple[str, str], str], names: _Names
) -> dict[tuple[str, str], dict[str, str]]:
    """Return the entries of the row optimizers' state, by table and name of the state."""
    collections = _collections(model)
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


def _check_shapes(
    state: StateDict,
    collections: dict[str, Collection],
    entries: list[_Entry],
    tables: dict[tuple[str, str], str],
    of_tables: dict[tuple[str, str], dict[str, str]],
) -> None:
    """Raise a CheckpointError where an array of the file has another shape."""

    def check(name: str, what: str, *wanted: tuple[int, ...]) -> None:
        if (found := state.shape(name)) not in wanted:
            raise CheckpointError(
                f"{state.path}, {name}: {what} has shape {wanted[0]}, the file's {found}"
            )

    for entry in entries:
        what = f"PyTorch's array of {dotted(entry.array.path)}"
        check(entry.name, what, entry.array.torch_shape)
    for (where, table), name in tables.items():
        (config,) = [each for each in collections[where].configs if each.name == table]
        check(name, f"table {table!r}", (config.num_embeddings, config.embedding_dim))
    for (where, table), found in of_tables.items():
        shapes = _state_shapes(collections[where], table)
        for key, name in found.items():
            wanted = shapes[key]
            columns = [(*wanted, 1)] if len(wanted) == 1 else []  # one number a row
            check(name, f"{key} of table {table!r}", wanted, *columns)


def _state_shapes(collection: Collection, table: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a table's optimizer state."""
    (config,) = [each for each in collection.configs if each.name == table]
    stored = collection.tables.get_value().checkpoint_shapes(table).state
    return {key: (config.num_embeddings, *each.shape[1:]) for key, each in stored.items()}


def _step(state: StateDict, names: list[str]) -> int | None:
    """Return the number of updates, the same in all entries `names`; None without entries."""
    numbers = set()
    for name in names:
        if math.prod(shape := state.shape(name)) != 1:
            raise CheckpointError(f"{state.path}, {name}: a number of updates has shape {shape}")
        number = np.asarray(state.read(name)).reshape(()).item()
        if not 0 <= number < 1 << 31:
            raise CheckpointError(f"{state.path}, {name}: {number} is not a number of updates")
        numbers.add(int(number))
    if len(numbers) > 1:
        raise CheckpointError(
            f"{state.path}: layers had different numbers of steps: {sorted(numbers)}"
        )
    return next(iter(numbers), None)
