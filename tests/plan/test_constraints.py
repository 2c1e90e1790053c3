"""Constraints that are refused."""

from __future__ import annotations

import pytest

from jaxrec.plan import ParameterConstraints

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"sharding_types": ["diagonal"]}, "sharding_types are some of data_parallel"),
        ({"sharding_types": []}, "sharding_types are some of"),
        ({"storages": ["tape"]}, "storages are some of device, host, store"),
        ({"exchanges": ["bags"]}, "exchanges are some of rows, pooled"),
        ({"devices": []}, "devices are different numbers from 0"),
        ({"devices": [1, 1]}, "devices are different numbers from 0"),
        ({"devices": [-1]}, "devices are different numbers from 0"),
        ({"pooling_factors": 0}, "pooling_factors are numbers above 0"),
        ({"pooling_factors": [3.0, -1.0]}, "pooling_factors are numbers above 0"),
        ({"batch_sizes": 0}, "batch_sizes are numbers above 0"),
        ({"min_column_width": 0}, "min_column_width is 1 or more"),
        ({"cache_ratio": 0.0}, "cache_ratio is above 0 and at most 1"),
        ({"store": "/data/users"}, "a row store is named by a URL such as 'file:///data/{table}'"),
        ({"cache_ratio": 1.5}, "cache_ratio is above 0 and at most 1"),
        ({"dtype": "int4"}, "dtype is one of"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_values_that_are_refused(constraints, message):
    with pytest.raises(ValueError, match=message):
        ParameterConstraints(**constraints)


def test_a_placement_is_made_by_its_functions(unchecked):
    with pytest.raises(TypeError, match=r"placement is made by jaxrec\.mesh"):
        ParameterConstraints(placement="row_wise")
