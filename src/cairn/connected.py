"""Streams that go into one function together: keyed ones that share state, and a broadcast."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from cairn.errors import PlanError
from cairn.functions import BatchProcess, Function, KeyedProcess, Process
from cairn.operators.as_of import AsOfJoin, Validity
from cairn.operators.join_plan import JoinPlan
from cairn.operators.joins import Join
from cairn.plan.check import (
    NO_UID,
    check_bound,
    check_broadcast,
    check_broadcast_state,
    check_function,
    check_handlers,
    check_same_keys,
    check_stream,
    check_uid,
)
from cairn.plan.graph import Inlet, Port, ProcessNode, port_schema, unite_schemas, unite_times
from cairn.plan.key_types import common_type
from cairn.types import SchemaLike, parse_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from cairn.job import Job
    from cairn.state import Declaration
    from cairn.stream import ProcessStream, Stream


class ConnectedStreams:
    """Inputs of one function. What is emitted comes out as one stream."""

    def __init__(
        self, job: Job, inlets: tuple[Inlet, ...], broadcast: Declaration | None = None
    ) -> None:
        self._job = job
        self._inlets = inlets
        self._broadcast = broadcast

    def broadcast(self, rows: Stream, declaration: Declaration | None = None) -> ConnectedStreams:
        """Give each of these rows to every subtask, to `process_broadcast(row, ctx)`.

        They come before the other rows of the epoch, everywhere in the same order: by event
        time where the stream has one, else as they arrived. What they say is kept in
        `declaration`, a `state.Broadcast`: `ctx.broadcast`, read by `process`.
        """
        from cairn.stream import Stream

        check_stream("broadcast", rows, self._job, Stream)
        if any(inlet.way == "broadcast" for inlet in self._inlets):
            raise PlanError(
                "an operator takes one broadcast\n  next: unite the streams with .union(...) first"
            )
        check_broadcast(declaration)
        inlet = Inlet(rows._ports, way="broadcast")
        return ConnectedStreams(self._job, (*self._inlets, inlet), declaration)

    def __repr__(self) -> str:
        names = (", ".join(port.node for port in inlet.ports) for inlet in self._inlets)
        return f"<connected streams {'; '.join(names)}>"

    def process(
        self,
        function: Function,
        *,
        schema: SchemaLike,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Run a function over the rows of all inputs. `uid` names its state, for good.

        With `parallelism`, only that many subtasks get rows, of those that the job has. Rows of a
        broadcast come to all.
        """
        kind = Process if self._inlets[0].way == "spread" else KeyedProcess
        return self._run(function, kind, schema, uid, parallelism)

    def process_batch(
        self,
        function: BatchProcess,
        *,
        schema: SchemaLike,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Run a function over Arrow batches of rows of many keys.

        It has a method `on_<name>(batch, ctx)` for each input. Rows are gathered, then each input
        that has rows is passed to its method, in the order of `connect`. `ctx.keys` and
        `ctx.times_us` belong to the rows of the call.
        """
        if self._inlets[0].way == "spread":
            raise PlanError(
                f"operator {uid!r}: process_batch needs keys\n  next: .key_by(...) before it"
            )
        return self._run(function, BatchProcess, schema, uid, parallelism)

    def _run(
        self,
        function: Function,
        kind: type[Function],
        schema: SchemaLike,
        uid: str,
        parallelism: int | None,
    ) -> ProcessStream:
        from cairn.stream import ProcessStream

        job = self._job
        check_uid(uid, job._nodes)
        check_function(function, uid, kind)
        rows = [inlet for inlet in self._inlets if inlet.way != "broadcast"]
        has_broadcast = len(rows) < len(self._inlets)
        check_handlers(function, uid, [i.name for i in rows if i.name], has_broadcast=has_broadcast)
        check_broadcast_state(function, uid, self._broadcast)
        out = parse_schema(schema)
        job._nodes[uid] = ProcessNode(
            uid,
            self._inlets,
            function,
            out,
            broadcast=with_name(self._broadcast),
            parallelism=check_bound(uid, parallelism),
        )
        return ProcessStream(job, (Port(uid),), out)


def connect(job: Job, streams: dict[str, Any], what: str = "connect") -> ConnectedStreams:
    """Connect keyed streams, each under the name of its handler. Errors name the call `what`."""
    from cairn.keyed import KeyedStream

    if len(streams) < 2:
        raise PlanError("connect takes two streams or more\n  next: job.connect(a=..., b=...)")
    inlets = []
    for name, keyed in streams.items():
        if not isinstance(keyed, KeyedStream):
            raise PlanError(
                f"connect: {name!r} is not a keyed stream but {type(keyed).__name__}\n"
                "  next: say with .key_by(...) which of its rows belong together"
            )
        if keyed._stream._job is not job:
            raise PlanError(
                f"connect: {name!r} is a stream of another job\n"
                "  next: build all of them with one Job"
            )
        inlets.append(Inlet(keyed._stream._ports, keyed._columns, name=name))
    check_same_keys(
        {
            inlet.name: [
                unite_schemas([port_schema(job._nodes, p) for p in inlet.ports]).field(key).type
                for key in inlet.keys
            ]
            for inlet in inlets
        },
        what,
    )
    return ConnectedStreams(job, tuple(inlets))


def join(
    left: Stream, right: Stream, plan: JoinPlan, uid: str, parallelism: int | None = None
) -> ProcessStream:
    """Return the rows of two streams that belong together, as one stream."""
    job = left._job
    if right._job is not job:
        raise PlanError("join of streams of two jobs\n  next: build both with one Job")
    function = Join(plan)
    if plan.clock == "event":
        function.set_times(_time_of(left, "left"), _time_of(right, "right"))
    return _connect_sides(left, right, plan).process_batch(
        function, schema=plan.schema(_key_types(plan)), uid=uid, parallelism=parallelism
    )


def join_as_of(
    left: Stream,
    right: Stream,
    plan: JoinPlan,
    validity: Validity,
    uid: str,
    parallelism: int | None = None,
) -> ProcessStream:
    """Return the rows of a stream, each with the version that was newest at its time."""
    if right._job is not left._job:
        raise PlanError("join of streams of two jobs\n  next: build both with one Job")
    _time_of(right, "right")
    function = AsOfJoin(plan, validity, _time_of(left, "left"))
    return _connect_sides(left, right, plan).process_batch(
        function, schema=plan.schema(_key_types(plan)), uid=uid, parallelism=parallelism
    )


def _time_of(stream: Stream, side: str) -> tuple[str, int]:
    """Return the time column of a side of a join, and its shift."""
    time = unite_times(stream._job._nodes, stream._ports)
    if time is None:
        raise PlanError(
            f"join: the {side} stream has no event time\n"
            "  next: declare it, with job.source(..., event_time=, watermark=), or after a "
            "transform with .event_time(...)"
        )
    return time.column, time.shift_us


def _connect_sides(left: Stream, right: Stream, plan: JoinPlan) -> ConnectedStreams:
    inputs = {"left": left.key_by(*plan.left_keys), "right": right.key_by(*plan.right_keys)}
    return connect(left._job, inputs, "join")


def _key_types(plan: JoinPlan) -> list[pa.DataType]:
    """Return types that are wide enough for the keys of both sides."""
    return [
        common_type([plan.left.field(mine).type, plan.right.field(theirs).type])
        for mine, theirs in plan.on
    ]


def with_name(declaration: Declaration | None) -> Declaration | None:
    """Return the declaration with a name; one of a class attribute has its own."""
    if declaration is None or declaration.name:
        return declaration
    named = copy.copy(declaration)
    named.name = "broadcast"
    return named
