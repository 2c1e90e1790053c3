"""Hostile arguments to every constructor: an error that names its cause, or the right batch.

What a call should give is worked out here from its arguments alone, in plain Python. A call whose
arguments have no such meaning must raise.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxrec.ragged import JaggedArray, KeyedJaggedArray
from tests.fuzz import max_examples

# An error's message names one of these.
CAUSE = re.compile(
    r"feature|values|lengths|offsets|weights|keys|capacit|bounds|strides|inverse|columns|data\b"
)
RAISED = (ValueError, TypeError, KeyError, OverflowError)

small = st.integers(0, 9)
odd_ids = st.sampled_from(
    [
        *(-1, -2, 10, 2**31 - 1, 2**31, 2**33 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**70, -(2**70)),
        *(1.0, 0.5, math.nan, "1", b"1", None, True, np.int8(3), np.uint64(2**63), np.float32(1)),
        *(1j, [1], (), {}),
    ]
)
odd_numbers = st.sampled_from([2.7, -1, "8", None, True, 2**31, 2**64, math.nan, np.int16(9)])
odd_weights = st.sampled_from(
    [
        *(math.nan, math.inf, -math.inf, 1e300, 1e39, -0.0, 1e-300, 3, 10**400, 2**70, "1", None),
        *(True, np.float16(0.5), np.float64(1e39), 1j, [0.5]),
    ]
)
weights = st.floats(-4, 4, width=16)
dtypes = st.sampled_from(
    [
        "i1",
        "u1",
        ">i2",
        "i4",
        ">u4",
        "i8",
        ">i8",
        "u8",
        "f2",
        "f4",
        ">f4",
        "f8",
        ">f8",
        "?",
        "O",
        "U4",
    ]
)


def rarely(usual: st.SearchStrategy, odd: st.SearchStrategy) -> st.SearchStrategy:
    """``usual`` nine times in ten."""
    return st.integers(0, 9).flatmap(lambda roll: odd if roll == 9 else usual)


@st.composite
def containers(draw, items: list) -> Any:
    """The items in some container: a list, an array of any type, masked, on a device, Arrow's."""
    kind = draw(
        st.sampled_from(["list", "list", "tuple", "array", "typed", "masked", "jax", "arrow"])
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            match kind:
                case "tuple":
                    return tuple(items)
                case "array":
                    return np.array(items)
                case "typed":
                    return np.array(items).astype(draw(dtypes))
                case "masked":
                    hidden = draw(st.integers(-1, len(items) - 1))
                    mask = [place == hidden for place in range(len(items))]
                    return np.ma.masked_array(np.array(items), mask)
                case "jax":
                    return jnp.asarray(np.array(items))
                case "arrow":
                    return pa.array(items)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        pass
    return items


def plain(container: Any) -> list:
    """The elements as plain Python objects; None where they are masked."""
    if isinstance(container, pa.Array):
        return container.to_pylist()
    if isinstance(container, list | tuple):
        return [item.item() if isinstance(item, np.generic) else item for item in container]
    return np.ma.asarray(container).tolist()


def numbers(container: Any) -> list:
    """`plain`, with bools among numbers as NumPy takes them."""
    return [int(item) if isinstance(item, bool) else item for item in plain(container)]


def is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def repaired(ids: list, bound: Any, mode: str) -> list:
    """The ids of a bag, those outside 0; fails where the call should have raised."""
    assert all(map(is_id, ids)), ids
    limit = 2**31 if bound is None else bound
    assert mode in ("clamp", "ignore") or all(0 <= i < limit for i in ids), (ids, bound, mode)
    return [i if 0 <= i < limit else 0 for i in ids]


def narrowed(weights: list) -> list:
    """The weights of a bag in float32; fails where the call should have raised."""
    assert all(isinstance(w, int | float) and not isinstance(w, bool) for w in weights), weights
    narrow = [struct.unpack("f", struct.pack("f", w))[0] for w in weights]
    assert all(map(math.isfinite, narrow)), weights
    return narrow


def cut(flat: list, lengths: list, keys: int, strides: Any) -> list[list[list]]:
    """The bags of each key; fails where the call should have raised."""
    assert all(is_id(length) and length >= 0 for length in lengths), lengths
    assert sum(lengths) == len(flat)
    per_key = [len(lengths) // keys] * keys if strides is None else list(strides)
    assert all(map(is_id, per_key))
    assert sum(per_key) == len(lengths)
    ids, bags = iter(flat), iter(lengths)
    return [[[next(ids) for _ in range(next(bags))] for _ in range(n)] for n in per_key]


def assert_right_or_named(call, expected, options) -> None:
    """Calls a constructor; ``expected()`` is its ids and weights, by key."""
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            batch = call(**options)
        except RAISED as raised:
            error = raised
    if error is not None:
        assert CAUSE.search(str(error)), repr(error)
        return
    messages = [str(warning.message) for warning in caught]
    assert all("ids became 0" in message for message in messages), messages
    ids, given_weights = expected()
    bounds, mode = options.get("bounds") or {}, options.get("bounds_mode", "raise")
    assert list(batch.keys) == list(ids)
    assert batch.values.dtype == batch.lengths.dtype == np.int32 or not batch.values.size
    assert batch.to_lists() == {
        key: [repaired(bag, bounds.get(key), mode) for bag in bags] for key, bags in ids.items()
    }
    capacities = options.get("capacities") or {}
    if not isinstance(capacities, dict):
        capacities = dict(zip(ids, capacities, strict=True))
    assert all(is_id(plain([c])[0]) for c in capacities.values())
    assert {key: batch.capacity_per_key[key] for key in capacities} == capacities
    assert (batch.weights is None) == (given_weights is None) or not ids
    if given_weights is not None and ids:
        assert batch.weights.dtype == np.float32
        for key, bags in given_weights.items():
            assert batch[key].weights_to_lists() == [narrowed(bag) for bag in bags]


@st.composite
def packing_options(draw, keys: list) -> dict:
    """Options of packing, mostly sensible ones."""
    named = st.dictionaries(rarely(st.sampled_from([*keys, "a"]), st.just("zz")), st.just(0))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        rows = {key: draw(rarely(st.integers(1, 12), odd_numbers)) for key in draw(named)}
        options["bounds"] = draw(rarely(st.just(rows), st.sampled_from([[10], 10, "a"])))
        modes = st.sampled_from(["raise", "clamp", "ignore"])
        options["bounds_mode"] = draw(rarely(modes, st.sampled_from(["fix", None, 0, []])))
    if draw(st.integers(0, 3)) == 0:
        size = rarely(st.integers(6, 40), odd_numbers)
        rooms = draw(
            st.lists(size, min_size=len(keys), max_size=len(keys))
            | st.just({key: draw(size) for key in draw(named)})
        )
        options["capacities"] = draw(rarely(st.just(rooms), st.sampled_from([64, "64", 2.7])))
    return options


@st.composite
def batches(draw) -> tuple[list, dict, dict | None]:
    """Keys, ids and weights by key, as nested lists; now and then something is odd."""
    keys = draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True))
    size = draw(st.integers(0, 3))
    is_weighted = draw(st.booleans())
    is_odd = draw(st.booleans())
    one_id = rarely(small, odd_ids) if is_odd else small
    one_weight = rarely(weights, odd_weights) if is_odd else weights
    ids = {key: [draw(st.lists(one_id, max_size=3)) for _ in range(size)] for key in keys}
    if not is_weighted:
        return keys, ids, None
    nested = {key: [[draw(one_weight) for _ in bag] for bag in ids[key]] for key in keys}
    return keys, ids, nested


def by_sample(rows: Any) -> list[list]:
    return [plain(bag) for bag in plain(rows)]


fuzzed = settings(
    max_examples=max_examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
pytestmark = pytest.mark.usefixtures("unchecked")


@fuzzed
@given(st.data())
def test_from_lists(data):
    keys, ids, nested = data.draw(batches())
    held = {key: [data.draw(containers(bag)) for bag in bags] for key, bags in ids.items()}
    if nested is not None:
        nested = {k: [data.draw(containers(bag)) for bag in bags] for k, bags in nested.items()}
    if keys and data.draw(st.integers(0, 9)) == 0:
        held[keys[0]] = data.draw(
            st.sampled_from([None, 3, "ab", {}, [1, 2], [None], held[keys[0]][1:]])
        )

    def expected():
        weights = nested and {key: by_sample(rows) for key, rows in nested.items()}
        return {key: by_sample(rows) for key, rows in held.items()}, weights or None

    options = data.draw(packing_options(keys))
    assert_right_or_named(
        lambda **options: KeyedJaggedArray.from_lists(held, nested, **options), expected, options
    )


@st.composite
def flat_arguments(draw) -> tuple[list, Any, list, Any, Any]:
    """Keys, values, lengths (plain), weights and strides of TorchRec's layout."""
    keys, ids, nested = draw(batches())
    lengths = [len(bag) for bags in ids.values() for bag in bags]
    flat = draw(containers([i for bags in ids.values() for bag in bags for i in bag]))
    if nested is not None:
        nested = draw(containers([w for bags in nested.values() for bag in bags for w in bag]))
    if lengths and draw(st.integers(0, 5)) == 0:
        wrong = st.sampled_from([-1, 2**62, 2**63, 2**64 - 1, 1.0, math.nan, "1", None, 4, True])
        lengths[draw(st.integers(0, len(lengths) - 1))] = draw(wrong)
    strides = None
    if draw(st.integers(0, 4)) == 0:
        strides = draw(
            st.just([len(bags) for bags in ids.values()])
            | st.sampled_from([[1], [1.0] * len(keys), [-1, 1], 2, "12", [2**63]])
        )
    odd_keys = st.sampled_from(["ab", None, 3, ["a", "a"], [1, 2], [b"a"], {}])
    return draw(rarely(st.just(keys), odd_keys)), flat, lengths, nested, strides


def expected_of_flat(keys: Any, flat: Any, lengths: list, nested: Any, strides: Any):
    assert not isinstance(keys, str)
    keys = list(keys)
    assert all(isinstance(key, str) for key in keys)
    assert len(set(keys)) == len(keys)
    ids = dict(zip(keys, cut(numbers(flat), lengths, len(keys) or 1, strides), strict=bool(keys)))
    if nested is None:
        return ids, None
    bags = cut(numbers(nested), lengths, len(keys) or 1, strides)
    return ids, dict(zip(keys, bags, strict=bool(keys)))


@fuzzed
@given(st.data())
def test_from_lengths(data):
    keys, flat, lengths, nested, strides = data.draw(flat_arguments())
    held = data.draw(containers(lengths))
    assert_right_or_named(
        lambda **options: KeyedJaggedArray.from_lengths(
            keys, flat, held, nested, strides=strides, **options
        ),
        lambda: expected_of_flat(keys, flat, numbers(held), nested, strides),
        data.draw(packing_options(["a"])),
    )


@fuzzed
@given(st.data())
def test_from_offsets(data):
    keys, flat, lengths, nested, strides = data.draw(flat_arguments())
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length if is_id(length) and is_id(offsets[-1]) else length)
    if data.draw(st.integers(0, 9)) == 0:
        offsets = data.draw(st.sampled_from([[], [1], 0, None, [[0]], offsets[::-1]]))
    held = data.draw(containers(offsets)) if isinstance(offsets, list) else offsets

    def expected():
        ends = numbers(held)
        assert all(map(is_id, ends))
        assert ends[0] == 0
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        return expected_of_flat(keys, flat, lengths, nested, strides)

    assert_right_or_named(
        lambda **options: KeyedJaggedArray.from_offsets(
            keys, flat, held, nested, strides=strides, **options
        ),
        expected,
        data.draw(packing_options(["a"])),
    )


@fuzzed
@given(st.data())
def test_constructor(data):
    """TorchRec's flat arrays, or segments of capacities with anything behind the ids."""
    keys, ids, nested = data.draw(batches())
    lengths = [len(bag) for bags in ids.values() for bag in bags]
    fields: dict[str, Any] = {"keys": keys}
    rooms = [sum(map(len, bags)) + data.draw(st.integers(0, 2)) for bags in ids.values()]
    is_padded = data.draw(st.booleans())
    behind = st.sampled_from([0, -1, 7, 2**40])

    def flat(bags_by_key, padding):
        out = []
        for room, bags in zip(rooms, bags_by_key.values(), strict=True):
            used = [item for bag in bags for item in bag]
            out += used + [data.draw(padding) for _ in range(room - len(used))] * is_padded
        return out

    values, held = data.draw(containers(flat(ids, behind))), None
    # Arrays of floats are batches of something else than ids.
    assume(getattr(getattr(values, "dtype", None), "kind", "i") != "f")
    if nested is not None:
        padding = st.sampled_from([0.0, math.nan, 1e300])
        held = data.draw(containers(flat(nested, padding)))
    if is_padded:
        fields["capacities"] = data.draw(rarely(st.just(rooms), st.lists(odd_numbers, max_size=2)))
        strides = [len(bags) for bags in ids.values()]
        fields["strides"] = data.draw(st.sampled_from([strides, (), strides[1:]]))
    on_device = jnp.asarray(np.array(lengths, np.int32))
    if lengths and data.draw(st.integers(0, 5)) == 0:
        wrong = st.sampled_from([-1, 2**62, 2**63, 2**64 - 1, 1.0, "1", None, 4])
        lengths[data.draw(st.integers(0, len(lengths) - 1))] = data.draw(wrong)
    given_lengths = data.draw(containers(lengths))
    if isinstance(given_lengths, jax.Array):  # of which shape and type alone are checked
        given_lengths = on_device

    def segments(padded: list, rooms: list, per_key: int) -> dict:
        out, start = {}, 0
        counts = numbers(given_lengths)
        assert all(is_id(count) and count >= 0 for count in counts)
        for index, (key, room) in enumerate(zip(keys, rooms, strict=True)):
            own = counts[index * per_key : (index + 1) * per_key]
            assert sum(own) <= room
            out[key] = cut(padded[start : start + sum(own)], own, 1, None)[0]
            start += room
        return out

    def expected():
        if not is_padded or not rooms:
            return expected_of_flat(keys, values, numbers(given_lengths), held, None)
        size = len(lengths) // len(keys)
        weights = None if held is None else segments(numbers(held), rooms, size)
        return segments(numbers(values), rooms, size), weights

    def call():
        batch = KeyedJaggedArray(values=values, lengths=given_lengths, weights=held, **fields)
        if isinstance(values, jax.Array):
            batch.with_checked_ids({})
        if batch.weights is not None and isinstance(held, jax.Array):
            for key in keys:
                if not np.isfinite(np.concatenate(batch[key].weights_to_lists() or [[]])).all():
                    raise ValueError("weights on a device may be anything")
        return batch

    assert_right_or_named(call, expected, {})


@fuzzed
@given(st.data())
def test_from_dict(data):
    keys, ids, nested = data.draw(batches())
    try:
        columns = {
            key: JaggedArray.from_lists(bags, nested and nested[key]) for key, bags in ids.items()
        }
    except (ValueError, TypeError, OverflowError):
        columns = {}
        for key, bags in ids.items():
            values = np.array([i for bag in bags for i in bag], object)
            columns[key] = JaggedArray(values, np.array([len(bag) for bag in bags], np.int64))
        nested = None
    assume(all(column.values.dtype.kind != "f" for column in columns.values()))
    if keys and data.draw(st.integers(0, 9)) == 0:
        columns[keys[0]] = data.draw(st.sampled_from([None, [[1]], JaggedArray([1], [1])]))

    def expected():
        weights = nested and {key: [numbers(bag) for bag in nested[key]] for key in keys}
        return {key: columns[key].to_lists() for key in keys}, weights or None

    options = data.draw(packing_options(keys))
    if "bounds" not in options:
        options.pop("bounds_mode", None)
    assert_right_or_named(
        lambda **options: KeyedJaggedArray.from_dict(columns, **options), expected, options
    )


@fuzzed
@given(st.data())
def test_from_arrow(data):
    keys, ids, nested = data.draw(batches())
    kinds = st.sampled_from(
        [None, pa.list_(pa.int8()), pa.large_list(pa.uint64()), pa.list_(pa.float32())]
    )

    def column(bags, kind=None):
        try:
            return pa.array(bags, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            return bags

    held = {key: column(bags, data.draw(kinds)) for key, bags in ids.items()}
    for key in keys:
        if data.draw(st.integers(0, 5)) == 0:
            held[key] = column([None for _ in ids[key][:1]] + ids[key][1:])
    if nested is not None:
        nested = {key: column(bags) for key, bags in nested.items()}
    table: Any = held
    if all(isinstance(array, pa.Array) for array in held.values()) and data.draw(st.booleans()):
        names = data.draw(rarely(st.just(keys), st.just([*keys[:1], *keys[:-1]])))
        table = pa.Table.from_arrays(list(held.values()), names)

    def rows(array):
        assert isinstance(array, pa.Array)
        return [[] if bag is None else bag for bag in array.to_pylist()]

    def expected():
        assert not isinstance(table, pa.Table) or table.column_names == keys
        weights = nested and {key: rows(array) for key, array in nested.items()}
        return {key: rows(array) for key, array in held.items()}, weights or None

    assert_right_or_named(
        lambda **options: KeyedJaggedArray.from_arrow(table, nested, **options),
        expected,
        data.draw(packing_options(keys)),
    )
