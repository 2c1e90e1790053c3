from __future__ import annotations

import numpy as np
import pytest

from jaxrec.tier.stores.record_format import RecordFormat

FORMAT = RecordFormat(260, "user rows float32[64], user sum float32[1]", 1000)


def test_json():
    assert RecordFormat.from_json(FORMAT.to_json()) == FORMAT
    for text in ("", "[]", "{}", '{"width": 3, "rows": 4}', '{"width": 0, "description": ""}'):
        with pytest.raises(ValueError):  # noqa: PT011
            RecordFormat.from_json(text)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"width": 0}, "a record has 1 byte or more, got a width of 0"),
        ({"num_ids": 0}, "a format has 1 id or more, got num_ids=0"),
    ],
    ids=["width", "num_ids"],
)
def test_bad_formats(field, message):
    with pytest.raises(ValueError, match=message):
        RecordFormat(**({"width": 1, "description": ""} | field))


def test_the_same_format():
    FORMAT.check_same(RecordFormat(**vars(FORMAT)), "here")
    with pytest.raises(
        ValueError, match=r"here has records of 4 bytes \(x\), any ids, and"
    ) as both:
        FORMAT.check_same(RecordFormat(4, "x"), "here")
    assert "records are 260 bytes (user rows float32[64], user sum float32[1]), ids 0 to 999;" in (
        str(both.value)
    )


@pytest.mark.parametrize("bad", [-1, 1000, -(2**63), 2**63 - 1])
def test_ids(bad):
    FORMAT.check_ids(np.array([0, 999]))
    RecordFormat(1, "").check_ids(np.array([0, 2**63 - 1, -(2**63)]))
    with pytest.raises(ValueError, match=f"id {bad} at position 1: the store has 0 to 999"):
        FORMAT.check_ids(np.array([5, bad]))
    with pytest.raises(ValueError, match="id -1 at position 0: the store has any id but -1"):
        RecordFormat(1, "").check_ids(np.array([-1]))
