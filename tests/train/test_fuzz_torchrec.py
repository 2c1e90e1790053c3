"""Random damage to files of TorchRec: each is read right, or raises an error that names it."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import shutil
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.train import CheckpointError
from jaxrec.train.torchrec.files import open_state_dict
from tests.damage import INTEGERS, VALUES, damaged, edited
from tests.fuzz import max_examples
from tests.train.torch_files import (
    Global,
    Raw,
    metadata,
    pickled,
    tensor,
    tensor_file,
    torch_file,
    whole,
)

pytestmark = pytest.mark.every_case

RECORDED = pathlib.Path(__file__).parents[1] / "golden/torchrec"
LARGEST = 1 << 14  # elements of an array that is read
MEMORY = 8 << 20


def read(path):
    """Return the arrays of a file; None if it is refused, by an error that names it."""
    arrays, message = None, None
    tracemalloc.start()
    try:
        with open_state_dict(path) as state:
            arrays = {
                name: np.asarray(state.read(name))
                for name in state.names
                if math.prod(state.shape(name)) <= LARGEST
            }
    except CheckpointError as error:
        message = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY
    assert message is None or (str(path) in message and len(message) < 4000)
    return arrays


def assert_equal(found, expected):
    for name, array in found.items():
        np.testing.assert_array_equal(
            array.astype(np.float64), expected[name].astype(np.float64), err_msg=name
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of each kind with the recorded arrays, and the arrays of each."""
    path = tmp_path_factory.mktemp("fuzzed")
    with np.load(RECORDED / "whole.npz") as file:
        arrays = dict(file)
    np.savez(path / "x.npz", **arrays)
    np.savez_compressed(path / "compressed.npz", **arrays)
    shutil.copy(RECORDED / "model.pt", path / "x.pt")
    shutil.copytree(RECORDED / "dcp", path / "dcp")
    return path, arrays


@pytest.mark.parametrize(
    "name", ["x.npz", "compressed.npz", "x.pt", "dcp/.metadata", "dcp/__0_0.distcp"]
)
@settings(max_examples=max_examples(15))
@given(data=st.data())
def test_damaged_bytes(folder, name, data):
    """Whatever differs is found, since all numbers have checksums, or does not matter."""
    path, _ = folder
    file = path / name
    content, opened = file.read_bytes(), path / name.split("/")[0]
    expected = read(opened)
    assert expected
    file.write_bytes(data.draw(damaged(content)))
    try:
        found = read(opened)
    finally:
        file.write_bytes(content)
    if found is not None:
        assert_equal(found, expected)


def safetensors_file(header, content):
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + content


SAFETENSORS_TYPES = {"F32": "f4", "F16": "f2", "F64": "f8", "I64": "i8", "U8": "u1", "BOOL": "b1"}
HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
    "c": {"dtype": "BF16", "shape": [], "data_offsets": [40, 42]},
}
CONTENT = np.arange(42, dtype=np.uint8).tobytes()


@settings(max_examples=max_examples(30))
@given(data=st.data())
def test_safetensors(tmp_path_factory, data):
    """The numbers are those at the places that the header has, though it may be damaged."""
    pytest.importorskip("safetensors")
    path = tmp_path_factory.getbasetemp() / "x.safetensors"
    if data.draw(st.booleans()):
        header = data.draw(edited(HEADER))
        path.write_bytes(safetensors_file(header, CONTENT))
    else:
        path.write_bytes(data.draw(damaged(safetensors_file(HEADER, CONTENT))))
    found = read(path)
    if found is None:
        return
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    described = json.loads(content[8:begin])
    for name, array in found.items():
        entry = described[name]
        assert list(array.shape) == entry["shape"]
        if (kind := SAFETENSORS_TYPES.get(entry["dtype"])) is None:
            continue
        start, end = (begin + place for place in entry["data_offsets"])
        wanted = np.frombuffer(content[start:end], kind).reshape(entry["shape"])
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(array, np.asarray(jnp.asarray(wanted)))


NUMBERS = np.arange(1, 25, dtype=np.float32)
small = st.one_of(st.integers(0, 4), INTEGERS)
places = st.lists(small, max_size=3).map(tuple)


def elements_of(shape, strides, offset, elements):
    """Return a tensor's numbers, element by element; None if they are not all in the storage."""
    numbers = [*shape, *strides, offset]
    if len(shape) != len(strides) or elements != NUMBERS.size:
        return None
    if not all(0 <= number < 1 << 63 for number in numbers):
        return None
    if math.prod(shape) > LARGEST or math.prod(filter(None, shape)) > 1 << 59:
        return None
    if 0 in shape:
        return np.zeros(shape, np.float32)
    positions = [
        offset + sum(i * step for i, step in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    if any(position >= NUMBERS.size for position in positions):
        return None
    return NUMBERS[positions].reshape(shape)


@settings(max_examples=max_examples(60))
@given(
    shape=places,
    strides=places,
    offset=small,
    elements=st.one_of(st.just(NUMBERS.size), INTEGERS),
)
def test_places_of_tensors(tmp_path_factory, shape, strides, offset, elements):
    path = tmp_path_factory.getbasetemp() / "places.pt"
    described = tensor(shape, strides, offset, elements=elements)
    path.write_bytes(torch_file({"a": described}, {"0": NUMBERS.tobytes()}))
    found, expected = read(path), elements_of(shape, strides, offset, elements)
    if expected is not None:
        np.testing.assert_array_equal(found["a"], expected)
    else:
        assert not found  # refused, or larger than what is read


def written(write):
    """Return a file's content; None where an edit left values that have no instructions."""
    try:
        return write()
    except (TypeError, AttributeError, ValueError, UnicodeError):
        return None


PICKLED = {
    "model": {"a.weight": whole(NUMBERS.reshape(4, 6)), "b": whole(NUMBERS[:3], "1")},
    "epoch": 3,
    "rates": [0.5, None, True],
}
CODES = st.binary(max_size=6).map(Raw)
GLOBALS = st.sampled_from(
    [
        Global("torch", "FloatStorage"),
        Global("torch", "Size"),
        Global("collections", "OrderedDict"),
        Global("torch._utils", "_rebuild_parameter"),
        Global("builtins", "eval"),
    ]
)


@settings(max_examples=max_examples(40))
@given(data=st.data())
def test_edited_pickles(tmp_path_factory, data):
    """Nodes are replaced, and the program itself is damaged, under a right checksum."""
    path = tmp_path_factory.getbasetemp() / "edited.pt"
    value = data.draw(edited(PICKLED, st.one_of(VALUES, CODES, GLOBALS)))
    if data.draw(st.booleans()):
        value = Raw(data.draw(damaged(pickled(PICKLED))))
    storages = {"0": NUMBERS.tobytes(), "1": NUMBERS[:3].tobytes()}
    if (content := written(lambda: torch_file(value, storages))) is not None:
        path.write_bytes(content)
        read(path)


ROWS = NUMBERS.reshape(6, 4)
SHARDS = [((0, 0), ROWS[:2]), ((2, 0), ROWS[2:, :1].copy()), ((2, 1), ROWS[2:, 1:].copy())]


def rows_of(shape, chunks, stored, files):
    """Return a tensor's numbers, shard by shard; None if some are there never or twice."""
    counts, rows = np.zeros(shape, int), np.zeros(shape, np.float32)
    for offsets, sizes in chunks:
        if 0 in sizes:
            continue
        found = [place for at, *place in stored if at == offsets]
        array = files.get(tuple(found[0])) if len(found) == 1 else None
        if array is None or array.shape != sizes:
            return None
        for index in np.ndindex(*sizes):
            at = tuple(o + i for o, i in zip(offsets, index, strict=True))
            if not all(0 <= a < n for a, n in zip(at, shape, strict=True)):
                return None
            counts[at] += 1
            rows[at] = array[index]
    return rows if (counts == 1).all() else None


@settings(max_examples=max_examples(60))
@given(data=st.data())
def test_edited_shards(tmp_path_factory, data):
    """Sizes and places of shards and of their bytes are replaced by others."""
    path = tmp_path_factory.getbasetemp() / "edited"
    path.mkdir(exist_ok=True)
    parts = [tensor_file(array) for _, array in SHARDS]
    starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
    (path / "0.distcp").write_bytes(b"".join(parts))
    ranges = [("0.distcp", s, len(part)) for s, part in zip(starts, parts, strict=True)]
    files = {place: array for place, (_, array) in zip(ranges, SHARDS, strict=True)}
    chunks = [(offsets, array.shape) for offsets, array in SHARDS]
    stored = [(at, *place) for (at, _), place in zip(SHARDS, ranges, strict=True)]
    kind = data.draw(st.sampled_from(["places", "ranges", "order", "anything"]))
    if kind == "places":
        i = data.draw(st.integers(0, 2))
        at, sizes = (data.draw(st.tuples(small, small)) for _ in range(2))
        keep = data.draw(st.booleans())
        chunks[i] = (at, chunks[i][1] if keep else sizes)
        stored[i] = (at, *stored[i][1:])
    elif kind == "ranges":
        i = data.draw(st.integers(0, 2))
        number = st.one_of(small, st.sampled_from([*starts, *map(len, parts)]))
        stored[i] = (stored[i][0], "0.distcp", data.draw(number), data.draw(number))
    elif kind == "order":
        order = data.draw(st.permutations(range(3)))
        stored = [(at, *ranges[i]) for (at, *_), i in zip(stored, order, strict=True)]
    described = metadata({"a": (ROWS.shape, chunks)}, [("a", *each) for each in stored])
    if kind == "anything":
        described = data.draw(edited(described, st.one_of(VALUES, CODES, GLOBALS)))
    if (content := written(lambda: pickled(described))) is None:
        return
    (path / ".metadata").write_bytes(content)
    found = read(path)
    if kind == "anything":
        return
    expected = rows_of(ROWS.shape, chunks, stored, files)
    if expected is None:
        assert found is None
    elif found is not None:
        np.testing.assert_array_equal(found["a"], expected)
    else:
        ends = sorted((start, start + length) for _, _, start, length in stored)
        assert any(end > start for (_, end), (start, _) in itertools.pairwise(ends))
