"""Models whose tables are planned, and what is none."""

from __future__ import annotations

import pytest

from tests.plan.models import plan_on_h100


def test_models_without_tables(unchecked):
    with pytest.raises(ValueError, match="there are no tables to plan"):
        plan_on_h100(tables=[])
    with pytest.raises(TypeError, match="a plan is for a Flax model"):
        plan_on_h100(tables=3)
