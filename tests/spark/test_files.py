"""Spark reads what the files sink wrote: every format, every type, and by the list."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import Job, KeyedProcess
from cairn.sinks import Files, list_published
from cairn.sinks.base import Execution, SinkContext
from cairn.types import parse_schema, type_ddl
from tests.spark.support import finish

FLAT = (
    "b boolean, y tinyint, h smallint, i int, l bigint, f float, d double, s string, "
    "day date, at timestamp, local timestamp_ntz, price decimal(38,18), took interval day to second"
)
NESTED = FLAT + (
    ", raw binary, tags array<string>, at_all array<timestamp>, "
    "by map<string,struct<n:bigint,x:double>>, deep struct<a:array<map<string,int>>,`b c`:string>"
)
UTC = dt.UTC
FLAT_ROWS: list[tuple[Any, ...]] = [
    (True, 1, 2, 3, 4, 0.5, 1e300, "a, \"b\"\r\n\tö\\ '\\\"'", dt.date(2026, 1, 31),
     dt.datetime(2026, 1, 31, 10, 0, 0, 123456, UTC), dt.datetime(1969, 12, 31, 23, 59, 59, 1),
     decimal.Decimal("12345678901234567890.123456789012345678"),
     dt.timedelta(days=1, hours=2, microseconds=3)),
    (False, -128, -32768, -(2**31), -(2**63), float("-inf"), float("nan"), "", dt.date(1, 1, 1),
     dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
     decimal.Decimal("-0.000000000000000001"), -dt.timedelta(days=3, seconds=1)),
    (None,) * 13,
    (True, 0, 0, 0, 0, 0.1, -0.0, " null ", dt.date(1582, 10, 4),
     dt.datetime(2026, 3, 29, 1, 30, tzinfo=UTC), dt.datetime(2026, 3, 29, 2, 30),
     decimal.Decimal(0), dt.timedelta(0)),
]  # fmt: skip
NESTED_ROWS = [
    (*FLAT_ROWS[0], b"\x00\xff\x80", ["a", None, ""], [dt.datetime(2026, 1, 1, tzinfo=UTC), None],
     {"k": {"n": 1, "x": float("inf")}, "é": {"n": None, "x": None}, "": None},
     {"a": [{"k": 1, "l": None}, None, {}], "b c": "x"}),
    (*FLAT_ROWS[1], b"", [], [], {}, {"a": None, "b c": None}),
    (*FLAT_ROWS[2], None, None, None, None, None),
    (*FLAT_ROWS[3], b"x", ["ü\n"], [None], {"a": None}, {"a": [], "b c": ""}),
]  # fmt: skip


def written(sink: Files, schema: pa.Schema, folder: Path, *epochs: list[Any]) -> None:
    """Each of the lists of rows becomes an epoch."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    sink.open(SinkContext("job", "j", "out", schema, str(scratch)))
    for number, rows in enumerate(epochs, start=1):
        columns = zip(*rows, strict=True)
        arrays = [pa.array(list(c), f.type) for c, f in zip(columns, schema, strict=True)]
        writer = sink.writer(number, 0, Execution())
        writer.write(pa.RecordBatch.from_arrays(arrays, schema=schema))
        prepared = writer.prepare()
        assert prepared is not None
        sink.commit(number, [prepared])
    sink.close()


def rows_of(table: pa.Table, schema: pa.Schema) -> list[str]:
    """Rows as text: NaN is not equal to itself, and -0.0 is equal to 0.0."""
    return sorted(map(repr, table.cast(schema).to_pylist()))


@pytest.mark.parametrize("settings", [
    {"format": "parquet", "listed": True},
    {"format": "json", "listed": True},
    {"format": "json", "compression": "gzip"},
    {"format": "csv"},
    {"format": "csv", "compression": "gzip", "listed": True},
], ids=str)  # fmt: skip
def test_spark_reads_the_very_rows_that_were_written(
    spark: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    is_flat = settings["format"] == "csv"
    schema = parse_schema(FLAT if is_flat else NESTED)
    rows = FLAT_ROWS if is_flat else NESTED_ROWS
    folder = tmp_path / "out é #%1"
    written(Files(str(folder), **settings), schema, tmp_path, rows[:2], rows[2:])
    reader = spark.read.schema(", ".join(f"`{f.name}` {type_ddl(f.type)}" for f in schema))
    if is_flat:
        reader = reader.option("header", True).option("escape", '"').option("multiLine", True)
        # Else Spark takes the empty string for null.
        reader = reader.option("nullValue", "\0")
    by_name = [dict(zip(schema.names, row, strict=True)) for row in rows]
    expected = rows_of(pa.Table.from_pylist(by_name, schema=schema), schema)
    of_folder = reader.format(settings["format"]).load(str(folder)).toArrow()
    assert rows_of(of_folder, schema) == expected
    of_files = reader.format(settings["format"]).load(list_published(str(folder))).toArrow()
    assert rows_of(of_files, schema) == expected


PARTITIONS: list[tuple[Any, ...]] = [
    (1, "a", 7, dt.date(2026, 1, 31), True, decimal.Decimal("1.50")),
    (2, "x/y=z %25 #?é {}[]^:*'\"\\ \t", -3, dt.date(1, 1, 1), False, decimal.Decimal("0.00")),
    (3, None, None, None, None, None),
    (4, " ", 0, dt.date(2026, 1, 31), True, decimal.Decimal("-2.25")),
]


@pytest.mark.parametrize("listed", [False, True])
def test_spark_finds_partition_columns_again(spark: Any, tmp_path: Path, listed: bool) -> None:
    ddl = "id bigint, s string, n int, day date, yes boolean, price decimal(5,2)"
    folder = tmp_path / "out"
    sink = Files(str(folder), partition_by=["s", "n", "day", "yes", "price"], listed=listed)
    written(sink, parse_schema(ddl), tmp_path, PARTITIONS[:3], PARTITIONS[3:])
    frame = spark.read.schema(ddl).parquet(str(folder))
    assert sorted(map(tuple, frame.collect())) == PARTITIONS
    assert [r.id for r in frame.where("n = -3 and day = date'0001-01-01'").collect()] == [2]


def test_timestamps_in_folders_are_read_in_utc(spark: Any, tmp_path: Path) -> None:
    ddl = "id bigint, at timestamp, local timestamp_ntz"
    row = (1, dt.datetime(2026, 3, 29, 1, 30, 0, 5, UTC), dt.datetime(2026, 3, 29, 2, 30))
    sink = Files(str(tmp_path / "out"), partition_by=["at", "local"])
    written(sink, parse_schema(ddl), tmp_path, [row])
    frame = spark.read.schema(ddl).parquet(str(tmp_path / "out"))
    found = frame.selectExpr("id", "unix_micros(at)", "cast(local as string)").collect()
    assert [tuple(r) for r in found] == [(1, 1774747800000005, "2026-03-29 02:30:00")]


def test_spark_reads_the_list_and_nothing_else(spark: Any, tmp_path: Path) -> None:
    """Also across `.compact` entries, and what was in the folder before the list."""
    schema = parse_schema("k bigint")
    folder = tmp_path / "out"
    count: Callable[[], int] = lambda: spark.read.parquet(str(folder)).count()  # noqa: E731
    spark.range(3).selectExpr("id as k").write.parquet(str(folder))
    sink = Files(str(folder), listed=True)
    written(sink, schema, tmp_path, *[[(n,)] for n in range(25)])
    assert count() == 28
    writer = sink.writer(26, 0, Execution())
    writer.write(pa.RecordBatch.from_pylist([{"k": 1}], schema=schema))
    prepared = writer.prepare()
    assert count() == 28
    sink.commit(26, [prepared or {}])
    assert count() == 29
    assert len(list_published(str(folder))) == 26 + len(list(folder.glob("part-*-c000.*.parquet")))


class Echo(KeyedProcess):
    def process(self, row: Any, ctx: Any) -> Any:
        yield row


def test_a_job_writes_listed_merged_partitioned_files_over_restarts(
    spark: Any, make_input: Any, tmp_path: Path
) -> None:
    source = make_input("k bigint, s string")
    folder = tmp_path / "out"
    for parallelism in (1, 2):
        source.add_all([(n, "ab"[n % 2]) for n in range(4 * source.count)] or [(7, "a")]
                       for _ in range(13))  # fmt: skip
        job = Job("listed", max_parallelism=8)
        rows = job.source("rows", source.stream(spark)).key_by("k")
        sink = Files(
            str(folder), format="json", partition_by="s", listed=True, compact=True,
            compact_grace_s=0,
        )  # fmt: skip
        echo = rows.process(Echo(), schema="k bigint, s string", uid="echo")
        echo.sink_to(sink, uid="out")
        finish(job, tmp_path / "checkpoint", parallelism)
        found = spark.read.schema("k bigint, s string").json(str(folder)).collect()
        expected = spark.read.parquet(str(source.folder)).collect()
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected))


def test_spark_reads_merged_files_instead_of_their_sources(spark: Any, tmp_path: Path) -> None:
    schema = parse_schema("k bigint, s string")
    folder = tmp_path / "out"
    sink = Files(str(folder), listed=True, compact=True, compact_grace_s=0)
    written(sink, schema, tmp_path, *[[(n, "a")] for n in range(9)])
    sink.open(SinkContext("job", "j", "out", schema, str(tmp_path / "scratch")))
    sink._compacting().round()
    for epoch in (10, 11):
        writer = sink.writer(epoch, 0, Execution())
        writer.write(pa.RecordBatch.from_pylist([{"k": epoch - 1, "s": "a"}], schema=schema))
        sink.commit(epoch, [writer.prepare() or {}])
    sink._compacting().round()
    found = spark.read.parquet(str(folder)).collect()
    assert sorted(map(tuple, found)) == [(n, "a") for n in range(11)]
    assert len(list_published(str(folder))) == 3 == len(list(folder.glob("*.parquet")))
