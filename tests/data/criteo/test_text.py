"""Lines that NumPy parses, against a regular expression and Python's numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data.criteo import text

pytestmark = pytest.mark.every_case

LINE = re.compile(
    rb"([01])" + rb"\t(-?[0-9]{1,11})?" * 13 + rb"\t([0-9a-fA-F]{8})?" * 26 + rb"\n",
)
# Digits, separators, and the neighbours of both.
CHARACTERS = b"\0\b\t\n\v\r -+./059:@AFG`afg\xff"


def plain(lines):
    """The plain way: None if a line is not well-formed."""
    rows = []
    for line in lines:
        match = LINE.fullmatch(line)
        if match is None:
            return None
        label, *rest = match.groups()
        counts = [int(x or 0) for x in rest[:13]]
        lengths = [len(x or b"") for x in rest[:13]]
        if max(lengths) > 11 or not all(-(2**31) <= x < 2**31 for x in counts):
            return None
        rows.append([int(label), *counts, *[int(x or b"0", 16) for x in rest[13:]]])
    return rows


def parsed(lines):
    columns = text.parse_fields(b"".join(lines), b"".join(lines).count(b"\n"))
    if columns is None:
        return None
    assert [x.dtype for x in columns] == [np.int32, np.int32, np.uint32]
    return np.concatenate([x.reshape(-1, len(lines)).astype(np.int64) for x in columns]).T.tolist()


def line_of(label, counts, hashes):
    return "\t".join([label, *counts, *hashes]).encode() + b"\n"


_COUNTS = st.one_of(
    st.just(""),
    st.integers(-(2**31), 2**31 - 1).map(str),
    st.integers(-200, 200).map(str),
    st.sampled_from(["-0", "007", "-00000001", "00000000005", "-2147483648", "2147483647"]),
)
_HASHES = st.one_of(
    st.just(""), st.integers(0, 2**32 - 1).map("{:08x}".format), st.sampled_from(["ABCDEF09"])
)
_LINES = st.lists(
    st.builds(
        line_of,
        st.sampled_from("01"),
        st.lists(_COUNTS, min_size=13, max_size=13),
        st.lists(_HASHES, min_size=26, max_size=26),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("piece_bytes", [1, 300, 1 << 18])
@settings(max_examples=50, deadline=None)
@given(lines=_LINES)
def test_well_formed_lines(piece_bytes, lines):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_PIECE_BYTES", piece_bytes)
        assert parsed(lines) == plain(lines) is not None


@settings(max_examples=300, deadline=None)
@given(lines=_LINES, data=st.data())
def test_any_change_of_a_line(lines, data):
    """A character replaced, inserted or deleted anywhere: the same columns, or None."""
    text = b"".join(lines)
    place = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(
        st.sampled_from([b"", *(bytes([x]) for x in b"\0\b\t\n\v\r -+.059:/`afgAFG@\xff")])
    )
    end = place + data.draw(st.integers(0, 1))
    text = text[:place] + new + text[end:]
    lines = [x + b"\n" for x in text.removesuffix(b"\n").split(b"\n")]
    assert parsed(lines) == plain(lines)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_every_byte_of_an_id(place):
    """In a word of eight, whatever its neighbours."""
    for filler in b"09afAF":
        words = np.full((256, 8), filler, np.uint8)
        words[:, place] = np.arange(256)
        for byte, word in enumerate(words):
            numbers = word.view("<u8").copy()
            good = text._parse_hexadecimals(numbers)
            assert good == (chr(byte) in "0123456789abcdefABCDEF")
            if good:
                assert numbers.tolist() == [int(word.tobytes(), 16)]


def with_integer(field):
    return b"0\t" + field + b"\t" * 38 + b"\n"


@pytest.mark.parametrize("length", [1, 7, 8, 9, 11])
def test_every_byte_of_an_integer(length):
    """At every place, in fields of one word and of two."""
    for place in range(length):
        for byte in set(range(256)) - set(b"\t\n"):
            field = bytearray(b"00345678901"[-length:])
            field[place] = byte
            assert parsed([with_integer(field)]) == plain([with_integer(field)])


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**32, 10**10, -(10**9 * 9), 10**11 - 1])
def test_numbers_of_more_than_32_bits(number):
    assert parsed([with_integer(b"%d" % number)]) is None


@pytest.mark.parametrize("length", [12, 13, 5000])
def test_long_integers_are_left_to_others(length):
    """Arrow's view of a longer field holds its offset in place of its last characters."""
    assert parsed([with_integer(b"7".zfill(length))]) is None
