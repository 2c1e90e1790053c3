"""Tables that are not trained cost their forward pass alone."""

from __future__ import annotations

import pytest
from flax import nnx

import jaxrec
from jaxrec.mesh import column_wise, data_parallel, row_wise, table_wise
from jaxrec.plan import Planner, ShardingPlan, Topology

PLACEMENTS = {
    "rows": row_wise(),
    "pooled": row_wise(exchange="pooled"),
    "bags": table_wise(1),
    "replicated": data_parallel(),
    "columns": column_wise((0, 1)),
}
TOPOLOGY = Topology.named("h100", devices=8)


def phases(placement, **settings) -> dict[str, float]:
    config = jaxrec.EmbeddingBagConfig("a", 100_000, 64, **settings)
    plan = ShardingPlan.from_dict({"a": placement})
    return Planner(TOPOLOGY).evaluate([config], plan, batch_size=4096).estimate.phases


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_frozen_tables_have_no_backward_pass(placement):
    trained, frozen = phases(placement), phases(placement, trainable=False)
    for phase, seconds in frozen.items():
        expected = 0 if phase.startswith("backward") else trained[phase]
        assert seconds == pytest.approx(expected)


def test_plan_for_a_quantized_model():
    config = jaxrec.EmbeddingBagConfig("a", 1000, 64)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    plans = [
        Planner(TOPOLOGY).plan(each, batch_size=4096)
        for each in (model, jaxrec.serve.quantize(model, "int4"))
    ]
    trained, served = (plan.estimate for plan in plans)
    assert served.phases["backward compute"] == served.phases["backward exchange"] == 0
    assert served.seconds < trained.seconds
    assert served.tables[0].dtype == "int4"
