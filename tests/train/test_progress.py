from __future__ import annotations

import io
import time

from rich.console import Console

from jaxrec.train.progress import LINE_SECONDS, Progress


def shown(*, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    with Progress(console, num_steps=10, done=2) as progress:
        assert progress.samples_per_second == 0
        assert not progress.is_due()
        for step in (3, 4, 5):
            progress.advance(100)
            progress.show(step, 0.75)
    return progress, text.getvalue()


def test_lines_where_there_is_no_terminal():
    progress, text = shown(terminal=False)
    first, *_, last = text.splitlines()
    assert first == "step 3 of 10, compiling, NE 0.7500"
    assert last.startswith("step 5 of 10, ")
    assert last.endswith(" samples/s, NE 0.7500")
    assert "\x1b" not in text
    rate = progress.samples_per_second
    assert rate > 0
    time.sleep(0.01)
    assert progress.samples_per_second == rate


def test_a_bar_on_a_terminal():
    _, text = shown(terminal=True)
    assert "5/10" in text
    assert "NE 0.7500" in text
    assert "step 5" not in text


def test_lines_come_seconds_apart(monkeypatch):
    progress = Progress(Console(file=io.StringIO()), num_steps=10)
    later = time.perf_counter() + LINE_SECONDS + 1
    monkeypatch.setattr(time, "perf_counter", lambda: later)
    assert progress.is_due()
    progress.show(1, 1.0)
    assert not progress.is_due()
