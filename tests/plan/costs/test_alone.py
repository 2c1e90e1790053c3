"""Tables on the only device beside counts by hand."""

from __future__ import annotations

import pytest

from jaxrec import optim
from jaxrec.mesh import row_wise, table_wise
from jaxrec.mesh.exchange import ALONE
from jaxrec.plan.costs import Group, make_costs
from jaxrec.plan.rates import Rate
from tests.plan.costs.cases import evaluate, linked, topology, workload_of


@pytest.mark.parametrize(
    "placement", [row_wise(), row_wise(exchange="pooled"), table_wise(0)], ids=str
)
def test_rows_are_read_sorted_and_updated_once(placement):
    """A device with 12 ids, in arrays of 12, all but distinct of ten million rows."""
    rates = {"sort": Rate(item=1e6), "gather": Rate(item=1e3), "update": Rate(item=1.0)}
    found = evaluate(placement, topology(each=1, **rates), rows=10_000_000, pooling=3)
    assert found.phases["forward compute"] == pytest.approx(12e3)
    assert found.phases["backward compute"] == pytest.approx(12e6 + 12e3 + 12, rel=1e-6)


def test_a_bound_on_the_norm_sums_gradients_twice():
    counted = topology(each=1, sort=Rate(item=1.0))
    found = evaluate(row_wise(), counted, pooling=3, optimizer=optim.sgd(0.1, clip_norm=1.0))
    assert found.phases["backward compute"] == pytest.approx(2 * 12)


def test_bags_are_written_and_nothing_is_sent():
    devices = topology(each=1, copy=Rate(byte=1.0), **linked(within=1.0, call=1.0))
    found = evaluate(row_wise(), devices, pooling=3)
    assert found.phases["forward compute"] == 4 * 4 * 8
    assert found.phases["forward exchange"] == found.phases["backward exchange"] == 0


def test_kernels_are_started_once():
    devices = topology(each=1, **dict.fromkeys(("gather", "sort", "update"), Rate(call=1.0)))
    found = evaluate(row_wise(), devices)
    assert found.phases["forward compute"] == 1
    assert found.phases["backward compute"] == 3


def test_memory_by_hand():
    devices = topology(each=1)
    workload = workload_of(devices, pooling=3)
    costs = make_costs(Group.of(workload, workload.dim, ALONE), devices)
    assert costs.kept_bytes(workload) == 12 * 12 + 8 * 4 * 8
    assert costs.temporary_bytes(workload) == 32 * 12
