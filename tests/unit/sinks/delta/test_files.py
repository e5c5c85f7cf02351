"""Files of a Delta table: values, bounds and partitions, and which of them stay."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import EpochError
from cairn.sinks.base import Execution
from cairn.sinks.delta.files import statistics
from cairn.types import parse_schema
from tests.unit.sinks.delta.tables import MODES, open_sink, prepared, published, read_rows, table

# Types


def test_rows_of_every_type_come_back_equal(tmp_path: Path) -> None:
    schema = parse_schema(
        "b boolean, y byte, h short, i int, l long, f float, d double, m decimal(20,4), "
        "t string, x binary, day date, ts timestamp, ntz timestamp_ntz, "
        "n struct<a:int,b:array<string>>, p map<string,long>"
    )
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678901)
    row = (
        True, -1, -2, -3, -4, 0.5, float("inf"), decimal.Decimal("-12.3400"), "é", b"\x00\xff",
        dt.date(1969, 1, 1), at.replace(tzinfo=dt.UTC), at,
        {"a": 1, "b": ["x", None]}, [("k", 1)],
    )  # fmt: skip
    nothing = (None,) * len(row)
    sink = open_sink(tmp_path, schema)
    published(sink, 2, row, nothing)
    found = table(tmp_path)
    assert [tuple(r.values()) for r in found.to_pylist()] == [row, nothing]
    assert found.schema.equals(schema)
    merged = open_sink(tmp_path / "merged", schema, mode="merge", key="l")
    published(merged, 2, row)
    assert [tuple(r.values()) for r in table(tmp_path / "merged").to_pylist()] == [row]


def test_partitions_are_read_back_from_the_log(tmp_path: Path) -> None:
    schema = parse_schema("k long, day date, s string, i int, b boolean")
    values = [
        (dt.date(2026, 1, 1), "a/b=c %é", -7, True),
        (dt.date(2026, 1, 2), None, None, False),
        (None, "x", 0, None),
    ]
    rows = [(k, *values[k % 3]) for k in range(30)]
    sink = open_sink(tmp_path, schema, partition_by=["day", "s", "i", "b"])
    committable = prepared(sink, 2, *rows)
    sink.commit(2, [committable])
    assert read_rows(tmp_path) == sorted(rows, key=str)
    assert len(committable["files"]) == 3
    read = DeltaTable(str(tmp_path)).to_pyarrow_table(filters=[("day", "=", dt.date(2026, 1, 1))])
    assert sorted(pa.table(read)["k"].to_pylist()) == list(range(0, 30, 3))


def test_many_values_of_many_partition_columns_are_kept_apart(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(20)]
    schema = parse_schema("k long, " + ", ".join(f"{name} long" for name in names))
    rows = [(k, *(k * (i + 1) for i in range(20))) for k in range(20)]
    published(open_sink(tmp_path, schema, partition_by=names), 2, *rows)
    assert read_rows(tmp_path) == sorted(rows, key=str)


def test_an_empty_text_as_a_partition_is_null_as_delta_has_it(tmp_path: Path) -> None:
    published(open_sink(tmp_path, partition_by="s"), 2, (1, ""))
    assert read_rows(tmp_path) == [(1, None)]


@given(st.lists(st.one_of(st.none(), st.datetimes(dt.datetime(1900, 1, 1)))))
def test_the_bounds_of_a_file_hold_for_times_of_microseconds(values: list[Any]) -> None:
    rows = pa.table({"t": pa.array(values, pa.timestamp("us"))})
    found = json.loads(statistics(rows))
    times = [value for value in values if value is not None]
    assert found["nullCount"]["t"] == len(values) - len(times)
    if times:
        low, high = (found[name]["t"] for name in ("minValues", "maxValues"))
        assert dt.datetime.fromisoformat(low) <= min(times)
        assert dt.datetime.fromisoformat(high) >= max(times)


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_and_dates_at_the_end_of_the_calendar_and_beyond_have_no_bounds(
    tmp_path: Path, zone: str | None
) -> None:
    beyond = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    last = pa.array([dt.datetime.max], pa.timestamp("us")).cast(pa.timestamp("us", zone))
    rows = pa.table({"t": last, "day": beyond})
    found = json.loads(statistics(rows))
    assert found["minValues"] == found["maxValues"] == {}
    assert found["nullCount"] == {"t": 0, "day": 0}
    sink = open_sink(tmp_path, rows.schema)
    writer = sink.writer(2, 0, Execution())
    writer.write(rows.to_batches()[0])
    sink.commit(2, [writer.prepare()])
    assert table(tmp_path).equals(rows)


def test_a_partition_of_a_date_that_no_reader_can_read_is_refused_in_the_slot(
    tmp_path: Path,
) -> None:
    sink = open_sink(tmp_path, parse_schema("k long, day date"), partition_by="day")
    day = pa.array([2932897 + 30], pa.int32()).cast(pa.date32())
    writer = sink.writer(2, 0, Execution())
    writer.write(pa.RecordBatch.from_arrays([pa.array([1]), day], schema=sink.context.schema))
    with pytest.raises(EpochError, match="10000-01-31 cannot be the value of a partition"):
        writer.prepare()


def test_values_that_json_cannot_hold_have_no_bounds() -> None:
    rows = pa.table(
        {"nan": [1.0, float("nan")], "inf": [1.0, float("inf")], "long": ["a", "b" * 99]}
    )
    found = json.loads(statistics(rows))
    assert found["numRecords"] == 2 and found["minValues"] == found["maxValues"] == {}


def test_a_filter_finds_rows_by_the_bounds_of_files(tmp_path: Path) -> None:
    schema = parse_schema("k long, ts timestamp, s string")
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [(k, start + dt.timedelta(microseconds=1001 * k), f"s{k}") for k in range(20)]
    sink = open_sink(tmp_path, schema)
    for epoch, row in enumerate(rows):
        published(sink, epoch, row)
    dataset = DeltaTable(str(tmp_path)).to_pyarrow_dataset()
    for k, ts, s in rows:
        for column, value in (("k", k), ("ts", ts), ("s", s)):
            found = dataset.to_table(filter=pa.compute.field(column) == pa.scalar(value))
            assert found["k"].to_pylist() == [k]


@MODES
def test_a_vacuum_touches_nothing_that_is_published(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sink = open_sink(tmp_path, **settings)
    for epoch in range(2, 6):
        published(sink, epoch, (epoch, "x"))
    DeltaTable(str(tmp_path)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert [row[0] for row in read_rows(tmp_path)] == [2, 3, 4, 5]


def test_a_vacuum_with_the_usual_retention_leaves_what_is_prepared(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    committable = prepared(sink, 2, (1, "x"))
    DeltaTable(str(tmp_path)).vacuum(dry_run=False)
    sink.commit(2, [committable])
    assert read_rows(tmp_path) == [(1, "x")]


def test_files_that_the_table_has_compacted_stay_for_readers_of_older_versions(
    tmp_path: Path,
) -> None:
    sink = open_sink(tmp_path)
    committables = {epoch: [prepared(sink, epoch, (epoch, "x"))] for epoch in (2, 3)}
    for epoch, prepared_then in committables.items():
        sink.commit(epoch, prepared_then)
    version = DeltaTable(str(tmp_path)).version()
    DeltaTable(str(tmp_path)).optimize.compact()
    sink.commit(3, committables[3])
    prepared(sink, 4, (4, "abandoned"))
    open_sink(tmp_path).recover(5)
    assert read_rows(tmp_path) == [(2, "x"), (3, "x")]
    old = DeltaTable(str(tmp_path), version=version).to_pyarrow_table()
    assert sorted(pa.table(old)["k"].to_pylist()) == [2, 3]


def test_a_file_that_was_compacted_before_its_note_was_removed_stays_for_older_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that publishes before the record died; nobody commits its epoch again."""
    sink = open_sink(tmp_path)
    published(sink, 2, (2, "x"))
    committable = prepared(sink, 3, (3, "x"))
    monkeypatch.setattr(sink.store, "delete", lambda paths: None)
    sink.commit(3, [committable])
    prepared(sink, 4, (4, "abandoned"))
    version = DeltaTable(str(tmp_path)).version()
    DeltaTable(str(tmp_path)).optimize.compact()
    new = open_sink(tmp_path)
    new.recover(5)
    old = DeltaTable(str(tmp_path), version=version).to_pyarrow_table()
    assert sorted(pa.table(old)["k"].to_pylist()) == [2, 3]
    assert new.store.list(f"_cairn/{new.home}/") == []
    assert list(tmp_path.glob("part-000000000004-*")) == []
