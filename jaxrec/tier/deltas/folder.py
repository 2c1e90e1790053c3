"""The folder of versions: on a disk, or in an object store that PyArrow reaches.

A version is a folder of files and a manifest beside it, both named after its number and a random
token. The manifest is moved to its name last, so that a version is whole or not there. A killed
publisher leaves a folder without a manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs

from jaxrec.files.atomic import sync
from jaxrec.files.lock import locked
from jaxrec.files.manifest import CheckedStream
from jaxrec.tier.deltas.manifest import File, Files, Manifest

_NAME = re.compile(r"(\d{12})-([0-9a-f]{16})")
_MANIFEST = ".json"
_PART_BYTES = 1 << 22


class VersionError(ValueError):
    """A published version is damaged, missing, or of another model."""


@dataclasses.dataclass(frozen=True, order=True)
class VersionName:
    """Name of a version's files: its number and a random token, as in ``000000000001-9f...``."""

    version: int
    token: str

    def __str__(self) -> str:
        return f"{self.version:012d}-{self.token}"


# The versions to take over, in order, and whether each is taken as a full one.
Chain: TypeAlias = list[tuple[VersionName, bool]]


class VersionFolder:
    """A folder of versions: a path, or a URL of `pyarrow.fs.FileSystem.from_uri`.

    Methods raise a `VersionError` if a file is damaged or was removed, and an OSError if the folder
    cannot be read or written.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        if not isinstance(self.url, str) or not self.url:
            raise ValueError(f"versions are in a folder such as 'file:///versions', got {url!r}")
        scheme, separator, _ = self.url.partition("://")
        if not separator or scheme == "file":
            path = self.url
            if separator:
                host, slash, rest = path.removeprefix("file://").partition("/")
                if host not in ("", "localhost") or not slash:
                    raise ValueError(
                        f"{self.url!r} names the host {host!r}; an absolute path has three "
                        "slashes, as in 'file:///data/versions'"
                    )
                path = urllib.parse.unquote(f"/{rest}")
            self.local: pathlib.Path | None = pathlib.Path(path).absolute()
            self._files, self._path = pafs.LocalFileSystem(), str(self.local)
            return
        self.local = None
        try:
            self._files, self._path = pafs.FileSystem.from_uri(self.url)
        except (pa.ArrowException, ValueError) as error:
            raise ValueError(
                f"no folder has the URL {_without_user(self.url)!r} ({error}); use a path, or one "
                "like 'file:///data/versions', 's3://bucket/versions' or 'gs://bucket/versions'"
            ) from None

    def __str__(self) -> str:
        return _without_user(self.url)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other publishers of this machine, if the folder is on a disk."""
        with contextlib.nullcontext() if self.local is None else locked(self.local):
            yield

    # Reading.

    def names(self) -> list[VersionName]:
        """Return the names of the versions, ascending."""
        return sorted(name for name, path in self._entries() if path.endswith(_MANIFEST))

    def read_manifest(self, name: VersionName) -> Manifest:
        """Read the manifest of a version."""
        path = f"{name}{_MANIFEST}"
        try:
            with self._files.open_input_stream(self._at(path), compression=None) as stream:
                content = stream.read()
        except FileNotFoundError:
            raise VersionError(f"{self}: manifest {path} was removed") from None
        try:
            manifest = Manifest.from_json(content)
        except ValueError as error:
            raise VersionError(f"{self}: manifest {path} is damaged ({error})") from None
        if (manifest.version, manifest.token) != (name.version, name.token):
            raise VersionError(f"{self}: manifest {path} is that of version {manifest.version}")
        return manifest

    def check(self, file: File) -> None:
        """Compare a file of a version with the size and checksum in its manifest."""
        size = crc = 0
        try:
            with self._files.open_input_stream(self._at(file.name), compression=None) as stream:
                while part := stream.read(_PART_BYTES):
                    size += len(part)
                    crc = zlib.crc32(part, crc)
        except FileNotFoundError:
            raise VersionError(f"{self}: file {file.name} was removed") from None
        if size != file.bytes:
            raise VersionError(
                f"{self}: file {file.name} is damaged: it has {size:,} bytes, {file.bytes:,} were "
                "published"
            )
        if crc != file.crc32:
            raise VersionError(
                f"{self}: file {file.name} is damaged: it does not have the bytes that were "
                "published"
            )

    @contextlib.contextmanager
    def reading(self, file: File) -> Iterator[Any]:
        """Open a file for reading at any position, as a `pyarrow.NativeFile`."""
        try:
            source = self._files.open_input_file(self._at(file.name))
        except FileNotFoundError:
            raise VersionError(f"{self}: file {file.name} was removed") from None
        with source:
            try:
                yield source
            # Content that another program wrote may raise anything in Arrow and NumPy.
            except Exception as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                problem = next(iter(str(error).splitlines()), type(error).__name__)
                raise VersionError(f"{self}: file {file.name} cannot be used: {problem}") from error

    # Writing.

    def begin(self, name: VersionName) -> None:
        """Make a version's folder, and remove the folders that killed publishers left."""
        # Object stores have no locks: random tokens keep two publishers out of each other's files.
        # Readers start from manifests, so that a folder without one is never read.
        complete = set(self.names())
        for other, path in self._entries():
            if other not in complete:
                with contextlib.suppress(FileNotFoundError):
                    self._files.delete_dir(self._at(path))
        self._files.create_dir(self._at(str(name)), recursive=True)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[CheckedStream]:
        """Write a file of a version whose folder exists; ``path`` is relative to this folder."""
        with self._files.open_output_stream(self._at(path), compression=None) as stream:
            yield CheckedStream(stream)
        if self.local is not None:
            sync(self.local / path)

    def commit(self, name: VersionName, manifest: Manifest) -> None:
        """Write the manifest of a version, whose files are complete; the version then appears."""
        unfinished = f"{name}/manifest{_MANIFEST}"
        with self.writing(unfinished) as stream:
            stream.write(manifest.to_json())
        if self.local is not None:
            sync(self.local / str(name))
        self._files.move(self._at(unfinished), self._at(f"{name}{_MANIFEST}"))
        if self.local is not None:
            sync(self.local)

    def remove_before(self, version: int) -> None:
        """Remove the versions whose number is below ``version``."""
        for name in self.names():
            if name.version < version:
                # Manifests first: a version without all of its files must not be found.
                self._files.delete_file(self._at(f"{name}{_MANIFEST}"))
                self._files.delete_dir(self._at(str(name)))

    def _entries(self) -> list[tuple[VersionName, str]]:
        """Return the names and paths of the versions' manifests and folders."""
        selector = pafs.FileSelector(self._path, allow_not_found=True)
        entries = []
        for info in self._files.get_file_info(selector):
            stem = info.base_name.removesuffix(_MANIFEST)
            if found := _NAME.fullmatch(stem):
                name = VersionName(int(found.group(1)), found.group(2))
                entries.append((name, info.base_name))
        return entries

    def _at(self, path: str) -> str:
        return f"{self._path.rstrip('/')}/{path}"


class Follower:
    """Base of readers that follow the versions of a folder, from one to the next."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._folder = VersionFolder(url)
        self._name: VersionName | None = None

    @property
    def version(self) -> int:
        """Number of the version that was reached; 0 before the first."""
        return 0 if self._name is None else self._name.version

    def _chains(self, names: Sequence[VersionName]) -> Iterator[Chain]:
        """Yield the ways to the newest version, each as the versions to load, in order.

        The first has only deltas. The others begin with a full version, the newest one first. A
        caller that failed on a way takes the next one, from the version that it has reached.
        """
        if newer := [name for name in names if 0 < self.version < name.version]:
            yield [(name, False) for name in newer]
        # If its version is gone, any full one can be the first: the folder may be a new one.
        after = self.version if self._name in names else 0
        for index in reversed(range(len(names))):
            if names[index].version <= after:
                return
            with contextlib.suppress(VersionError):
                if self._folder.read_manifest(names[index]).full is not None:
                    yield [(names[index], True), *((name, False) for name in names[index + 1 :])]

    def _read_version(
        self, name: VersionName, is_full: bool, before: str
    ) -> tuple[Manifest, Files]:
        """Return a version's manifest, and its files of all rows (``is_full``) or of its changes.

        ``before`` is the token of the version before. A VersionError is raised if the version is
        damaged or does not follow that one.
        """
        manifest = self._folder.read_manifest(name)
        files = manifest.full if is_full else manifest.delta
        if files is None or not (is_full or manifest.base == before):
            raise VersionError(
                f"{self._folder}: version {name.version} does not follow the version before it: "
                "versions between them are missing, or the publisher was started again"
            )
        return manifest, files

    def _no_way(self, damage: VersionError | None) -> VersionError:
        """Return the error to raise where no chain of versions leads to the newest one.

        ``damage`` is the first error that a chain met; None: the folder has no full version.
        """
        return VersionError(
            f"{damage or f'{self._folder}: there is no full version to begin with'}; publish a "
            "full version, by jaxrec.tier.publish with full_every=1"
        )


def _without_user(url: str) -> str:
    """Return a URL without its user, password and options."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    place, mark, _ = rest.partition("?")
    _, at, place = place.rpartition("@")
    return f"{scheme}://{'...@' if at else ''}{place}{'?...' if mark else ''}"
