"""The state of a run's batches: saved with the model, and restored before training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxrec.data.streams.batches import ResumableBatches
from jaxrec.mesh.agree import gather_texts


class ReaderState:
    """Positions of a run's batches, where these can be resumed (`jaxrec.data.StreamBatches`).

    Use it as a context while batches are read: leaving it wakes batches that wait for rows.

    Attributes:
        saved: State of each process from a checkpoint, which the next batches get.
    """

    def __init__(self) -> None:
        self.saved: tuple[str, ...] = ()
        self._batches: ResumableBatches | None = None

    def begin(self, batches: Any) -> None:
        """Set the batches; they go on where those of the model ended, here or in a checkpoint."""
        if batches is self._batches and not self.saved:
            return
        saved = self.saved or self.states()
        self._batches, self.saved = None, saved
        if isinstance(batches, ResumableBatches):
            self._batches, self.saved = batches, ()
            if saved:
                batches.restore(saved)

    @property
    def goes_on(self) -> bool:
        """Whether more batches may come later although none is there now."""
        return self._batches is not None

    def advance(self, count: int) -> None:
        """Note that the next ``count`` batches are in the model."""
        if self._batches is not None:
            # A callback may have restored a checkpoint: these batches went on nevertheless.
            self.saved = ()
            self._batches.advance(count)

    def states(self) -> tuple[str, ...]:
        """Return the state of each process; all of them call this."""
        # The model is that of a checkpoint, and the batches have not gone back yet; or batches of
        # another kind leave the states as they are, for those that come after.
        if self.saved or self._batches is None:
            return self.saved
        state = self._batches.state()
        return tuple(gather_texts(state)) if jax.process_count() > 1 else (state,)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that sets the batches back to where they are now."""
        if (batches := self._batches) is None:
            return lambda: None
        state = batches.state()
        return lambda: batches.restore([state])

    def scalars(self) -> dict[str, float]:
        """Return figures of the batches by name."""
        return {} if self._batches is None else self._batches.scalars()

    def __enter__(self) -> ReaderState:
        return self

    def __exit__(self, *_: object) -> None:
        if self._batches is not None:
            self._batches.interrupt()
