"""Telling how far training is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

# Seconds between two updates of the bar, and between two lines.
BAR_SECONDS = 0.2
LINE_SECONDS = 5.0

BAR_WIDTH = 20

# The first steps compile; samples per second are counted from the end of this one on.
WARM_UP_STEPS = 1


class Progress:
    """Shows steps, samples per second and running NE.

    Args:
        console: Where to.
        num_steps: Steps of the whole run.
        done: Steps made before.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        console: Console,
        num_steps: int,
        done: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._console = console
        self._num_steps = num_steps
        self._seconds = BAR_SECONDS if console.is_terminal else LINE_SECONDS
        self._clock = clock
        self._shown = clock()
        self._steps = 0
        self._samples = 0
        # By a clock that stands still in pauses.
        self._start = self._end = 0.0
        self._pauses = 0  # that are under way, one in another
        self._paused_at = self._paused_for = 0.0
        self._bar = Bar(
            BarColumn(bar_width=BAR_WIDTH, table_column=_fixed(BAR_WIDTH)),
            MofNCompleteColumn(table_column=_fixed(2 * len(str(num_steps)) + 1)),
            TimeRemainingColumn(table_column=_fixed(len("0:00:00"))),
            # What a narrow terminal has no room for is cut off here.
            TextColumn(
                "{task.fields[rate]}  {task.fields[ne]}  {task.fields[held_out]}",
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            expand=True,
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=num_steps, completed=done, rate="compiling", ne="", held_out=""
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        if not self._console.is_terminal:
            self._console.print("compiling the training step")
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
        """Between the end of the first step and that of the last, without pauses; 0 before."""
        seconds = self._end - self._start
        return self._samples / seconds if self._samples and seconds > 0 else 0.0

    def advance(self, samples: int) -> None:
        """Count one more step, with its samples unless it ends in a pause."""
        self._steps += 1
        now = (self._paused_at if self._pauses else self._clock()) - self._paused_for
        if self._steps <= WARM_UP_STEPS:
            self._start = self._end = now
        elif not self._pauses:
            self._samples += samples
            self._end = now

    def is_due(self) -> bool:
        """Whether it is time to show something again."""
        return self._clock() - self._shown > self._seconds

    def show(self, step: int, ne: float) -> None:
        """Shows where training is."""
        self._shown = self._clock()
        speed = self.samples_per_second
        rate = f"{speed:,.0f} samples/s" if speed else "compiling"
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
        """While it lasts, neither time nor samples count for `samples_per_second`."""
        if not self._pauses:
            self._paused_at = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused_for += self._clock() - self._paused_at


def _fixed(width: int) -> Column:
    """A column that a narrow terminal leaves as it is."""
    return Column(min_width=width, no_wrap=True)
