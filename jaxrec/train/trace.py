"""A trace of some steps, for TensorBoard's profiler or Perfetto."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from types import TracebackType

import jax

# The steps before compile, and warm up.
FIRST_STEP = 5
STEPS = 10


class StepTrace:
    """Traces some steps of a run; to be told of each.

    Args:
        directory: Where the trace goes; None: nothing is traced.
        paused: Makes a context that lasts while steps are traced: they take longer than others.
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

    def step(self) -> None:
        """Counts a step that begins."""
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
