"""Numbers of JSON in columns of integers and of floats."""

from __future__ import annotations

import pyarrow as pa

from jaxrec.data.streams.decode import Decoder
from jaxrec.data.streams.numbers import WholeNumbers


def refuse(at, error):
    raise AssertionError(at, error)


def test_lines_without_such_numbers_stay():
    whole = WholeNumbers(pa.schema({"id": pa.int64(), "x": pa.float64()}))
    payloads = [b'{"id":  1,"x": 2.0}', b"no JSON", b"", b'{"other": 1.0}\n{"id": 3}']
    assert whole(payloads) == payloads
    assert whole([b'{"id": 1.0}\n{"id":  2}']) == [b'{"id": 1}\n{"id":  2}']
    assert not whole.fractions


def test_numbers_of_json():
    """7, 7.0 and 7e0 are one number, in columns of integers and of floats."""
    kinds = {"id": pa.int64(), "at": pa.list_(pa.int32()), "in": pa.struct({"n": pa.int8()})}
    numbers = [b'{"id": 9007199254740993, "at": [7.0, 1], "in": {"n": 2e0}}', b'{"id": 5.0}', b"{}"]
    whole = [
        {"id": 2**53 + 1, "at": [7, 1], "in": {"n": 2}},
        {"id": 5, "at": None, "in": None},
        {"id": None, "at": None, "in": None},
    ]
    table, counts = Decoder("json", pa.schema(kinds))(numbers, refuse)
    assert table.to_pylist() == whole
    assert counts.tolist() == [1, 1, 1]
    # A fraction is none of an integer, and names its column; the others are decoded.
    for bad, name in (
        (b'{"id": 1.5}', "id"),
        (b'{"in": {"n": 0.5}}', "in.n"),
        (b'{"at": [2.5]}', "at"),
    ):
        found = {}
        table, _ = Decoder("json", pa.schema(kinds))([*numbers, bad], found.__setitem__)
        assert table.to_pylist() == whole
        assert f"the field {name!r} has a number with a fraction" in str(found[3])


def test_numbers_that_a_float_may_not_hold():
    """Their digits are lost when they are read, and an id would become another."""
    for text in (b"9007199254740993.0", b"9007199254740992.0", b"-1e16"):
        whole = WholeNumbers(pa.schema({"id": pa.int64()}))
        payload = b'{"id": ' + text + b"}"
        assert whole([payload]) == [payload]
        found = {}
        table, _ = Decoder("json", pa.schema({"id": pa.int64()}))(
            [b'{"id": 9007199254740991.0}', payload], found.__setitem__
        )
        assert table["id"].to_pylist() == [2**53 - 1]
        assert [*found] == [1]


def test_fractions_come_later():
    decode = Decoder("json")
    table, _ = decode([b'{"price": 2, "in": {"n": 1}, "at": [1]}'], refuse)
    assert table.schema.types == [pa.int64(), pa.struct({"n": pa.int64()}), pa.list_(pa.int64())]
    payload = b'{"price": 2.5, "in": {"n": 1.5}, "at": [1, 0.5]}'
    found = {}
    later, _ = decode([b"{", payload], found.__setitem__)
    assert [*found] == [0]
    assert later.to_pylist() == [{"price": 2.5, "in": {"n": 1.5}, "at": [1, 0.5]}]
    again, _ = decode([b'{"price": 3, "in": {"n": 2}, "at": [2]}'], refuse)
    assert again.schema == later.schema
