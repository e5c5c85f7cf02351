"""Columns are packed to the bytes that their values are packed to, and read back."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.backends.cached.packed_columns import is_packable, pack_columns, unpack_column
from cairn.backends.packing import Packing
from cairn.types import parse_type
from cairn.types.codec import codec

NONE = st.none()
INTS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(
    [
        sign * 2**bits + more
        for bits in (5, 7, 8, 15, 16, 31, 32, 62)
        for sign in (1, -1)
        for more in (-1, 0, 1)
    ]
)
TEXT = st.text(max_size=40) | st.integers(0, 70_000).map(lambda n: "é" * n)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bigint": INTS,
    "int": st.integers(-(2**31), 2**31 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "tinyint": st.integers(-128, 127),
    "double": st.floats(allow_nan=False),
    "float": st.floats(width=32, allow_nan=False),
    "boolean": st.booleans(),
    "string": TEXT,
    "binary": st.binary(max_size=40) | st.integers(0, 70_000).map(bytes),
    "date": st.dates(),
    "timestamp": st.datetimes().map(lambda time: time.replace(tzinfo=dt.UTC, fold=0)),
}
STRUCT = "struct<a:bigint,s:struct<x:double,t:string NOT NULL,n:int>,b:string,c:boolean>"
VALUES[STRUCT] = st.fixed_dictionaries(
    {
        "a": NONE | INTS,
        "s": NONE
        | st.fixed_dictionaries(
            {"x": NONE | st.floats(allow_nan=False), "t": TEXT, "n": NONE | st.integers(0, 9)}
        ),
        "b": NONE | TEXT,
        "c": NONE | st.booleans(),
    }
)


@pytest.mark.parametrize("ddl", VALUES)
@given(data=st.data())
def test_columns_have_the_bytes_of_their_values(ddl: str, data: st.DataObject) -> None:
    type_ = parse_type(ddl)
    own = codec(type_)
    given_values = data.draw(st.lists(NONE | VALUES[ddl], max_size=6))
    values = [None if value is None else own.normalise(value) for value in given_values]
    column = own.encode(values)
    assert is_packable(type_)
    packing = Packing("value", own, own, None)
    packed = pack_columns([column])
    assert packed.to_pylist() == [packing.value(value) for value in values]
    back = unpack_column(packed, type_)
    assert back.type == type_
    back.validate(full=True)
    assert own.decode(back) == values
    cut = data.draw(st.integers(0, len(values)))
    assert pack_columns([column[cut:]]).equals(packed[cut:])
    assert own.decode(unpack_column(packed[cut:], type_)) == values[cut:]
    keys = own.decode_keys(column)
    assert pack_columns([column], are_keys=True).to_pylist() == [packing.key(key) for key in keys]


def test_wide_structs_and_names_of_two_parts_have_the_bytes_of_their_values() -> None:
    wide = parse_type(f"struct<{','.join(f'f{n}:bigint' for n in range(20))}>")
    own = codec(wide)
    values = [own.normalise({f"f{n}": n * 1000 for n in range(20)}), None]
    packed = pack_columns([own.encode(values)])
    assert packed.to_pylist() == [Packing("value", own, own, None).value(v) for v in values]
    assert own.decode(unpack_column(packed, wide)) == values
    two = [pa.array([5, None]), pa.array(["a", "b"])]
    names = Packing("map", codec(pa.int64()), own, codec(pa.string()))
    expected = [names.key(5) + names.entry("a"), names.key(None) + names.entry("b")]
    assert pack_columns(two, are_keys=True).to_pylist() == expected


def test_all_nans_and_zeros_of_keys_have_the_same_bytes() -> None:
    column = pa.array([math.nan, -math.nan, 0.0, -0.0])
    first, second, zero, other = pack_columns([column], are_keys=True).to_pylist()
    assert first == second and zero == other
    kept = unpack_column(pack_columns([column]), pa.float64()).to_pylist()
    assert math.copysign(1, kept[3]) == -1.0


def test_rows_that_are_not_there_are_null() -> None:
    packed = pack_columns([pa.array([{"a": "x", "b": 1}, {"a": None, "b": None}])])
    rows = pa.array([packed[0].as_py(), None, packed[1].as_py()], pa.binary())
    found = unpack_column(rows, pa.struct([("a", pa.string()), ("b", pa.int64())]))
    assert found.to_pylist() == [{"a": "x", "b": 1}, None, {"a": None, "b": None}]


@pytest.mark.parametrize("ddl", ["decimal(12,3)", "array<int>", "struct<a:map<string,int>>"])
def test_other_types_are_left_to_the_codec(ddl: str) -> None:
    assert not is_packable(parse_type(ddl))
