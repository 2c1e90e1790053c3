"""Which rows are held out: by number, by value, and from a value on."""

from __future__ import annotations

import datetime
import decimal
import zoneinfo

import numpy as np
import pyarrow as pa
import pytest

from jaxrec.data import DataError, TableGroups
from jaxrec.data.last_of_each import LastOfEach
from jaxrec.data.later_rows import LaterRows
from jaxrec.data.split import LastRows, RandomRows, ValuesOf

pytestmark = pytest.mark.every_case

ROWS = 1000
UTC = datetime.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


def held_out(split, column=None, rows=ROWS, group_rows=300):
    """Which rows a split holds out, of a table in groups."""
    groups = None
    if column is not None:
        groups = TableGroups(pa.table({"x": column}), group_rows)
        rows = len(column)
    return split.mask(rows, "data", groups).part(0, rows)


@pytest.mark.parametrize(("fraction", "count"), [(0.1, 100), (0.0001, 1), (0.9996, None)])
def test_the_last_rows(fraction, count):
    if count is None:
        with pytest.raises(DataError, match="data: 1000 rows are too few to train on some and"):
            held_out(LastRows(fraction))
        return
    expected = np.arange(ROWS) >= ROWS - count
    np.testing.assert_array_equal(held_out(LastRows(fraction)), expected)


def test_random_rows_depend_on_their_number_and_the_seed():
    rows = 200_000
    whole = held_out(RandomRows(0.25, seed=3), rows=rows)
    # Four deviations of a binomial.
    assert abs(whole.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / rows)
    np.testing.assert_array_equal(held_out(RandomRows(0.25, seed=3), rows=500), whole[:500])
    # A larger fraction holds out these rows and more; another seed other ones.
    assert held_out(RandomRows(0.3, seed=3), rows=rows)[whole].all()
    other = held_out(RandomRows(0.25, seed=4), rows=rows)
    assert abs((whole & other).mean() - 0.0625) < 0.003
    # Neighbours are independent.
    assert abs((whole[1:] & whole[:-1]).mean() - 0.0625) < 0.003
    with pytest.raises(DataError, match=r"random:0\.01 holds out 0 of 3 rows; give more rows"):
        held_out(RandomRows(0.01), rows=3)


USERS = np.random.default_rng(0).integers(0, 200, ROWS)
COLUMNS = {
    "int64": pa.array(USERS),
    "uint8": pa.array(USERS, pa.uint8()),
    "floats": pa.array(USERS.astype(float)),
    "dictionary": pa.array(USERS).dictionary_encode(),
    "text": pa.array([f"user {user}" for user in USERS]),
    "bytes": pa.array([b"%d" % user for user in USERS]),
    "dates": pa.array(USERS, pa.int32()).cast(pa.date32()),
    "times": pa.array(USERS).cast(pa.timestamp("ns", "UTC")),
    "decimals": pa.array([decimal.Decimal(int(user)) / 4 for user in USERS], pa.decimal128(9, 2)),
    "fractions": pa.array(USERS / 7),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_all_rows_of_a_value_are_on_one_side(name):
    mask = held_out(ValuesOf("x", 0.2), COLUMNS[name])
    assert 0.1 < mask.mean() < 0.3
    assert not {*USERS[mask].tolist()} & {*USERS[~mask].tolist()}
    if name in ("uint8", "floats", "dictionary"):
        # The width of a type, which may differ between files, does not matter.
        np.testing.assert_array_equal(mask, held_out(ValuesOf("x", 0.2), COLUMNS["int64"]))
    again = held_out(ValuesOf("x", 0.2), COLUMNS[name], group_rows=77)
    np.testing.assert_array_equal(mask, again)
    assert (mask != held_out(ValuesOf("x", 0.2, seed=1), COLUMNS[name])).any()


def test_values_that_are_missing_or_unfit():
    users = [None if user < 50 else float(user) for user in USERS]
    users[0] = float("nan")
    mask = held_out(ValuesOf("x", 0.5), pa.array(users))
    assert not mask[[user is None or user != user for user in users]].any()
    assert mask.any()
    with pytest.raises(DataError, match=r"no values of column 'x' are among the 0\.1 that are"):
        held_out(ValuesOf("x", 0.1), pa.array([None, None]))
    with pytest.raises(DataError, match="column 'x' is of type list"):
        held_out(ValuesOf("x"), pa.array([[1]]))


LAST_USERS = ["a", "b", None, "a", "c", "b", None, "a"]
# Numbers of the held-out rows, by the type of times; the only row of "c" is trained on.
LAST = {
    "files": (None, [5, 7]),
    "int": (pa.array([1, 9, 9, 5, 7, 2, 9, 3]), [1, 3]),
    "equal": (pa.array([1, 2, 9, 5, 7, 2, 9, 5]), [5, 7]),
    "time": (pa.array([1, 9, 9, 5, 7, 2, 9, 3]).cast(pa.timestamp("s", "UTC")), [1, 3]),
    "text": (pa.array([f"2024-03-0{n}" for n in "19957293"]), [1, 3]),
    "duration": (pa.array([1, 9, 9, 5, 7, 2, 9, 3]).cast(pa.duration("s")), [1, 3]),
    "time-of-day": (pa.array([1, 9, 9, 5, 7, 2, 9, 3]).cast(pa.time64("us")), [1, 3]),
    "zones": (
        pa.array([f"2024-03-01T12:00:00+0{9 - int(n)}:00" for n in "19957293"]),
        [1, 3],
    ),
    "dictionary": (pa.array([f"2024-03-0{n}" for n in "19957293"]).dictionary_encode(), [1, 3]),
}


@pytest.mark.parametrize(("times", "expected"), LAST.values(), ids=LAST)
def test_the_last_row_of_each_value(times, expected):
    columns = {"x": pa.array(LAST_USERS)}
    if times is not None:
        columns["t"] = times
    split = LastOfEach("x", None if times is None else "t")
    mask = split.mask(8, "data", TableGroups(pa.table(columns), 3)).part(0, 8)
    assert np.flatnonzero(mask).tolist() == expected


def test_times_of_last_rows_are_known():
    table = pa.table({"x": [1, 1, 2], "t": [1.0, 2.0, np.nan]})
    with pytest.raises(DataError, match=r"row 2 \(from 0\), column 't': the time is null"):
        LastOfEach("x", "t").mask(3, "data", TableGroups(table, 2))
    with pytest.raises(DataError, match="no value of column 'x' has two rows, of which"):
        LastOfEach("x").mask(2, "data", TableGroups(table[1:], 2))


DAY = datetime.datetime(2024, 3, 1)
# Columns of two files: users and times.
SEVERAL = {
    "date-and-time": (["a", "b"], [DAY.date(), DAY.date()], ["a", "b"], [DAY, DAY]),
    "time-and-zone": (["a", "b"], [DAY, DAY], ["a", "b"], [DAY.replace(tzinfo=UTC, hour=1)] * 2),
    "text-and-time": (["a", "b"], ["2024-02-29T23:00:00Z"] * 2, ["a", "b"], [DAY, DAY]),
    "int-and-float": ([1, 2], [1, 2], [1.0, 2.0], [1.5, 2.5]),
    "no-users": ([None, None], [1, 2], ["a", "a"], [1, 2]),
}


class Several:
    """A row group of each of two tables, whose columns have types of their own."""

    def __init__(self, *tables):
        self.tables, self.sizes = tables, tuple(map(len, tables))

    def read(self, group, columns=None):
        return self.tables[group].select(columns)

    def location(self, group):
        return f"{group}.parquet", 0


@pytest.mark.parametrize("case", SEVERAL)
def test_the_last_rows_of_files_with_several_types(case):
    x, t, other_x, other_t = SEVERAL[case]
    groups = Several(pa.table({"x": x, "t": t}), pa.table({"x": other_x, "t": other_t}))
    expected = [3] if case == "no-users" else [2, 3]
    assert np.flatnonzero(LastOfEach("x", "t").mask(4, "data", groups).part(0, 4)).tolist() == (
        expected
    )


def test_times_that_cannot_be_compared():
    groups = Several(pa.table({"x": [1], "t": [1]}), pa.table({"x": [1], "t": ["2024-03-01"]}))
    with pytest.raises(DataError, match=r"column 't' in types that cannot be compared \(int64, st"):
        LastOfEach("x", "t").mask(2, "data", groups)
    text = TableGroups(pa.table({"x": [1, 1], "t": ["9", "10"]}))
    with pytest.raises(DataError, match=r"row 0 \(from 0\), column 't': \"9\" is no time"):
        LastOfEach("x", "t").mask(2, "data", text)
    lists = TableGroups(pa.table({"x": [1, 1], "t": [[1], [2]]}))
    with pytest.raises(DataError, match=r"column 't' is of type list.*--time takes a column of"):
        LastOfEach("x", "t").mask(2, "data", lists)


def test_the_values_of_files_with_several_types_are_named():
    table = pa.table({"x": [DAY]})
    nanoseconds = table.cast(pa.schema({"x": pa.timestamp("ns")}))
    groups = Several(pa.table({"x": [DAY.date()]}), nanoseconds, pa.table({"x": ["2024-02-01"]}))
    with pytest.raises(DataError, match="has values from 2024-02-01 to 2024-03-01"):
        LaterRows("x", "2025-01-01").mask(3, "data", groups)


DAYS = [datetime.datetime(2024, 2, 28) + datetime.timedelta(hours=6 * n) for n in range(40)]
START = datetime.datetime(2024, 3, 1)
IN_UTC = [day.replace(tzinfo=UTC) for day in DAYS]
IN_BERLIN = START.replace(tzinfo=BERLIN)

# Column, text, and which rows are held out by Python's own comparisons.
LATER = {
    "int": (pa.array(range(40), pa.int16()), "30", [n >= 30 for n in range(40)]),
    "int-fraction": (pa.array(range(40)), "29.5", [n >= 30 for n in range(40)]),
    "uint64": (
        pa.array([2**64 - 40 + n for n in range(40)], pa.uint64()),
        str(2**64 - 10),
        [n >= 30 for n in range(40)],
    ),
    "float": (pa.array(np.arange(40) / 4), "7.25", [n / 4 >= 7.25 for n in range(40)]),
    "decimal": (
        pa.array([decimal.Decimal(n) / 4 for n in range(40)], pa.decimal128(5, 2)),
        "7.25",
        [n / 4 >= 7.25 for n in range(40)],
    ),
    "date32": (
        pa.array([x.date() for x in DAYS]), "2024-03-01", [x.date() >= START.date() for x in DAYS]
    ),
    "date32-noon": (
        pa.array([x.date() for x in DAYS]),
        "2024-03-01T12:00",
        [x.date() >= datetime.date(2024, 3, 2) for x in DAYS],
    ),
    "date64": (
        pa.array([x.date() for x in DAYS], pa.date64()),
        "2024-03-01",
        [x.date() >= START.date() for x in DAYS],
    ),
    **{
        f"timestamp-{unit}": (
            pa.array(DAYS, pa.timestamp(unit)), "2024-03-01", [x >= START for x in DAYS]
        )
        for unit in ("s", "ms", "us", "ns")
    },
    "utc": (
        pa.array(IN_UTC, pa.timestamp("ms", "UTC")),
        "2024-03-01T06:00:00+02:00",
        [x >= datetime.datetime(2024, 3, 1, 4, tzinfo=UTC) for x in IN_UTC],
    ),
    "berlin": (
        pa.array(IN_UTC, pa.timestamp("us", "Europe/Berlin")),
        "2024-03-01",
        [x >= IN_BERLIN for x in IN_UTC],
    ),
    "offset": (
        pa.array(IN_UTC, pa.timestamp("us", "+05:00")),
        "2024-03-01 05:00",
        [x >= START.replace(tzinfo=UTC) for x in IN_UTC],
    ),
    "text": (
        pa.array([x.isoformat() for x in DAYS]), "2024-03-01", [x >= START for x in DAYS]
    ),
    "text-zone": (
        pa.array([x.isoformat() for x in IN_UTC]),
        "2024-03-01",
        [x >= START for x in DAYS],
    ),
    "dictionary": (
        pa.array([str(x.date()) for x in DAYS]).dictionary_encode(),
        "2024-03-01",
        [x.date() >= START.date() for x in DAYS],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("column", "start", "expected"), LATER.values(), ids=LATER)
def test_rows_from_a_value_on(column, start, expected):
    assert 0 < sum(expected) < 40
    mask = held_out(LaterRows("x", start), column, group_rows=7)
    assert mask.tolist() == expected


WRONG = {
    "nothing": (
        LATER["berlin"][0], "2025-01-01",
        r"x=2025-01-01 holds out no rows; column 'x' has values from 2024-02-28 01:00:00\+01:00 to",
    ),
    "no-text": (
        LATER["dictionary"][0], "2025-01-01", "column 'x' has values from 2024-02-28 to 2024-03-08",
    ),
    "all": (LATER["int"][0], "-5", "holds out all rows; column 'x' has values from 0 to 39"),
    "beyond": (LATER["int"][0], "99999999999", "holds out no rows"),
    "seconds": (
        pa.array([0, 1]), "2024-03-01",
        "int64: '2024-03-01' is not a number; in seconds since 1970 that is 1709251200, in UTC",
    ),
    "nan": (pa.array([0, 1]), "nan", "nan is not a number to compare with"),
    "no-date": (LATER["utc"][0], "March", "expected a date or time such as 2024-03-01 or"),
    "no-zone": (LATER["timestamp-s"][0], "2024-03-01T00Z", "its times have no zone; leave that"),
    "null": (pa.array([1, None]), "1", r"row 1 \(from 0\), column 'x': the value is null"),
    "float-nan": (pa.array([1, np.nan]), "1", r"row 1 \(from 0\), column 'x': the value is null"),
    "list": (pa.array([[1]]), "1", "takes a column of numbers, dates or times"),
    "boolean": (pa.array([True]), "1", "takes a column of numbers, dates or times"),
    "bad-text": (
        pa.array(["2024-01-01", "soon"]), "2024-03-01", r"row 1 .*'soon' is not a date or time"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("column", "start", "message"), WRONG.values(), ids=WRONG)
def test_values_that_do_not_split(column, start, message):
    with pytest.raises(DataError, match=message):
        held_out(LaterRows("x", start), column)
