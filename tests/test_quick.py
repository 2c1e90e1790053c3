"""Which cases of a test with parameters run."""

from __future__ import annotations

import itertools

from tests.quick import choose


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
