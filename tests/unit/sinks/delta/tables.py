"""Delta tables that a sink writes, and their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cairn.sinks import Delta
from cairn.sinks.base import Committable, Execution, SinkContext
from cairn.types import parse_schema

KS = parse_schema("k long, s string")
MERGE = {"mode": "merge", "key": "k"}
MODES = pytest.mark.parametrize("settings", [{}, MERGE], ids=["append", "merge"])


def open_sink(path: Any, schema: pa.Schema = KS, **settings: Any) -> Delta:
    sink = Delta(str(path), **settings)
    sink.open(SinkContext("job", "j", "out", schema))
    return sink


def prepared(
    sink: Delta, epoch: int, *rows: Any, subtask: int = 0, **execution: int
) -> Committable:
    writer = sink.writer(epoch, subtask, Execution(**execution))
    schema = sink.context.schema
    named = [dict(zip(schema.names, row, strict=True)) for row in rows]
    writer.write(pa.RecordBatch.from_pylist(named, schema))
    committable = writer.prepare()
    assert committable is not None
    return committable


def published(sink: Delta, epoch: int, *rows: Any) -> None:
    sink.commit(epoch, [prepared(sink, epoch, *rows)])


def table(path: Any) -> pa.Table:
    return pa.table(DeltaTable(str(path)).to_pyarrow_table())


def read_rows(path: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in table(path).to_pylist()), key=str)


def once(work: Callable[[], Any]) -> Callable[[str], None]:
    """Return a hook that calls `work` at the first crash point, just before the log is written."""
    done: list[str] = []

    def on_pass(point: str) -> None:
        if not done:
            done.append(point)
            work()

    return on_pass
