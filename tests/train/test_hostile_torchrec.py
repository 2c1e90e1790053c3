"""Files of PyTorch that lie about places, sizes and types, and files that are damaged.

Each is read right, or raises a CheckpointError that names it, and takes memory in proportion to the
file and to the model.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.train import CheckpointError, load_torchrec
from jaxrec.train.torchrec.distributed import holds_each_once
from tests.fuzz import max_examples
from tests.train.torch_files import (
    METADATA,
    Call,
    Global,
    Raw,
    encode,
    metadata,
    pickled,
    tensor,
    tensor_file,
    torch_file,
    whole,
    write_shards,
)

RECORDED = pathlib.Path(__file__).parents[1] / "golden/torchrec"
NAME = "embedding_bags.a.weight"
ROWS = np.arange(1, 11, dtype=np.float32).reshape(5, 2)


@pytest.fixture(scope="module")
def bags():
    """A table of the shape of `ROWS`."""
    config = jaxrec.EmbeddingBagConfig("a", 5, 2)
    return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))


@contextlib.contextmanager
def bounded(limit=16 << 20):
    """Fail if Python and NumPy take more memory than ``limit`` bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


def assert_refused(bags, path, *words):
    """The error names the file, and the table is what it was."""
    before = np.asarray(bags.table("a"))
    with bounded(), pytest.raises(CheckpointError) as raised:
        load_torchrec(bags, path)
    message = str(raised.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 2000
    for word in words:
        assert word in message, message
    np.testing.assert_array_equal(bags.table("a"), before)


# Tensors of files of `torch.save`, and what is said of them. All have a storage of ten numbers.
TENSORS = {
    "strides of both signs": (((5, 2), (-9, 36)), "is not a size or a position"),
    "negative stride": (((5, 2), (2, -1), 1), "is not a size or a position"),
    "negative offset": (((5, 2), (2, 1), -1), "is not a size or a position"),
    "negative size": (((-5, -2), (2, 1)), "is not a size or a position"),
    "offset": (((5, 2), (2, 1), 1), "ends beyond its storage of 10 elements"),
    "stride": (((5, 2), (3, 1)), "ends beyond its storage"),
    "products beyond 64 bits": (((5, 2), (1 << 61, 1)), "ends beyond its storage"),
    "offset beyond 64 bits": (((5, 2), (2, 1), 1 << 64), "is not a size or a position"),
    "sum beyond 64 bits": (((5, 2), (2, 1), (1 << 63) - 1), "ends beyond its storage"),
    "number of strides": (((5, 2), (2,)), "a tensor of shape (5, 2) with strides (2,)"),
    "empty, and beyond 64 bits": (((0, 1 << 40, 1 << 40), (0, 0, 0)), "is larger than any tensor"),
    "bool": (((5, True), (2, 1)), "is not a size or a position"),
    "text": (((5, 2), "21"), "is not the size of a tensor"),
    "none": ((None, None), "is not the size of a tensor"),
}


@pytest.mark.parametrize(("arguments", "message"), TENSORS.values(), ids=TENSORS)
@pytest.mark.every_case
def test_places_of_tensors(bags, tmp_path, arguments, message):
    (tmp_path / "x.pt").write_bytes(
        torch_file({NAME: tensor(*arguments, elements=10)}, {"0": ROWS.tobytes()})
    )
    assert_refused(bags, tmp_path / "x.pt", message)


STORAGES = {
    "type": (dict(of_type=Global("torch", "ComplexFloatStorage")), "'ComplexFloatStorage', which"),
    "type that is none": (dict(of_type="FloatStorage" * 99), "which is not read"),
    "type of the wrong size": (
        dict(of_type=Global("torch", "LongStorage")),
        "has 40 bytes, a storage of 10 int64 80",
    ),
    "more elements": (dict(elements=11), "has 40 bytes, a storage of 11 float32 44"),
    "fewer elements": (dict(elements=9), "has 40 bytes"),
    "elements beyond 64 bits": (dict(elements=1 << 64), "is not a size"),
    "key": (dict(key="1"), "it has no entry 'x/data/1'"),
    "key outside": (dict(key="../../y"), "it has no entry"),
    "number as key": (dict(key=0), "is not a storage"),
}


@pytest.mark.parametrize(("storage", "message"), STORAGES.values(), ids=STORAGES)
@pytest.mark.every_case
def test_storages(bags, tmp_path, storage, message):
    described = tensor((5, 2), (2, 1), **({"elements": 10} | storage))
    (tmp_path / "x.pt").write_bytes(torch_file({NAME: described}, {"0": ROWS.tobytes()}))
    assert_refused(bags, tmp_path / "x.pt", message)


GOOD = {
    "transposed": (tensor((5, 2), (1, 5), elements=10), ROWS.reshape(2, 5).T),
    "of a larger storage": (
        tensor((5, 2), (0, 1), 3, elements=10),
        np.broadcast_to(ROWS.reshape(-1)[3:5], (5, 2)),
    ),
    "compressed": (whole(ROWS), ROWS),
    "with attributes": (whole(ROWS), ROWS),
}


@pytest.mark.parametrize(("described", "rows"), GOOD.values(), ids=GOOD)
@pytest.mark.every_case
def test_files_that_are_read(bags, tmp_path, request, described, rows):
    """Views, files that were packed anew, and the attributes of a `state_dict`."""
    case = request.node.callspec.id
    value = {NAME: described}
    if case == "with attributes":
        empty = Call(Global("collections", "OrderedDict"), ())
        items = b"(" + encode(NAME) + encode(described) + b"u"
        value = Raw(b"\x80\x02" + encode(empty) + items + encode({"_metadata": {}}) + b"b.")
    compression = zipfile.ZIP_DEFLATED if case == "compressed" else zipfile.ZIP_STORED
    content = torch_file(value, {"0": ROWS.tobytes()}, compression)
    (tmp_path / "x.pt").write_bytes(content)
    assert load_torchrec(bags, tmp_path / "x.pt") == []
    np.testing.assert_array_equal(bags.table("a"), rows)


# Bombs: pickles, each a program of its own.

LAUGHS = b"\x80\x02N\x85q\x00" + b"h\x00h\x00\x86q\x00" * 60  # a tuple of 2 ** 60 leaves
DICTS = b"\x80\x02}q\x00" + (b"}(" + encode("a") + b"h\x00" + encode("b") + b"h\x00uq\x00") * 60
BOMBS = {
    "memo": b"\x80\x02Nr" + struct.pack("<I", 1 << 27) + b".",
    "bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "text": b"\x80\x05\x8d" + struct.pack("<Q", 1 << 33) + b".",
    "frame": b"\x80\x05\x95" + struct.pack("<Q", 1 << 33) + b".",
    "integer": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b".",
    "nested lists": b"\x80\x02" + b"](" * 20_000 + b".",
    "nested dictionaries": b"\x80\x02" + (b"}" + encode("a")) * 5000 + b"}" + b"s" * 5000 + b".",
    "shared dictionaries": DICTS + b".",
    "dictionary within itself": b"\x80\x02}q\x00" + encode("a") + b"h\x00s.",
    "hash of a key": LAUGHS.replace(b"\x80\x02", b"\x80\x02}", 1) + b"Ns.",
    "shown": LAUGHS + b"ctorch\nSize\nh\x00\x85R.",
    "copies of a list": b"\x80\x02](" + b"N" * 100_000 + b"eq\x00"
    + b"ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * 10_000 + b".",
    "copies of a dictionary": b"\x80\x02"
    + encode({i: i for i in range(10_000)}) + b"q\x00ccollections\nOrderedDict\nq\x01"
    + b"h\x01h\x00\x85R" * 10_000 + b".",
    "arguments": b"\x80\x02" + encode(tuple(range(10_000)))
    + b"q\x00ctorch._utils\n_rebuild_parameter\nq\x01" + b"h\x01h\x00R" * 10_000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("program", BOMBS.values(), ids=BOMBS)
@pytest.mark.every_case
def test_pickles_take_no_more_than_their_bytes(bags, tmp_path, program):
    (tmp_path / "x.pt").write_bytes(torch_file(Raw(program), {}))
    assert_refused(bags, tmp_path / "x.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(program)
    assert_refused(bags, tmp_path / "dcp")


def test_pickles_change_no_class(bags, tmp_path):
    """``BUILD`` sets attributes of whatever it finds: of a class, for all files after this one."""
    program = encode(Global(METADATA, "MetadataIndex")) + encode((None, {"__setstate__": 3}))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"\x80\x02" + program + b"b.")
    assert_refused(bags, tmp_path / "dcp")
    write_shards(tmp_path / "good", {NAME: ((5, 2), TWO)})
    assert load_torchrec(bags, tmp_path / "good") == []


def save(path, value):
    path.write_bytes(torch_file(value, {"0": ROWS.tobytes()}))
    return path


def test_compressed_files_take_no_more_than_the_model(bags, tmp_path):
    zeros, path = bytes(1 << 26), tmp_path / "x.pt"
    described = tensor((5, 2), (2, 1), elements=len(zeros) // 4)
    path.write_bytes(torch_file({NAME: described}, {"0": zeros}, zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 100_000
    assert_refused(bags, path, "is compressed and has 67,108,864 bytes, more than the 40")
    program = Raw(b"\x80\x02" + b"}" * (1 << 24) + b".")
    path.write_bytes(torch_file(program, {}, zipfile.ZIP_DEFLATED))
    assert_refused(bags, path, "is compressed and has 16,777,219 bytes")
    path = tmp_path / "x.npz"
    np.savez_compressed(path, **{NAME: np.zeros((1 << 22, 2), np.float32)})
    assert_refused(bags, path, "has shape (5, 2), the file's (4194304, 2)")


def test_entries_that_are_there_twice(bags, tmp_path):
    """Two entries of one name, of which programs read either."""
    path = save(tmp_path / "x.pt", {NAME: whole(ROWS)})
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data/0", bytes(40))
    assert_refused(bags, path, "it has the entry 'x/data/0' more than once")


# Directories of `torch.distributed.checkpoint`.

TWO = [((0, 0), ROWS[:3]), ((3, 0), ROWS[3:])]
CUTS = {
    "rows": TWO,
    "columns": [((0, 1), ROWS[:, 1:].copy()), ((0, 0), ROWS[:, :1].copy())],
    "whole": [((0, 0), ROWS)],
    "an empty one": [*TWO, ((5, 0), ROWS[5:])],
    "a windmill": [
        ((0, 0), ROWS[:2, :1].copy()), ((0, 1), ROWS[:3, 1:].copy()),
        ((2, 0), ROWS[2:, :1].copy()), ((3, 1), ROWS[3:, 1:].copy()),
    ],
}  # fmt: skip


@pytest.mark.parametrize("shards", CUTS.values(), ids=CUTS)
@pytest.mark.every_case
def test_shards(bags, tmp_path, shards):
    write_shards(tmp_path / "dcp", {NAME: ((5, 2), shards)})
    assert load_torchrec(bags, tmp_path / "dcp") == []
    np.testing.assert_array_equal(bags.table("a"), ROWS)


ZEROS = np.zeros((2, 2), np.float32)
WRONG_CUTS = {
    "none": [],
    "a gap": [((0, 0), ROWS[:2]), ((3, 0), ROWS[3:])],
    "an overlap": [((0, 0), ROWS[:4]), ((3, 0), ROWS[3:])],
    "an overlap and a gap": [((0, 0), ROWS[:3]), ((2, 0), ROWS[3:])],  # as many elements
    "beyond the end": [((0, 0), ROWS[:4]), ((4, 0), ZEROS)],
    "before the beginning": [((0, 0), ROWS[:3]), ((-40, 0), ROWS[3:])],
    "other axes": [((0,), ROWS[:, 0].copy()), ((5,), ROWS[:, 1].copy())],
    "twice": [*TWO, ((3, 0), ROWS[3:])],
    "far away": [((0, 0), ROWS[:3]), (((1 << 63) - 1, 0), ROWS[3:])],
    "columns that overlap": [((0, 0), ROWS), ((0, 1), ROWS[:, 1:].copy())],
}


@pytest.mark.parametrize("shards", WRONG_CUTS.values(), ids=WRONG_CUTS)
@pytest.mark.every_case
def test_shards_that_are_no_cut(bags, tmp_path, shards):
    write_shards(tmp_path / "dcp", {NAME: ((5, 2), shards)})
    assert_refused(bags, tmp_path / "dcp")


def described(*parts, chunks=None):
    """The metadata of two shards of `ROWS`, of which ``parts`` are the places in files."""
    chunks = chunks or [((0, 0), (3, 2)), ((3, 0), (2, 2))]
    places = zip([offsets for offsets, _ in chunks], parts, strict=True)
    return metadata({NAME: ((5, 2), chunks)}, [(NAME, offsets, *part) for offsets, part in places])


FIRST, SECOND = tensor_file(ROWS[:3]), tensor_file(ROWS[3:])
ONE = ("a.distcp", 0, len(FIRST))
PLACES = {
    "the bytes of another": (described(ONE, ONE), "two entries share the bytes of a.distcp"),
    "bytes that overlap": (
        described(ONE, ("a.distcp", len(FIRST) - 1, len(SECOND) + 1)),
        "two entries share the bytes",
    ),
    "beyond the end": (
        described(ONE, ("a.distcp", len(FIRST), len(SECOND) + 1)),
        "a.distcp is cut short",
    ),
    "far beyond the end": (described(ONE, ("a.distcp", 1 << 62, 9)), "a.distcp is cut short"),
    "before the beginning": (described(ONE, ("a.distcp", -1, 9)), "-1 is not a size or a position"),
    "no numbers": (described(ONE, ("a.distcp", "0", None)), "is not a size or a position"),
    "another folder": (described(("../a.distcp", 0, 9), ONE), "is not the name of a file"),
    "the root": (described(("/etc/passwd", 0, 9), ONE), "is not the name of a file"),
    "the folder": (described(("..", 0, 9), ONE), "is not the name of a file"),
    "no name": (described((3, 0, 9), ONE), "3 is not a name"),
    "a missing file": (described(("b.distcp", 0, 9), ONE), "b.distcp is missing"),
    "shards exchanged": (
        described(("a.distcp", len(FIRST), len(SECOND)), ONE),
        "not a tensor of shape (3, 2)",
    ),
    "sizes that are none": (
        described(ONE, ONE, chunks=[((0, 0), "32"), ((3, 0), (2, 2))]),
        "is not the size of a tensor",
    ),
}


@pytest.mark.parametrize(("content", "message"), PLACES.values(), ids=PLACES)
@pytest.mark.every_case
def test_places_of_shards(bags, tmp_path, content, message):
    (tmp_path / "a.distcp").write_bytes(FIRST + SECOND)
    (tmp_path / ".metadata").write_bytes(pickled(content))
    with pytest.raises(CheckpointError, match=str(tmp_path)) as raised:
        load_torchrec(bags, tmp_path)
    assert message in str(raised.value)


def test_shards_of_two_types(bags, tmp_path):
    shards = [((0, 0), ROWS[:3]), ((3, 0), ROWS[3:].astype(np.float64))]
    write_shards(tmp_path / "dcp", {NAME: ((5, 2), shards)})
    with pytest.raises(CheckpointError, match=r"distcp holds float64 for .*, and float32"):
        load_torchrec(bags, tmp_path / "dcp")


boxes = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=5,
)


def cuts(rows, columns):
    """Boxes of a grid, so that many cuts are right."""
    edges = [[0, *row, 4] for row in (rows, columns)]
    spans = [list(itertools.pairwise(sorted(each))) for each in edges]
    return [((a, c), (b - a, d - c)) for a, b in spans[0] for c, d in spans[1]]


grids = st.builds(cuts, st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)))


@settings(max_examples=max_examples(100))
@given(parts=st.one_of(boxes, grids), drop=st.integers(0, 30))
def test_boxes_that_hold_each_element_once(parts, drop):
    parts = parts[:drop] + parts[drop + 1 :]
    counts = np.zeros((12, 12), int)
    for (a, c), (rows, columns) in parts:
        counts[a : a + rows, c : c + columns] += 1
    wanted = np.zeros_like(counts)
    wanted[:4, :4] = 1
    assert holds_each_once((4, 4), parts) == np.array_equal(counts, wanted)
