"""A profile of some training steps."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from types import TracebackType

import jax

from jaxrec.train.trainer import Callback, Trainer

# Number of the first traced step of a run; earlier steps compile and warm up.
FIRST_STEP = 5
STEPS = 10


class StepTrace(Callback):
    """Traces `STEPS` steps of a run for TensorBoard's profiler or Perfetto.

    Args:
        directory: Directory of the trace; None: no trace.
        paused: Function that returns a context, entered while steps are traced, since traced steps
            are slower than others.
    """

    def __init__(
        self,
        directory: pathlib.Path | None,
        paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self._directory = directory
        self._paused = paused
        self._pause = contextlib.ExitStack()
        self._steps = 0
        self._is_on = False

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        self.step()

    def step(self) -> None:
        """Count a dispatched step; start or stop the trace."""
        if self._directory is None:
            return
        self._steps += 1
        if self._steps == FIRST_STEP:
            self._pause.enter_context(self._paused())
            jax.profiler.start_trace(self._directory)
            self._is_on = True
        elif self._steps == FIRST_STEP + STEPS:
            self._stop()

    def _stop(self) -> None:
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
            self._pause.close()

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
