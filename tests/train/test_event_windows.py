"""Windows of event time end at the same rows, whenever a run is stopped."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.train import CheckpointManager, EventWindows
from tests.train.test_reader_state import ROWS, make, stream


def test_windows(tmp_path):
    ids = list(range(ROWS))  # 10 steps of 4 rows; row i comes at second 1000 + 10 * i
    (tmp_path / "in").mkdir()
    pq.write_table(
        pa.table({"id": ids, "t": [1000 + 10 * i for i in ids]}), tmp_path / "in/a.parquet"
    )
    seen = []

    def windows(batches, **options):
        def action(trainer, end):
            seen.append((trainer.step, end))

        return EventWindows(batches, 100, action, every=1, **options)

    def train(steps=None, **options):
        batches = stream(tmp_path / "in", event_time="t")
        trainer = make(callbacks=[windows(batches, **options)])
        return trainer, lambda: trainer.train(batches, steps=steps)

    # Step s ends with the row at second 1000 + 10 * (4 * s - 1).
    whole = [(3, 1100), (6, 1200), (8, 1300)]
    train()[1]()
    assert seen == whole
    seen.clear()
    train(lateness=25)[1]()
    assert seen == [(4, 1100), (6, 1200), (9, 1300)]
    seen.clear()
    with CheckpointManager(tmp_path / "run") as manager:
        trainer, run = train(steps=5)
        run()
        trainer.save(manager)
        trainer, run = train()
        trainer.restore(manager)
        run()
    assert seen == whole


def test_unknown_times(tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "in/a.parquet")
    batches = stream(tmp_path / "in")
    make(callbacks=[EventWindows(batches, 100, lambda trainer, end: pytest.fail(f"{end}"))]).train(
        batches
    )


@pytest.mark.parametrize("options", [{"seconds": 0}, {"lateness": -1}, {"every": 0}], ids=str)
def test_options(tmp_path, options):
    with pytest.raises(ValueError, match="EventWindows: seconds is above 0"):
        EventWindows(stream(tmp_path), **{"seconds": 1, "action": print, **options})
