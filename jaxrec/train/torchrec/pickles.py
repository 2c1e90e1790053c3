"""PyTorch's files without PyTorch: pickles of known classes alone, and the arrays beside them."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jaxrec.train.checkpoint import CheckpointError

# PyTorch's types of storages and of tensors.
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class Record:
    """An object of a class of PyTorch, with its fields as attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # a field that another version of PyTorch does not have


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file that `torch.save` wrote.

    Attributes:
        dtype: NumPy's name of its type.
        key: Name of its storage in the file.
        offset: Position of its first element in the storage.
        shape: Its shape.
        strides: Number of elements between neighbours of each axis.
    """

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Unpickles objects of known classes, none of which runs code of the file."""

    def __init__(self, file: IO[bytes], known: Mapping[tuple[str, str], Any], where: str) -> None:
        super().__init__(file)
        self._known, self._where = known, where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch":
            return _STORAGES.get(name, name)
        raise CheckpointError(
            f"{self._where}: it holds an object of {module}.{name}, which is not read. Save plain "
            "tensors, as model.state_dict() of an unsharded model has them; sharded models are "
            "saved by torch.distributed.checkpoint"
        )

    def persistent_load(self, pid: Any) -> Any:
        return pid  # ("storage", type, key, device, number of elements)


def _size(*args: Any) -> tuple[int, ...]:
    return tuple(args[0]) if args else ()


def _rebuild_tensor(
    storage: tuple[Any, ...], offset: int, shape: Any, strides: Any, *_: Any
) -> StoredTensor:
    dtype, key = storage[1:3]
    return StoredTensor(dtype, key, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: StoredTensor, *_: Any) -> StoredTensor:
    return tensor


_TENSORS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): dict,
}

_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): str,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): str,
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): Record,
} | {
    (f"{_CHECKPOINT}.metadata", name): type(name, (Record,), {})
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
}


def read_metadata(path: str | os.PathLike[str]) -> Record:
    """Return the object of a ``.metadata`` file of `torch.distributed.checkpoint`.

    Raises:
        OSError: The file cannot be read.
        CheckpointError: It is another file.
    """
    with open(path, "rb") as file:
        return _load(_Unpickler(file, _METADATA, str(path)).load, path)


class TensorFile:
    """A file that `torch.save` wrote: an object, and tensors that are read one at a time.

    Args:
        file: The file's name, or its content.
        where: Name of the file in errors.

    Attributes:
        value: The object, with a `StoredTensor` for each tensor.

    Raises:
        OSError: The file cannot be read.
        CheckpointError: It is another file, or holds objects that are not read.
    """

    def __init__(self, file: str | os.PathLike[str] | bytes, where: str) -> None:
        self._where = where
        source = io.BytesIO(file) if isinstance(file, bytes) else file
        try:
            self._archive = zipfile.ZipFile(source)
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{where} is not a file of torch.save, or is cut short ({error}); PyTorch before "
                "1.6 wrote other files"
            ) from None
        names = self._archive.namelist()
        pickled = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(pickled) != 1:
            raise CheckpointError(f"{where} is not a file of torch.save: it has no data.pkl")
        self._prefix = pickled[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in names and self._archive.read(order) != b"little":
            raise CheckpointError(f"{where} has big-endian numbers, which are not read")
        with self._archive.open(pickled[0]) as data:
            self.value = _load(_Unpickler(data, _TENSORS, where).load, where)

    def read(self, tensor: StoredTensor) -> Shaped[np.ndarray, "..."]:
        """Return the numbers of a tensor.

        Raises:
            CheckpointError: The file is damaged.
        """
        dtype = jnp.dtype(tensor.dtype)
        try:
            content = self._archive.read(f"{self._prefix}data/{tensor.key}")
            storage = np.frombuffer(content, dtype)[tensor.offset :]
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
            if 0 not in tensor.shape and not 0 <= last < storage.size:
                raise ValueError("a tensor ends beyond its storage")
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{self._where} is damaged ({error})") from None
        steps = tuple(step * dtype.itemsize for step in tensor.strides)
        return np.lib.stride_tricks.as_strided(storage, tensor.shape, steps, writeable=False)

    def close(self) -> None:
        """Close the file."""
        self._archive.close()


def _load(load: Callable[[], Any], where: Any) -> Any:
    try:
        return load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{where} cannot be read as PyTorch's ({error})") from None
