import numpy as np
import pyarrow as pa
import pytest

from jaxrec.data.streams.decode import Decoder


def refuse(at, error):
    raise AssertionError(at, error)


def stream(table, file=False):
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_json():
    decode = Decoder("json")
    table, counts = decode([b'{"id": 1}', b'{"id": 2}\n{"id": 3, "tags": ["a"]}\n', b""], refuse)
    assert table.to_pylist() == [
        {"id": 1, "tags": None},
        {"id": 2, "tags": None},
        {"id": 3, "tags": ["a"]},
    ]
    assert counts.tolist() == [1, 2, 0]
    # Fields keep their types, also where later messages lack them.
    table, _ = decode([b'{"new": true}'], refuse)
    assert table.schema.types == [pa.int64(), pa.list_(pa.string()), pa.bool_()]


def test_json_with_a_schema():
    decode = Decoder("json", pa.schema([("x", pa.float64()), ("when", pa.string())]))
    table, _ = decode([b'{"x": 1, "other": 5}', b'{"when": "2024-01-01"}'], refuse)
    assert table.to_pydict() == {"x": [1.0, None], "when": [None, "2024-01-01"]}


BAD = {
    "no JSON": b"{",
    "no object": b"5",
    "another type": b'{"id": "five"}',
    "two objects on a line": b'{"id": 7}{"id": 8}',
    "beyond int64": b'{"id": 99999999999999999999}',
    "no UTF-8": b'{"name": "\xff\xfe"}',
}


@pytest.mark.every_case
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_json_is_found(bad):
    payloads = [b'{"id": %d}' % i for i in range(100)]
    payloads[37] = payloads[80] = bad
    found = {}
    table, counts = Decoder("json")(payloads, found.__setitem__)
    assert sorted(found) == [37, 80]
    assert table["id"].to_pylist() == [i for i in range(100) if i not in found]
    assert counts.tolist() == [int(i not in found) for i in range(100)]


def test_only_bad_messages():
    table, counts = Decoder("json")([b"{", b"["], lambda at, error: None)
    assert (len(table), counts.tolist()) == (0, [0, 0])


def test_arrow():
    table = pa.table({"id": [1, 2], "x": pa.array([[0.5], []], pa.list_(pa.float32()))})
    payloads = [stream(table), stream(table[:1], file=True), b""]
    decoded, counts = Decoder("arrow")(payloads, refuse)
    assert decoded.equals(pa.concat_tables([table, table[:1]]))
    assert counts.tolist() == [2, 1, 0]
    found = {}
    payloads.insert(1, stream(table)[:-40])
    payloads.insert(2, b"nonsense")
    decoded, counts = Decoder("arrow", table.schema)(payloads, found.__setitem__)
    assert sorted(found) == [1, 2]
    assert counts.tolist() == [2, 0, 0, 1, 0]


def test_function():
    def numbers(payloads):
        return pa.table({"id": [int(x) for x in payloads]})

    found = {}
    table, counts = Decoder(numbers)([b"1", b"x", b"3"], found.__setitem__)
    assert (table["id"].to_pylist(), counts.tolist()) == ([1, 3], [1, 0, 1])
    assert isinstance(found[1], ValueError)
    Decoder(lambda payloads: numbers(payloads)[:1])([b"1", b"2"], found.__setitem__)
    assert "returned" not in str(found.get(0))
    Decoder(lambda payloads: None)([b"1"], found.__setitem__)
    assert "decode returned NoneType of 1 payloads" in str(found[0])


def test_unknown_way():
    with pytest.raises(ValueError, match='"json", "arrow" or a function of payloads, got \'avro\''):
        Decoder("avro")
    assert np.array_equal(Decoder("json")([], refuse)[1], [])
