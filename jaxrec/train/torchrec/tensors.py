"""State dicts, whose arrays are read one at a time, and files of `torch.save`."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jaxrec.files.archive import Archive
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.torchrec.pickles import (
    PICKLE_BYTES,
    array_shape,
    ignored,
    integer,
    integers,
    read_pickle,
    shorten,
    torch_size,
)

# PyTorch's types of storages, and of their numbers.
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

# Largest pickle that is read if it is compressed, which `torch.save` does not do.
_COMPRESSED_PICKLE_BYTES = 1 << 20

_WANTED = (
    "Save plain tensors, as model.state_dict() of an unsharded model has them; sharded models are "
    "saved by torch.distributed.checkpoint"
)


@dataclasses.dataclass(frozen=True)
class StateDict:
    """The arrays of a file by dotted names.

    ``read(name)`` reads an array, ``shape(name)`` only its shape.
    """

    path: pathlib.Path
    names: Sequence[str]
    read: Callable[[str], Array | np.ndarray]
    shape: Callable[[str], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file as the file describes it, unchecked.

    Attributes:
        storage: PyTorch's name of the numbers' type, the storage's name in the file, and its number
            of elements.
        offset: Position of the tensor's first element in the storage.
        shape: Its shape.
        strides: Number of elements between neighbours along each axis.
    """

    storage: tuple[str, str, int]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    kind, of_type, key, _, elements = storage
    if kind != "storage" or not isinstance(of_type, str) or not isinstance(key, str):
        raise ValueError(f"{shorten(storage)} is not a storage")
    described = (of_type, key, integer(elements))
    tensor = StoredTensor(described, integer(offset), array_shape(shape), integers(strides))
    if len(tensor.shape) != len(tensor.strides):
        raise ValueError(f"a tensor of shape {shape} with strides {strides}")
    return tensor


def _rebuild_parameter(tensor: Any, *_: Any) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise ValueError(f"a parameter of {shorten(tensor)}")
    return tensor


def _ordered_dict() -> dict[Any, Any]:
    return {}


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): torch_size,
    ("torch", "device"): ignored,
    ("collections", "OrderedDict"): _ordered_dict,
}


class TensorFile:
    """A file that `torch.save` wrote, or the ``size`` bytes of a file from ``start`` on.

    ``value`` is its object, with a `StoredTensor` for each tensor.
    """

    def __init__(
        self, path: str | os.PathLike[str], start: int = 0, size: int | None = None
    ) -> None:
        self._where = str(path)
        self._archive = Archive(
            path,
            "a file of torch.save since PyTorch 1.6",
            CheckpointError,
            start=start,
            size=size,
        )
        try:
            self.value, self.pickle_bytes = self._unpickle()
        except BaseException:
            self.close()
            raise

    def _unpickle(self) -> tuple[Any, int]:
        names = self._archive.names
        pickled = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(pickled) != 1:
            raise CheckpointError(f"{self._where} is not a file of torch.save: it has no data.pkl")
        self._prefix = pickled[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in names and self._archive.head(order, 7) != b"little":
            raise CheckpointError(f"{self._where} has big-endian numbers, which are not read")
        size = min(self._archive.size(pickled[0]), PICKLE_BYTES + 1)
        content = self._archive.read(pickled[0], _COMPRESSED_PICKLE_BYTES)[:size].tobytes()
        return read_pickle(content, _KNOWN, self._where, _WANTED), size

    def read(self, tensor: StoredTensor) -> Shaped[np.ndarray, "..."]:
        """Return a copy of a tensor's numbers."""
        return np.array(self.view(tensor))

    def view(self, tensor: StoredTensor) -> Shaped[np.ndarray, "..."]:
        """Return a tensor as a view of the mapped file; a CheckpointError if it does not fit."""
        of_type, key, elements = tensor.storage
        if of_type not in _STORAGES:
            raise CheckpointError(
                f"{self._where}: a tensor has numbers of {of_type[:80]!r}, which is not read; "
                f"read are {', '.join(_STORAGES)}"
            )
        dtype = jnp.dtype(_STORAGES[of_type])
        entry = f"{self._prefix}data/{key}"
        count = math.prod(tensor.shape)
        if self._archive.size(entry) != elements * dtype.itemsize:
            raise CheckpointError(
                f"{self._where} is damaged: {entry!r} has {self._archive.size(entry):,} bytes, "
                f"a storage of {elements:,} {dtype} {elements * dtype.itemsize:,}"
            )
        if not count:
            return np.empty(tensor.shape, dtype)
        # No stride is negative: the last element has the largest position.
        # A stride of an axis of size 1 may be any number, which `torch.save` keeps.
        steps = [s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.strides, strict=True)]
        last = tensor.offset + sum(
            (n - 1) * step for n, step in zip(tensor.shape, steps, strict=True)
        )
        if last >= elements:
            raise CheckpointError(
                f"{self._where} is damaged: a tensor of shape {tensor.shape}, strides "
                f"{tensor.strides} and offset {tensor.offset} ends beyond its storage of "
                f"{elements:,} elements"
            )
        content = self._archive.read(entry, limit=count * dtype.itemsize)
        return np.lib.stride_tricks.as_strided(
            content.view(dtype)[tensor.offset :],
            tensor.shape,
            [step * dtype.itemsize for step in steps],
            writeable=False,
        )

    def close(self) -> None:
        """Close the file; arrays that `read` returned stay valid."""
        self._archive.close()
