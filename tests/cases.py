"""Which cases of a test with parameters run.

A test takes one case, and two with ``--slow``, unless it is marked `every_case`. The test's name
decides which of the two is the one, so that each kind of mesh, optimizer and format occurs in some
tests. ``JAXREC_TEST_CASES=all pytest`` runs every case and checks all annotations,
``JAXREC_TEST_CASES=1 pytest`` runs the first case of every test.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence

import pytest

from tests import fuzz

# "all", the largest number of cases of every test, or nothing.
CASES = os.environ.get("JAXREC_TEST_CASES", "")
DEFAULT_COUNT = 2  # with --slow

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
    of_tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for name, of_test in of_tests.items():
        if len(of_test) == 1 or (not CASES and of_test[0].get_closest_marker("every_case")):
            kept.update(of_test)
        else:
            values = [item.callspec.indices for item in of_test]
            places = choose(values, int(CASES or DEFAULT_COUNT))
            kept.update(of_test[place] for place in places)
            if not CASES:
                places.pop(pick(name, len(places)))
                for place in places:
                    of_test[place].add_marker(pytest.mark.slow)
    left_out = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    return left_out


def pick(name: str, count: int) -> int:
    """Choose one of ``count`` cases of a test by its name: the same one in each process."""
    return zlib.crc32(name.encode()) % count


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
