"""Parts of row stores in checkpoints, dealt to other numbers of processes."""

from __future__ import annotations

import itertools
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.rows.records import RecordLayout
from jaxrec.tier.rows.transfer import RowTransfer
from jaxrec.tier.saved_stores import check_stores, load_stores, snapshot_stores
from jaxrec.tier.stores import open_store

LAYOUT = RecordLayout.of([LogicalTable(jax.ShapeDtypeStruct((9, 2), np.float32), {})])
IDS = np.random.default_rng(0).integers(-(2**62), 2**62, 300)


def rows_of(ids, number):
    return [{"rows": np.stack([ids % 1000, np.full(ids.size, number)], 1).astype(np.float32)}]


class Run:
    """The stores of some processes; 0: of one process, which is not divided."""

    def __init__(self, num_processes: int, url: str = "memory://") -> None:
        self.processes = []
        for process in range(max(1, num_processes)):
            transfer = RowTransfer(open_store(url.format(process)), LAYOUT)
            if num_processes:
                transfer.divide(process, num_processes)
            vocabulary = cast(Any, None)
            self.processes.append(TableVocabulary("user", (), (), vocabulary, transfer))

    def put(self, ids, number):
        for each in self.processes:
            each.transfer.put(ids, rows_of(ids, number))

    def delete(self, ids):
        for each in self.processes:
            each.transfer.delete(ids)

    def save(self, directory, written=None):
        for each in self.processes:
            own = None if written is None else written[each.transfer.is_own(written)]
            snapshot_stores([each], directory, {} if own is None else {"user": own})

    def load(self, directories):
        for each in self.processes:
            check_stores([each], directories)
            load_stores([each], directories)

    def records(self) -> dict[int, float]:
        """The number of each id; raises where two stores have an id."""
        numbers: dict[int, float] = {}
        for each in self.processes:
            for ids, records in each.transfer.store.scan():
                assert each.transfer.is_own(ids).all()
                (table,) = LAYOUT.unpack(records)
                np.testing.assert_array_equal(table["rows"][:, 0], ids % 1000)
                new = dict(zip(ids.tolist(), table["rows"][:, 1].tolist(), strict=True))
                assert not numbers.keys() & new.keys()
                numbers |= new
        return numbers


@pytest.mark.parametrize(
    ("saved", "restored", "url"),
    [(*counts, "memory://") for counts in itertools.product([0, 1, 2, 3], repeat=2)]
    + [(*counts, "file://{directory}/{run}-{{}}") for counts in [(2, 2), (3, 2), (2, 0), (0, 2)]],
)
def test_each_record_goes_to_its_owner(saved, restored, url, tmp_path):
    run = Run(saved, url.format(directory=tmp_path, run="saved"))
    run.put(IDS, 1)
    run.save(tmp_path / "full")
    run.put(IDS[:90], 2)
    run.delete(IDS[60:120])
    run.save(tmp_path / "changes", written=IDS[:120])
    expected = dict.fromkeys(IDS[120:].tolist(), 1.0) | dict.fromkeys(IDS[:60].tolist(), 2.0)
    assert run.records() == expected
    other = Run(restored, url.format(directory=tmp_path, run="restored"))
    other.put(np.arange(10), 3)  # which the checkpoint has not
    other.load([tmp_path / "full"])
    assert other.records() == dict.fromkeys(IDS.tolist(), 1.0)
    other.load([tmp_path / "full", tmp_path / "changes"])
    assert other.records() == expected
    for each in (*run.processes, *other.processes):
        each.transfer.store.close()


def test_rows_that_a_process_does_not_own_are_ignored(tmp_path):
    """As in a store where an earlier version kept the rows of all processes."""
    run = Run(2)
    for each in run.processes:
        each.transfer.store.put(IDS, LAYOUT.pack(rows_of(IDS, 1)))
    scanned = [np.concatenate([i for i, _ in p.transfer.scan_own(64)]) for p in run.processes]
    np.testing.assert_array_equal(np.sort(np.concatenate(scanned)), np.sort(IDS))
    run.save(tmp_path / "full")
    for processes in (0, 3):
        other = Run(processes)
        other.load([tmp_path / "full"])
        assert other.records() == dict.fromkeys(IDS.tolist(), 1.0)


@pytest.mark.parametrize("restored", [0, 2, 3])
def test_a_part_that_is_missing_is_named(restored, tmp_path):
    run = Run(2)
    run.put(IDS, 1)
    run.save(tmp_path / "full")
    (tmp_path / "full" / "user" / "process-1-of-2").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"process-1-of-2 is missing, .* of process 1 of 2"):
        Run(restored).load([tmp_path / "full"])
