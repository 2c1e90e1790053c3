"""The files of a checkpoint: their names, checks and metadata."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrec.train.checkpoint.checksums import CHECKSUMS_FILE, STORES, find_damage
from jaxrec.train.checkpoint.preservation import PreservationPolicy

# Orbax adds this to the name of an incomplete checkpoint.
UNFINISHED = ".orbax-checkpoint-tmp"

# Entries of a checkpoint's folder.
_ENTRIES = ("state", "tables", "run", STORES, "_CHECKPOINT_METADATA", CHECKSUMS_FILE)

# Keys of run/metadata: the checkpoint was saved with checksums; its `Link`; the capacities of the
# model's exchanges.
_HAS_CHECKSUMS = "has_checksums"
_LINK = "link"
_CAPACITIES = "capacities"

# Largest capacity factor that is taken over; the worst case of an exchange is one per device.
_LARGEST_FACTOR = 1e9


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or was saved from another model."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A part that a model and a checkpoint do not have alike, so that it was not loaded.

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
    """Facts about the run that a checkpoint holds besides the model.

    Attributes:
        step: Number of training steps.
        batches: Number of batches used; a resumed run continues with the next one.
        metrics: Metrics by name, by which a `PreservationPolicy` ranks checkpoints.
        plan: The sharding plan as JSON. The model restores to any other plan as well.
        differences: The parts that ``restore(..., partial=True)`` did not load.
    """

    step: int
    batches: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    plan: str | None = None
    differences: tuple[Difference, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class Link:
    """Place of a checkpoint in a chain of incremental ones.

    Attributes:
        token: A random text that no other checkpoint has; empty: other checkpoints do not build on
            it.
        base: Step of the checkpoint on which it builds, the one before; None: it is full.
        base_token: Token of that checkpoint.
    """

    token: str = ""
    base: int | None = None
    base_token: str = ""


def all_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the complete checkpoints in a directory, ascending."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_checkpoint(path))


def is_checkpoint(path: pathlib.Path) -> bool:
    """Return whether a folder is named after a step and has a file of a checkpoint."""
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
    """Find a checkpoint and compare all its files with their checksums.

    Args:
        directory: Directory of the checkpoints.
        step: The checkpoint's step; None: the newest.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    directory = pathlib.Path(directory).absolute()
    complete = all_steps(directory)
    if not complete:
        raise CheckpointError(f"{directory}: there is no saved model here")
    if step is not None and step not in complete:
        raise CheckpointError(f"{directory}: step {step} was not saved; there are {complete}")
    path = directory / str(complete[-1] if step is None else step)
    if not (path / CHECKSUMS_FILE).exists() and not _read_run_file(path).get(_HAS_CHECKSUMS):
        warnings.warn(
            f"{path}: this checkpoint was saved without checksums by an older jaxrec; damage to it "
            "would not be noticed. Save it anew",
            stacklevel=3,
        )
    else:
        for link in _links(path):
            if damage := find_damage(link):
                raise damaged(path, damage, link)
    return path


def chain(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the checkpoints that make up one: the full one, and the incremental ones after it.

    Raises:
        CheckpointError: One of them is missing, or was saved again.
    """
    return list(_links(path))[::-1]


def _links(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Iterate over the checkpoints of a chain, the last one first; see `chain`."""
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

    Args:
        path: The checkpoint.
        damage: Its damage.
        broken: The checkpoint that has the damage, on which ``path`` builds; None: ``path``.
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


def read_json(path: pathlib.Path) -> Any:
    """Read a JSON file of a checkpoint, two folders below its directory."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        checkpoint = path.parent.parent
        raise damaged(
            checkpoint, f"{path.relative_to(checkpoint)} cannot be read: {error}"
        ) from None


def run_file(
    run: CheckpointMetadata, link: Link, capacities: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the content of ``run/metadata``."""
    facts = dataclasses.asdict(run)
    del facts["differences"]  # between a checkpoint and the model that loaded it
    return {
        **facts,
        _HAS_CHECKSUMS: True,
        _LINK: dataclasses.asdict(link),
        _CAPACITIES: capacities,
    }


def read_capacities(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the capacities of exchanges, for `jaxrec.mesh.ahead.restore_capacities`."""
    capacities: list[dict[str, Any]] = _read_run_file(path).get(_CAPACITIES, [])
    wanted = {"collection": str, "group": str, "devices": int, "exchange": str, "factor": float}
    is_list = isinstance(capacities, list)
    if not is_list or not all(_has_types(each, wanted) for each in capacities):
        raise damaged(path, f"run/metadata has no capacities of exchanges in {_CAPACITIES!r}")
    if not all(0 < each["factor"] <= _LARGEST_FACTOR for each in capacities):
        raise damaged(path, "run/metadata has a capacity factor that no exchange has")
    return capacities


def read_link(path: pathlib.Path) -> Link:
    """Read a checkpoint's place in its chain; one that an older jaxrec saved is full."""
    content = _read_run_file(path).get(_LINK, {})
    wanted = {"token": str, "base": int | None, "base_token": str}
    if content != {} and not _has_types(content, wanted):
        raise damaged(path, f"run/metadata has no place in a chain in {_LINK!r}")
    link = Link(**content)
    # The step of the folder, under which others name this checkpoint: a chain has an end.
    if link.base is not None and not 0 <= link.base < int(path.name):
        raise damaged(path, f"run/metadata has step {link.base} as its base, which is no older one")
    return link


def read_run(path: pathlib.Path) -> CheckpointMetadata:
    """Read the metadata of a checkpoint."""
    content = _read_run_file(path)
    content.pop(_HAS_CHECKSUMS, None)
    content.pop(_LINK, None)
    content.pop(_CAPACITIES, None)
    types = {"step": int, "batches": int | None, "metrics": dict, "plan": str | None}
    metrics = content.get("metrics", {})
    if not _has_types(content, {name: types.get(name, object) for name in content}) or not (
        _has_types(metrics, dict.fromkeys(metrics, float))
    ):
        raise damaged(path, "run/metadata has entries of other types")
    try:
        return CheckpointMetadata(**content, differences=())
    except TypeError as error:
        raise damaged(path, f"run/metadata has other entries: {error}") from None


def read_shapes(path: pathlib.Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Read the rows on the devices and the columns of tables, by collection and table."""
    content = read_json(path / "tables" / "metadata")
    tables = list(content.values()) if isinstance(content, dict) else [None]
    if not all(
        isinstance(each, dict)
        and all(
            isinstance(shape, list) and [type(n) for n in shape] == [int, int] and min(shape) >= 0
            for shape in each.values()
        )
        for each in tables
    ):
        raise damaged(path, "tables/metadata does not hold the shapes of tables")
    return {
        collection: {name: (shape[0], shape[1]) for name, shape in each.items()}
        for collection, each in content.items()
    }


def _has_types(content: Any, types: Mapping[str, Any]) -> bool:
    """Return whether a JSON object has values of some types by name. Integers are numbers, too."""
    return (
        isinstance(content, dict)
        and content.keys() == types.keys()
        and all(
            isinstance(content[name], int | float if kind is float else kind)
            and not isinstance(content[name], bool)
            for name, kind in types.items()
        )
    )


def _read_run_file(path: pathlib.Path) -> dict[str, Any]:
    content = read_json(path / "run" / "metadata")
    if not isinstance(content, dict):
        raise damaged(path, "run/metadata is not a JSON object")
    return content
