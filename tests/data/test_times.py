"""Parts of times, compared with `datetime`, `zoneinfo` and NumPy."""

from __future__ import annotations

import datetime
import re
import zoneinfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import DataError, Schema, SchemaError
from jaxrec.data.encode import Location
from jaxrec.data.feature_table import check_zones, feature_table
from jaxrec.data.times import days, instants, part_of
from tests.fuzz import max_examples

pytestmark = pytest.mark.every_case

LOCATION = Location("a.parquet", 10, "ts")
UTC = datetime.UTC
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=UTC)
# With summer time on both halves of the globe, of half an hour, and without.
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC")
# Both sides of changes to and from summer time, leap days, years without one, NumPy's NaT, 1970.
MOMENTS = (
    None,
    datetime.datetime(2024, 3, 31, 0, 59, 59, 999_999),
    datetime.datetime(2024, 3, 31, 1),
    datetime.datetime(2024, 10, 27, 0, 30),
    datetime.datetime(2024, 10, 27, 1, 30),
    datetime.datetime(2024, 2, 29, 23, 59, 59),
    datetime.datetime(2000, 2, 29),
    datetime.datetime(1900, 2, 28, 23),
    datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999),
    datetime.datetime(1970, 1, 1),
    datetime.datetime(1600, 1, 1),
)


def parts(moments, zone):
    """Return hours, weekdays, months and days since 1970 of moments in UTC, by `datetime`."""
    local = [None if x is None else x.replace(tzinfo=UTC).astimezone(zone) for x in moments]
    age = [None if x is None else (x - EPOCH) / datetime.timedelta(days=1) for x in local]
    return [
        [None if x is None else get(x) for x in local]
        for get in (lambda x: x.hour, lambda x: x.weekday(), lambda x: x.month)
    ], age


def check(column, moments, zone):
    times = instants(column, LOCATION)
    wanted, age = parts(moments, zoneinfo.ZoneInfo(zone))
    for part, expected in zip(("hour", "weekday", "month"), wanted, strict=True):
        assert part_of(times, part, zone).to_pylist() == expected
        if zone == "UTC":
            assert part_of(times, part, None).to_pylist() == expected
    found = days(times).to_pylist()
    assert [x is None for x in found] == [x is None for x in age]
    np.testing.assert_allclose(
        [x for x in found if x is not None], [x for x in age if x is not None], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("kind", ["us", "ns", "us-zoned", "numpy", "text", "zoned-text"])
def test_known_moments(zone, kind):
    column = pa.array(MOMENTS, pa.timestamp("us"))
    if kind == "ns":
        column = column.cast(pa.timestamp("ns"), safe=False).slice(0, 10)  # 1600 is out of range
    elif kind == "us-zoned":  # as pandas writes it: the same instants, shown elsewhere
        column = column.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us", "Asia/Tokyo"))
    elif kind == "numpy":
        column = pa.array(np.array(MOMENTS, "datetime64[us]"))
    elif kind == "text":
        column = pa.array([None if x is None else x.isoformat(" ") for x in MOMENTS])
    elif kind == "zoned-text":
        east = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
        texts = [None if x is None else x.replace(tzinfo=UTC).astimezone(east) for x in MOMENTS]
        column = pa.array([None if x is None else x.isoformat() for x in texts])
    check(column, MOMENTS[: len(column)], zone)


# Arrow's time zones have no summer time after 2037.
moments = st.one_of(
    st.none(),
    st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(2037, 12, 31)),
)


@settings(max_examples=max_examples(30))
@given(st.lists(moments, min_size=1, max_size=20), st.sampled_from(ZONES), st.booleans())
def test_any_moments(rows, zone, is_text):
    column = pa.array(rows, pa.timestamp("us"))
    if is_text:
        # A column of text may mix forms: with a zone, without, and with digits Arrow refuses.
        forms = ("{}Z", "{}+00:00", "{}", "{}-00")
        texts = [
            None if x is None else forms[n % 4].format(x.isoformat(timespec="microseconds"))
            for n, x in enumerate(rows)
        ]
        column = pa.array(texts, pa.string())
    check(column, rows, zone)


@settings(max_examples=max_examples(30))
@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20),
    st.sampled_from(["s", "ms", "ns"]),
)
def test_units_by_numpy(counts, unit):
    scale = {"s": 2**27, "ms": 2**18, "ns": 1}[unit]
    counts = np.array(counts) // scale  # years that text can name
    whole = counts.astype(f"datetime64[{unit}]").astype("datetime64[us]")
    date = whole.astype("datetime64[D]")
    times = instants(pa.array(counts).cast(pa.timestamp(unit)), LOCATION)
    hours = ((whole - date) // np.timedelta64(1, "h")).tolist()
    assert part_of(times, "hour", None).to_pylist() == hours
    weekdays = ((date.astype(int) + 3) % 7).tolist()
    assert part_of(times, "weekday", None).to_pylist() == weekdays
    months = (date.astype("datetime64[M]").astype(int) % 12 + 1).tolist()
    assert part_of(times, "month", None).to_pylist() == months


def test_nanoseconds_before_1970_are_of_the_day_before():
    times = instants(pa.array([-1, 0, 999], pa.timestamp("ns")), LOCATION)
    assert part_of(times, "hour", None).to_pylist() == [23, 0, 0]
    text = instants(pa.array(["1970-01-01T00:00:00.123456789Z"]), LOCATION)
    assert text.cast(pa.int64()).to_pylist() == [123_456]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()], ids=str)
def test_dates(kind):
    dates = [datetime.date(2024, 2, 29), None, datetime.date(1969, 12, 31)]
    times = instants(pa.array(dates, kind), LOCATION)
    assert part_of(times, "weekday", None).to_pylist() == [3, None, 2]
    assert days(times).to_pylist() == [19_782, None, -1]


WRONG = {
    "words": (
        ["2024-03-01", None, "yesterday"],
        "row 12 .*'ts': \"yesterday\" is no time; write it",
    ),
    "no-day": (["2023-02-29"], 'row 10 .*"2023-02-29" is no time'),
    "no-zone": (["2024-03-01T10:00:00 Berlin"], "row 10 .* is no time"),
    "hour": (["2024-03-01T25:00:00Z"], "row 10 .* is no time"),
    "empty": ([""], 'row 10 .*"" is no time'),
    "far": (pa.array([0, 2**50], pa.timestamp("s")), "row 11 .*outside of the years 1 to 9999"),
    "before": (pa.array([-62_135_596_801], pa.timestamp("s")), "outside of the years 1 to 9999"),
}


@pytest.mark.parametrize(("column", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_time_is_named(column, message):
    column = column if isinstance(column, pa.Array) else pa.array(column)
    with pytest.raises(DataError, match=rf"^a.parquet, {message}" if "row" in message else message):
        instants(column, LOCATION)


def test_the_first_and_the_last_moment_are_times():
    ends = pa.array([-62_135_596_800, 253_402_300_799], pa.timestamp("s"))
    assert part_of(instants(ends, LOCATION), "month", None).to_pylist() == [1, 12]


def schema(dense=None, categorical=None):
    return Schema.from_dict({"label": [], "dense": dense, "categorical": categorical})


def test_feature_tables():
    hour = {"part": "hour", "zone": "America/New_York"}
    since = {"part": "age", "since": "shop.born"}
    wanted = schema(
        {"ts.age": since, "ts.month": {"part": "month"}},
        {"ts.hour": hour, "day.month": {"part": "month", "zone": "America/New_York"}},
    )
    assert wanted.inputs == ("ts", "shop.born", "day")
    noon = datetime.datetime(2024, 3, 1, 12)
    table = pa.table(
        {
            "ts": pa.array([noon, None], pa.timestamp("ms", "Europe/Berlin")),
            "shop": [{"born": datetime.date(2024, 2, 28)}, {"born": datetime.date(2024, 3, 1)}],
            "day": [datetime.date(2024, 3, 1), None],
            "ts.hour": ["a column of this name", "gives way"],
        }
    )
    features = feature_table(wanted, table)
    for at in (0, 1):  # a second time changes nothing
        assert features["ts.age"].to_pylist() == [2.5, None], at
        assert features["ts.month"].to_pylist() == [3, None]
        assert features["ts.hour"].to_pylist() == [7, None]
        assert features["day.month"].to_pylist() == [3, None]  # no zone moves a date
        features = feature_table(wanted, features)
    for columns, message in (
        ({"day": pa.array([1, 2])}, "a.csv, column 'day' is of type int64; day.month is a part of"),
        ({"ts": pa.array(["a", None])}, r"a.csv, row 7 \(from 0\), column 'ts': \"a\" is no time"),
    ):
        given = {name: table[name] for name in table.column_names} | columns
        with pytest.raises(DataError, match=message):
            feature_table(wanted, pa.table(given), "a.csv", 7)
    with pytest.raises(DataError, match=r"a.csv has no columns 'ts'; its columns are day"):
        feature_table(wanted, table.drop_columns(["ts", "shop", "ts.hour"]), "a.csv")


def test_unknown_zones():
    check_zones(schema(None, {"ts.hour": {"part": "hour", "zone": "Europe/Berlin"}}))
    wrong = schema(None, {"ts.hour": {"part": "hour", "zone": "Mars/Olympus"}})
    with pytest.raises(
        SchemaError, match=r"'ts.hour' is in the time zone 'Mars/Olympus': .*locate"
    ):
        check_zones(wrong)


ROLES = {
    "name": (({"hour": {"part": "hour"}},), "'hour' is the hour of a time; name it after the col"),
    "age": (({"ts.age": {"part": "age"}},), "part must be one of hour, weekday, month; got 'age'"),
    "zone": (({"x": {"zone": "UTC"}},), "zone is for part: hour, weekday or month"),
    "number": (({"x": {"part": "hour", "zone": 3}},), "zone must be the name of a time zone"),
    "since": (({"c": {}}, {"ts.hour": {"part": "hour", "since": "x"}}), "since is for part: age"),
    "age-zone": (({"c": {}}, {"ts.age": {"part": "age", "zone": "UTC"}}), "zone is for part: hour"),
    "width": (({"c": {}}, {"ts.age": {"part": "age", "width": 3}}), "give one of the two"),
    "none": (({"c": {}}, {"v": {"width": 0}}), "width must be from 1"),
}


@pytest.mark.parametrize(("roles", "message"), ROLES.values(), ids=ROLES)
def test_schemas_that_are_wrong(roles, message):
    categorical, *dense = roles
    with pytest.raises(SchemaError, match=re.escape(message)):
        schema(*(dense or [None]), categorical)


def test_times_that_are_all_null():
    times = instants(pa.nulls(3), LOCATION)
    assert times.type == pa.timestamp("us", "UTC")
    assert times.null_count == 3
