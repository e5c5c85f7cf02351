"""Spark's own answers: its hash, its key groups, and its reading of our DDL."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal

import pyarrow as pa
import pytest

from cairn.key_groups import hash_key, key_group, spark_key_group_sql
from cairn.types import parse_schema, parse_type, schema_ddl, type_ddl
from cairn.types.codec import codec

UTC = dt.UTC
COLUMNS = {
    "boolean": [True, False, None],
    "tinyint": [0, 1, -128, 127, None],
    "smallint": [0, -7, 32767, None],
    "int": [0, 42, -42, 2**31 - 1, -(2**31), None],
    "bigint": [0, 42, -42, 2**63 - 1, -(2**63), None],
    "float": [0.0, -0.0, 1.5, -3.25, math.inf, -math.inf, math.nan, None],
    "double": [0.0, -0.0, 1.5, 1e300, 5e-324, math.inf, -math.inf, math.nan, None],
    "string": ["", "a", "spark", "grüße 😀", "x" * 31, "y" * 32, "z" * 1000, "\0", None],
    "binary": [b"", b"\0", b"\xff" * 7, bytes(range(256)), None],
    "date": [dt.date(1970, 1, 1), dt.date(1582, 10, 4), dt.date(9999, 12, 31), None],
    "timestamp": [
        dt.datetime(1970, 1, 1, tzinfo=UTC),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        dt.datetime(2024, 2, 29, 12, 34, 56, 789012, tzinfo=UTC),
        None,
    ],
    "timestamp_ntz": [dt.datetime(1970, 1, 1), dt.datetime(1900, 5, 6, 7, 8, 9, 10), None],
    "decimal(10,2)": [Decimal("0.00"), Decimal("12.34"), Decimal("-99999999.99"), None],
    "decimal(18,0)": [Decimal(10**18 - 1), Decimal(-(10**18) + 1), None],
    "decimal(19,4)": [Decimal("0.0000"), Decimal("-1.0000"), Decimal("1.2700"), None],
    "decimal(38,0)": [
        *(Decimal(s * 2**e + d) for s in (1, -1) for e in (7, 8, 63, 64, 100) for d in (-1, 0, 1)),
        None,
    ],
    "interval day to second": [dt.timedelta(0), dt.timedelta(days=-3, microseconds=7), None],
    "struct<a:int,b:string>": [(1, "x"), (None, "x"), (None, None), None],
    "array<bigint>": [(), (1, 2, None), (None,), None],
    "array<double>": [(0.0, -0.0), (math.nan,), None],
    "struct<d:double,f:float>": [(-0.0, math.nan), (1.0, -0.0), None],
    "array<struct<a:int,b:array<string>>>": [((1, ("x", "")),), (None, (None, ())), (), None],
}


def frame(spark, columns):
    return spark.createDataFrame(pa.table(columns))


@pytest.mark.parametrize("declared", COLUMNS)
def test_hash_and_key_group_are_sparks(spark, declared):
    type = parse_type(declared)
    values = [None if v is None else codec(type).normalise(v) for v in COLUMNS[declared]]
    ids = pa.array(range(len(values)), pa.int64())
    rows = (
        frame(spark, {"n": ids, "the key": codec(type).encode(values)})
        .selectExpr(
            "n",
            "xxhash64(`the key`) AS h",
            f"{spark_key_group_sql([('`the key`', type)], 127)} AS g",
        )
        .orderBy("n")
        .collect()
    )
    assert [row.h for row in rows] == [hash_key([v], [type]) for v in values]
    assert [row.g for row in rows] == [key_group([v], [type], 127) for v in values]


def test_several_columns_chain_and_nulls_leave_the_hash_alone(spark):
    types = [parse_type(t) for t in ("bigint", "string", "double", "decimal(38,2)")]
    keys = [
        (1, "a", -0.0, Decimal("1.10")),
        (None, "a", math.nan, None),
        (3, None, None, Decimal("-7.00")),
        (None, None, None, None),
    ]
    columns = {f"c{i}": codec(t).encode([key[i] for key in keys]) for i, t in enumerate(types)}
    sql = spark_key_group_sql([(f"c{i}", t) for i, t in enumerate(types)], 4096)
    data = frame(spark, {"n": pa.array(range(len(keys))), **columns})
    rows = data.selectExpr("n", f"{sql} AS g").orderBy("n").collect()
    assert [row.g for row in rows] == [key_group(key, types, 4096) for key in keys]


DDL = (
    "select long NOT NULL, `order id` struct<`a-b`:int NOT NULL,not:array<string>>, "
    "`tick``ed` map<string,decimal(20,3)>, interval interval day to second, "
    "struct timestamp_ntz, `é` timestamp, `1a` date, b binary, f float, y tinyint, s smallint, "
    "t boolean"
)


def test_spark_reads_our_ddl_as_the_same_schema(spark):
    schema = parse_schema(DDL)
    read = spark.createDataFrame([], schema_ddl(schema)).schema
    assert parse_schema(read) == schema
    as_type = type_ddl(parse_type(read))
    assert spark.sql(f"SELECT CAST(NULL AS {as_type}) AS c").schema["c"].dataType == read
