"""What names and values of columns say before anything is learned."""

from __future__ import annotations

import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import ParquetGroups, Schema
from jaxrec.data.column_values import are_ids, skewed_numbers, suspects, whole_floats
from jaxrec.data.common_types import CommonTypes
from jaxrec.data.groups import GroupRange

pytestmark = pytest.mark.every_case


def of_columns(tmp_path, *tables: dict) -> list[ParquetGroups]:
    paths = [tmp_path / f"{number}.parquet" for number in range(len(tables))]
    for path, columns in zip(paths, tables, strict=True):
        pq.write_table(pa.table(columns), path, row_group_size=2)
    return [ParquetGroups(tuple(paths))]


def test_floats_that_are_whole(tmp_path):
    columns = {
        "brand": pa.array([1.0, None, 7.0, 2.0**53]),
        "segment": np.array([3.0, math.nan, 1.0, 0.0]),  # as fastparquet writes nulls
        "age": [20.0, 30.0, 40.0, 50.0],
        "userId": [5.0, 6.0, 7.0, 8.0],
        "paid": [5.0, 6.0, 7.0, 8.5],
        "huge": [1.0, 2.0, 3.0, 1e300],
        "infinite": [1.0, 2.0, 3.0, math.inf],
        "narrow": pa.array([1.0, 2.0, 2.0**25, None], pa.float32()),
        "empty": pa.nulls(4, pa.float64()),
        "count": pa.array([1, 2, 3, 4], pa.int64()),
    }
    later = columns | {"count": pa.array([1.0, 2.0, 3.0, 4.0])}
    groups = of_columns(tmp_path, columns, later)
    types = CommonTypes()
    for path, each in groups[0].schemas.items():
        types.add(each, path)
    whole = whole_floats(types.schema, groups)
    has_nulls = {"brand": True, "segment": True, "age": False, "userId": False, "count": False}
    assert whole == has_nulls
    assert are_ids(whole, types.mixed) == ["brand", "segment", "userId", "count"]


ROWS = 400


def said(tmp_path, columns: dict, schema: dict | None = None, **options) -> list[str]:
    rng = np.random.default_rng(0)
    label = (rng.random(ROWS) < 0.3).astype(int)
    features = {name: x(label, rng) if callable(x) else x for name, x in columns.items()}
    pq.write_table(pa.table({"y": label, **features}), tmp_path / "x.parquet", row_group_size=90)
    roles = {"label": "y", "categorical": [*features]}
    groups = ParquetGroups((tmp_path / "x.parquet",))
    rows = GroupRange(groups, 0, ROWS)
    return list(suspects(Schema.from_dict(schema or roles), rows, **options))


SUSPECTS = {
    "copy": (
        lambda y, rng: y.astype(bool),
        "may come from the label 'y': it tells 100.0% of 310 labels; ",
    ),
    "text": (lambda y, rng: np.array(["no", "yes"])[y], ": it tells 100.0% of 310 labels"),
    "opposite": (lambda y, rng: 1.0 - y, ": it tells 100.0% of 310 labels"),
    "rating": (lambda y, rng: y * 3 + rng.integers(0, 3, ROWS), ": it tells 100.0% of"),
    "bought": (
        lambda y, rng: y * (rng.random(ROWS) < 0.5),
        r"all \d+ rows where it is 1(.0)? have label 1",
    ),
    "click": (lambda y, rng: rng.integers(0, 9, ROWS), "looks like another label"),
    "is_converted": (lambda y, rng: rng.integers(0, 2, ROWS), "looks like another label"),
    "sample_weight": (lambda y, rng: rng.random(ROWS), "looks like weights .*--weight sample_w"),
}


FORMS = {
    "1,000": "numbers, such as '1,000'; write 12000.5",
    "12,5 %": "numbers, such as",
    "$3": "numbers, such as",
    "3/1/2024": "dates, such as '3/1/2024'; write dates as 2024-03-01",
    "2024-03-01T10:00": "dates, such as",
    "[1, 2]": "lists, such as '\\[1, 2\\]'; write lists",
    "007": None,
    "3 rooms": None,
    "a": None,
}


@pytest.mark.parametrize("text", FORMS)
def test_text_of_other_values(tmp_path, text):
    (sentence,) = said(tmp_path, {"x": pa.array([text, None] * (ROWS // 2))}) or [""]
    if FORMS[text] is None:
        assert not sentence
    else:
        assert re.match(
            f"column 'x' is text for categories that looks like {FORMS[text]}", sentence
        )


@pytest.mark.parametrize("name", SUSPECTS)
def test_suspects(tmp_path, name):
    values, message = SUSPECTS[name]
    (sentence,) = said(tmp_path, {name: values})
    assert re.match(f"column {name!r} .*{message}", sentence), sentence
    assert f"--exclude {name}" in sentence


def test_features_are_no_suspects(tmp_path):
    features = {
        "flag": lambda y, rng: rng.random(ROWS) < 0.2 + 0.5 * y,
        "city": lambda y, rng: rng.integers(0, 30, ROWS).astype(str),
        "user": lambda y, rng: np.arange(ROWS),  # tells all, once each
        "constant": np.zeros(ROWS, int),
        "weight_kg": lambda y, rng: rng.random(ROWS),
        "weight": lambda y, rng: rng.normal(size=ROWS),  # some below 0
        "target_id": lambda y, rng: rng.integers(0, 9, ROWS),
        "nulls": pa.nulls(ROWS, pa.int8()),
        "tags": pa.array([["click"]] * ROWS),
    }
    assert said(tmp_path, features) == []
    # Names count no more where the user has named the columns; values do.
    names = {"click": lambda y, rng: rng.integers(0, 9, ROWS), "liked": lambda y, rng: y}
    (sentence,) = said(tmp_path, names, by_name=False)
    assert "'liked' may come from the label" in sentence
    assert "leave it out of the schema" in sentence


def test_skewed_numbers(tmp_path):
    """Counts of a power law are skewed, and their logarithms less; others stay as they are."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(1000)
    counts = np.floor(np.exp(3 + 1.5 * normal))
    columns = {
        "counts": pa.array(np.where(normal > 2, np.nan, counts), from_pandas=True),
        "normal": normal,
        "one": np.ones(1000),
        "negative": -counts,
        "given": counts,
        "large": 1e300 * np.exp(2 * normal),
        "id": ["a", "b"] * 500,
        "label": [0, 1] * 500,
    }
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    dense = {name: {} for name in ("counts", "normal", "one", "negative", "large")}
    schema = Schema.from_dict(
        {
            "label": "label",
            "dense": dense | {"given": {"transform": "none"}},
            "categorical": ["id"],
        }
    )
    groups = ParquetGroups([path])
    assert skewed_numbers(schema, GroupRange(groups, 0, 1000)) == ["counts", "large"]
    assert skewed_numbers(schema, GroupRange(groups, 0, 10)) == []
