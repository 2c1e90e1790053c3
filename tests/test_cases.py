"""Which cases of a test with parameters run, and how they may be named."""

from __future__ import annotations

import itertools
import types

import pytest

from tests import fuzz
from tests.cases import CASES, choose, pick, refuse_addresses, thin_out

pytestmark = pytest.mark.every_case


def product(**counts):
    places = itertools.product(*map(range, counts.values()))
    return [dict(zip(counts, case, strict=True)) for case in places]


def test_few_cases_have_all_values_of_the_parameters():
    cases = product(kernel=4, shape=6, dtype=2)
    chosen = [cases[place] for place in choose(cases, 6)]
    assert {case["kernel"] for case in chosen} == set(range(4))
    assert {case["shape"] for case in chosen} == set(range(6))
    assert {case["dtype"] for case in chosen} == {0, 1}


def test_cases_of_one_parameter_are_spread():
    assert choose(product(shape=9), 3) == [0, 8, 4]


def test_no_case_is_chosen_twice():
    cases = product(kernel=2, shape=3)
    assert sorted(choose(cases, 100)) == list(range(6))
    assert len(set(choose(cases, 4))) == 4


def test_each_place_is_picked_for_some_tests():
    assert {pick(f"tests/test_a.py::test_{name}", range(3)) for name in "abcdefgh"} == {0, 1, 2}


class Item(types.SimpleNamespace):
    """A case of a test with one parameter."""

    def get_closest_marker(self, name):
        return next((mark for mark in self.own_markers if mark.name == name), None)

    def add_marker(self, decorator):
        self.own_markers.append(decorator.mark)

    def __hash__(self):
        return id(self)


@pytest.mark.skipif(bool(CASES or fuzz.CASES), reason="the environment names the cases")
@pytest.mark.parametrize(
    ("slow", "kept", "quick"),
    [([0, 0, 0], 2, 1), ([0, 0, 1], 2, 1), ([1, 0, 1], 1, 0), ([1, 1, 1], 1, 0)],
    ids=["quick", "one is slow", "both of the chosen are", "slow"],
)
def test_how_many_cases_run(slow, kept, quick):
    items = [
        Item(
            nodeid=f"test_a[{place}]",
            callspec=types.SimpleNamespace(indices={"x": place}, params={"x": place}),
            own_markers=[pytest.mark.slow.mark] * is_slow,
        )
        for place, is_slow in enumerate(slow)
    ]
    left_out = thin_out(items)
    assert len(items) == kept
    assert len(left_out) == len(slow) - kept
    assert sum(item.get_closest_marker("slow") is None for item in items) == quick


@pytest.mark.parametrize("name", ["0x7f", "at=0x7f", "format 0x7f", "object"])
def test_names_of_tests(name):
    refuse_addresses([types.SimpleNamespace(nodeid=f"test_a[{name}]")])


@pytest.mark.parametrize("value", [test_names_of_tests, object()], ids=["a function", "an object"])
@pytest.mark.parametrize("space", [" ", "_"], ids=["spaces", "underscores"])
def test_names_of_tests_hold_no_address(value, space):
    name = repr(value).replace(" ", space)
    with pytest.raises(pytest.UsageError, match=r"give ids= to test_a\[<"):
        refuse_addresses([types.SimpleNamespace(nodeid=f"test_a[{name}]")])


@pytest.mark.skipif(bool(CASES or fuzz.CASES), reason="the environment names the cases")
def test_each_backend_has_cases_of_its_own():
    items = [
        Item(
            nodeid=f"test_a[{gpu}-{place}]",
            callspec=types.SimpleNamespace(
                indices={"gpu": number, "x": place}, params={"gpu": gpu, "x": place}
            ),
            own_markers=[],
        )
        for number, gpu in enumerate(["mosaic", "triton"])
        for place in range(3)
    ]
    thin_out(items)
    quick = [item.nodeid for item in items if item.get_closest_marker("slow") is None]
    assert [len([name for name in quick if gpu in name]) for gpu in ("mosaic", "triton")] == [1, 1]
    assert len(items) == 4
