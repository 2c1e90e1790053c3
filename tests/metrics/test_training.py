from __future__ import annotations

import math

import pytest

from jaxrec.metrics import Throughput, tower_qps


def at(times, **options):
    """A counter that has seen a step of 10 samples at each of these seconds."""
    clock = iter(times)
    throughput = Throughput(clock=lambda: next(clock), **options)
    for _ in times:
        throughput.update(10)
    return throughput


def test_warm_up_counts_samples_and_no_time():
    values = at([0.0, 100.0, 101.0, 103.0], warmup_steps=2).compute()
    assert values == {
        "throughput/total_examples": 40,
        "throughput/attempt_examples": 40,
        "throughput/lifetime_throughput": pytest.approx(20 / 3),
        "throughput/window_throughput": pytest.approx(20 / 3),
        "throughput/attempt_throughput": pytest.approx(20 / 3),
    }
    assert set(at([0.0, 1.0], warmup_steps=2).compute()) == {
        "throughput/total_examples",
        "throughput/attempt_examples",
    }


def test_window_is_of_the_last_seconds():
    """Whole steps, no longer than the window together."""
    throughput = at([0.0, 4.0, 6.0, 7.0, 8.0], warmup_steps=1, window_seconds=4.5)
    values = throughput.compute()
    assert values["throughput/window_throughput"] == pytest.approx(30 / 4)
    assert values["throughput/lifetime_throughput"] == pytest.approx(40 / 8)


def test_a_step_longer_than_the_window():
    values = at([0.0, 50.0], warmup_steps=1, window_seconds=10).compute()
    assert values["throughput/window_throughput"] == 0.0
    assert values["throughput/lifetime_throughput"] == pytest.approx(0.2)


def test_an_attempt_goes_on_where_the_last_one_ended():
    first = at([0.0, 1.0, 2.0], warmup_steps=1)
    second = at([], warmup_steps=1)
    second.restore(first.state())
    clock = iter([1000.0, 1005.0])
    second.clock = lambda: next(clock)
    second.update(10)
    assert "throughput/lifetime_throughput" not in second.compute()
    second.update(10)
    assert second.compute() == {
        "throughput/total_examples": 50,
        "throughput/attempt_examples": 20,
        "throughput/lifetime_throughput": pytest.approx(30 / 7),
        "throughput/window_throughput": pytest.approx(2),
        "throughput/attempt_throughput": pytest.approx(2),
    }


def test_processes_of_different_speed():
    slow, fast = at([0.0, 4.0], warmup_steps=1), at([0.0, 1.0, 2.0], warmup_steps=1)
    assert tower_qps([slow, fast]) == pytest.approx((10 + 20) / 4)
    assert math.isnan(tower_qps([at([0.0], warmup_steps=1)]))


@pytest.mark.parametrize("options", [{"window_seconds": 0.5}, {"warmup_steps": 0}], ids=str)
def test_wrong_options(options):
    with pytest.raises(ValueError, match="must be 1 or more"):
        Throughput(**options)


def test_window_is_two_hours_at_most():
    assert Throughput(window_seconds=1e9).window_seconds == 7200
