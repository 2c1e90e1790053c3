"""Which rows of which log a run trains on, and which it holds out."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

from jaxrec.data import ClickBatch, ClickLog, CriteoFile, DataError, GeneratedLog, batches, prefetch
from jaxrec.data.transforms import CATEGORICAL_NAMES
from jaxrec.train.config import TrainConfig
from jaxrec.train.model import table_rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows ``[start, stop)`` of a log."""

    log: ClickLog
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def num_batches(self, batch_size: int) -> int:
        """Batches that hold all rows."""
        return -(-len(self) // batch_size)

    def batches(self, batch_size: int, first: int = 0) -> Generator[ClickBatch, None, None]:
        """The rows as batches, from batch ``first`` on, made ahead by a thread."""
        chunks = self.log.chunks(self.start + first * batch_size, self.stop)
        return prefetch(batches(chunks, batch_size, CATEGORICAL_NAMES))


def split_rows(config: TrainConfig) -> tuple[Rows, Rows]:
    """The rows to train on and those that are held out: the last ones, as they come later.

    Raises:
        OSError, DataError: A file cannot be read, or has too few rows.
    """
    data, tables = config.data, table_rows(config)
    if data.path is None:
        rows = data.generated_rows
        log = GeneratedLog(rows + data.generated_eval_rows, config.seed, tables)
        return Rows(log, 0, rows), Rows(log, rows, log.num_rows)
    file = CriteoFile(data.path, tables)
    if data.eval_path is not None:
        held_out = CriteoFile(data.eval_path, tables)
        return Rows(file, 0, file.num_rows), Rows(held_out, 0, held_out.num_rows)
    count = max(1, round(file.num_rows * data.eval_fraction))
    if count >= file.num_rows:
        raise DataError(
            f"{data.path}: {file.num_rows} rows are too few to train on some and hold out "
            f"{data.eval_fraction:.0%}; give more rows, or others with --data.eval-path"
        )
    return Rows(file, 0, file.num_rows - count), Rows(file, file.num_rows - count, file.num_rows)
