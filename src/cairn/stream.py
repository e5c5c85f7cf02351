"""Streams: what a program is written with. Each call adds a node to the job's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cairn.errors import PlanError
from cairn.functions import BatchProcess, Function, KeyedProcess
from cairn.plan.check import check_function, check_keys, check_same_schema, check_uid
from cairn.plan.graph import (
    Port,
    ProcessNode,
    SinkNode,
    TransformNode,
    port_event_time,
    united_schema,
)
from cairn.sinks.base import Sink
from cairn.types import parse_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from cairn.job import Job


class Stream:
    """Rows of one schema, moving through the job."""

    def __init__(self, job: Job, ports: tuple[Port, ...], schema: pa.Schema) -> None:
        self._job = job
        self._ports = ports
        self.schema = schema

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> Stream:
        """All of Spark SQL, on the rows of one epoch (so a `groupBy` in it is per epoch)."""
        from cairn.plan.dataframe import transformed_schema

        job = self._job
        schema = transformed_schema(job._spark(), self.schema, function)
        times = {port_event_time(job._nodes, port) for port in self._ports}
        time = times.pop() if len(times) == 1 else None
        name = f"transform:{len(job._nodes)}"
        job._nodes[name] = TransformNode(
            name, self._ports, function, schema, time if time in schema.names else None
        )
        return Stream(job, (Port(name),), schema)

    def union(self, *others: Stream) -> Stream:
        """The rows of all these streams; their columns must agree in name and type."""
        for other in others:
            if other._job is not self._job:
                raise PlanError("union of streams of two jobs")
            check_same_schema(self.schema, other.schema)
        ports = tuple(dict.fromkeys(p for s in (self, *others) for p in s._ports))
        if len(ports) != sum(len(s._ports) for s in (self, *others)):
            raise PlanError("union of a stream with itself would double its rows")
        return Stream(self._job, ports, united_schema([s.schema for s in (self, *others)]))

    def key_by(self, *columns: str) -> KeyedStream:
        """Partition by one or several columns; rows with equal values share state."""
        check_keys(columns, self.schema)
        return KeyedStream(self, columns)

    def sink_to(self, sink: Sink, *, uid: str) -> None:
        """Write the stream out; an epoch's rows become visible when it is committed."""
        check_uid(uid, self._job._nodes)
        if not isinstance(sink, Sink):
            raise PlanError(f"sink {uid!r} is no cairn.sinks.Sink but {type(sink).__name__}")
        self._job._nodes[uid] = SinkNode(uid, self._ports, sink)

    def __repr__(self) -> str:
        names = ", ".join(p.node if p.tag is None else f"{p.node}:{p.tag}" for p in self._ports)
        return f"<stream {names}: {', '.join(self.schema.names)}>"


class KeyedStream:
    """A stream partitioned by key, ready for functions with keyed state."""

    def __init__(self, stream: Stream, columns: tuple[str, ...]) -> None:
        self._stream = stream
        self._columns = columns

    def process(self, function: KeyedProcess[Any], *, schema: Any, uid: str) -> ProcessStream:
        """Run a function over every row of every key. `uid` names its state, for good."""
        return self._run(function, KeyedProcess, schema, uid)

    def process_batch(self, function: BatchProcess, *, schema: Any, uid: str) -> ProcessStream:
        """Run a function over Arrow batches of rows of many keys."""
        return self._run(function, BatchProcess, schema, uid)

    def _run(
        self, function: Function, kind: type[Function], schema: Any, uid: str
    ) -> ProcessStream:
        job = self._stream._job
        check_uid(uid, job._nodes)
        check_function(function, uid, kind)
        out = parse_schema(schema)
        job._nodes[uid] = ProcessNode(uid, self._stream._ports, self._columns, function, out, ())
        return ProcessStream(job, (Port(uid),), out)


class ProcessStream(Stream):
    """What a function emits; its side outputs hang off it."""

    def side(self, tag: str, schema: Any) -> Stream:
        """The rows emitted with `ctx.output(tag, row)`."""
        uid = self._ports[0].node
        node = self._job._nodes[uid]
        assert isinstance(node, ProcessNode)
        parsed = parse_schema(schema)
        known = dict(node.sides).get(tag)
        if known is None:
            sides = (*node.sides, (tag, parsed))
            self._job._nodes[uid] = ProcessNode(
                uid, node.inputs, node.keys, node.function, node.schema, sides
            )
        elif known != parsed:
            raise PlanError(
                f"side output {tag!r} of {uid!r} has two schemas\n  found: {known} and {parsed}"
            )
        return Stream(self._job, (Port(uid, tag),), parsed)
