"""Saving checkpoints while training goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import msgspec
import numpy as np
from flax import nnx

from jaxrec.embed.variables import plain
from jaxrec.mesh.agree import on_process_zero
from jaxrec.mesh.ahead import describe_capacities
from jaxrec.mesh.replicas import average_replicas, has_replicas
from jaxrec.tier.changes.change_tracker import ChangeTracker, HandOver
from jaxrec.tier.rows.under_way import WrittenIds
from jaxrec.train.checkpoint.arrays import os_errors, processes_that_wait, quiet
from jaxrec.train.checkpoint.files import (
    NO_LINK,
    STORES,
    UNFINISHED,
    CheckpointError,
    CheckpointMetadata,
    Link,
    PreservationPolicy,
    all_steps,
    chain,
    is_checkpoint,
    lock_directory,
    read_link,
    read_run,
    run_file,
    write_checksums,
)
from jaxrec.train.checkpoint.tree import Changes, saved_tree, table_shapes

# Bytes of a chunk of a table's file: the least that a device reads.
_CHUNK_BYTES = 1 << 24


class CheckpointManager:
    """Saves the checkpoints of a directory while training goes on, and deletes old ones.

    A checkpoint's folder is renamed to its step once all data and checksums are written: a run
    killed at any moment leaves the last complete checkpoint.

    With several processes each of them makes a manager and calls its methods.

    Args:
        directory: Directory of the checkpoints, one folder each. The manager locks it against other
            runs until it is closed (`jaxrec.train.checkpoint.files.lock_directory`).
        preservation_policy: Which checkpoints are kept; None: the newest. The checkpoints on which
            a kept one builds are kept too.
        tracker: Tracks the changes of the model, so that checkpoints after a full one are
            incremental. An incremental checkpoint holds the rows that changed since the one before,
            with their optimizer state, on the devices and in row stores, and all variables outside
            the tables. None: all are full.
        consumer: Name of the tracker's consumer for these checkpoints.
        full_every: Number of checkpoints from one full one to the next. `restore` reads the last
            full one and all after it, so that damage to one harms those that build on it.

    Raises:
        KeyError: The tracker has no such consumer.
        ValueError: ``full_every`` is below 1.
        BlockingIOError: Another run writes to the directory.
        OSError: The directory cannot be written.

    Example:
        >>> import jaxrec, optax, tempfile
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> with CheckpointManager(tempfile.mkdtemp(), PreservationPolicy(latest=2)) as manager:
        ...     path = manager.save(model, optimizer, batches=0)
        >>> jaxrec.train.restore(model, path.parent, optimizer)
        CheckpointMetadata(step=0, batches=0, metrics={}, plan=None)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        preservation_policy: PreservationPolicy | None = None,
        *,
        tracker: ChangeTracker | None = None,
        consumer: str = "checkpoint",
        full_every: int = 10,
    ):
        if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 1:
            raise ValueError(f"full_every is an integer of 1 or more, got {full_every!r}")
        self._directory = pathlib.Path(directory).absolute()
        self._increments = None
        if tracker is not None:
            self._increments = _Increments(self._directory, tracker, consumer, full_every)
        self._policy = preservation_policy or PreservationPolicy()
        # If Orbax cannot start, this releases the lock and restores the log.
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_directory(self._directory))
            # Also for the threads that write while training goes on.
            stack.enter_context(quiet())
            self._checkpointer, self._arguments = _orbax()
            stack.callback(self._checkpointer.close)
            self._resources = stack.pop_all()
        self._under_way: tuple[pathlib.Path, _Increment | None] | None = None

    @property
    def directory(self) -> pathlib.Path:
        """Directory of the checkpoints."""
        return self._directory

    @property
    def preservation_policy(self) -> PreservationPolicy:
        """Rule that chooses the checkpoints to keep."""
        return self._policy

    def save(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *,
        state: Any = None,
        batches: int | None = None,
        metrics: Mapping[str, float] | None = None,
        plan: str | None = None,
        reader: Sequence[str] = (),
    ) -> pathlib.Path:
        """Start saving a checkpoint; the model may change as soon as this returns.

        Tables with replicas (``jaxrec.shard(replica_axis=...)``) are averaged first, in the model
        itself (`jaxrec.mesh.average_replicas`), so that a restored run goes on as this one does.

        Args:
            model: The model. Its tables are saved by name, rows in logical order, with their
                optimizer state, so that they load into any placement.
            optimizer: The model's optimizer; its step names the checkpoint.
            state: A pytree of the run's own arrays, such as the state of metrics.
            batches, metrics, plan, reader: See `CheckpointMetadata`.

        Returns:
            The folder of the checkpoint, which exists once it is complete.

        Raises:
            FileExistsError: A file or folder that is no checkpoint has the name of the step.
            OSError: This checkpoint or the one before cannot be written, such as on a full disk.
                Earlier checkpoints stay.
        """
        import orbax.checkpoint as ocp

        # Two checkpoints at once would take the memory of two copies, and the second might build on
        # one that fails.
        self.wait_until_finished()
        step = int(optimizer.step.get_value())
        path = self._directory / str(step)
        if path.exists() and not is_checkpoint(path):
            raise FileExistsError(
                errno.EEXIST, "the checkpoint needs this name; move what is there", str(path)
            )
        # A write that fails for lack of space makes concurrent writes print tracebacks.
        require_space(self._directory, model, optimizer)
        if jax.process_index() == 0:
            for unfinished in self._directory.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        # Replicas differ between synchronizations, and a checkpoint has one value of each row.
        if has_replicas(model):
            average_replicas(model)
        run = CheckpointMetadata(step, batches, dict(metrics or {}), plan, reader=tuple(reader))
        stores = _stores(self._directory, str(step))
        increment = None
        if self._increments is not None:
            self._increments.tracker.check_model(model)
            increment = _Increment(self._increments, step)
        try:
            with os_errors(path):
                take = (lambda: None) if increment is None else increment.take
                tree = saved_tree(model, optimizer, state, stores, take)
                chunks = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
                link = NO_LINK if increment is None else increment.link
                self._checkpointer.save(
                    path,
                    self._arguments(
                        state=ocp.args.StandardSave(tree, jax.tree.map(lambda _: chunks, tree)),
                        tables=ocp.args.JsonSave(table_shapes(model)),
                        run=ocp.args.JsonSave(run_file(run, link, describe_capacities(model))),
                    ),
                    # Orbax would refuse a step that is there already; the new one takes its place.
                    force=True,
                )
        except BaseException:
            if increment is not None:
                increment.fail()
            raise
        # Only now may `wait_until_finished` take the changes over: a failed save leaves them to the
        # next.
        self._under_way = path, increment
        return path

    def wait_until_finished(self) -> None:
        """Wait for the checkpoint that is being written, then delete checkpoints by the policy.

        Raises:
            OSError: The checkpoint could not be written.
        """
        if self._under_way is None:
            return
        (path, increment), self._under_way = self._under_way, None
        try:
            with os_errors(path):
                self._checkpointer.wait_until_finished()
        except BaseException:
            if increment is not None:
                increment.fail()
            raise
        if increment is not None:
            increment.complete()
        if jax.process_index() != 0:
            return
        saved = all_steps(self._directory)
        metrics = {step: _metrics(self._directory / str(step)) for step in saved}
        # Deletion waits for the new checkpoint, so that at any moment a complete one exists.
        kept = self._policy.preserved(metrics)
        for step in set(metrics) - kept - _bases(self._directory, kept):
            self._remove(step)

    def remove_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, so that ``step`` is the newest.

        Raises:
            OSError: A checkpoint cannot be deleted, or the one that is being written fails.
        """
        self.wait_until_finished()

        def remove() -> None:
            for later in all_steps(self._directory):
                if later > step:
                    self._remove(later)

        # The other processes wait, so that none reads a checkpoint that is being deleted.
        on_process_zero(remove)

    def _remove(self, step: int) -> None:
        # Renamed before its files are deleted: under its own name a checkpoint is whole at any
        # moment.
        leftover = self._directory / f"{step}{UNFINISHED}-removed"
        shutil.rmtree((self._directory / str(step)).rename(leftover))

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the threads that write."""
        with self._resources:
            self.wait_until_finished()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Increments:
    """Decides which saves of a manager are incremental, and on which checkpoint each builds."""

    def __init__(
        self, directory: pathlib.Path, tracker: ChangeTracker, consumer: str, full_every: int
    ) -> None:
        if consumer not in tracker.consumers:
            names = ", ".join(map(repr, tracker.consumers))
            raise KeyError(f"the tracker has no consumer {consumer!r}; it has {names}")
        self.tracker, self.consumer = tracker, consumer
        self._directory, self._full_every = directory, full_every
        # The ids whose records in row stores changed, by vocabulary.
        self.written: dict[str, WrittenIds] = {}
        for each in tracker.vocabularies:
            if each.transfer is not None:
                self.written[each.name] = written = WrittenIds()
                each.transfer.watchers.add(written)

    def link(self, step: int, position: str | None) -> Link:
        """Return the link of a step's checkpoint: full, or built on the last one.

        ``position`` has the last one's step and token; None: there is none.
        """
        # A step may be saved anew by a resumed run. The token tells that checkpoint from the one on
        # which later ones were built.
        token = secrets.token_hex(8)
        full = Link(token, None, "")
        if position is None:
            return full
        base, base_token = position.split()
        path = self._directory / base
        # A run that went back to an older step would make a chain without an end, or build on a
        # checkpoint that this save replaces.
        if int(base) >= step or (self._directory / str(step)).exists() or not path.exists():
            return full
        try:
            follows = read_link(path).token == base_token and len(chain(path)) < self._full_every
        except CheckpointError:
            follows = False
        return Link(token, int(base), base_token) if follows else full


class _Increment:
    """The changes that one checkpoint saves; once it is complete they are not saved again."""

    def __init__(self, increments: _Increments, step: int) -> None:
        self._increments, self._step = increments, step
        self._stack = contextlib.ExitStack()
        self._changes: HandOver | None = None
        self._written: dict[str, np.ndarray | None] = {}
        self.link = NO_LINK

    def take(self) -> Changes | None:
        """Return the changes for an incremental checkpoint; None for a full one."""
        increments = self._increments
        self._written = {name: ids.take() for name, ids in increments.written.items()}
        handed_over = increments.tracker.hand_over(increments.consumer)
        self._changes = changes = self._stack.enter_context(handed_over)
        # Process 0 alone decides: the others might see the directory earlier or later.
        link = on_process_zero(
            lambda: msgspec.to_builtins(increments.link(self._step, changes.position))
        )
        self.link = Link(**link)
        return None if self.link.base is None else Changes(changes.ids, self._written)

    def complete(self) -> None:
        """Mark the changes as saved by this checkpoint."""
        if self._changes is not None:
            self._changes.position = f"{self._step} {self.link.token}"
        self._stack.close()

    def fail(self) -> None:
        """Leave the changes to the next checkpoint; call it within ``except``."""
        for name, ids in self._written.items():
            self._increments.written[name].give_back(ids)
        # The hand-over gives its changes back only if its block raises, so it gets the error.
        self._stack.__exit__(*sys.exc_info())


def save(
    directory: str | os.PathLike[str], model: nnx.Module, optimizer: nnx.Optimizer, **details: Any
) -> pathlib.Path:
    """Save a model and its optimizer, wait, and delete the directory's older checkpoints.

    Arguments, result and errors are those of `CheckpointManager.save`.
    """
    with CheckpointManager(directory) as manager:
        return manager.save(model, optimizer, **details)


def require_space(
    directory: str | os.PathLike[str], model: nnx.Module, optimizer: nnx.Optimizer
) -> None:
    """Make the directory, and raise an OSError unless its disk has space for a checkpoint."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # An upper bound: on a mesh, replicated tables count once for each device.
    needed = sum(plain(x).nbytes for x in jax.tree.leaves(nnx.state((model, optimizer))))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the model takes {needed:,} bytes, {free:,} are free",
            str(directory),
        )


def _metrics(path: pathlib.Path) -> dict[str, float]:
    """Return the metrics of a checkpoint; a damaged one has none, so that saving goes on."""
    try:
        return read_run(path).metrics
    except CheckpointError:
        return {}


def _bases(directory: pathlib.Path, steps: Iterable[int]) -> set[int]:
    """Return the steps on which the checkpoints of ``steps`` build; damaged links are left out."""
    bases = set()
    for step in steps:
        with contextlib.suppress(CheckpointError):
            bases |= {int(link.name) for link in chain(directory / str(step))}
    return bases


def _stores(directory: pathlib.Path, step: str) -> pathlib.Path:
    """Return the folder of row stores' snapshots until the rest of the checkpoint is written."""
    return directory / f"{step}{UNFINISHED}-{STORES}"


def _orbax() -> tuple[Any, type]:
    """Return a checkpointer that writes checksums last, and the class of its arguments."""
    import orbax.checkpoint as ocp

    class Handler(ocp.CompositeCheckpointHandler):
        def finalize(self, directory: Any) -> None:
            """Write the checksums. Process 0 calls this after all processes have written."""
            # Orbax renames the folder to the step only after this method, so that a checkpoint with
            # a name always has its checksums.
            super().finalize(directory)
            path = pathlib.Path(directory)
            stores = _stores(path.parent, path.name.split(UNFINISHED)[0])
            if stores.exists():
                stores.rename(path / STORES)
            write_checksums(path)

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    class Arguments(ocp.args.Composite):
        pass

    # Otherwise threads wait for directories, for minutes if one cannot be made.
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    processes = processes_that_wait()
    handler = Handler(
        composite_options=ocp.CompositeOptions(
            async_options=options, multiprocessing_options=processes
        )
    )
    checkpointer = ocp.AsyncCheckpointer(
        handler, async_options=options, multiprocessing_options=processes
    )
    return checkpointer, Arguments
