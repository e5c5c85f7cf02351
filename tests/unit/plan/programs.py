"""Programs without Spark: sources and transforms are put into the graph as they are."""

from __future__ import annotations

from typing import Any

from cairn import Job, KeyedProcess
from cairn.plan.graph import Port, SourceNode, TransformNode, Watermark, unite_times
from cairn.stream import Stream
from cairn.types import parse_schema

ROW = "k long, v long"


class Pass(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


def source(
    job: Job,
    name: str,
    schema: str = ROW,
    event_time: str | None = None,
    watermark: Watermark | None = None,
) -> Stream:
    parsed = parse_schema(schema)
    job._nodes[name] = SourceNode(name, None, parsed, event_time, watermark)
    return Stream(job, (Port(name),), parsed)


def transform(stream: Stream, schema: str = ROW) -> Stream:
    job, parsed = stream._job, parse_schema(schema)
    name = f"transform:{len(job._nodes)}"
    time = unite_times(job._nodes, stream._ports)
    column = None if time is None or time.column not in parsed.names else time.column
    job._nodes[name] = TransformNode(name, stream._ports, len, parsed, column)
    return Stream(job, (Port(name),), parsed)


def process(stream: Stream, uid: str, schema: str = ROW, key: str = "k") -> Any:
    return stream.key_by(key).process(Pass(), schema=schema, uid=uid)
