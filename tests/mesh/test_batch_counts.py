"""Processes, here threads with a board in memory, that have different numbers of batches."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import Pipeline
from jaxrec.mesh.batch_counts import EvenBatches, even_batches
from jaxrec.mesh.processes import NoteBoard
from tests.fuzz import max_examples


class Board(NoteBoard):
    """The board of one process in memory; ``notes`` are those of all."""

    def __init__(self, process, num_processes, notes):
        self.process, self.num_processes, self._notes = process, num_processes, notes

    def write(self, note):
        self._notes[self.process] = note

    def read(self):
        return dict(self._notes)


def in_processes(sources, iterate=list, empty=None):
    """The result of ``iterate`` or its error, of each process."""
    notes = {}

    def run(process):
        board = Board(process, len(sources), notes)
        try:
            return iterate(EvenBatches(sources[process], empty, board))
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(run, range(len(sources))))


@settings(max_examples=max_examples(20), deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_all_end_after_the_last_batch_that_each_has(counts):
    found = in_processes([iter(range(count)) for count in counts])
    assert found == [list(range(min(counts)))] * len(counts)


@settings(max_examples=max_examples(20), deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_empty_batches_stand_in_until_all_have_ended(counts):
    found = in_processes([range(count) for count in counts], empty=lambda last: -last)
    for count, batches in zip(counts, found, strict=True):
        assert batches == [*range(count), *[1 - count] * (max(counts) - count)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("counts", "empty", "line"),
    [
        (
            (3, 2, 2),
            None,
            "processes 1 and 2 have only 2 batches, and others more: all stop",
        ),
        ((1, 2), None, "process 0 has only 1 batch, and others more: all stop after these"),
        ((2, 1), abs, "process 1 has only 1 batch, and others more: empty ones stand in until"),
        ((2, 2), None, None),
        ((2, 2), abs, None),
    ],
    ids=str,
)
def test_one_line_names_those_that_ended_first(counts, empty, line, caplog):
    with caplog.at_level(logging.WARNING):
        in_processes([range(count) for count in counts], empty=empty)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (line is not None)
    assert all(message.startswith(line) for message in messages)


def failing():
    yield 0
    raise OSError("disk on fire")


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in the loop", "in a thread"])
def test_an_error_of_one_process_ends_all(is_ahead):
    def iterate(batches):
        if not is_ahead:
            return list(batches)
        with Pipeline(batches) as pipeline:
            return list(pipeline)

    first, second, third = in_processes([range(5), failing(), range(5)], iterate)
    assert isinstance(second, OSError)
    for error in (first, third):
        assert str(error) == "process 1 cannot go on: OSError: disk on fire"


def test_without_a_batch_there_is_no_empty_one():
    first, second = in_processes([range(2), ()], empty=abs)
    assert str(first).startswith(
        "process 1 cannot go on: ValueError: process 1 has no batch at all"
    )
    assert isinstance(second, ValueError)


@pytest.mark.every_case
@pytest.mark.parametrize("is_nested", [False, True], ids=["waits", "reads"])
def test_a_pipeline_that_is_closed_ends_the_wait(is_nested):
    """The wait for another process that never answers, or for a batch of a pipeline before."""

    def slow():
        time.sleep(0.5)
        yield 0

    running = threading.active_count()
    pipeline = Pipeline(EvenBatches(Pipeline(slow()) if is_nested else [1], None, Board(0, 2, {})))
    time.sleep(0.02)
    start = time.monotonic()
    pipeline.close()
    assert time.monotonic() - start < 2
    while is_nested and threading.active_count() > running:
        time.sleep(0.05)  # until the inner source ends
    assert threading.active_count() == running


def test_a_single_process_keeps_its_batches():
    assert list(even_batches(range(3), empty=abs)) == [0, 1, 2]
