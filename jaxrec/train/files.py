"""The files of checkpoints, by Orbax: which there are, what is read of them, and its errors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrec.embed.logical import LogicalTable
from jaxrec.train.keep import Keep

# What Orbax adds to the name of a checkpoint that is not complete.
UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointError(ValueError):
    """There is no checkpoint, or it is of another model."""


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


def steps(directory: pathlib.Path) -> list[int]:
    """The steps of a directory's complete checkpoints, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())


def best_step(directory: pathlib.Path, keep: Keep) -> int | None:
    """The step of the best checkpoint of a directory; None if none is kept for being so."""
    ranked = keep.ranked(read_metrics(directory)) if keep.best else []
    return ranked[0] if ranked else None


def read_metrics(directory: pathlib.Path) -> dict[int, dict[str, float]]:
    return {step: read_run(directory, step).metrics for step in steps(directory)}


def path_of(directory: pathlib.Path, step: int | None) -> pathlib.Path:
    complete = steps(directory)
    if not complete:
        raise CheckpointError(f"{directory}: there is no saved model here")
    if step is not None and step not in complete:
        raise CheckpointError(f"{directory}: step {step} was not saved; there are {complete}")
    return directory.absolute() / str(complete[-1] if step is None else step)


def read_arrays(path: pathlib.Path, wanted: set[str]) -> dict[str, Any]:
    """Parts of what `_tree` made, on the host."""
    import orbax.checkpoint as ocp

    with _damaged(path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saved = checkpointer.metadata(path / "state").item_metadata.tree
        target = {
            name: jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved[name])
            for name in wanted
            if name in saved
        }
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
        read = _restore(checkpointer, path, target, arguments)
    return {name: {} for name in wanted} | read


def read_tables(
    path: pathlib.Path, collection: str, wanted: dict[str, LogicalTable], *, has_state: bool
) -> dict[str, LogicalTable]:
    """Tables of a collection, each device's part on that device; without their state, if so."""
    import orbax.checkpoint as ocp

    with _damaged(path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saved = checkpointer.metadata(path / "state").item_metadata.tree["tables"][collection]
        target = {}
        for name, form in wanted.items():
            target[name] = (
                {"rows": form.rows, "state": form.state} if has_state else {"rows": form.rows}
            )
            state = saved[name].get("state") or {}
            if has_state and set(state) != set(form.state):
                raise CheckpointError(
                    f"{path}: the optimizer of table {name!r} keeps {sorted(form.state)}, but "
                    f"{sorted(state)} was saved; load the model without its optimizer"
                )
        # What the rows are followed by depends on the devices: more zeros here, or fewer.
        arguments = jax.tree.map(
            lambda form: ocp.ArrayRestoreArgs(
                sharding=form.sharding, global_shape=form.shape, strict=False
            ),
            target,
        )
        nested = [{"tables": {collection: tree}} for tree in (target, arguments)]
        read = _restore(checkpointer, path, *nested)["tables"][collection]
    return {
        name: LogicalTable(table["rows"], table.get("state") or {}) for name, table in read.items()
    }


def _restore(checkpointer: Any, path: pathlib.Path, target: Any, arguments: Any) -> Any:
    import orbax.checkpoint as ocp

    return checkpointer.restore(
        path / "state",
        ocp.args.PyTreeRestore(target, restore_args=arguments, partial_restore=True),
    )


@contextlib.contextmanager
def _damaged(path: pathlib.Path) -> Iterator[None]:
    """Orbax's errors as one sentence, and without its log."""
    try:
        with quiet():
            yield
    except CheckpointError:
        raise
    except (ValueError, KeyError, FileNotFoundError, json.JSONDecodeError, AttributeError) as error:
        older = [step for step in steps(path.parent) if str(step) != path.name]
        raise CheckpointError(
            f"{path}: the checkpoint is damaged ({' '.join(str(error).split())[:200]}); "
            + (f"remove it to go on from step {older[-1]}" if older else "there is no other")
        ) from None


def read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged ({error})") from None


def read_run(directory: pathlib.Path, step: int) -> Run:
    path = directory / str(step) / "run" / "metadata"
    try:
        return Run(**read_json(path))
    except TypeError as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged ({error})") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Orbax's log: what it says in tracebacks is raised as well.

    Where one write fails, Orbax closes its event loop, and each other write that ends then finds it
    closed. Python prints that by `sys.unraisablehook`, as it does of callbacks from C++.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    def without_late_writes(raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            hook(raised)

    log, hook = logging.getLogger("absl"), sys.unraisablehook
    log.addFilter(is_wanted)
    sys.unraisablehook = without_late_writes
    try:
        yield
    finally:
        log.removeFilter(is_wanted)
        if sys.unraisablehook is without_late_writes:
            sys.unraisablehook = hook


@contextlib.contextmanager
def os_errors(path: pathlib.Path) -> Iterator[None]:
    """Orbax's errors as the errors of the operating system that they wrap, and without its log."""
    try:
        with quiet():
            yield
    except Exception as error:
        for unfinished in path.parent.glob(f"{path.name}{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        number = int(code.group(1))
        raise OSError(number, os.strerror(number), str(path)) from None
