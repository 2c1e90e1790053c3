"""Files of state dicts: safetensors, npz, `torch.save` and `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.torchrec.pickles import Record, StoredTensor, TensorFile, read_metadata

METADATA_FILE = ".metadata"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")

Read = Callable[[str], "Array | np.ndarray"]


@dataclasses.dataclass(frozen=True)
class StateDict:
    """The arrays of a file by their dotted names, read one at a time.

    Attributes:
        path: The file, or the directory of a distributed checkpoint.
        names: Names of the arrays.
        read: Function that reads an array.
        shape: Function that returns the shape of an array, without reading it.
    """

    path: pathlib.Path
    names: Sequence[str]
    read: Read
    shape: Callable[[str], tuple[int, ...]]


@contextlib.contextmanager
def open_state_dict(path: pathlib.Path) -> Iterator[StateDict]:
    """Open the arrays of a file, or of a directory of `torch.distributed.checkpoint`.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: It is none of these files, or damaged.
        ImportError: The file is a safetensors file, and safetensors is not installed.
    """
    if path.is_dir():
        yield _distributed(path)
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            mapping: Mapping[str, np.ndarray] = arrays
            yield StateDict(
                path, list(arrays), lambda name: mapping[name], lambda name: _npy_shape(path, name)
            )
    elif path.suffix == ".safetensors":
        with _safetensors(path) as state:
            yield state
    elif path.suffix in TORCH_SUFFIXES:
        file = TensorFile(path, str(path))
        with contextlib.closing(file):
            tensors = dict(_flat("", file.value))
            yield StateDict(
                path,
                list(tensors),
                lambda name: _read(file, tensors[name]),
                lambda name: tuple(getattr(tensors[name], "shape", ())),
            )
    else:
        raise CheckpointError(
            f"{path}: a state dict is read from .safetensors, .npz, {', '.join(TORCH_SUFFIXES)}, "
            "or a directory of torch.distributed.checkpoint"
        )


@contextlib.contextmanager
def _safetensors(path: pathlib.Path) -> Iterator[StateDict]:
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "reading .safetensors needs safetensors: pip install 'jaxrec[torchrec]'"
        ) from None
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            yield StateDict(
                path,
                list(file.keys()),
                file.get_tensor,
                lambda name: tuple(file.get_slice(name).get_shape()),
            )
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: it cannot be read ({error})") from None


def _npy_shape(path: pathlib.Path, name: str) -> tuple[int, ...]:
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        is_first = version == (1, 0)
        read = (
            np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        )
        return read(file)[0]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of nested dictionaries by dotted names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, StoredTensor | int | float) and not isinstance(value, bool):
        yield prefix, value


def _read(file: TensorFile, value: StoredTensor | int | float) -> np.ndarray:
    return file.read(value) if isinstance(value, StoredTensor) else np.asarray(value)


def _distributed(path: pathlib.Path) -> StateDict:
    """Open a directory of `torch.distributed.checkpoint`, whatever the number of its processes."""
    if not (path / METADATA_FILE).exists():
        raise CheckpointError(
            f"{path} is not a checkpoint of torch.distributed.checkpoint: it has no {METADATA_FILE}"
        )
    metadata = read_metadata(path / METADATA_FILE)
    kinds, stored = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(kinds, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{path / METADATA_FILE} is of another version of PyTorch")
    shards: dict[str, list[tuple[tuple[int, ...], Record]]] = {}
    for index, info in stored.items():
        shards.setdefault(index.fqn, []).append((tuple(index.offset or ()), info))
    shapes = {
        name: tuple(kind.size)
        for name, kind in kinds.items()
        if type(kind).__name__ == "TensorStorageMetadata"
    }

    def read(name: str) -> np.ndarray:
        whole: np.ndarray | None = None
        count = 0
        for offset, info in shards.get(name, []):
            part = _shard(path, info)
            whole = np.empty(shapes[name], part.dtype) if whole is None else whole
            whole[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
            count += part.size
        if whole is None or count != whole.size:
            raise CheckpointError(f"{path}: shards of {name} are missing")
        return whole

    return StateDict(path, list(shapes), read, lambda name: shapes[name])


def _shard(path: pathlib.Path, info: Record) -> np.ndarray:
    """Read a shard of a tensor."""
    if info.transform_descriptors:
        raise CheckpointError(
            f"{path}: its files are compressed ({info.transform_descriptors}), and not read; save "
            "without extensions"
        )
    file = path / pathlib.PurePosixPath(info.relative_path).name
    with open(file, "rb") as content:
        content.seek(info.offset)
        part = content.read(info.length)
    if len(part) != info.length:
        raise CheckpointError(f"{file} is cut short")
    tensor = TensorFile(part, str(file))
    if not isinstance(tensor.value, StoredTensor):
        raise CheckpointError(f"{file} holds a {type(tensor.value).__name__}, not a tensor")
    return tensor.read(tensor.value)
