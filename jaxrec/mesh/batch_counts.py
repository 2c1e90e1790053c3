"""Equal numbers of batches in all processes, whatever number each of them has."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jaxrec.mesh.processes import NoteBoard, who_has

logger = logging.getLogger(__name__)

# Shortest and longest wait between two reads of the other processes' notes, in seconds.
_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.05

# Numbers the iterators of a process. Those with one number in all processes belong together.
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class _Progress:
    """Report of a process on its batches, for the other processes.

    Attributes:
        count: Number of batches so far.
        is_at_end: Whether the process has read its last batch.
        error: Error that ended the batches, or "".
    """

    count: int = 0
    is_at_end: bool = False
    error: str = ""

    def has_answered(self, index: int) -> bool:
        """Return whether the process has told if it has batch ``index``, counted from 0."""
        return self.count > index or self.is_at_end or bool(self.error)


def even_batches(
    batches: Iterable[Any], *, empty: Callable[[Any], Any] | None = None
) -> EvenBatches:
    """Iterate over this process's batches, with the same number of batches in all processes.

    A step over a mesh waits for all processes, so one without data would block the others for ever.
    Before it yields a batch, this iterator compares how many batches each process has. By default
    all processes stop after the last batch that every process has. With ``empty``, a process that
    has no more batches continues with empty ones until all have ended, so each sample is trained on
    once. In both cases process 0 logs one line that names the processes that ended first.

    The processes compare numbers through JAX's coordination service, without the devices. So any
    thread may iterate, such as the reader of a `jaxrec.data.Pipeline`. An error of one process's
    batches is raised in all processes.

    Args:
        batches: The batches of this process. All processes make their iterators in the same order.
        empty: Function from a batch of this process to an empty batch without effect, such as
            `jaxrec.data.empty_batch`. None: all processes end with the first that ends.

    Returns:
        An iterator. A single process gets its own batches, unchanged.

    Raises:
        RuntimeError: Another process failed to read its batches, or needs an empty batch and has
            none to make it from.
        ValueError: This process needs an empty batch and has no batch to make it from.

    Example:
        >>> import numpy as np, jaxrec
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batches = [{"x": np.zeros(8)}, {"x": np.ones(8)}]
        >>> for batch in jaxrec.mesh.even_batches(batches):
        ...     batch = jaxrec.mesh.shard_batch(batch, mesh)  # then a step
    """
    is_one = jax.process_count() == 1
    return EvenBatches(batches, empty, None if is_one else NoteBoard(f"batches {next(_numbers)}"))


class EvenBatches(Iterator[Any]):
    """The iterator that `even_batches` returns; a single process has no ``board``."""

    def __init__(
        self, batches: Iterable[Any], empty: Callable[[Any], Any] | None, board: NoteBoard | None
    ) -> None:
        self._batches, self._empty, self._board = batches, empty, board
        self._source = iter(batches)
        self._index = 0
        self._mine, self._last = _Progress(), None
        self._known_count = 0  # number of batches that all processes are known to have
        self._was_told = False
        self._stopped = threading.Event()

    def __next__(self) -> Any:
        if self._board is None:
            return next(self._source)
        if self._stopped.is_set():
            raise StopIteration
        has_batch, batch = self._read(self._board)
        if not self._agree(self._board):
            self.interrupt()
            raise StopIteration
        self._index += 1
        if has_batch:
            return batch
        assert self._empty is not None
        return self._empty(self._last)

    def interrupt(self) -> None:
        """End the iterator, even while another thread waits in it for the other processes."""
        self._stopped.set()
        if hasattr(self._batches, "interrupt"):
            self._batches.interrupt()

    def close(self) -> None:
        """End the iterator, and close the batches if they can be closed."""
        self._stopped.set()
        if hasattr(self._source, "close"):
            self._source.close()

    def _read(self, board: NoteBoard) -> tuple[bool, Any]:
        """Read the next batch and tell the other processes.

        Returns ``(True, batch)``, or ``(False, None)`` after the last batch.
        """
        if self._mine.is_at_end:
            return False, None
        try:
            batch = next(self._source)
        except StopIteration:
            if self._stopped.is_set():  # the source was closed, and may have had more
                raise
            error = None
            if self._index == 0 and self._empty is not None:
                error = ValueError(
                    f"process {board.process} has no batch at all, so that it cannot make "
                    "empty ones; give each process one batch or more"
                )
            self._tell(board, dataclasses.replace(self._mine, is_at_end=True), error)
            return False, None
        except BaseException as error:
            self._tell(board, self._mine, error)
            raise
        if self._empty is not None:
            self._last = batch
        self._tell(board, _Progress(self._index + 1))
        return True, batch

    def _tell(
        self, board: NoteBoard, progress: _Progress, error: BaseException | None = None
    ) -> None:
        """Write this process's progress to the board, then raise its error if there is one."""
        if error is not None:
            progress = dataclasses.replace(progress, error=f"{type(error).__name__}: {error}")
        self._mine = progress
        board.write(json.dumps(dataclasses.asdict(progress)))
        if error is not None:
            raise error

    def _agree(self, board: NoteBoard) -> bool:
        """Wait for the other processes; return whether all go on with this batch."""
        # A process that reads ahead has told of later batches, which need no further read of notes.
        if self._index < self._known_count:
            return True
        of_all = self._wait(board)
        if of_all is None:
            return False
        for process, progress in of_all.items():
            if progress.error and progress.count <= self._index:
                raise RuntimeError(f"process {process} cannot go on: {progress.error}")
        self._known_count = min(progress.count for progress in of_all.values())
        ended = [p for p, progress in of_all.items() if progress.count <= self._index]
        if not ended:
            return True
        self._report(board, ended)
        return self._empty is not None and len(ended) < len(of_all)

    def _wait(self, board: NoteBoard) -> dict[int, _Progress] | None:
        """Wait until each process tells if it has this batch; return all progress by process.

        Returns None if `interrupt` ended the wait.
        """
        seconds = _FIRST_WAIT
        while True:
            notes = {p: _Progress(**json.loads(note)) for p, note in board.read().items()}
            of_all = {p: notes.get(p, _Progress()) for p in range(board.num_processes)}
            if all(progress.has_answered(self._index) for progress in of_all.values()):
                return of_all
            if self._stopped.wait(seconds):
                return None
            seconds = min(2 * seconds, _LONGEST_WAIT)

    def _report(self, board: NoteBoard, ended: list[int]) -> None:
        """Log once, in process 0, which processes ended before others."""
        if self._was_told or len(ended) == board.num_processes:
            return
        self._was_told = True
        if board.process != 0:
            return
        count = f"{self._index} batch{'' if self._index == 1 else 'es'}"
        then = "all stop after these"
        if self._empty is not None:
            then = "empty ones stand in until all have ended"
        logger.warning("%s only %s, and others more: %s", who_has(ended), count, then)
