"""Actions at the ends of windows of event time, such as publishing a model every hour of a log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxrec.data import StreamBatches
from jaxrec.mesh.agree import gather_ids
from jaxrec.train.trainer import Callback, Trainer

# Stands for no event time in what processes gather.
_NONE = -(2**62)


@dataclasses.dataclass(eq=False)
class EventWindows(Callback):
    """Calls a function when the event time of the trained rows enters another window.

    Event time is `jaxrec.data.StreamBatches.newest_seconds`: windows end at the same rows in a run
    over old messages and in one that follows a topic. After a restart the windows go on. Put the
    callback before `jaxrec.train.SaveCheckpoints`: a window's end between a checkpoint and a kill
    is then acted on again, and none is left out.

    Attributes:
        batches: The batches of the trainer.
        seconds: Length of a window. Windows begin at multiples of it since 1970.
        action: ``action(trainer, end)``, where ``end`` is the Unix time at the end of the newest
            complete window. All processes call it at the same step.
        lateness: Seconds by which rows may come late. A window is complete this long after its
            end.
        every: Number of steps between two checks of the event time. With several processes a check
            compares their event times, takes the oldest, and waits for the devices.

    Raises:
        ValueError: ``seconds`` is not above 0, ``lateness`` is below 0 or ``every`` below 1.

    Example:
        >>> from jaxrec.data import FolderSource
        >>> batches = StreamBatches(source=FolderSource(directory="log"), batch_size=64)
        >>> hourly = EventWindows(batches, 3600, lambda trainer, end: print("until", end))
    """

    batches: StreamBatches
    seconds: float
    action: Callable[[Trainer, float], None]
    lateness: float = 0.0
    every: int = 16

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.lateness >= 0 or self.every < 1:
            raise ValueError(
                "EventWindows: seconds is above 0, lateness 0 or more, every 1 or more, got "
                f"{self.seconds}, {self.lateness} and {self.every}"
            )
        self._window: int | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        self._window = self._current()

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if step % self.every:
            return
        window = self._current()
        if window is None or self._window is None:
            self._window = window
        elif window > self._window:
            self._window = window
            trainer.wait()
            self.action(trainer, window * self.seconds)

    def _current(self) -> int | None:
        """Return the window of the oldest of all processes' event times; None: all are unknown."""
        time = self.batches.newest_seconds
        own = _NONE if time is None else math.floor((time - self.lateness) / self.seconds)
        windows = np.concatenate(gather_ids(np.array([own], np.int64)))
        known = windows[windows != _NONE]
        return int(known.min()) if known.size else None
