"""Which options are timed, and which choice is made."""

from __future__ import annotations

import pytest

from jaxrec import EmbeddingConfig, optim
from jaxrec.embed.kernels import registry
from jaxrec.plan import ParameterConstraints
from jaxrec.tune.calls import Batch, calls_of
from jaxrec.tune.search import (
    Timing,
    choose,
    default_for,
    fastest,
    implementations_for,
    timings_of,
)
from tests.tune.fakes import FAKE, REFERENCE

pytestmark = pytest.mark.every_case

TABLE = EmbeddingConfig("rows", 30, 4, optimizer=optim.sgd(0.1))
COPY, _ = calls_of([TABLE], {"rows": ParameterConstraints()}, Batch(6))
BOTH = [FAKE, REFERENCE]


def timer(milliseconds):
    """Times by a function of name and options; None is a failure. It notes what it times."""

    def time(implementation, options):
        taken = milliseconds(implementation.name, dict(options))
        time.timed.append((implementation.name, dict(options)))
        return Timing(implementation.name, options, taken, "broken" if taken is None else None)

    time.timed = []
    return time


def test_options_are_tried_one_after_the_other():
    time = timer(lambda name, options: 10 - options.get("width", 1) % 4 - options.get("depth", 0))
    timings = timings_of(COPY, BOTH, time)
    assert time.timed == [
        ("fake", {}),
        ("fake", {"width": 2}),  # 1 is the default
        ("fake", {"width": 4}),
        ("fake", {"width": 2, "depth": 1}),
        ("fake", {"width": 2, "depth": 2}),
        ("reference", {}),
    ]
    assert fastest(timings).options == {"width": 2, "depth": 2}


def test_options_of_a_broken_implementation_are_not_tried():
    time = timer(lambda name, options: None if name == "fake" else 1.0)
    timings_of(COPY, BOTH, time)
    assert time.timed == [("fake", {}), ("reference", {})]


def test_a_broken_option_is_passed_over():
    time = timer(lambda name, options: None if options.get("width") == 2 else 5.0)
    choice = choose(COPY, "fake", timings_of(COPY, BOTH, time), BOTH, time)
    assert (choice.implementation, choice.options) == ("fake", {})


@pytest.mark.parametrize(
    ("fake", "reference", "again", "chosen"),
    [
        (10.0, 5.0, 5.0, "reference"),
        (10.0, 9.8, 9.8, "fake"),  # saves too little
        (10.0, 5.0, 9.9, "fake"),  # was luck
        (10.0, 5.0, None, "fake"),
        (10.0, 20.0, 20.0, "fake"),
        (None, 20.0, 20.0, "reference"),
        (0.0, 0.0, 0.0, "fake"),
    ],
)
def test_a_choice_saves_time_twice(fake, reference, again, chosen):
    references = iter([reference, again])
    time = timer(lambda name, options: next(references) if name == "reference" else fake)
    timings = [time(FAKE, {}), time(REFERENCE, {})]
    choice = choose(COPY, "fake", timings, BOTH, time)
    assert (choice.implementation, choice.default) == (chosen, "fake")
    assert choice.milliseconds == (fake if chosen == "fake" else reference)
    assert choice.default_milliseconds == (reference if fake is None else fake)
    assert (choice.form, choice.lookups, choice.bags) == ("row_lookup D4 float32", 6, 6)


def test_nothing_works():
    time = timer(lambda name, options: None)
    assert choose(COPY, "fake", timings_of(COPY, BOTH, time), BOTH, time) is None


def test_implementations_of_a_platform(monkeypatch):
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", (*BOTH, registry.IMPLEMENTATIONS[1]))
    assert implementations_for(COPY, "cpu") == BOTH
    assert [each.name for each in implementations_for(COPY, "cuda")] == ["reference", "triton"]
    assert default_for(COPY, "cpu") == "fake"
    assert default_for(COPY, "cuda") == "reference"
