"""YAML files of models."""

from __future__ import annotations

import pytest

from jaxrec.mesh import row_wise, table_wise
from jaxrec.plan.model_file import read_model_file
from tests.plan.models import MODEL


def test_a_model_file_has_tables_and_constraints(model):
    found = read_model_file(model)
    product, user, page, day = found.tables
    assert (product.pooling, product.optimizer.learning_rate) == ("mean", 0.001)
    assert (user.dtype, type(user.optimizer).__name__) == ("bfloat16", "sgd")
    assert page.feature_names == ("a", "b")
    assert not hasattr(page, "pooling")
    assert found.constraints["product"].pooling_factors == 20
    assert found.constraints["product"].sharding_types == ("table_wise", "row_wise")
    assert found.constraints["day"].placement == table_wise(1)
    assert day.embedding_dim == 32
    assert (found.batch_size, found.dense_bytes) == (8192, 4_000_000)


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [("row_wise", row_wise()), ("{row_wise: [0, 1]}", row_wise((0, 1)))],
)
def test_placements_in_a_file(model, constraints, expected):
    model.write_text(MODEL.replace("{table_wise: 1}", constraints))
    assert read_model_file(model).constraints["day"].placement == expected
