"""Calls of several processes, here threads with a board in memory, that are compared."""

from __future__ import annotations

import concurrent.futures

import jax
import pytest

from jaxrec.mesh.call_checks import SWITCH, CallMismatchError, CallSequence, check_call
from tests.mesh.test_batch_counts import Board
from tests.pairs import Pair


def in_processes(calls, seconds=30.0):
    """Each process makes its calls; return what ended it."""
    notes = {}

    def run(process):
        sequence = CallSequence(Board(process, len(calls), notes), seconds)
        try:
            for call, facts in calls[process]:
                sequence.compare(call, facts)
        except CallMismatchError as error:
            return str(error)
        return "passed"

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, range(len(calls))))


STEP = ("step", {"batch": "int32[8]"})


def test_the_same_calls_pass():
    assert in_processes([[STEP] * 20] * 3) == ["passed"] * 3


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ("step", {"batch": "int32[4]"}),
            "process 0 has 'batch': int32[8]; processes 1 and 2 have 'batch': int32[4]",
        ),
        (
            ("evaluation", {}),
            "process 0 has 'call': step; processes 1 and 2 have 'call': evaluation",
        ),
        (("step", {}), "process 0 has 'batch': int32[8]; processes 1 and 2 have 'batch': None"),
    ],
    ids=["shape", "call", "array"],
)
def test_another_call_is_named_in_all(other, message):
    found = in_processes([[STEP, STEP], [STEP, other], [STEP, other]])
    assert found == [f"call 2 differs between processes: {message}"] * 3


def test_a_call_that_others_do_not_make():
    late, *_ = in_processes([[STEP, STEP], [STEP], []], seconds=0.2)
    assert late == (
        "process 0 is at call 1, step; process 2 has not come there in 0.2 s: the last call of "
        "process 2 is 0, none"
    )


def test_without_the_switch_nothing_is_compared(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    check_call("steps", "step", lambda: pytest.fail("is not asked"))


@pytest.mark.slow
@pytest.mark.jax_version
def test_two_processes_whose_batches_differ(forks):
    pair = Pair(forks)
    try:
        told = pair.run("tests.mesh.processes:differ")
    finally:
        pair.stop()
    for process, (of_batch, of_lookup, of_number) in enumerate(told):
        assert "process 0 has \"batch['x']\": float32[4, 2]; process 1 has" in of_batch
        assert "('a', 'b'), capacities (8, 8)" in of_lookup
        assert "('a', 'b'), capacities (8, 16)" in of_lookup
        assert of_number.startswith("" if process else "process 0 is at call 3, shard_batch; ")


def test_a_switch_that_is_not_a_number(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setenv(SWITCH, "on")
    with pytest.raises(ValueError, match=f"{SWITCH} is a number of seconds, got 'on'"):
        check_call("a sequence of its own", "step", dict)
