"""Values as JSON: nothing is lost on the way there and back, and what does not fit is refused."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import QueryError
from cairn.query.json_values import json_columns, json_rows
from cairn.types import OBJECT, parse_type
from cairn.types.codec.json_values import json_value, loose_json, python_value

UTC = dt.UTC
MOST = dt.timedelta(days=100_000_000)

TOLD: list[tuple[str, Any, Any]] = [
    ("bigint", 2**53 - 1, 2**53 - 1),
    ("bigint", 2**53, "9007199254740992"),
    ("bigint", -(2**63), "-9223372036854775808"),
    ("boolean", True, True),
    ("double", 0.1, 0.1),
    ("double", math.inf, "Infinity"),
    ("float", -math.inf, "-Infinity"),
    ("decimal(10,2)", Decimal("1E+2"), "100"),
    ("decimal(38,0)", Decimal("-12345678901234567890123456789012345678"), None),
    ("string", "☃", "☃"),
    ("binary", b"\x00\xff", "AP8="),
    ("date", dt.date(2024, 1, 31), "2024-01-31"),
    ("timestamp", dt.datetime(2024, 1, 31, 12, tzinfo=UTC), "2024-01-31T12:00:00Z"),
    ("timestamp_ntz", dt.datetime(2024, 1, 31, 12, 0, 0, 5), "2024-01-31T12:00:00.000005"),
    ("interval day to second", dt.timedelta(seconds=-1.5), "-PT1.5S"),
    ("array<bigint>", (1, None, 2**60), [1, None, str(2**60)]),
    ("map<int,string>", {1: "a", 2: None}, [[1, "a"], [2, None]]),
    ("struct<a:int,b:array<date>>", (1, (dt.date(2024, 1, 1),)), {"a": 1, "b": ["2024-01-01"]}),
]


@pytest.mark.parametrize("ddl, value, told", TOLD, ids=[f"{t[0]} {t[1]}" for t in TOLD])
def test_a_value_is_told_and_understood_again(ddl: str, value: Any, told: Any) -> None:
    type = parse_type(ddl)
    found = json_value(value, type)
    if told is not None:
        assert found == told
    assert python_value(json.loads(json.dumps(found, allow_nan=False)), type) == value


@pytest.mark.parametrize("ddl, value, told", TOLD[:-1], ids=[f"{t[0]} {t[1]}" for t in TOLD[:-1]])
def test_without_its_type_a_value_is_told_alike(ddl: str, value: Any, told: Any) -> None:
    assert loose_json(value) == json_value(value, parse_type(ddl))


def test_nan_is_text_that_comes_back_as_nan() -> None:
    assert json_value(math.nan, pa.float64()) == "NaN"
    assert math.isnan(python_value("NaN", pa.float64()))


def test_null_is_null_and_an_object_is_shown_not_sent() -> None:
    assert json_value(None, pa.int64()) is None
    assert python_value(None, pa.int64()) is None
    assert json_value({1}, OBJECT) == "{1}"
    with pytest.raises(QueryError):
        python_value("gASVBQAAAAAAAACPlChLAZAu", OBJECT)


@given(st.integers(-(2**63), 2**63 - 1))
def test_no_integer_loses_a_digit(number: int) -> None:
    told = json_value(number, pa.int64())
    assert isinstance(told, str) or abs(told) < 2**53
    assert python_value(told, pa.int64()) == number


@given(st.timedeltas(-MOST, MOST), st.datetimes(timezones=st.just(UTC)))
def test_times_keep_their_microseconds(span: dt.timedelta, at: dt.datetime) -> None:
    interval, timestamp = pa.duration("us"), pa.timestamp("us", "UTC")
    assert python_value(json_value(span, interval), interval) == span
    assert python_value(json_value(at, timestamp), timestamp) == at


@pytest.mark.parametrize(
    "ddl, found",
    [
        ("bigint", "x"),
        ("bigint", 1.5),
        ("bigint", 2**63),
        ("bigint", True),
        ("tinyint", 300),
        ("boolean", "true"),
        ("boolean", 1),
        ("double", "abc"),
        ("double", [1.0]),
        ("decimal(4,2)", "123.45"),
        ("decimal(4,2)", "NaN"),
        ("decimal(4,2)", True),
        ("string", 5),
        ("string", ["a"]),
        ("binary", "no base64!"),
        ("date", "2024-13-01"),
        ("timestamp", "noon"),
        ("timestamp_ntz", "2024-01-01T00:00:00Z"),
        ("interval day to second", "5 minutes"),
        ("array<int>", {"a": 1}),
        ("array<int>", ["x"]),
        ("map<string,int>", [["a"]]),
        ("struct<a:int>", {"b": 1}),
        ("struct<a:int>", [1, 2]),
        ("struct<a:int NOT NULL>", {}),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected(ddl: str, found: Any) -> None:
    with pytest.raises(QueryError, match=r"expected: [\s\S]*found: [\s\S]*next: "):
        python_value(found, parse_type(ddl))


def test_rows_are_objects_with_their_types_beside_them() -> None:
    batch = pa.record_batch(
        {"a": pa.array([2**60, None]), "t": pa.array([0, 1], pa.timestamp("us", "UTC"))}
    )
    assert json_rows(batch) == [
        {"a": str(2**60), "t": "1970-01-01T00:00:00Z"},
        {"a": None, "t": "1970-01-01T00:00:00.000001Z"},
    ]
    assert json_columns(batch.schema) == [
        {"name": "a", "type": "bigint"},
        {"name": "t", "type": "timestamp"},
    ]


def test_a_time_that_python_has_no_name_for_is_still_told() -> None:
    times = pa.array([-(2**62), 0, None], pa.timestamp("us", "UTC"))
    lists = pa.array([[2**31 - 1], [0], None], pa.list_(pa.date32()))
    assert json_rows(pa.record_batch({"t": times, "l": lists})) == [
        {"t": "-13097-06-28 09:59:32.612096Z", "l": ["<value out of range: 2147483647>"]},
        {"t": "1970-01-01T00:00:00Z", "l": ["1970-01-01"]},
        {"t": None, "l": None},
    ]


def test_of_a_value_with_a_time_too_far_away_only_the_time_is_told_in_arrows_words() -> None:
    time = pa.timestamp("us")
    types = {
        "s": pa.struct([("n", pa.int64()), ("t", time)]),
        "l": pa.list_(time),
        "m": pa.map_(pa.string(), time),
    }
    far = 9_000_000_000_000_000_000
    columns = {
        "s": pa.StructArray.from_arrays(
            [pa.array([7]), pa.array([far]).cast(time)], fields=list(types["s"])
        ),
        "l": pa.ListArray.from_arrays([0, 2], pa.array([0, far]).cast(time)),
        "m": pa.MapArray.from_arrays([0, 1], ["x"], pa.array([far]).cast(time)),
    }
    (row,) = json_rows(pa.table(columns))
    assert row["s"]["n"] == 7 and isinstance(row["s"]["t"], str)
    assert row["l"] == ["1970-01-01T00:00:00", row["s"]["t"]]
    assert row["m"] == [["x", row["s"]["t"]]]
