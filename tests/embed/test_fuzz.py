"""Random models on one device beside their formulas in NumPy float64.

The suite draws few; ``JAXREC_TEST_FUZZ=1000`` more. Case 812 again, alone:
``JAXREC_TEST_FUZZ=1000 pytest "tests/embed/test_fuzz.py::test_one_device[812]"``.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import differential
from tests.fuzz import max_examples


@pytest.mark.parametrize("seed", range(max_examples(6)))
def test_one_device(seed):
    rng = np.random.default_rng(seed)
    case = differential.draw_case(rng, samples=int(rng.integers(1, 9)))
    differential.check(case, differential.Model(case))
