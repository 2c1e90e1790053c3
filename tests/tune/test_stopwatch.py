"""What is checked before it is timed, and how the time is taken."""

from __future__ import annotations

import pytest

from jaxrec import EmbeddingBagConfig, EmbeddingConfig, optim
from jaxrec.plan import ParameterConstraints
from jaxrec.tune import search
from jaxrec.tune.calls import Batch, calls_of
from jaxrec.tune.search import ROUNDS, Stopwatch
from tests.tune.fakes import FAKE, REFERENCE, FakeClock

pytestmark = pytest.mark.every_case

TABLES = [
    EmbeddingBagConfig("bags", 30, 4, optimizer=optim.adagrad(0.1)),
    EmbeddingConfig("rows", 30, 4, optimizer=optim.sgd(0.1)),
]
CALLS = {
    (call.primitive, call.tables[0]): call
    for call in calls_of(TABLES, {t.name: ParameterConstraints() for t in TABLES}, Batch(6))
}
COPY = CALLS["row_lookup", "rows"]


def test_the_median_of_rounds():
    # Read twice a round: one that compiles, one that says how long a call takes, and the rounds.
    durations = [100.0, 0.5, *[7.0] * 3, 9.0, 1.0, 2.0, 90.0]
    assert len(durations) == 2 + ROUNDS
    clock = FakeClock(lambda read: durations[read // 2] if read % 2 else 1000.0)
    timing = Stopwatch(COPY, seconds=ROUNDS * 0.5 * 4, clock=clock).time(FAKE, {"width": 4})
    assert clock.reads == 2 * len(durations)
    assert timing == search.Timing("fake", {"width": 4}, milliseconds=1e3 * 7.0 / 4)


def test_a_clock_that_stands_still():
    assert Stopwatch(COPY, 1.0, FakeClock(lambda read: 0.0)).time(FAKE, {}).milliseconds == 0


@pytest.mark.parametrize("key", CALLS, ids=str)
def test_the_reference_is_timed_on_every_call(key):
    timing = Stopwatch(CALLS[key], 1e-6, FakeClock(lambda read: 1.0)).time(REFERENCE, {})
    assert timing == search.Timing("reference", {}, milliseconds=1e3)


@pytest.mark.parametrize(
    ("key", "options", "reason"),
    [
        (("fused_update", "bags"), {}, "its results differ from the reference's, by up to"),
        (("pooled_lookup", "bags"), {}, "it fails: NotImplementedError: no rule for this operatio"),
        (("row_lookup", "rows"), {"height": 3}, "it fails: TypeError"),
    ],
    ids=["wrong", "fails", "unknown_option"],
)
def test_what_fails_is_not_timed(key, options, reason):
    clock = FakeClock(lambda read: 1.0)
    timing = Stopwatch(CALLS[key], 1.0, clock).time(FAKE, options)
    assert timing.milliseconds is None
    assert reason in timing.failure
    assert clock.reads == 0


def test_wrong_results_on_the_call_alone(monkeypatch):
    monkeypatch.setattr(search.trial, "compare", lambda *_: None)
    timing = Stopwatch(CALLS["fused_update", "bags"], 1.0).time(FAKE, {})
    assert timing.failure == "its results differ from the reference's on this call"


def test_an_interrupt_is_no_failure():
    def interrupt(read: int) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stopwatch(COPY, 1.0, FakeClock(interrupt)).time(FAKE, {})
