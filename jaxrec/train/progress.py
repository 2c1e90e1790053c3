"""Telling how far training is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

# Seconds between two updates of the bar, and between two lines.
BAR_SECONDS = 0.2
LINE_SECONDS = 5.0

# The first steps compile; samples per second are counted from the end of this one on.
WARM_UP_STEPS = 1


class Progress:
    """Shows steps, samples per second and running NE.

    Args:
        console: Where to.
        num_steps: Steps of the whole run.
        done: Steps made before.
    """

    def __init__(self, console: Console, num_steps: int, done: int = 0):
        self._console = console
        self._num_steps = num_steps
        self._seconds = BAR_SECONDS if console.is_terminal else LINE_SECONDS
        self._shown = time.perf_counter()
        self._steps = 0
        self._samples = 0
        self._start = self._end = 0.0
        self._bar = Bar(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}  {task.fields[ne]}  {task.fields[held_out]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=num_steps, completed=done, rate="compiling", ne="", held_out=""
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def samples_per_second(self) -> float:
        """Between the end of the first step and that of the last; 0 before."""
        return self._samples / (self._end - self._start) if self._samples else 0.0

    def advance(self, samples: int) -> None:
        """Counts one more step, of so many samples."""
        self._steps += 1
        self._end = time.perf_counter()
        if self._steps > WARM_UP_STEPS:
            self._samples += samples
        else:
            self._start = self._end

    def is_due(self) -> bool:
        """Whether it is time to show something again."""
        return time.perf_counter() - self._shown > self._seconds

    def show(self, step: int, ne: float) -> None:
        """Shows where training is."""
        self._shown = time.perf_counter()
        rate = f"{self.samples_per_second:,.0f} samples/s" if self._samples else "compiling"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, rate=rate, ne=f"NE {ne:.4f}")
        else:
            self._console.print(f"step {step} of {self._num_steps}, {rate}, NE {ne:.4f}")

    def show_held_out(self, step: int, auc: float, ne: float) -> None:
        """Shows how the model of a step does on held-out rows."""
        values = f"held out: AUC {auc:.4f}, NE {ne:.4f}"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, held_out=values)
        else:
            self._console.print(f"step {step} of {self._num_steps}, {values}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While it lasts no training goes on; its time does not count."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start
