"""Improved solutions beside the best of all."""

from __future__ import annotations

import itertools
import time

from jaxrec.plan.local_search import improve
from jaxrec.plan.partitioners import place_fastest
from jaxrec.plan.proposers import (
    propose_uniformly,
)


def test_improving_never_makes_worse_and_from_somewhere_ends_near_the_best(counted):
    problem, best = counted
    ends = []
    for proposal in itertools.islice(propose_uniformly(problem), 10):
        start = place_fastest(problem, proposal)
        found = improve(problem, start, deadline=time.monotonic() + 60)
        assert not start.better_than(found)
        ends.append(found)
    assert min(end.seconds for end in ends if end.fits) <= 1.1 * best.seconds
