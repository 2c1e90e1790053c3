from __future__ import annotations

import io
import re
import time

import jax
import pytest
from rich.console import Console

from jaxrec.train.callbacks import FIRST_STEP, STEPS, StepTrace
from jaxrec.train.progress import LINE_SECONDS, Progress


def shown(*, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    with Progress(console, num_steps=10, done=2) as progress:
        assert progress.samples_per_second == 0
        assert not progress.is_due()
        for step in (3, 4, 5):
            progress.advance(100)
            progress.show(step, "NE 0.7500")
    return progress, text.getvalue()


def test_lines_where_there_is_no_terminal():
    progress, text = shown(terminal=False)
    begun, first, *_, last = text.splitlines()
    assert begun == "compiling the training step"
    assert first == "step 3 of 10, compiling, NE 0.7500"
    assert last.startswith("step 5 of 10, ")
    assert last.endswith(" samples/s, NE 0.7500")
    assert "\x1b" not in text
    rate = progress.samples_per_second
    assert rate > 0
    time.sleep(0.01)
    assert progress.samples_per_second == rate


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return Progress(Console(file=io.StringIO()), num_steps=10, clock=clock)


def step(progress, clock, seconds, samples=100):
    clock.tick(seconds)
    progress.advance(samples)


def test_the_first_step_compiles_and_does_not_count(progress, clock):
    step(progress, clock, 60)
    assert progress.samples_per_second == 0
    step(progress, clock, 2)
    step(progress, clock, 2)
    assert progress.samples_per_second == 50


@pytest.mark.parametrize("place", range(5), ids="before step {}".format)
def test_pauses_do_not_count(progress, clock, place):
    """Wherever they are, after the last step as well: the rate is that of the steps."""
    for number in range(5):
        if number == place:
            with progress.paused():
                clock.tick(1000)
        step(progress, clock, 2)
    assert progress.samples_per_second == 50
    with progress.paused():
        clock.tick(1000)
    assert progress.samples_per_second == 50


def test_steps_within_a_pause_do_not_count(progress, clock):
    """As those of a trace; a pause in a pause, such as a save then, is one with it."""
    step(progress, clock, 60)
    step(progress, clock, 2)
    with progress.paused():
        step(progress, clock, 500)
        with progress.paused():
            clock.tick(10)
        step(progress, clock, 500)
    step(progress, clock, 2)
    assert progress.samples_per_second == 50


def test_the_first_step_may_end_in_a_pause(progress, clock):
    with progress.paused():
        step(progress, clock, 60)
    step(progress, clock, 4)
    assert progress.samples_per_second == 25


def test_a_trace_is_a_pause(progress, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: clock.tick(100))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: clock.tick(1000))
    with StepTrace(tmp_path, progress.paused) as trace:
        for number in range(FIRST_STEP + STEPS + 5):
            traced = FIRST_STEP <= number < FIRST_STEP + STEPS
            step(progress, clock, 50 if traced else 2)
            trace.step()
    assert progress.samples_per_second == pytest.approx(50)


@pytest.mark.parametrize("width", [50, 60, 80])
def test_a_narrow_terminal_keeps_bar_count_and_time_left(width):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width)
    with Progress(console, num_steps=2442, done=1204) as progress:
        progress.advance(2048)
        progress.show(1205, "NE 0.8123")
        progress.show_held_out(1205, "AUC 0.8000, NE 0.8000")
    *_, line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()).strip().splitlines()
    assert "1205/2442" in line
    assert line.count("━") >= 15
    assert "--:--" in line


def test_a_bar_on_a_terminal():
    _, text = shown(terminal=True)
    assert "5/10" in text
    assert "NE 0.7500" in text
    assert "step 5" not in text


def test_lines_come_seconds_apart(progress, clock):
    clock.tick(LINE_SECONDS + 1)
    assert progress.is_due()
    progress.show(1, "NE 1.0000")
    assert not progress.is_due()
