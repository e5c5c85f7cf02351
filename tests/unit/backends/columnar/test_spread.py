"""Arrow columns over numpy arrays: every type there and back, and one form of bytes."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cairn.backends.columnar.spread import Columns, form_of
from cairn.types import parse_type
from cairn.types.codec import codec

NOON = dt.datetime(2026, 1, 1, 12)
VALUES: dict[str, list[Any]] = {
    "boolean": [True, False, True],
    "tinyint": [-128, 0, 127],
    "int": [-(2**31), 0, 7],
    "bigint": [-(2**63), 2**63 - 1, 0],
    "float": [0.5, -0.0, float("inf")],
    "double": [0.1, -0.0, 1e300],
    "decimal(5,2)": [decimal.Decimal("1.50"), decimal.Decimal("-999.99"), decimal.Decimal(0)],
    "decimal(38,0)": [decimal.Decimal(10) ** 37, decimal.Decimal(-1), decimal.Decimal(0)],
    "string": ["", "é", "a longer text than sixteen bytes"],
    "binary": [b"", b"\0", b"\xff" * 40],
    "date": [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)],
    "timestamp": [NOON.replace(tzinfo=dt.UTC)] * 3,
    "timestamp_ntz": [NOON, dt.datetime.min, NOON],
    "interval day to second": [dt.timedelta(-1), dt.timedelta(0), dt.timedelta(5)],
    "array<string>": [[], ["a", None], ["b"]],
    "map<string,bigint>": [{}, {"a": 1}, {"b": None}],
    "struct<a:bigint,b:struct<c:string,d:double NOT NULL>>": [
        {"a": 1, "b": None},
        {"a": None, "b": {"c": None, "d": 0.5}},
        {"a": 2, "b": {"c": "x", "d": 1.5}},
    ],
}


def column(type_: str, picks: list[int | None]) -> pa.Array:
    own = codec(parse_type(type_))
    values = [own.normalise(value) for value in VALUES[type_]]
    return own.encode([None if pick is None else values[pick] for pick in picks])


@pytest.mark.parametrize("type_", VALUES)
@pytest.mark.parametrize("picks", [[0, 1, 2], [2, None, 0, None], [None], []])
def test_a_column_comes_back_as_it_was(type_: str, picks: list[int | None]) -> None:
    form = form_of(parse_type(type_))
    whole = column(type_, picks)
    for array in (whole, column(type_, [1, None, *picks, 0])[2:-1]):
        joined = form.join(form.split(array))
        joined.validate(full=True)
        assert joined.equals(whole) and joined.type == whole.type


@pytest.mark.parametrize("type_", VALUES)
def test_what_lies_under_a_null_leaves_no_trace(type_: str) -> None:
    form = form_of(parse_type(type_))
    valid = np.array([False, True])
    bytes_of = []
    for under in (0, 2):
        arrays = form.split(column(type_, [under, 1]))
        arrays[0] = valid
        joined = form.join(arrays)
        assert joined.equals(column(type_, [None, 1]))
        bytes_of.append([None if b is None else b.to_pybytes() for b in joined.buffers()])
    assert bytes_of[0] == bytes_of[1]


@pytest.mark.parametrize("type_", VALUES)
def test_values_lie_by_position_and_the_last_put_counts(type_: str) -> None:
    form = form_of(parse_type(type_))
    held = Columns(form)
    held.reserve(4)
    for positions, picks in (([0, 3, 3], [0, 0, 2]), ([1, 2, 1], [None, 1, 0]), ([2], [None])):
        held.put(np.array(positions), form.split(column(type_, picks)))
    copy = held.copy_first(4)
    held.reserve(5_000)
    held.put(np.array([3, 4_999]), form.split(column(type_, [1, 1])))
    assert form.join(copy.take(np.array([3, 2, 1, 0]))).equals(column(type_, [2, None, 0, 0]))
    assert form.join(held.take(np.array([4_999, 3, 0]))).equals(column(type_, [1, 1, 0]))
