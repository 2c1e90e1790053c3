"""Opening state dicts: safetensors, npz, `torch.save` and `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxrec.files.npz import NpzFile
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.torchrec.distributed import open_distributed
from jaxrec.train.torchrec.tensors import StateDict, StoredTensor, TensorFile

TORCH_SUFFIXES = (".pt", ".pth", ".bin")

# Types of arrays in npz and safetensors files.
_NUMPY_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_SAFETENSORS_TYPES = (
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32"),
    *("U16", "U8", "BOOL"),
)

# Deepest nesting of dictionaries, and the most characters that all names together may have for each
# byte of the pickle.
_DEPTH = 64
_NAMES_PER_BYTE = 64


@contextlib.contextmanager
def open_state_dict(path: pathlib.Path) -> Iterator[StateDict]:
    """Open the arrays of a file, or of a directory of `torch.distributed.checkpoint`."""
    if path.is_dir():
        yield open_distributed(path)
    elif path.suffix == ".npz":
        with NpzFile(path, CheckpointError) as file:
            yield StateDict(
                path,
                file.names,
                lambda name: _npy(file, name, path),
                lambda name: file.form(name).shape,
            )
    elif path.suffix == ".safetensors":
        with _safetensors(path) as state:
            yield state
    elif path.suffix in TORCH_SUFFIXES:
        with contextlib.closing(TensorFile(path)) as tensors:
            yield _torch(path, tensors)
    else:
        raise CheckpointError(
            f"{path}: a state dict is read from .safetensors, .npz, {', '.join(TORCH_SUFFIXES)}, "
            "or a directory of torch.distributed.checkpoint"
        )


def _npy(file: NpzFile, name: str, path: pathlib.Path) -> np.ndarray:
    dtype = file.form(name).dtype
    if dtype.str[1:] not in _NUMPY_TYPES:
        raise CheckpointError(f"{path}: {name!r} has type {dtype}, which is not read")
    return file.read(name)


@contextlib.contextmanager
def _safetensors(path: pathlib.Path) -> Iterator[StateDict]:
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "reading .safetensors needs safetensors: pip install 'jaxrec[torchrec]'"
        ) from None

    def read(name: str) -> Array:
        if (kind := file.get_slice(name).get_dtype()) not in _SAFETENSORS_TYPES:
            raise CheckpointError(f"{path}: {name!r} has type {kind}, which is not read")
        return file.get_tensor(name)

    try:
        with safetensors.safe_open(path, framework="flax") as file:
            yield StateDict(
                path,
                list(file.keys()),
                read,
                lambda name: tuple(file.get_slice(name).get_shape()),
            )
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: it cannot be read ({error})") from None


def _torch(path: pathlib.Path, file: TensorFile) -> StateDict:
    tensors = _flat(file.value, path, (1 << 16) + _NAMES_PER_BYTE * file.pickle_bytes)

    def read(name: str) -> np.ndarray:
        value = tensors[name]
        return file.read(value) if isinstance(value, StoredTensor) else np.asarray(value)

    return StateDict(path, list(tensors), read, lambda name: getattr(tensors[name], "shape", ()))


def _flat(value: Any, path: pathlib.Path, limit: int) -> dict[str, StoredTensor | int | float]:
    """Return the tensors and numbers of nested dictionaries by dotted names.

    All names together may have ``limit`` characters.
    """
    # Dictionaries may contain each other any number of times, so that a small pickle can make
    # endless names.
    found: dict[str, StoredTensor | int | float] = {}
    left = [("", value, 0)]
    while left:
        prefix, value, depth = left.pop()
        if isinstance(value, dict):
            inner = [(str(key), each) for key, each in value.items() if _is_name(key)]
            limit -= sum(len(prefix) + len(key) + 1 for key, _ in inner)
            if depth > _DEPTH or limit < 0:
                raise CheckpointError(
                    f"{path}: its dictionaries are nested too deeply or too often"
                )
            begin = f"{prefix}." if prefix else ""
            left += [(begin + key, each, depth + 1) for key, each in reversed(inner)]
        elif isinstance(value, StoredTensor | float) or _is_number(value):
            if prefix in found:
                raise CheckpointError(f"{path}: {prefix[:200]!r} is there more than once")
            found[prefix] = value
    return found


def _is_name(key: Any) -> bool:
    return isinstance(key, str | int | float)


def _is_number(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63
