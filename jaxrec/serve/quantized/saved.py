"""Quantized models on disk: a checkpoint of the packed rows, and the formats of the tables.

The model of a run of ``jaxrec train`` lies beside the options and the features of the run.
"""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
import yaml
from flax import nnx

from jaxrec._public import directory_second
from jaxrec.embed.collection import Collection
from jaxrec.embed.formats import FORMATS
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import Tables
from jaxrec.embed.taps import tapped_modules
from jaxrec.embed.variables import variables
from jaxrec.files.atomic import write_atomically
from jaxrec.serve.quantized.models import on_one_device, quantized_stores, shared_copy
from jaxrec.serve.quantized.pruned_tables import PrunedTables, RowMap, row_maps_of
from jaxrec.serve.quantized.quantize import empty_store
from jaxrec.train import checkpoint
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.config import load_config
from jaxrec.train.features import FEATURES_DIRECTORY, saved_encoder
from jaxrec.train.model import CONFIG_FILE, make_model

Model = TypeVar("Model", bound=nnx.Module)

FORMATS_FILE = "quantized.yaml"

# The options of the run. Not under the run's own name, by which a run is recognized and trained
# further.
RUN_FILE = "run.yaml"


class _Arrays(nnx.Module):
    """The arrays of a model, by path, as plain variables that checkpoints save byte for byte."""

    def __init__(self, model: nnx.Module) -> None:
        # Checkpoints save tables as logical float rows, which would unpack them; plain variables
        # keep the bytes.
        self.arrays = nnx.Dict(
            {name: nnx.Variable(leaf) for name, leaf in _leaves(model) if leaf.size}
        )

    def write_to(self, model: nnx.Module) -> None:
        """Set the arrays of another model with the same structure."""
        for name, variable in variables(model).items():
            paths, tree = jax.tree.flatten_with_path(variable.get_value())
            new = [
                self.arrays[key].get_value() if (key := _name(name, path)) in self.arrays else leaf
                for path, leaf in paths
            ]
            variable.set_value(jax.tree.unflatten(tree, new))


def _leaves(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for name, variable in variables(model).items():
        for path, leaf in jax.tree.leaves_with_path(variable.get_value()):
            yield _name(name, path), leaf


def _name(variable: str, path: tuple[Any, ...]) -> str:
    return variable + jax.tree_util.keystr(path)


def save_quantized(model: nnx.Module, directory: str | os.PathLike[str], *, step: int = 0) -> None:
    """Save a quantized model: the packed rows as they are, and everything else.

    It writes ``quantized.yaml``, the formats, and a checkpoint with checksums, the folder ``STEP``.
    An older checkpoint of the directory is deleted when the new one is complete.

    Args:
        model: A model that `quantize` returned, on one device or over a mesh. Tables over a mesh
            are saved as on one device, on which they lie meanwhile.
        directory: The directory, which is made if it is missing.
        step: Number of training steps of the model.

    Raises:
        TypeError: A table is not quantized; or it lies over a mesh and is cut by columns, or there
            are several processes.
        FileExistsError: The directory has checkpoints of something else, such as of training.
        OSError: A file cannot be written.

    Example:
        >>> import jaxrec, tempfile
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> small, directory = jaxrec.serve.quantize(model, "int4"), tempfile.mkdtemp()
        >>> save_quantized(small, directory)
        >>> again = restore_quantized(model, directory)
        >>> bool((again.table("user") == small.table("user")).all())
        True
    """
    quantized_stores(model)
    model = on_one_device(model)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if checkpoint.all_steps(directory) and not is_quantized(directory):
        raise FileExistsError(
            errno.EEXIST, "checkpoints of training are here; give another directory", str(directory)
        )
    described = yaml.safe_dump(_description(model), sort_keys=False)
    # Before the checkpoint: a directory whose checkpoint is complete always has its formats.
    with write_atomically(directory / FORMATS_FILE) as unfinished:
        unfinished.write_text(described)
    arrays = _Arrays(model)
    # Checkpoints take their step from an optimizer; this one trains nothing.
    optimizer = nnx.Optimizer(arrays, optax.identity(), wrt=nnx.Param)
    optimizer.step.set_value(jnp.asarray(step, jnp.uint32))
    checkpoint.save(directory, arrays, optimizer)


def is_quantized(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory has a model that `save_quantized` wrote."""
    return pathlib.Path(directory, FORMATS_FILE).exists()


@directory_second
def restore_quantized(
    model: Model, directory: str | os.PathLike[str], *, step: int | None = None
) -> Model:
    """Return the model that `save_quantized` saved; its rows have the same bytes.

    Args:
        model: A model of the same structure, float or quantized, whose values are not used. It may
            be abstract, as `nnx.eval_shape` returns it, so that no float tables take memory.
        directory: The directory.
        step: Step of the checkpoint; None: the newest.

    Raises:
        CheckpointError: There is no saved model, it is damaged, or it is of another model.
        OSError: A file cannot be read.
    """
    described = _read_description(pathlib.Path(directory))
    copy = shared_copy(model)
    for path, module in tapped_modules(copy).items():
        of_collection = described.get(path or ".")
        store = module.tables.get_value()
        names = [config.name for config in store.configs]
        if of_collection is None or [*of_collection["tables"]] != names:
            raise CheckpointError(
                f"{directory}: it has {_listed(described)}, but the model has {path or '.'} with "
                f"{', '.join(names)}; build the model as the saved one was"
            )
        module.tables.set_value(_empty_store(store, of_collection["tables"]))
        module.is_trainable = False
        if isinstance(module, Collection):
            module.dtype = of_collection["dtype"]
    for variable in variables(copy).values():
        variable.set_value(jax.tree.map(_concrete, variable.get_value()))
    arrays = _Arrays(copy)
    checkpoint.restore(arrays, directory, step=step)
    arrays.write_to(copy)
    return copy


def save_quantized_run(
    small: nnx.Module,
    run: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int,
) -> None:
    """Save the quantized model ``small`` of a run, with the run's options and column encoder."""
    run, directory = pathlib.Path(run), pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / CONFIG_FILE, directory / RUN_FILE)
    if (run / FEATURES_DIRECTORY).is_dir():
        shutil.copytree(run / FEATURES_DIRECTORY, directory / FEATURES_DIRECTORY)
    save_quantized(small, directory, step=step)


def load_quantized(directory: str | os.PathLike[str]) -> Any:
    """Load a model that ``jaxrec quantize`` wrote; its rows have the same bytes.

    The model is called as the run's: ``model(dense, features)``. Memory never holds its float
    tables.

    Args:
        directory: The directory.

    Raises:
        CheckpointError: There is no such model, or it is damaged.
        OSError: A file cannot be read.
    """
    directory = pathlib.Path(directory)
    if not (directory / RUN_FILE).exists():
        raise CheckpointError(
            f"{directory}: there is no model of jaxrec quantize here ({RUN_FILE} is missing)"
        )
    config = load_config(directory / RUN_FILE)
    encoder = saved_encoder(directory)
    model = nnx.eval_shape(lambda: make_model(config, num_steps=1, encoder=encoder)[0])
    return restore_quantized(model, directory)


def _concrete(leaf: Any) -> Any:
    """Return zeros, or random keys, for an abstract array; other arrays as they are."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _description(model: nnx.Module) -> dict[str, Any]:
    """Return the content of ``quantized.yaml``: format and rows by collection and table."""
    described: dict[str, Any] = {}
    modules = tapped_modules(model)
    for path, store in quantized_stores(model).items():
        maps = row_maps_of(store)
        formats = store.formats()
        tables = {
            config.name: {"format": formats[config.name].name}
            | ({"rows": maps[config.name].num_rows} if config.name in maps else {})
            for config in store.configs
        }
        module = modules[path]
        dtype = module.dtype if isinstance(module, Collection) else None
        described[path or "."] = {"dtype": dtype, "tables": tables}
    return described


def _read_description(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / FORMATS_FILE
    if not path.exists():
        raise CheckpointError(
            f"{directory}: there is no quantized model here ({FORMATS_FILE} is missing)"
        )
    try:
        described = yaml.safe_load(path.read_text())
        for of_collection in described.values():
            of_collection["dtype"]
            for table in of_collection["tables"].values():
                FORMATS[table["format"]]
                int(table.get("rows", 0))
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} is damaged: it is not a list of formats of tables") from None
    return described


def _empty_store(store: TableStore, tables: Mapping[str, Any]) -> Tables | PrunedTables:
    """Return a quantized store of zeros for the tables of ``store``.

    ``tables`` has the format and the number of rows of each, as ``quantized.yaml`` does.
    """
    formats = {name: FORMATS[table["format"]] for name, table in tables.items()}
    row_maps = {
        config.name: RowMap.zeros(config.num_embeddings, tables[config.name]["rows"])
        for config in store.configs
        if "rows" in tables[config.name]
    }
    return empty_store(store.configs, formats, row_maps).zeros()


def _listed(described: Mapping[str, Any]) -> str:
    return "; ".join(f"{path} with {', '.join(x['tables'])}" for path, x in described.items())
