"""Key groups: Spark's hash without Spark, and ranges that add up."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import PlanError
from cairn.key_groups import (
    groups_of,
    hash_key,
    key_group,
    key_groups,
    key_hasher,
    spark_key_group_sql,
    subtask_of,
)
from cairn.types import OBJECT, parse_type
from cairn.types.codec import codec

LONG_TEXT = "héllo 😀 wörld, longer than thirty-two bytes so all lanes run"
TIMESTAMP = dt.datetime(2024, 2, 29, 12, 34, 56, 789012)

# Computed by Spark 4.3: SELECT xxhash64(…). tests/spark/test_key_hash.py asks Spark again.
VECTORS = [
    (["boolean"], [True], -6698625589789238999),
    (["boolean"], [False], 3614696996920510707),
    (["tinyint"], [-1], 2017008487422258757),
    (["smallint"], [-7], 4987848727247274714),
    (["int"], [42], -387659249110444264),
    (["int"], [-42], -1856222601613232968),
    (["bigint"], [42], -6876166290308861218),
    (["bigint"], [-(2**63)], -8619748838626508300),
    (["float"], [1.5], 6163473420726370430),
    (["float"], [math.nan], 2692338816207849720),
    (["float"], [-0.0], 3614696996920510707),
    (["double"], [1.5], 7738255526519901366),
    (["double"], [math.nan], -3127944061524951246),
    (["double"], [-0.0], -5252525462095825812),
    (["double"], [0.0], -5252525462095825812),
    (["string"], ["spark"], -1960931134668248110),
    (["string"], [""], -7444071767201028348),
    (["string"], [LONG_TEXT], 6277873556017144254),
    (["binary"], [b"\x00\xff\x10"], 5415089035989094387),
    (["date"], [dt.date(2024, 2, 29)], 4183429117450946631),
    (["timestamp"], [TIMESTAMP.replace(tzinfo=dt.UTC)], -2021281541725647388),
    (
        ["timestamp_ntz"],
        [dt.datetime(1969, 12, 31, 23, 59, 59, 999999)],
        3858142552250413010,
    ),
    (["decimal(10,2)"], [Decimal("12.34")], -3802813071951760351),
    (["decimal(10,2)"], [Decimal("-12.34")], -1614697014534150208),
    (["decimal(38,2)"], [Decimal("12.34")], 804797035677707363),
    (["decimal(38,2)"], [Decimal("-12345678901234567890.12")], 2794727827352827620),
    (["decimal(38,2)"], [Decimal("0.00")], -8959994473701255385),
    (["decimal(38,0)"], [Decimal(-1)], -4006032525457443936),
    (["decimal(38,0)"], [Decimal(128)], 6715097930120473301),
    (["decimal(38,0)"], [Decimal(-128)], -7898411661632158123),
    (
        ["interval day to second"],
        [dt.timedelta(days=1, hours=2, minutes=3, seconds=4.5)],
        -5867921652851782348,
    ),
    (["struct<a:int,b:string>"], [(1, "x")], 8510603489595372987),
    (["struct<a:int,b:string>"], [(None, "x")], -5636050478767222463),
    (["array<bigint>"], [(1, 2, None)], -8198029865082835910),
    (["array<bigint>"], [()], 42),
    (["bigint"], [None], 42),
    (["array<struct<a:int,b:array<string>>>"], [((1, ("x", "")),)], -9150458817852865197),
    (["int", "string"], [1, "a"], 8205864924878002737),
    (["int", "string"], [None, "a"], -8582455328737087284),
    (["bigint", "boolean", "double"], [1, True, 2.5], 5764716273995570066),
]


@pytest.mark.parametrize(("types", "values", "expected"), VECTORS)
def test_hash_is_the_one_spark_computed(types, values, expected):
    arrow_types = [parse_type(t) for t in types]
    assert hash_key(values, arrow_types) == key_hasher(arrow_types)(values) == expected


@pytest.mark.parametrize(("types", "values", "expected"), VECTORS)
def test_a_column_of_keys_has_the_groups_of_its_keys(types, values, expected):
    arrow_types = [parse_type(t) for t in types]
    columns = []
    for type, value in zip(arrow_types, values, strict=True):
        held = None if value is None else codec(type).normalise(value)
        # Not at the start of its buffers, as slices of a batch are.
        columns.append(codec(type).encode([None, held, None, held])[1:])
    nulls = hash_key([None] * len(types), arrow_types)
    hashes = [expected, nulls, expected]
    fields = [pa.field(str(at), t) for at, t in enumerate(arrow_types)]
    struct_keys = pa.StructArray.from_arrays(columns, fields=fields)
    for keys in [struct_keys] if len(columns) > 1 else [struct_keys, columns[0]]:
        for group_count in (1, 128, 40_000):
            found = key_groups(keys, keys.type, group_count)
            assert found.tolist() == [hash % group_count for hash in hashes]
    assert key_groups(struct_keys[:0], struct_keys.type, 8).tolist() == []


VERY_LONG = st.sampled_from([bytes(range(256)) * 8, b"x" * 1023, b"x" * 1024, b"x" * 1025])


@given(st.lists(st.none() | st.binary(max_size=140) | VERY_LONG), st.integers(0, 5))
def test_texts_of_every_length_are_hashed_alike_by_the_column(texts, start):
    column = pa.array(texts, pa.binary())[start:]
    numbers = pa.array(range(len(column)), pa.int64())
    keys = pa.StructArray.from_arrays([numbers, column], ["a", "b"])
    hash_values = key_hasher([pa.int64(), pa.binary()])
    expected = [hash_values(pair) % 1000 for pair in enumerate(texts[start:])]
    assert key_groups(keys, keys.type, 1000).tolist() == expected


def test_every_nan_has_one_hash():
    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    for declared in ("double", "float", "array<double>"):
        type = parse_type(declared)
        wrap = (lambda v: (v,)) if declared.startswith("array") else (lambda v: v)
        assert hash_key([wrap(odd)], [type]) == hash_key([wrap(math.nan)], [type])


def test_decimal_hash_ignores_how_many_zeros_were_written():
    type = parse_type("decimal(10,2)")
    assert hash_key([Decimal("1.5")], [type]) == hash_key([Decimal("1.50")], [type])


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 1 << 15))
def test_key_group_is_an_index_below_the_count(key, group_count):
    assert 0 <= key_group([key], [parse_type("bigint")], group_count) < group_count


@given(st.integers(1, 1000), st.integers(1, 300))
def test_ranges_partition_the_groups_and_agree_with_subtask_of(group_count, parallelism):
    ranges = [groups_of(i, parallelism, group_count) for i in range(parallelism)]
    assert [g for r in ranges for g in r] == list(range(group_count))
    for subtask, owned in enumerate(ranges):
        assert all(subtask_of(g, parallelism, group_count) == subtask for g in owned)


@given(st.sets(st.integers(1, 99), max_size=20))
def test_ranges_with_given_starts_partition_the_groups_and_agree_with_subtask_of(inner):
    starts = (0, *sorted(inner))
    ranges = [groups_of(i, len(starts), 100, starts) for i in range(len(starts))]
    assert [g for r in ranges for g in r] == list(range(100))
    for subtask, owned in enumerate(ranges):
        assert all(subtask_of(g, len(starts), 100, starts) == subtask for g in owned)


@given(st.integers(1, 1000), st.integers(1, 300))
def test_ranges_differ_by_at_most_one_group(group_count, parallelism):
    sizes = {len(groups_of(i, parallelism, group_count)) for i in range(parallelism)}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("type", [parse_type("array<map<int,int>>"), OBJECT])
def test_unhashable_key_is_refused(type):
    with pytest.raises(PlanError, match="a key cannot be"):
        hash_key([()], [type])
    with pytest.raises(PlanError, match="a key cannot be"):
        spark_key_group_sql([("k", type)], 8)


def test_sql_normalises_floating_columns_only():
    columns = [("`a b`", parse_type("double")), ("t.f", parse_type("float")), ("s", "string")]
    columns = [(text, parse_type(type)) for text, type in columns]
    assert spark_key_group_sql(columns, 128) == (
        "CAST(pmod(xxhash64((`a b` + 0.0D), (t.f + CAST(0 AS FLOAT)), s), 128L) AS INT)"
    )
    with pytest.raises(PlanError, match="at least one column"):
        spark_key_group_sql([], 128)
