"""How many cases the fuzz tests draw: few in the suite, ``JAXREC_TEST_FUZZ=1000`` for more.

The suite draws the same cases in each run. With the variable set they are new ones each time, and
``--hypothesis-seed=7`` repeats them.
"""

from __future__ import annotations

import os

CASES = int(os.environ.get("JAXREC_TEST_FUZZ", "0"))


def max_examples(default: int) -> int:
    """Return how many cases to draw: ``default``, or as many as the variable says."""
    return CASES or default
