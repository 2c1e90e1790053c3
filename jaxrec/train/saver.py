"""Writing checkpoints while training goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax
from flax import nnx

from jaxrec.train.arrays import os_errors, quiet
from jaxrec.train.checksums import write_checksums
from jaxrec.train.contents import plain, saved_tree, table_shapes
from jaxrec.train.files import (
    UNFINISHED,
    CheckpointError,
    Run,
    is_checkpoint,
    read_run,
    run_file,
    steps,
)
from jaxrec.train.keep import Keep
from jaxrec.train.lock import lock_directory

# Bytes of a chunk of a table's file: what is read at once by a device with other rows.
_CHUNK_BYTES = 1 << 24


class Saver:
    """Writes checkpoints while training goes on.

    A checkpoint appears under its name, that of its step, once it is complete with the checksums of
    all its data: a run killed at any moment leaves the last complete one.

    With several processes all of them make a saver, and all call its methods.

    Args:
        directory: Where checkpoints go, one folder each. Until it is closed, the saver keeps other
            runs from writing there; see `jaxrec.train.lock.lock_directory`.
        keep: Which of them stay; None: the newest.

    Raises:
        BlockingIOError: Another run writes to the directory.
        OSError: The directory cannot be written.

    Example:
        >>> import jaxrec, optax, tempfile
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> with Saver(tempfile.mkdtemp(), Keep(last=2)) as saver:
        ...     path = saver.save(model, optimizer, batches=0)
        >>> jaxrec.train.restore(path.parent, model, optimizer)
        Run(step=0, batches=0, metrics={}, plan=None)
    """

    def __init__(self, directory: str | os.PathLike[str], keep: Keep | None = None):
        self._directory, self._keep = pathlib.Path(directory).absolute(), keep or Keep()
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_directory(self._directory))
            # The threads that write while training goes on are to be quiet, too.
            stack.enter_context(quiet())
            self._checkpointer, self._arguments = _orbax()
            stack.callback(self._checkpointer.close)
            self._resources = stack.pop_all()
        self._under_way: pathlib.Path | None = None

    @property
    def directory(self) -> pathlib.Path:
        """Where checkpoints go."""
        return self._directory

    def save(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *,
        state: Any = None,
        batches: int | None = None,
        metrics: Mapping[str, float] | None = None,
        plan: str | None = None,
    ) -> pathlib.Path:
        """Starts to save; what is saved may change as soon as this returns.

        Args:
            model: The model; its tables are saved by name, logical rows in order, with their
                optimizer state, so that they can be loaded into any layout.
            optimizer: Its optimizer, with the number of steps.
            state: Any pytree of arrays that belongs to the run, such as that of metrics.
            batches, metrics, plan: See `Run`.

        Returns:
            The folder that the checkpoint will have.

        Raises:
            FileExistsError: The directory has an entry of the step's name that is no checkpoint.
            OSError: This or the checkpoint before it cannot be written, for instance because the
                disk is full. What was saved before is still there.
        """
        import orbax.checkpoint as ocp

        self.wait()
        step = int(optimizer.step.get_value())
        path = self._directory / str(step)
        if path.exists() and not is_checkpoint(path):
            raise FileExistsError(
                errno.EEXIST, "the checkpoint needs this name; move what is there", str(path)
            )
        # Where a write fails, those under way beside it end in tracebacks of their own.
        require_space(self._directory, model, optimizer)
        if jax.process_index() == 0:
            for unfinished in self._directory.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        run = Run(step, batches, dict(metrics or {}), plan)
        tree = saved_tree(model, optimizer, state)
        chunks = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
        with os_errors(path):
            self._checkpointer.save(
                path,
                self._arguments(
                    state=ocp.args.StandardSave(tree, jax.tree.map(lambda _: chunks, tree)),
                    tables=ocp.args.JsonSave(table_shapes(model)),
                    run=ocp.args.JsonSave(run_file(run)),
                ),
                force=True,
            )
        self._under_way = path
        return path

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, and removes those that do not stay.

        Raises:
            OSError: It could not be written.
        """
        if self._under_way is None:
            return
        path, self._under_way = self._under_way, None
        with os_errors(path):
            self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return
        metrics = {step: _metrics(self._directory / str(step)) for step in steps(self._directory)}
        for step in set(metrics) - self._keep.chosen(metrics):
            # Whoever looks at the directory meanwhile finds a whole checkpoint there, or none.
            leftover = self._directory / f"{step}{UNFINISHED}-removed"
            shutil.rmtree((self._directory / str(step)).rename(leftover))

    def close(self) -> None:
        """Waits, and ends the threads that write."""
        with self._resources:
            self.wait()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def save(
    directory: str | os.PathLike[str], model: nnx.Module, optimizer: nnx.Optimizer, **details: Any
) -> pathlib.Path:
    """Saves a model and its optimizer as the newest checkpoint of a directory, and waits.

    Older ones are removed. Arguments, result and errors as for `Saver.save`.
    """
    with Saver(directory) as saver:
        return saver.save(model, optimizer, **details)


def require_space(
    directory: str | os.PathLike[str], model: nnx.Module, optimizer: nnx.Optimizer
) -> None:
    """Makes the directory, and sees whether `save` has room in it.

    Raises:
        OSError: There is not room enough, or no directory can be made.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # As they lie here: on a mesh tables may take more, where each device has a copy.
    needed = sum(plain(x).nbytes for x in jax.tree.leaves(nnx.state((model, optimizer))))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the model takes {needed:,} bytes, {free:,} are free",
            str(directory),
        )


def _metrics(path: pathlib.Path) -> dict[str, float]:
    """The metrics of a checkpoint; none if it is damaged, so that saving goes on beside it."""
    try:
        return read_run(path).metrics
    except CheckpointError:
        return {}


def _orbax() -> tuple[Any, type]:
    """Make a checkpointer that writes checksums last, and the class of its arguments."""
    import orbax.checkpoint as ocp

    class Handler(ocp.CompositeCheckpointHandler):
        def finalize(self, directory: Any) -> None:
            """Write the checksums: process 0 calls this after all processes have written."""
            super().finalize(directory)
            write_checksums(pathlib.Path(directory))

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    class Arguments(ocp.args.Composite):
        pass

    # Otherwise threads wait for directories, for minutes if one cannot be made.
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    handler = Handler(composite_options=ocp.CompositeOptions(async_options=options))
    return ocp.AsyncCheckpointer(handler, async_options=options), Arguments
