"""Which cases of a test with parameters run.

A test takes one case, and two with ``--slow``, unless it is marked `every_case`. The test's name
decides which of the two is the one, so that each kind of mesh, optimizer and format occurs in some
tests. A test that is marked slow itself takes the case that is farthest from its first one.
``JAXREC_TEST_CASES=all pytest`` runs every case and checks all annotations,
``JAXREC_TEST_CASES=1 pytest`` runs the first case of every test.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

from tests import fuzz

# "all", the largest number of cases of every test, or nothing.
CASES = os.environ.get("JAXREC_TEST_CASES", "")
DEFAULT_COUNT = 2  # with --slow

Case = TypeVar("Case")

# An address of memory, as the repr of a function ends with one.
ADDRESS = re.compile(r"(?<![0-9A-Za-z])at[ _]0x[0-9a-f]")


def runs_all() -> bool:
    """Whether nothing is left out: all cases, and all checks of annotations."""
    return CASES == "all"


def refuse_addresses(items: list[pytest.Item]) -> None:
    """Refuse tests whose names hold an address of memory, which differs between processes.

    The processes of pytest-xdist must find the same tests; they do so by chance where an address is
    cut, until the first run in which they do not.

    Raises:
        pytest.UsageError: With the names of such tests.
    """
    names = [item.nodeid for item in items if ADDRESS.search(item.nodeid)]
    if names:
        raise pytest.UsageError(
            f"the names of tests must not hold addresses; give ids= to {', '.join(names)}"
        )


def long_files_first(items: list[pytest.Item]) -> None:
    """Put files with tests that are marked slow before the others.

    The tests at the end are short ones then: no process of pytest-xdist has a minute's work left
    when the others are done.
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def thin_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave out of ``items`` the cases that are not asked for, and return them."""
    if runs_all() or (fuzz.CASES and not CASES):  # a seed of a fuzz test is a case
        return []
    of_tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        of_tests.setdefault((item.nodeid.partition("[")[0], backend_of(item)), []).append(item)
    kept: set[pytest.Item] = set()
    for (name, _), of_test in of_tests.items():
        if len(of_test) == 1 or (not CASES and of_test[0].get_closest_marker("every_case")):
            kept.update(of_test)
        else:
            values = [item.callspec.indices for item in of_test]
            chosen = [of_test[place] for place in choose(values, int(CASES or DEFAULT_COUNT))]
            if not CASES and all(is_slow(item) for item in chosen):
                chosen = chosen[-1:]
            elif not CASES:
                one = pick(name, [item for item in chosen if not is_slow(item)])
                for item in chosen:
                    if item is not one:
                        item.add_marker(pytest.mark.slow)
            kept.update(chosen)
    left_out = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    return left_out


def backend_of(item: pytest.Item) -> str:
    """The value of the parameter ``gpu``, or "": each backend of kernels has cases of its own."""
    return item.callspec.params.get("gpu", "") if hasattr(item, "callspec") else ""


def is_slow(item: pytest.Item) -> bool:
    """Whether a test or this case of it is marked slow, rather than its whole file."""
    return any(marker.name == "slow" for marker in item.own_markers)


def pick(name: str, cases: Sequence[Case]) -> Case:
    """Choose one of the cases of a test by its name: the same one in each process."""
    return cases[zlib.crc32(name.encode()) % len(cases)]


def choose(cases: Sequence[Mapping[str, int]], count: int) -> list[int]:
    """Choose cases of a test that have many values of its parameters and are far from each other.

    Args:
        cases: The index of each case's value of each parameter.
        count: Largest number of cases to choose.

    Returns:
        The indices of the chosen cases, the first case among them.
    """
    chosen: list[int] = []
    seen: set[tuple[str, int]] = set()

    def gain(place: int) -> tuple[int, int]:
        far = min((abs(place - other) for other in chosen), default=0)
        return len(cases[place].items() - seen), far

    rest = list(range(len(cases)))
    while rest and len(chosen) < count:
        best = max(rest, key=gain)  # the first of several
        chosen.append(best)
        rest.remove(best)
        seen.update(cases[best].items())
    return chosen
