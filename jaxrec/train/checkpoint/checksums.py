"""Checksums of all files of a checkpoint, in the file ``checksums.json``."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import zlib
from typing import Any

import jax

from jaxrec.files.manifest import THREADS, Segment, segments_of
from jaxrec.mesh.agree import gather_texts
from jaxrec.tier.stores.snapshots import MANIFEST

CHECKSUMS_FILE = "checksums.json"

# Folder with snapshots of row stores. Their files, which may be sparse and of any size, have
# checksums of their own, and the manifests of these are among the files here.
STORES = "stores"


def write_checksums(directory: pathlib.Path) -> None:
    """Write ``checksums.json`` into a checkpoint: the sizes and checksums of its files.

    Only files in subfolders count: Orbax changes the files of the folder itself afterwards.
    """
    sizes = _sizes(directory)
    files: dict[str, Any] = {file: {"bytes": size, "crc32": []} for file, size in sizes.items()}
    segments = [segment for file, size in sizes.items() for segment in segments_of(file, size)]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        checksums = threads.map(lambda segment: segment.checksum(directory), segments)
        for segment, checksum in zip(segments, checksums, strict=True):
            files[segment.file]["crc32"].append(checksum)
    (directory / CHECKSUMS_FILE).write_bytes(_content(files))


def find_damage(directory: pathlib.Path) -> str:
    """Compare the files of a checkpoint with its checksums.

    With several processes each of them calls this and reads a part of the files.

    Returns:
        The first damaged file and its damage, the same text in all processes; empty if all files
        are whole.
    """
    try:
        damage = _find_damage(directory)
    except OSError as error:
        damage = f"{error.filename} cannot be read: {error.strerror}"
    if jax.process_count() > 1:
        damage = next(filter(None, gather_texts(damage)), "")
    return damage


def _find_damage(directory: pathlib.Path) -> str:
    try:
        content = (directory / CHECKSUMS_FILE).read_bytes()
        files = json.loads(content)["files"]
        is_whole = isinstance(files, dict) and content == _content(files)
        is_whole = is_whole and all(map(_is_entry, files.values()))
    except FileNotFoundError:
        return f"{CHECKSUMS_FILE} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        return f"{CHECKSUMS_FILE} is not what was saved"
    sizes = _sizes(directory)
    for file in sorted(files.keys() | sizes.keys()):
        if file not in sizes:
            return f"{file} is missing"
        if file not in files:
            return f"{file} was added after the checkpoint was saved"
        if sizes[file] != files[file]["bytes"]:
            return f"{file} has {sizes[file]:,} bytes, {files[file]['bytes']:,} were saved"
        if len(segments_of(file, sizes[file])) != len(files[file]["crc32"]):
            return f"{CHECKSUMS_FILE} is not what was saved"
    segments = [
        (segment, checksum)
        for file, entry in files.items()
        for segment, checksum in zip(segments_of(file, entry["bytes"]), entry["crc32"], strict=True)
    ]

    def check(part: tuple[Segment, str]) -> str:
        segment, checksum = part
        try:
            is_same = segment.checksum(directory) == checksum
        except OSError as error:
            return f"{segment.file} cannot be read: {error.strerror}"
        return "" if is_same else f"{segment.file} does not have the bytes that were saved"

    mine = segments[jax.process_index() :: jax.process_count()]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        return next(filter(None, threads.map(check, mine)), "")


def _is_entry(entry: Any) -> bool:
    """Return whether a file is described by its size and a list of checksums."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("crc32"), list)
        and type(entry.get("bytes")) is int
    )


def _sizes(directory: pathlib.Path) -> dict[str, int]:
    """Return the sizes of the files in a checkpoint's subfolders, by path."""
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.glob("*/**/*"))
        if path.is_file() and (path.name == MANIFEST or directory / STORES not in path.parents)
    }


def _content(files: dict[str, Any]) -> bytes:
    """Return the content of ``checksums.json``, which ends with its own checksum."""
    crc = zlib.crc32(json.dumps(files).encode())
    return json.dumps({"files": files, "crc32_of_files": f"{crc:08x}"}, indent=1).encode()
