"""Files as PyTorch writes them, and as it would not, made without it."""

from __future__ import annotations

import dataclasses
import io
import pathlib
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TYPES = {"float32": "FloatStorage", "float64": "DoubleStorage", "int64": "LongStorage"}


@dataclasses.dataclass(frozen=True)
class Global:
    """A class or a function, by its module and name."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """The result of a function."""

    function: Any
    arguments: Any


@dataclasses.dataclass(frozen=True)
class Object:
    """An object of a class, with its state."""

    kind: Any
    state: Any


@dataclasses.dataclass(frozen=True)
class Persistent:
    """What `torch.save` writes in place of a storage."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Raw:
    """Instructions as they are."""

    code: bytes


@dataclasses.dataclass(frozen=True)
class Items:
    """A dictionary of any keys, of which some may be equal."""

    pairs: Any


def pickled(value: Any) -> bytes:
    """Return the pickle of a value."""
    return b"\x80\x02" + encode(value) + b"."


def encode(value: Any) -> bytes:
    """Return the instructions that make a value."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(content)]) + content
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case tuple():
            return b"(" + b"".join(map(encode, value)) + b"t"
        case list():
            return b"](" + b"".join(map(encode, value)) + b"e"
        case dict():
            return encode(Items(value.items()))
        case Items():
            items = (encode(each) for pair in value.pairs for each in pair)
            return b"}(" + b"".join(items) + b"u"
        case Global():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            return encode(value.function) + encode(value.arguments) + b"R"
        case Object():
            return encode(value.kind) + b")\x81" + encode(value.state) + b"b"
        case Persistent():
            return encode(value.value) + b"Q"
        case Raw():
            return value.code
    raise TypeError(value)


def tensor(
    shape: Any,
    strides: Any,
    offset: Any = 0,
    *,
    elements: Any,
    key: Any = "0",
    of_type: Any = Global("torch", "FloatStorage"),
) -> Call:
    """A tensor as `torch.save` describes it."""
    storage = Persistent(("storage", of_type, key, "cpu", elements))
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    hooks = Call(Global("collections", "OrderedDict"), ())
    return Call(rebuild, (storage, offset, shape, strides, False, hooks))


def whole(array: np.ndarray, key: str = "0") -> Call:
    """A tensor that has a storage of its own."""
    strides = tuple(step // array.itemsize for step in array.strides)
    of_type = Global("torch", TYPES[array.dtype.name])
    return tensor(array.shape, strides, elements=array.size, key=key, of_type=of_type)


def torch_file(
    value: Any, storages: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED
) -> bytes:
    """Return the file of a value and its storages."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("x/data.pkl", value.code if isinstance(value, Raw) else pickled(value))
        archive.writestr("x/byteorder", "little")
        for key, content in storages.items():
            archive.writestr(f"x/data/{key}", content)
    return file.getvalue()


def tensor_file(array: np.ndarray) -> bytes:
    """Return the file of one tensor."""
    return torch_file(whole(array), {"0": array.tobytes()})


METADATA = "torch.distributed.checkpoint.metadata"


def size(numbers: Any) -> Call:
    """A ``torch.Size``."""
    return Call(Global("torch", "Size"), (numbers,))


def metadata(
    tensors: Mapping[str, tuple[Any, Sequence[tuple[Any, Any]]]],
    stored: Sequence[tuple[str, Any, Any, Any, Any]],
) -> Object:
    """The object of a file ``.metadata``.

    Args:
        tensors: For each name the shape, and the offsets and sizes of the shards.
        stored: For each shard its name, offsets, file, first byte and length.
    """
    kinds = {
        name: Object(
            Global(METADATA, "TensorStorageMetadata"),
            {
                "size": size(shape),
                "chunks": [
                    Object(
                        Global(METADATA, "ChunkStorageMetadata"),
                        {"offsets": size(offsets), "sizes": size(sizes)},
                    )
                    for offsets, sizes in chunks
                ],
            },
        )
        for name, (shape, chunks) in tensors.items()
    }
    data = Items(
        [
            (
                Object(Global(METADATA, "MetadataIndex"), {"fqn": name, "offset": size(offsets)}),
                Object(
                    Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
                    {"relative_path": file, "offset": start, "length": length},
                ),
            )
            for name, offsets, file, start, length in stored
        ]
    )
    return Object(
        Global(METADATA, "Metadata"), {"state_dict_metadata": kinds, "storage_data": data}
    )


Shards = Mapping[str, tuple[Any, Sequence[tuple[Any, np.ndarray]]]]


def write_shards(directory: pathlib.Path, tensors: Shards) -> None:
    """Write a directory of `torch.distributed.checkpoint` with one file.

    Args:
        directory: The directory, which is made.
        tensors: For each name the shape, and the offsets and the numbers of the shards.
    """
    directory.mkdir()
    stored, content = [], b""
    for name, (_, shards) in tensors.items():
        for offsets, array in shards:
            part = tensor_file(array)
            stored.append((name, offsets, "__0_0.distcp", len(content), len(part)))
            content += part
    described = {
        name: (shape, [(offsets, array.shape) for offsets, array in shards])
        for name, (shape, shards) in tensors.items()
    }
    (directory / "__0_0.distcp").write_bytes(content)
    (directory / ".metadata").write_bytes(pickled(metadata(described, stored)))
