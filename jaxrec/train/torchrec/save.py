"""A model in TorchRec's names, for those who move a model to TorchRec."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrec.atomic import write_atomically
from jaxrec.embed import EmbeddingBagCollection
from jaxrec.mesh.agree import on_process_zero
from jaxrec.train.torchrec.layers import Collection, Layers, dense_arrays, dotted
from jaxrec.train.torchrec.states import counters, dense_states, table_state_names


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
    PyTorch by ``model.load_state_dict(safetensors.torch.load_file(path))``; state has names that
    begin with ``state.`` and is for the optimizer's ``load_state_dict``. `load_torchrec` reads the
    file. With several processes all of them call this, and the first writes.

    Args:
        model: The model, on one device or on a mesh.
        path: File ``.safetensors`` (needs the extra ``jaxrec[torchrec]``) or ``.npz``, which
            appears when it is complete. An npz file has bfloat16 numbers as float32.
        layers: As for `load_torchrec`. None: tables alone.
        optimizer: The model's optimizer, whose state is written, too; None: none is.

    Returns:
        Names of the entries.

    Raises:
        ValueError: The file's name has another ending, or a row optimizer keeps state that TorchRec
            does not have.
        KeyError: ``layers`` names what the model does not have.
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
    for where, module in nnx.iter_modules(model):
        if isinstance(module, Collection):
            prefix = layers.get(dotted(where), dotted(where))
            arrays |= _table_arrays(module, prefix, has_state=optimizer is not None)
    for array in dense:
        arrays[array.name] = array.to_torch(array.variable.get_value())
    if optimizer is not None:
        for array, variable, keys in dense_states(optimizer, dense):
            arrays[f"state.{array.name}.{keys[0]}"] = array.to_torch(variable.get_value())
        step = np.asarray(counters(optimizer)[0].get_value(), np.float32)
        arrays |= {
            f"state.{array.name}.step": step
            for array in dense
            if isinstance(array.variable, nnx.Param)
        }
    on_process_zero(lambda: _write(path, arrays))
    return sorted(arrays)


def _table_arrays(collection: Collection, prefix: str, *, has_state: bool) -> dict[str, Any]:
    """Return the rows of a collection's tables, and their state."""
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
