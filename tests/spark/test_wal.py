"""Wal, Spark and Foreach with a real Spark: what their functions are given."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import Job, sinks
from cairn.sinks.base import Execution, SinkContext
from cairn.storage.store import LocalStore, Retry
from cairn.types import parse_schema, schema_ddl
from tests.spark.support import epochs, finish

TYPES = parse_schema(
    "b boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f float, d double, "
    "c decimal(20, 4), s string, y binary, day date, at timestamp, local timestamp_ntz, "
    "span interval day to second, a array<int>, m map<string, bigint>, "
    "`a b` struct<x: int, y: struct<z: array<string>>>"
)
ROW = (
    True, 1, 2, 3, 4, 0.5, 0.25, decimal.Decimal("1.5000"), "é", b"\x00\xff", dt.date(2026, 1, 31),
    dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC), dt.datetime(2026, 1, 31, 12),
    dt.timedelta(days=1, microseconds=5), [1, None], [("k", 1)], {"x": 1, "y": {"z": ["q"]}},
)  # fmt: skip


class AwayStore(LocalStore):
    """A store that Spark has no file system for."""

    def local_path(self, path: str) -> str | None:
        return None


@pytest.mark.parametrize("is_local", [True, False])
def test_a_dataframe_has_the_types_and_rows_of_the_stream(
    spark: Any, tmp_path: Path, is_local: bool
) -> None:
    seen: list[Any] = []
    sink: Any = sinks.Wal(lambda df, epoch: seen.append((df.schema, df.toArrow())))
    # A name that is a pattern to Spark.
    checkpoint = str(tmp_path / "a* {b} #%20")
    sink.open(SinkContext("job", "j", "out", TYPES, checkpoint=checkpoint, spark=spark))
    if not is_local:
        sink._store = AwayStore(checkpoint, Retry())
    columns = [[value, None] for value in ROW]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, TYPES, strict=True)]
    rows = pa.record_batch(arrays, schema=TYPES)
    prepared = []
    for subtask in range(2):
        writer = sink.writer(2, subtask, Execution())
        writer.write(rows)
        prepared.append(writer.prepare())
    sink.commit(2, prepared)
    ((schema, table),) = seen
    assert schema == spark.createDataFrame([], schema_ddl(TYPES)).schema
    assert parse_schema(table.schema) == TYPES
    expected = pa.Table.from_batches([rows, rows])
    order = [("i32", "ascending")]
    assert table.cast(TYPES).sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()


def test_a_job_may_end_in_functions_and_spark_writers(
    spark: Any, tmp_path: Path, make_input: Any
) -> None:
    source = make_input("k bigint, s string")
    source.add_all([[(1, "a"), (2, "b")], [(3, None)]])
    job = Job("walled", max_parallelism=4)
    rows = job.source("rows", source.stream(spark))
    frames: list[Any] = []
    called: list[Any] = []
    rows.sink_to(sinks.Wal(lambda df, e: frames.append((e.key, df.collect()))), uid="wal")
    rows.sink_to(sinks.Spark("json", path=str(tmp_path / "json")), uid="json")
    rows.sink_to(sinks.Foreach(lambda row, e: called.append((int(e), row.k, row.s))), uid="each")
    finish(job, tmp_path / "checkpoint")
    numbers = [epoch.number for epoch in epochs(tmp_path / "checkpoint")]
    first, second = sorted({epoch for epoch, _, _ in called})
    assert {first, second} <= set(numbers)
    assert sorted(called) == [(first, 1, "a"), (first, 2, "b"), (second, 3, None)]
    assert sorted(tuple(row) for _, found in frames for row in found) == [
        (1, "a"), (2, "b"), (3, None)
    ]  # fmt: skip
    assert [key.split("/")[1:] for key, _ in frames] == [
        ["wal", str(epoch), "0"] for epoch in (first, second)
    ]
    written = spark.read.schema("k bigint, s string").json(str(tmp_path / "json"))
    assert sorted(map(tuple, written.collect())) == [(1, "a"), (2, "b"), (3, None)]
    # Only marks are left of what rode in the epochs.
    left = [path for path in (tmp_path / "checkpoint" / "wal").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} == {"published"} and len(left) == 6
