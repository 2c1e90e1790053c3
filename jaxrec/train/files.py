"""The files of checkpoints: which there are, whether they are whole, what they say of the run."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import warnings
from typing import Any

from jaxrec.train.checksums import CHECKSUMS_FILE, find_damage
from jaxrec.train.keep import Keep

# What Orbax adds to the name of a checkpoint that is not complete.
UNFINISHED = ".orbax-checkpoint-tmp"

# What the folder of a checkpoint has.
_ENTRIES = ("state", "tables", "run", "_CHECKPOINT_METADATA", CHECKSUMS_FILE)

# Entry of run/metadata that says that the checkpoint has checksums.
_HAS_CHECKSUMS = "has_checksums"


class CheckpointError(ValueError):
    """There is no such checkpoint, it is damaged, or it is of another model."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a checkpoint says about the run besides the model.

    Attributes:
        step: Steps made.
        batches: Batches used: where to go on in the data.
        metrics: Values to choose the best by.
        plan: The sharding plan, as text; the model restores to any.
    """

    step: int
    batches: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    plan: str | None = None


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of a directory's complete checkpoints, ascending; other entries are left out."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_checkpoint(path))


def is_checkpoint(path: pathlib.Path) -> bool:
    """Whether a folder is named after a step and has some file of a checkpoint."""
    is_step = path.name.isdecimal() and path.name == str(int(path.name))
    return is_step and any((path / name).exists() for name in _ENTRIES)


def best_step(directory: str | os.PathLike[str], keep: Keep) -> int | None:
    """The step of the best checkpoint of a directory; None if none is kept for being so."""
    directory = pathlib.Path(directory)
    if not keep.best:
        return None
    ranked = keep.ranked(
        {step: read_run(directory / str(step)).metrics for step in steps(directory)}
    )
    return ranked[0] if ranked else None


def open_checkpoint(directory: str | os.PathLike[str], step: int | None) -> pathlib.Path:
    """Find a checkpoint, the newest for None, and compare all its files with their checksums.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    directory = pathlib.Path(directory).absolute()
    complete = steps(directory)
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
    elif damage := find_damage(path):
        raise damaged(path, damage)
    return path


def damaged(path: pathlib.Path, damage: str) -> CheckpointError:
    """Make the error that says what is wrong with a checkpoint, and what to do."""
    older = [step for step in steps(path.parent) if step < int(path.name)]
    return CheckpointError(
        f"{path}: the checkpoint is damaged ({damage}); "
        + (f"remove it to go on from step {older[-1]}" if older else "there is no older one")
    )


def read_json(path: pathlib.Path) -> Any:
    """Read a JSON file of a checkpoint, two folders below its directory."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        checkpoint = path.parent.parent
        raise damaged(
            checkpoint, f"{path.relative_to(checkpoint)} cannot be read: {error}"
        ) from None


def run_file(run: Run) -> dict[str, Any]:
    """The content of ``run/metadata``."""
    return {**dataclasses.asdict(run), _HAS_CHECKSUMS: True}


def read_run(path: pathlib.Path) -> Run:
    """Read what a checkpoint says about the run."""
    content = _read_run_file(path)
    content.pop(_HAS_CHECKSUMS, None)
    try:
        return Run(**content)
    except TypeError as error:
        raise damaged(path, f"run/metadata has other entries: {error}") from None


def _read_run_file(path: pathlib.Path) -> dict[str, Any]:
    content = read_json(path / "run" / "metadata")
    if not isinstance(content, dict):
        raise damaged(path, "run/metadata is no JSON object")
    return content
