"""Division of a table's records among the row stores of several processes."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.tier.ids.batch_ops import mix

# Number of buckets of ids. A process has a run of consecutive buckets.
NUM_BUCKETS = 1024

# Seed of the hash; beyond those of admission and of the counters of sightings.
_SEED = 1 << 40

# Number of consecutive ids of a large range that are in one bucket. Such ids are neighbours in a
# file, and a page of a file should have records of one process.
_RUN = 1024


@dataclasses.dataclass(frozen=True)
class Division:
    """Rule by which each of several processes has a part of a table's records in its store.

    Attributes:
        process: Index of the process.
        num_processes: Number of processes.
        num_ids: Ids are 0 to ``num_ids`` - 1; None: any 64-bit ids.

    Raises:
        ValueError: There are more processes than buckets.
    """

    process: int
    num_processes: int
    num_ids: int | None = None

    def __post_init__(self) -> None:
        if self.num_processes > NUM_BUCKETS:
            raise ValueError(
                f"row stores are divided among {NUM_BUCKETS:,} processes or fewer, got "
                f"{self.num_processes:,}"
            )

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """Return the process whose store has the record of each id.

        Args:
            ids: int64 ``[n]``.

        Returns:
            Process indices, int64 ``[n]``. They depend on the ids and the number of processes
            alone.
        """
        if self.num_ids is not None:
            # Small ranges have shorter runs, so that every process has its share.
            ids = ids // min(_RUN, 1 + self.num_ids // (64 * NUM_BUCKETS))
        buckets = (mix(ids, _SEED) % np.uint64(NUM_BUCKETS)).astype(np.int64)
        return buckets * self.num_processes // NUM_BUCKETS

    def is_own(self, ids: np.ndarray) -> np.ndarray:
        """Return whether the record of each id belongs in this process's store, bool ``[n]``."""
        return self.owners(ids) == self.process
