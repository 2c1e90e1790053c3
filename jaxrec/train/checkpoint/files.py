"""The files of checkpoints, with their checksums and metadata, and the policy that keeps some."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import jax
import msgspec

from jaxrec.files import manifest
from jaxrec.files.lock import locked
from jaxrec.files.manifest import StoredFile, describe_files
from jaxrec.mesh.agree import gather_texts, on_process_zero
from jaxrec.tier.stores.snapshots import MANIFEST

CHECKSUMS_FILE = "checksums.json"

# Folder with snapshots of row stores. Their files, which may be sparse and of any size, have
# checksums of their own, and the manifests of these are among the files that are checked here.
STORES = "stores"

# Orbax adds this to the name of an incomplete checkpoint.
UNFINISHED = ".orbax-checkpoint-tmp"

# Entries of a checkpoint's folder.
_ENTRIES = ("state", "tables", "run", STORES, "_CHECKPOINT_METADATA", CHECKSUMS_FILE)

# Largest capacity factor that is restored. The worst case of an exchange is the number of devices.
_LARGEST_FACTOR = 1e9

Content = TypeVar("Content")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or was saved from another model."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A part of a model or a checkpoint that was not loaded because the other does not match it.

    Attributes:
        kind: "collection", "table", "optimizer of table" (the state of its rows), "vocabulary",
            "variable", "optimizer variable" or "state" (of the run, such as that of metrics).
        name: Name of the table or vocabulary; path of the collection or variable.
        reason: Why it was not loaded; the end of a sentence.
        collection: Path of a table's collection.

    Example:
        >>> print(Difference("table", "user", "is not in the checkpoint", "embeddings"))
        the table 'user' is not in the checkpoint
    """

    kind: str
    name: str
    reason: str
    collection: str = ""

    def __str__(self) -> str:
        return f"the {self.kind} {self.name!r} {self.reason}"


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """The step, batches, metrics and plan of a checkpoint.

    Attributes:
        step: Number of training steps.
        batches: Number of batches used; a resumed run continues with the next one.
        metrics: Metrics by name, by which a `PreservationPolicy` ranks checkpoints.
        plan: The sharding plan as JSON. The model restores to any other plan as well.
        differences: The parts that ``restore(..., partial=True)`` did not load.
        reader: State of the batches in each process, for batches that go on by it
            (`jaxrec.data.StreamBatches`); (): the batches have none.
    """

    step: int
    batches: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    plan: str | None = None
    differences: tuple[Difference, ...] = dataclasses.field(default=(), repr=False)
    reader: tuple[str, ...] = dataclasses.field(default=(), repr=False)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Place of a checkpoint in a chain of incremental ones.

    Attributes:
        token: Random text that identifies this checkpoint; empty if no other can build on it.
        base: Step of the checkpoint before, on which it builds; None: it is full.
        base_token: Token of that checkpoint.
    """

    token: str
    base: int | None
    base_token: str


NO_LINK = Link("", None, "")


class _Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Capacity factor of an exchange, as `jaxrec.mesh.ahead.describe_capacities` returns it."""

    collection: str
    group: str
    devices: int
    exchange: str
    factor: float


class _RunFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``run/metadata``; earlier versions of jaxrec wrote fewer entries."""

    step: int
    batches: int | None = None
    metrics: dict[str, float] = {}
    plan: str | None = None
    has_checksums: bool = False
    link: Link = NO_LINK
    capacities: list[_Capacity] = []
    reader: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PreservationPolicy:
    """Rule that chooses the checkpoints to keep; others are deleted after each save.

    Attributes:
        latest: Number of newest checkpoints to keep.
        best: Number of checkpoints with the best ``metric`` to keep besides the newest.
        metric: Name of a saved metric.
        mode: Whether the largest ("max") or the smallest ("min") value is the best.

    Raises:
        ValueError: A number is below 1 (``best``: 0), or ``best`` has no ``metric``.
    """

    latest: int = 1
    best: int = 0
    metric: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.latest < 1 or self.best < 0 or (self.best and self.metric is None):
            raise ValueError(
                f"latest must be 1 or more and best 0 or more, and best needs a metric; got {self}"
            )

    def preserved(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return the steps of the checkpoints to keep.

        Args:
            metrics: The metrics of each checkpoint by its step.

        Example:
            >>> policy = PreservationPolicy(latest=1, best=1, metric="auc")
            >>> sorted(policy.preserved({1: {"auc": 0.7}, 2: {"auc": 0.6}, 3: {}}))
            [1, 3]
        """
        return {*sorted(metrics)[-self.latest :], *self.ranked(metrics)[: self.best]}

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps of the checkpoints that have the metric, the best first."""
        sign = 1 if self.mode == "max" else -1
        rated = [
            (sign * value, step)
            for step, values in metrics.items()
            for name, value in values.items()
            if name == self.metric and not math.isnan(value)
        ]
        return [step for _, step in sorted(rated, reverse=True)]


@contextlib.contextmanager
def lock_directory(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a run's directory against other runs, and make it if needed.

    A process may lock a directory several times. Every process calls this; process 0 holds the
    lock.
    """
    with contextlib.ExitStack() as stack:
        # One process stands for the run: the others would find the directory locked.
        on_process_zero(
            lambda: stack.enter_context(locked(directory, is_shared=True)),
            (BlockingIOError, OSError),
        )
        yield


def all_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, ascending."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_checkpoint(path))


def is_checkpoint(path: pathlib.Path) -> bool:
    """Return whether a folder has a step's number as name and a file of a checkpoint in it."""
    is_step = path.name.isdecimal() and path.name == str(int(path.name))
    return is_step and any((path / name).exists() for name in _ENTRIES)


def best_step(directory: str | os.PathLike[str], policy: PreservationPolicy) -> int | None:
    """Return the step of the best checkpoint in a directory; None if the policy keeps no best."""
    directory = pathlib.Path(directory)
    if not policy.best:
        return None
    ranked = policy.ranked(
        {step: read_run(directory / str(step)).metrics for step in all_steps(directory)}
    )
    return ranked[0] if ranked else None


def open_checkpoint(directory: str | os.PathLike[str], step: int | None) -> pathlib.Path:
    """Return a checkpoint's folder after comparing all files of its chain with their checksums.

    ``step`` None is the newest checkpoint.
    """
    directory = pathlib.Path(directory).absolute()
    complete = all_steps(directory)
    if not complete:
        raise CheckpointError(f"{directory}: there is no saved model here")
    if step is not None and step not in complete:
        raise CheckpointError(f"{directory}: step {step} was not saved; there are {complete}")
    path = directory / str(complete[-1] if step is None else step)
    if not (path / CHECKSUMS_FILE).exists() and not _read_run_file(path).has_checksums:
        warnings.warn(
            f"{path}: this checkpoint was saved without checksums by an older jaxrec; damage to it "
            "would not be noticed. Save it anew",
            stacklevel=3,
        )
    else:
        # Lazily, so that a base is checked before the metadata that it holds leads further back.
        for link in _links(path):
            if damage := find_damage(link):
                raise damaged(path, damage, link)
    return path


def chain(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders that make up a checkpoint, from the full one to ``path``."""
    return list(_links(path))[::-1]


def _links(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a checkpoint's folder and those that it builds on, the full one last."""
    current = path
    yield path
    while (link := read_link(current)).base is not None:
        base = path.parent / str(link.base)
        if not is_checkpoint(base):
            raise damaged(path, f"{base} is missing, on which {current.name} builds")
        yield base
        if read_link(base).token != link.base_token:
            raise damaged(path, f"{base}, on which {current.name} builds, was saved again")
        current = base


def damaged(path: pathlib.Path, damage: str, broken: pathlib.Path | None = None) -> CheckpointError:
    """Return an error that names the damage of a checkpoint and what to do.

    ``broken`` is the checkpoint of the chain that is damaged; None: ``path`` itself.
    """
    if broken is not None and broken != path:
        steps = [step for step in all_steps(path.parent) if step >= int(broken.name)]
        return CheckpointError(
            f"{path}: the checkpoint builds on {broken}, which is damaged ({damage}); remove "
            f"those that build on it, of steps {steps}, to go on from an older one"
        )
    older = [step for step in all_steps(path.parent) if step < int(path.name)]
    return CheckpointError(
        f"{path}: the checkpoint is damaged ({damage}); "
        + (f"remove it to go on from step {older[-1]}" if older else "there is no older one")
    )


def write_checksums(directory: pathlib.Path) -> None:
    """Write ``checksums.json`` into a checkpoint: the sizes and checksums of its files.

    Only files in subfolders count: Orbax changes the files of the folder itself afterwards.
    """
    (directory / CHECKSUMS_FILE).write_bytes(_content(describe_files(directory, _files(directory))))


def find_damage(directory: pathlib.Path) -> str:
    """Return text that names the first damaged file of a checkpoint; "" if all are whole.

    Each process reads a part of the files, and all return the same text.
    """
    try:
        damage = _find_damage(directory)
    except OSError as error:
        damage = f"{error.filename} cannot be read: {error.strerror}"
    if jax.process_count() > 1:
        # All processes must raise or none: one that goes on alone would wait for the others in
        # Orbax.
        damage = next(filter(None, gather_texts(damage)), "")
    return damage


def _find_damage(directory: pathlib.Path) -> str:
    try:
        content = (directory / CHECKSUMS_FILE).read_bytes()
        saved = msgspec.convert(json.loads(content)["files"], dict[str, StoredFile])
        # Equal bytes, not only an equal checksum: JSON that parses to the same entries is still not
        # what was written.
        is_same = content == _content(saved)
    except FileNotFoundError:
        return f"{CHECKSUMS_FILE} is missing"
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError):
        is_same = False
    if not is_same:
        return f"{CHECKSUMS_FILE} is not what was saved"
    # Orbax may read an added file in the place of a saved one: refuse it too.
    if different := sorted(saved.keys() ^ set(_files(directory))):
        how = "is missing" if different[0] in saved else "was added after the checkpoint was saved"
        return f"{different[0]} {how}"
    share = slice(jax.process_index(), None, jax.process_count())
    return manifest.find_damage(directory, saved, "saved", share=share)


def _files(directory: pathlib.Path) -> list[str]:
    """Return the files in a checkpoint's subfolders that have checksums, by path."""
    return [
        path.relative_to(directory).as_posix()
        for path in sorted(directory.glob("*/**/*"))
        if path.is_file() and (path.name == MANIFEST or directory / STORES not in path.parents)
    ]


def _content(files: Mapping[str, StoredFile]) -> bytes:
    """Return the content of ``checksums.json``, which holds a checksum of itself."""
    plain = msgspec.to_builtins(files)
    crc = zlib.crc32(json.dumps(plain).encode())
    return json.dumps({"files": plain, "crc32_of_files": f"{crc:08x}"}, indent=1).encode()


def run_file(
    run: CheckpointMetadata, link: Link, capacities: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the content of ``run/metadata``, which `_RunFile` describes."""
    facts = dataclasses.asdict(run)
    del facts["differences"]  # between a checkpoint and the model that loaded it
    if not run.reader:
        del facts["reader"]  # which earlier versions of jaxrec refuse
    details = {"has_checksums": True, "link": msgspec.to_builtins(link), "capacities": capacities}
    return facts | details


def read_capacities(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the exchanges' capacity factors, for `jaxrec.mesh.ahead.restore_capacities`."""
    capacities = _read_run_file(path).capacities
    if not all(0 < each.factor <= _LARGEST_FACTOR for each in capacities):
        raise damaged(path, "run/metadata has a capacity factor that no exchange has")
    return msgspec.to_builtins(capacities)


def read_link(path: pathlib.Path) -> Link:
    """Read a checkpoint's place in its chain; a checkpoint of an older jaxrec is full."""
    link = _read_run_file(path).link
    # Compared with the folder's own step, under which others name it. Steps fall along a chain, so
    # that it ends.
    if link.base is not None and not 0 <= link.base < int(path.name):
        raise damaged(path, f"run/metadata has step {link.base} as its base, which is no older one")
    return link


def read_run(path: pathlib.Path) -> CheckpointMetadata:
    """Read the metadata of a checkpoint."""
    run = _read_run_file(path)
    return CheckpointMetadata(run.step, run.batches, run.metrics, run.plan, reader=run.reader)


def read_shapes(path: pathlib.Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Read ``(rows on the devices, columns)`` of each table, by collection and table."""
    shapes = _read_as(path, "tables/metadata", dict[str, dict[str, tuple[int, int]]])
    if any(min(shape) < 0 for tables in shapes.values() for shape in tables.values()):
        raise damaged(path, "tables/metadata does not hold the shapes of tables")
    return shapes


def _read_run_file(path: pathlib.Path) -> _RunFile:
    return _read_as(path, "run/metadata", _RunFile)


def _read_as(path: pathlib.Path, file: str, kind: type[Content]) -> Content:
    """Read a JSON file of a checkpoint and convert it to ``kind``."""
    try:
        return msgspec.convert(json.loads((path / file).read_text()), kind)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise damaged(path, f"{file} cannot be read: {error}") from None
