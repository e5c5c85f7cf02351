"""What stands in a dead letter: text that does not vary, and JSON that can be read back."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import pytest

from cairn.protocol.letters import SCHEMA, error_text, json_text, key_text, time_of, timer_json
from cairn.types import parse_schema, row_class

TIME = dt.datetime(2026, 1, 2, 3, 4, 5, 600_000)
Pair: Any = row_class(["a b", "n"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (2**70, str(2**70)),
        (0.1, "0.1"),
        (math.nan, '"NaN"'),
        (-math.inf, '"-Infinity"'),
        (Decimal("1E+3"), '"1000"'),
        (Decimal("0.10"), '"0.10"'),
        ('é"', '"é\\""'),
        ("\ud800", '"?"'),
        (b"\x00\xff", '"AP8="'),
        (TIME.date(), '"2026-01-02"'),
        (TIME, '"2026-01-02T03:04:05.600000"'),
        (TIME.replace(tzinfo=dt.UTC), '"2026-01-02T03:04:05.600000Z"'),
        (
            dt.timedelta(1, 3, 0, 0, 0, 2),
            "\"INTERVAL '1 02:00:03.000000' DAY TO SECOND\"",
        ),
        (-dt.timedelta(seconds=1.5), "\"INTERVAL '-0 00:00:01.500000' DAY TO SECOND\""),
        ([1, None, (2,)], "[1, null, [2]]"),
        (Pair(1, Pair(None, "x")), '{"a b": 1, "n": {"a b": null, "n": "x"}}'),
        ({"x": 1, 2: 3, TIME.date(): 4}, '{"x": 1, "2": 3, "2026-01-02": 4}'),
    ],
)
def test_values_have_the_json_that_spark_reads_back(value: Any, text: str) -> None:
    assert json_text(value) == text
    json.loads(text)


def test_what_json_has_no_form_for_is_shown_without_addresses() -> None:
    assert json_text({"x": object()}) == "{'x': <object object at 0x…>}"


def test_a_key_is_text_as_it_is_and_json_otherwise() -> None:
    assert [key_text(key) for key in (None, "a", 1, Pair("x", 2))] == [
        None, "a", "1", '{"a b": "x", "n": 2}',
    ]  # fmt: skip


def test_errors_are_cut_and_named() -> None:
    assert error_text(KeyError("x")) == "KeyError: 'x'"
    assert error_text(RuntimeError()) == "RuntimeError"
    assert len(error_text(RuntimeError("x" * 100_000))) == 4000


def test_times_beyond_the_calendar_are_left_out() -> None:
    assert time_of(1000) == dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
    assert time_of(1 << 60) is None and time_of(None) is None
    assert json.loads(timer_json("event", 5)) == {"timer": "event", "time_ms": 5}


def test_the_schema_is_what_is_documented() -> None:
    assert (
        parse_schema(
            "operator string, input string, error string, traceback string, key string, "
            "row string, event_time timestamp, epoch bigint"
        )
        == SCHEMA
    )
