"""Reading the arrays of checkpoints by Orbax; its errors become errors of one sentence."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.train.checkpoint.files import UNFINISHED, CheckpointError, damaged

# Errors by which Orbax and its metadata fail over damaged files.
_READ_ERRORS = (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError)


def read_arrays(path: pathlib.Path, wanted: set[str]) -> dict[str, Any]:
    """Read the named top-level parts of a checkpoint's tree to the host; missing ones are empty.

    `tree.saved_tree` describes the tree.
    """
    with _reader(path) as (saved, restore):
        target = {name: saved[name] for name in wanted if name in saved}
        return {name: {} for name in wanted} | _to_host(restore, target)


def read_forms(path: pathlib.Path) -> dict[str, Any]:
    """Read the shapes of tables and of their state, by collection and table."""
    with _reader(path) as (saved, _):
        return saved.get("tables", {})


def read_tables(
    path: pathlib.Path, collection: str, wanted: dict[str, LogicalTable], *, has_state: bool
) -> dict[str, LogicalTable]:
    """Read tables of a collection to their devices, with their optimizer state if ``has_state``."""
    import orbax.checkpoint as ocp

    target = {
        name: {"rows": form.rows} | ({"state": form.state} if has_state else {})
        for name, form in wanted.items()
    }
    with _reader(path) as (_, restore):
        # The number of zeros after the rows depends on the devices.
        arguments = jax.tree.map(
            lambda form: ocp.ArrayRestoreArgs(
                sharding=form.sharding, global_shape=form.shape, strict=False
            ),
            target,
        )
        nested = [{"tables": {collection: tree}} for tree in (target, arguments)]
        read = restore(*nested)["tables"][collection]
    return {
        name: LogicalTable(table["rows"], table.get("state") or {}) for name, table in read.items()
    }


def read_table(
    path: pathlib.Path, collection: str, name: str, *, has_state: bool
) -> dict[str, np.ndarray]:
    """Read a table to the host: its rows under "rows", and the arrays of its state by name."""
    with _reader(path) as (saved, restore):
        form = saved["tables"][collection][name]
        wanted = {"rows": form["rows"]} | ({"state": form.get("state") or {}} if has_state else {})
        read = _to_host(restore, {"tables": {collection: {name: wanted}}})
    table = read["tables"][collection][name]
    return {"rows": table["rows"], **(table.get("state") or {})}


def _to_host(restore: Callable[[Any, Any], Any], forms: Any) -> Any:
    """Read arrays to the host, nested as ``forms``, which has their shapes and types."""
    import orbax.checkpoint as ocp

    # Orbax wants arrays as targets; those of `np.empty` take no memory until they are written.
    target = jax.tree.map(lambda form: np.empty(form.shape, form.dtype), forms)
    return restore(target, jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target))


def read_changes(path: pathlib.Path) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """Read the changed rows of an incremental checkpoint, by collection and table.

    Each table has row indices under "index", rows under "rows", and the arrays of its state by
    name.
    """

    def arrays(table: dict[str, Any]) -> dict[str, np.ndarray]:
        named = {"index": table["index"], "rows": table["rows"], **(table.get("state") or {})}
        return {key: array[:-1] for key, array in named.items()}  # `saved_tree` appended an element

    return {
        collection: {name: arrays(table) for name, table in tables.items()}
        for collection, tables in read_arrays(path, {"changes"})["changes"].items()
    }


# Levels of dictionaries above the arrays of each part of the tree.
_LEVELS = {"dense": 1, "optimizer": 1, "run": 1, "vocabularies": 2, "tables": 3, "changes": 3}


def _forms(tree: Any) -> dict[str, Any]:
    """Return Orbax's description of a checkpoint's arrays, checked, with {} for empty parts."""
    # Orbax writes an empty dictionary as None, so that depth alone tells an array from a part.
    forms = {name: _form(name, tree[name], _LEVELS[name]) for name in tree}
    for part, wanted in (("tables", {"rows"}), ("changes", {"rows", "index"})):
        for collection, tables in forms.get(part, {}).items():
            for name, arrays in tables.items():
                if not wanted <= arrays.keys():
                    raise ValueError(f"state/_METADATA lacks arrays of {collection}/{name}")
    return forms


def _form(name: str, tree: Any, levels: int) -> Any:
    if name == "state" and levels == 0:
        return _form("", tree, 1)  # of a table's rows
    if levels:
        nested = {} if tree is None else tree
        return {key: _form(key, nested[key], levels - 1) for key in dict(nested)}
    if not isinstance(tree.shape, tuple) or tree.dtype is None:
        raise ValueError(f"state/_METADATA has no array {name!r}")
    return tree


@contextlib.contextmanager
def _reader(path: pathlib.Path) -> Iterator[tuple[dict[str, Any], Callable[[Any, Any], Any]]]:
    """Yield the shapes and types of a checkpoint's arrays, and a function that reads some of them.

    Errors of Orbax become a `CheckpointError` of one sentence, and Orbax logs nothing.
    """
    import orbax.checkpoint as ocp

    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        try:
            processes = processes_that_wait()
            handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
            checkpointer = stack.enter_context(
                ocp.Checkpointer(handler, multiprocessing_options=processes)
            )
            metadata = checkpointer.metadata(path / "state").item_metadata
            if metadata is None:
                raise damaged(path, "state/_METADATA cannot be read")

            def restore(target: Any, arguments: Any) -> Any:
                return checkpointer.restore(
                    path / "state",
                    ocp.args.PyTreeRestore(target, restore_args=arguments, partial_restore=True),
                )

            yield _forms(metadata.tree), restore
        except CheckpointError:
            raise
        except Exception as error:
            # Orbax raises a plain Exception where TensorStore cannot read.
            if type(error) is not Exception and not isinstance(error, _READ_ERRORS):
                raise
            raise damaged(path, " ".join(str(error).split())[:200]) from None


def processes_that_wait() -> Any:
    """Return options with which Orbax's processes wait for each other without the devices."""
    import orbax.checkpoint as ocp

    # Unless processes are named, Orbax waits by sums over the devices, in a thread whose programs
    # have no order among those of the main thread. Named ones wait at JAX's coordination service.
    is_one = jax.process_count() == 1
    names = None if is_one else set(range(jax.process_count()))
    return ocp.options.MultiprocessingOptions(active_processes=names)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this context, silence Orbax's log, which repeats its errors, and its late writes."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    def without_late_writes(raised: Any) -> None:
        if str(raised.exc_value) != "Event loop is closed":
            hook(raised)

    # After a failed write Orbax closes its event loop. Each concurrent write that ends later then
    # raises "Event loop is closed" in a callback from C++, and Python prints it by
    # `sys.unraisablehook`.
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
    """Within this context, silence Orbax's log, and raise the system's error that Orbax wraps.

    ``path`` is the checkpoint's folder; after an error its unfinished files are removed.
    """
    try:
        with quiet():
            yield
    except Exception as error:
        for unfinished in path.parent.glob(f"{path.name}{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        # TensorStore reports the system's error number only within its message.
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        number = int(code.group(1))
        raise OSError(number, os.strerror(number), str(path)) from None
