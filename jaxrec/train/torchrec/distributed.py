"""Directories of `torch.distributed.checkpoint`, written by any number of processes.

The file ``.metadata`` names the shards of each tensor, and the file and bytes of each shard. It is
checked before any tensor is read: the shards hold every element of a tensor once, and no two of
them share a byte of a file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.torchrec.pickles import (
    PICKLE_BYTES,
    Record,
    array_shape,
    ignored,
    integer,
    integers,
    read_pickle,
    shorten,
    torch_size,
)
from jaxrec.train.torchrec.tensors import StateDict, StoredTensor, TensorFile

METADATA_FILE = ".metadata"

# Largest number of axes along which a tensor is cut: `holds_each_once` takes 2**axes corners of
# each shard. Shards of tables are cut along two.
_CUT_AXES = 8


class _Chunk(Record):
    pass


class _Metadata(Record):
    pass


class _Index(Record):
    pass


class _Tensor(Record):
    pass


class _Stored(Record):
    pass


_PACKAGE = "torch.distributed.checkpoint"
_KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch_size,
    ("torch.serialization", "_get_layout"): ignored,
    ("pathlib", "PosixPath"): ignored,
    ("pathlib", "WindowsPath"): ignored,
    ("pathlib._local", "PosixPath"): ignored,
    ("pathlib._local", "WindowsPath"): ignored,
    (f"{_PACKAGE}.filesystem", "_StorageInfo"): _Stored,
    (f"{_PACKAGE}.metadata", "_MEM_FORMAT_ENCODING"): ignored,
    (f"{_PACKAGE}.metadata", "BytesStorageMetadata"): Record,
    (f"{_PACKAGE}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_PACKAGE}.metadata", "Metadata"): _Metadata,
    (f"{_PACKAGE}.metadata", "MetadataIndex"): _Index,
    (f"{_PACKAGE}.metadata", "StorageMeta"): Record,
    (f"{_PACKAGE}.metadata", "TensorProperties"): Record,
    (f"{_PACKAGE}.metadata", "TensorStorageMetadata"): _Tensor,
}


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part of a tensor, of shape ``sizes`` from the element at ``offsets`` on.

    It is in ``length`` bytes of a file, from ``start`` on.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def open_distributed(path: pathlib.Path) -> StateDict:
    """Open a directory of `torch.distributed.checkpoint` as a state dict."""
    shapes, shards = _read_metadata(path)
    return StateDict(
        path,
        list(shapes),
        lambda name: _read(path, name, shapes[name], shards[name]),
        lambda name: shapes[name],
    )


def holds_each_once(
    shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> bool:
    """Return whether boxes, ``(offsets, sizes)`` each, hold every element of an array exactly once.

    The number of boxes over an element is the sum, over all corners at or before it, of the
    corners' signs. So the boxes' corners with their signs cancel those of the array exactly if the
    number is 1 everywhere.
    """
    # Comparing corners takes time in proportion to the number of shards, comparing shards with each
    # other its square, and counting elements the memory of the whole tensor.
    boxes = [box for box in boxes if 0 not in box[1]]
    if 0 in shape:
        return not boxes
    # Along the other axes all boxes have the array's corners.
    cut = [
        axis
        for axis, count in enumerate(shape)
        if any(offsets[axis] != 0 or sizes[axis] != count for offsets, sizes in boxes)
    ]
    if not cut:
        return len(boxes) == 1
    if len(cut) > _CUT_AXES:
        return False
    corners: collections.Counter[tuple[int, ...]] = collections.Counter()
    whole = ((0,) * len(shape), shape)
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(
                offsets[axis] + end * sizes[axis] for axis, end in zip(cut, ends, strict=True)
            )
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _read_metadata(
    path: pathlib.Path,
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[Shard]]]:
    """Return the shapes of a directory's tensors and their shards, by name."""
    file = path / METADATA_FILE
    try:
        with open(file, "rb") as opened:
            content = opened.read(min(os.fstat(opened.fileno()).st_size, PICKLE_BYTES + 1))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a checkpoint of torch.distributed.checkpoint: it has no {METADATA_FILE}"
        ) from None
    metadata = read_pickle(content, _KNOWN, str(file), "Save tensors alone")
    if not isinstance(metadata, _Metadata):
        raise CheckpointError(f"{file} holds {shorten(metadata)}, which is no metadata")
    kinds, stored = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(kinds, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{file} is of another version of PyTorch")
    try:
        shapes = {
            _text(name): array_shape(kind.size)
            for name, kind in kinds.items()
            if isinstance(kind, _Tensor)
        }
        files = _stored(stored)
        shards = {name: list(_shards(name, kinds[name], files)) for name in shapes}
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    for name, parts in shards.items():
        if not holds_each_once(shapes[name], [(part.offsets, part.sizes) for part in parts]):
            places = [f"{list(part.sizes)} at {list(part.offsets)}" for part in parts[:8]]
            raise CheckpointError(
                f"{file} is damaged: the shards of {name[:200]!r} do not hold each element of its "
                f"shape {list(shapes[name])} exactly once; there are {len(parts)}: "
                + "; ".join(places)
            )
    return shapes, shards


def _stored(stored: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Record]:
    """Return each shard's entry, which names its bytes, by tensor and offsets.

    A ValueError says that two entries share bytes, or that one is malformed.
    """
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    parts: list[tuple[str, int, int]] = []
    for index, info in stored.items():
        if not isinstance(index, _Index) or not isinstance(info, _Stored):
            raise ValueError(f"{shorten(index)} lies in {shorten(info)}")
        key = _text(index.fqn), integers(() if index.offset is None else index.offset)
        if key in places:
            raise ValueError(f"{key[0][:200]!r} has two shards at {list(key[1])}")
        places[key] = info
        file = _text(info.relative_path)
        # A damaged or malicious directory must not name files outside of it.
        if file in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(file):
            raise ValueError(f"{file[:80]!r} is not the name of a file in the directory")
        parts.append((file, integer(info.offset), integer(info.length)))
    parts.sort()
    for (file, start, length), (other, later, _) in itertools.pairwise(parts):
        if file == other and start + length > later:
            raise ValueError(f"two entries share the bytes of {file} from {later:,} on")
    return places


def _shards(
    name: str, kind: Record, places: Mapping[tuple[str, tuple[int, ...]], Record]
) -> Iterator[Shard]:
    """Yield a tensor's shards that have elements; ``places`` are the entries of `_stored`."""
    if not isinstance(kind.chunks, list):
        raise ValueError(f"{name[:200]!r} has no shards but {shorten(kind.chunks)}")
    for chunk in kind.chunks:
        if not isinstance(chunk, _Chunk):
            raise ValueError(f"{shorten(chunk)} is not a shard of {name[:200]!r}")
        offsets, sizes = integers(chunk.offsets), integers(chunk.sizes)
        if not len(offsets) == len(sizes) == len(kind.size):
            raise ValueError(
                f"{name[:200]!r} of shape {list(kind.size)} has a shard of shape {list(sizes)} at "
                f"{list(offsets)}"
            )
        if 0 in sizes:
            continue
        info = places.get((name, offsets))
        if info is None:
            raise ValueError(f"the shard of {name[:200]!r} at {list(offsets)} is in no file")
        if info.transform_descriptors:
            raise ValueError(
                f"files are compressed ({shorten(info.transform_descriptors)}), and not read; save "
                "without extensions"
            )
        yield Shard(offsets, sizes, info.relative_path, info.offset, info.length)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shorten(value)} is not a name")
    return value


def _read(
    path: pathlib.Path, name: str, shape: tuple[int, ...], shards: list[Shard]
) -> Shaped[np.ndarray, "..."]:
    """Read a tensor from its shards, which hold each element once."""
    whole: np.ndarray | None = None
    for shard in shards:
        file = path / shard.file
        with _opened(file, shard) as opened:
            stored = opened.value
            if not isinstance(stored, StoredTensor) or stored.shape != shard.sizes:
                raise CheckpointError(
                    f"{file} holds {shorten(stored)} for {name[:200]!r} at byte {shard.start:,}, "
                    f"not a tensor of shape {shard.sizes}"
                )
            part = opened.view(stored)
            whole = np.empty(shape, part.dtype) if whole is None else whole
            if part.dtype != whole.dtype:
                raise CheckpointError(
                    f"{file} holds {part.dtype} for {name[:200]!r}, and {whole.dtype} for others "
                    "of its shards"
                )
            places = zip(shard.offsets, shard.sizes, strict=True)
            # Copied shard by shard from the mapped file, so that one tensor is in memory at a time.
            whole[tuple(slice(start, start + count) for start, count in places)] = part
    return np.zeros(shape, np.float32) if whole is None else whole


@contextlib.contextmanager
def _opened(file: pathlib.Path, shard: Shard) -> Iterator[TensorFile]:
    try:
        tensor = TensorFile(file, shard.start, shard.length)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing, which {METADATA_FILE} names; copy the whole directory"
        ) from None
    with contextlib.closing(tensor):
        yield tensor
