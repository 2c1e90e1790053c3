"""Workloads of tables, from constraints and configurations."""

from __future__ import annotations

import pytest

from jaxrec.plan import ParameterConstraints
from tests.plan.models import plan_on_h100


def test_pooling_factors_and_batch_sizes_are_by_feature():
    constraints = {"a": ParameterConstraints(pooling_factors=[2, 5], batch_sizes=[400, 40])}
    a, b = plan_on_h100(constraints).estimate.tables
    assert a.lookups == 2 * 100 + 5 * 10
    assert b.lookups == 100


@pytest.mark.parametrize("field", ["pooling_factors", "batch_sizes"])
def test_as_many_values_as_features(field):
    constraints = {"a": ParameterConstraints(**{field: [1, 2, 3]})}
    with pytest.raises(ValueError, match=f"table 'a' has 2 features and 3 {field}"):
        plan_on_h100(constraints)


def test_constraints_are_for_tables_that_there_are():
    with pytest.raises(ValueError, match="constraints for table 'c', which the model lacks"):
        plan_on_h100({"c": ParameterConstraints()})


def test_a_dtype_is_planned_for_configurations():
    constraints = {"a": ParameterConstraints(dtype="bfloat16")}
    a, _ = plan_on_h100(constraints).estimate.tables
    assert (a.dtype, a.bytes % (1000 * 64 * 2)) == ("bfloat16", 0)
