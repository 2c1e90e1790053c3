"""Uses of rows by batches, and when they are written to the records."""

from __future__ import annotations

import numpy as np

from jaxrec.tier.ids.batch_ops import distinct, record_uses
from jaxrec.tier.ids.mixing import mix
from jaxrec.tier.vocabulary.eviction import MAX_POWER, Eviction
from jaxrec.tier.vocabulary.records import Records

# Seed of the draws that raise a frequency class; beyond those of the hashes of `Sightings`.
_SEED = 1 << 21

# Uses that wait at most, with 4 bytes each, and batches.
_MOST_USES = 1 << 17
_MOST_BATCHES = 32


class Uses:
    """Uses of rows that wait to be written to the records, all at once.

    Between two batches the training step drives the records out of the processor's cache, and to
    fetch them back takes longer than to change them. So the uses of several batches are written
    together. Whoever reads the records calls `record` first; ``ids`` and ``born`` do not wait.

    Args:
        records: The records.
        policy: The eviction policy, which says what is recorded.
    """

    def __init__(self, records: Records, policy: Eviction) -> None:
        self._records, self._policy = records, policy
        self._waiting: list[tuple[np.ndarray, int, int]] = []
        self._num_waiting = 0

    def add(self, rows: np.ndarray, batch: int) -> None:
        """Note the use of rows by a batch.

        Args:
            rows: int32 ``[n]``, with repeats; -1 stands for no row. The array must not change
                afterwards.
            batch: Number of the batch; not less than that of any batch before.
        """
        seconds = int(self._policy.seconds()) if self._policy.uses_seconds else 0
        self._waiting.append((rows, batch, seconds))
        self._num_waiting += rows.size
        if self._num_waiting >= _MOST_USES or len(self._waiting) >= _MOST_BATCHES:
            self.record()

    def record(self) -> None:
        """Write all uses to the records."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        for rows, batch, seconds in waiting:
            if self._policy.uses_power:
                self._raise_powers(rows, batch)
            if self._policy.uses_seconds:
                self._records.last_seconds[rows[rows >= 0]] = seconds
            record_uses(rows, batch, self._records.count, self._records.last_use)

    def _raise_powers(self, rows: np.ndarray, batch: int) -> None:
        """Raise the frequency classes of rows by chance."""
        records = self._records
        once = distinct(rows[rows >= 0].astype(np.int64))[0]
        power = records.power[once]
        # As many low bits of the draw as the class are zero with probability 2**-power.
        draws = mix(records.ids[once], _SEED + batch)
        masks = (np.uint64(1) << power.astype(np.uint64)) - np.uint64(1)
        raised = ((draws & masks) == 0) & (records.last_use[once] != batch)
        # The class of an id that is new in this batch stays.
        raised &= records.born[once] != batch
        records.power[once] = np.minimum(power + raised, MAX_POWER).astype(np.uint8)
