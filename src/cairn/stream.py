"""Streams: what a program is written with. Each call adds a node to the job's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa

from cairn.connected import ConnectedStreams, join, join_as_of
from cairn.errors import PlanError
from cairn.functions import ERRORS, LATE, BatchProcess, Process
from cairn.operators.as_of import as_of_plan, check_validity
from cairn.operators.deduplicate import DUPLICATES, Distinct, DistinctWithin
from cairn.operators.idle import parse_ttl
from cairn.operators.join_plan import join_plan
from cairn.operators.rows import RowKind
from cairn.operators.top import Top, check_top, parse_by
from cairn.plan.check import (
    NO_UID,
    check_body,
    check_event_time,
    check_keys,
    check_rounds,
    check_same_schema,
    check_stream,
    check_uid,
    check_watermark,
)
from cairn.plan.graph import (
    Inlet,
    LoopNode,
    Port,
    ProcessNode,
    SinkNode,
    TimeNode,
    TransformNode,
    bare_ports,
    keep_time,
    port_schema,
    root_ports,
    unite_schemas,
    unite_times,
)
from cairn.plan.key_columns import KeyColumns, has_expressions
from cairn.plan.loops import check_feedback
from cairn.plan.rows import add_rows_nodes, take_errors
from cairn.plan.select_plan import plan_select
from cairn.plan.selects import are_behind_operators
from cairn.protocol.letters import SCHEMA as LETTERS
from cairn.sinks.base import Sink
from cairn.state import Declaration, TTLLike
from cairn.types import SchemaLike, parse_schema, schema_ddl, type_ddl
from cairn.types.durations import Duration, duration_ms
from cairn.windows import WindowSpec

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from cairn.job import Job
    from cairn.keyed import KeyedStream, WindowedStream


class Stream:
    """Rows of one schema, moving through the job."""

    def __init__(self, job: Job, ports: tuple[Port, ...], schema: pa.Schema) -> None:
        self._job = job
        self._ports = ports
        self.schema = schema

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> Stream:
        """All of Spark SQL, on the rows of one epoch (so a `groupBy` in it is per epoch).

        Event time follows its column, also under another name. A transform that drops the column
        drops the event time: declare another one with `.event_time(column)`.
        """
        from cairn.plan.frames import plan_transform, unreadable_rows

        job = self._job
        time = unite_times(job._nodes, self._ports)
        column = None if time is None else time.column
        planned = plan_transform(job._spark(), self.schema, function, column)
        schema = planned.schema
        name = f"transform:{len(job._nodes)}"
        column = keep_time(job._nodes, self._ports, schema) or planned.time
        select = None
        if are_behind_operators(job._nodes, self._ports):
            rows = unreadable_rows(job._spark(), self.schema)
            select = plan_select(rows, function, self.schema, schema)
        job._nodes[name] = TransformNode(
            name,
            self._ports,
            function,
            schema,
            column,
            calls_python=planned.calls_python,
            select=select,
        )
        return Stream(job, (Port(name),), schema)

    def map(
        self,
        function: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = None,
        uid: str | None = None,
    ) -> RowsStream:
        """Replace each row by the row that a Python function returns for it.

        It returns a tuple, a dict or a row object that fits `schema`; None: the columns of this
        stream. The function runs where the rows are, without a shuffle: in the process of the
        operator that emits them, or in the Spark stage that reads them. It has no state, so
        `uid` is only the name that errors and `explain` show.
        """
        return self._call_rows("map", function, schema, uid)

    def flat_map(
        self,
        function: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = None,
        uid: str | None = None,
    ) -> RowsStream:
        """Replace each row by the rows that a Python function returns or yields: any number.

        Otherwise like `map`.
        """
        return self._call_rows("flat_map", function, schema, uid)

    def filter(self, function: Callable[[Any], Any], *, uid: str | None = None) -> RowsStream:
        """Keep the rows for which a Python function returns something true. See `map`."""
        return self._call_rows("filter", function, None, uid)

    def _call_rows(
        self,
        kind: RowKind,
        function: Callable[[Any], Any],
        schema: SchemaLike | None,
        uid: str | None,
    ) -> RowsStream:
        out = self.schema if schema is None else parse_schema(schema)
        nodes, schemas = self._job._nodes, (self.schema, out)
        ports = add_rows_nodes(nodes, self._ports, schemas, kind, function, uid)
        return RowsStream(self._job, ports, out)

    def event_time(
        self,
        column: str,
        watermark: Duration | None = None,
        idle_after: Duration | None = "1 minute",
    ) -> Stream:
        """From here on, event time and watermark are these, as `job.source` would declare them.

        A watermark that a source declares no longer counts for what comes this way.
        """
        job = self._job
        where = f"stream {', '.join(port.node for port in self._ports)}"
        check_event_time(column, self.schema, where)
        mark = check_watermark(watermark, idle_after, column, where)
        roots = root_ports(job._nodes, self._ports)
        if mark is not None and any(isinstance(job._nodes[p.node], ProcessNode) for p in roots):
            raise PlanError(
                f"watermark of {where}: what operators emit follows the watermark of their input\n"
                "  next: declare it before the first operator; event_time(column) alone is fine"
            )
        # Found again by its name after a restart, so it is made of what seldom changes.
        name = f"{'+'.join(dict.fromkeys(p.node for p in roots))}:{column}"
        taken = sum(node == name or node.startswith(f"{name}:") for node in job._nodes)
        name = name if not taken else f"{name}:{taken + 1}"
        job._nodes[name] = TimeNode(name, self._ports, self.schema, column, mark)
        return Stream(job, (Port(name),), self.schema)

    def union(self, *others: Stream) -> Stream:
        """The rows of all these streams; their columns must agree in name and type."""
        for other in others:
            check_stream("union", other, self._job, Stream)
            check_same_schema(self.schema, other.schema)
        ports = tuple(port for s in (self, *others) for port in s._ports)
        bare = bare_ports(self._job._nodes, ports)
        if len(set(bare)) != len(bare):
            raise PlanError(
                "union of a stream with itself would double its rows\n  next: name each stream once"
            )
        return Stream(self._job, ports, unite_schemas([s.schema for s in (self, *others)]))

    def iterate(
        self,
        body: Callable[[Stream], tuple[Stream, Stream]],
        *,
        uid: str = NO_UID,
        max_rounds_per_epoch: int = 1,
    ) -> Stream:
        """A loop: `body(loop)` gives `(feedback, output)`, and `output` is what comes out.

        `loop` has the rows of this stream and, an epoch later, those of `feedback`, which has
        the same columns; an operator gets what was sent back before all other rows. What is on
        its way back is written with each epoch, and epochs are run for it also when the sources
        are silent. With `max_rounds_per_epoch` it enters the same epoch up to that many times; what
        the last round sends back enters the next one. Rounds belong to the epoch: the largest
        number of the job's loops counts for all of them, and every operator of the job sees each
        round as it sees an epoch, under the same number.
        """
        job = self._job
        check_uid(uid, job._nodes)
        check_rounds(uid, max_rounds_per_epoch)
        # Rows sent back may be null where the input never is.
        schema = pa.schema([field.with_nullable(True) for field in self.schema])
        loop = LoopNode(uid, self._ports, schema, (), max_rounds_per_epoch)
        before = dict(job._nodes)
        try:
            job._nodes[uid] = loop
            result = body(Stream(job, (Port(uid),), schema))
            feedback, output = check_body(uid, result, Stream)
            if feedback._job is not job or output._job is not job:
                raise PlanError(
                    f"loop {uid!r} has streams of two jobs\n"
                    "  next: return streams that its body has made of what it is given",
                    uid=uid,
                )
            check_same_schema(schema, feedback.schema, f"the feedback of loop {uid!r}")
            check_feedback(job._nodes, uid, feedback._ports)
        except BaseException:
            # Nothing is left of a loop that did not come about: it can be tried again.
            job._nodes.clear()
            job._nodes.update(before)
            raise
        job._nodes[uid] = replace(loop, feedback=feedback._ports)
        return output

    def key_by(self, *columns: str | Column) -> KeyedStream:
        """Partition by one or several columns; rows with equal values share state.

        A Spark expression needs an alias: `key_by(F.lower("email").alias("email_key"))`. It is
        added to the rows as a column of that name, and so the key is called everywhere.
        """
        from cairn.keyed import KeyedStream

        if has_expressions(columns):
            added = KeyColumns(self._job._spark(), self.schema, columns)
            stream = self if added.is_empty else self.transform(added)
            return stream.key_by(*added.names)
        names = cast("tuple[str, ...]", columns)
        check_keys(names, self.schema)
        return KeyedStream(self, names)

    def window(
        self,
        spec: WindowSpec,
        *,
        allowed_lateness: Duration = "0 seconds",
        emit: str | None = None,
        early_every_rows: int | None = None,
        early_every: Duration | None = None,
    ) -> WindowedStream:
        """Cut all rows into windows, without a key: `stream.window(spec).aggregate(...)`.

        The options are those of windows per key.
        """
        from cairn.keyed import KeyedStream

        return KeyedStream(self, ()).window(
            spec,
            allowed_lateness=allowed_lateness,
            emit=emit,
            early_every_rows=early_every_rows,
            early_every=early_every,
        )

    def process(
        self,
        function: Process[Any],
        *,
        schema: SchemaLike,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Run a function without keys over every row. `uid` names its state, for good.

        It runs where the rows are, without a shuffle, if they come from another operator.
        """
        made = self._spread()
        return made.process(function, schema=schema, uid=uid, parallelism=parallelism)

    def broadcast(self, rows: Stream, declaration: Declaration | None = None) -> ConnectedStreams:
        """Let a function without keys see each of these rows in every subtask."""
        return self._spread().broadcast(rows, declaration)

    def _spread(self) -> ConnectedStreams:
        return ConnectedStreams(self._job, (Inlet(self._ports, way="spread"),))

    def join(
        self,
        right: Stream,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        within: Duration | tuple[Duration, Duration] | None = None,
        ttl: Duration | None = None,
        how: Literal["inner", "left", "right", "full"] = "inner",
        uid: str = NO_UID,
        suffix: str = "_right",
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Rows of two streams with equal keys, near each other in time if `within` is given.

        `on` is a column, several, or {left column: right column}; null equals nothing. The result
        has the columns of left, then those of right without its key; a name that is taken gets
        `suffix`. A pair is emitted when the later of its rows arrives.

        `within` is how far apart event times may be: "10 minutes", or how much later the right
        row is, from and to: ("-5 minutes", "10 minutes"). With `how` "left", "right" or "full",
        rows that find no other come with nulls, when the watermark says that none can come any
        more. Late rows go to `.side("late.left")` and `.side("late.right")`.

        Without `within`, all rows with equal keys are joined, and kept: for ever, or for `ttl`.
        If both streams have an event time, `ttl` means the same as `within`. Otherwise it counts
        the epoch's clock from the arrival of a row, no row is late, and a row of an outer join
        that has found no other comes with nulls when its `ttl` ends.
        """
        if not isinstance(right, Stream):
            raise PlanError(f"join with a {type(right).__name__}\n  expected: a stream")
        nodes = self._job._nodes
        has_time = all(
            each._job is self._job and unite_times(nodes, each._ports) is not None
            for each in (self, right)
        )
        plan = join_plan(
            self.schema, right.schema, on, within, how, suffix, ttl=ttl, has_time=has_time
        )
        return join(self, right, plan, uid, parallelism)

    def join_as_of(
        self,
        versions: Stream,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        how: Literal["inner", "left"] = "inner",
        valid_until: str | Duration | None = None,
        uid: str = NO_UID,
        suffix: str = "_right",
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Each row with the version of its key that was newest at the row's event time.

        A version holds from its event time on, until the next one of its key, and no longer than
        `valid_until`: a column of the versions (its time included; null for no end), or a span of
        time such as "1 day". A row is emitted when the watermark has passed its time. Without a
        version it is left out, or with `how="left"` comes with nulls. Of versions of one time
        the greatest row of the last epoch counts. Columns, `on` and late rows are as in `join`.
        """
        if not isinstance(versions, Stream):
            raise PlanError(f"join_as_of with a {type(versions).__name__}\n  expected: a stream")
        plan = as_of_plan(self.schema, versions.schema, on, how, suffix)
        validity = check_validity(valid_until, versions.schema)
        return join_as_of(self, versions, plan, validity, uid, parallelism)

    def deduplicate(
        self,
        *,
        on: str | Sequence[str],
        within: Duration | None = None,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """The first row of each key; with `within`, again after that time.

        Time is event time where there is one, else the epoch's clock: of rows that pass, no two
        of a key are less than `within` apart. Null is a key like others. Rows that do not pass
        go to `.side("duplicates")`.
        """
        columns = (on,) if isinstance(on, str) else tuple(on)
        is_timed = unite_times(self._job._nodes, self._ports) is not None
        function: BatchProcess = Distinct(columns)
        if within is not None:
            within_ms = duration_ms(within, "within of deduplicate", positive=True)
            function = DistinctWithin(within_ms, by_event=is_timed, keys=columns)
        return self.key_by(*columns).process_batch(
            function, schema=self.schema, uid=uid, parallelism=parallelism
        )

    def top(
        self,
        n: int,
        *,
        by: str | Sequence[str],
        per: str | Sequence[str],
        uid: str = NO_UID,
        ttl: TTLLike = None,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """The first n rows of each key by some columns: `top(10, by="price desc", per="auction")`.

        `by` is "column", "column desc", or several of them; nulls are least, as in Spark. Rows
        that are equal there come in the order of all their columns, from the left. The result has
        the columns of the stream and `rank`, from 1. At the end of an epoch each row whose rank
        has changed is emitted with its new rank, and each row that has left the first n
        with null. Late rows count like all others. With `ttl` a key is forgotten when it has had no
        row for that long.
        """
        check_top(n, self.schema)
        columns = (per,) if isinstance(per, str) else tuple(per)
        is_timed = unite_times(self._job._nodes, self._ports) is not None
        parsed = parse_ttl(ttl, f"top {uid!r}", is_timed=is_timed)
        function = Top(n, parse_by(by, self.schema), self.schema, parsed)
        return self.key_by(*columns).process_batch(
            function, schema=function.schema, uid=uid, parallelism=parallelism
        )

    def sink_to(self, sink: Sink, *, uid: str = NO_UID) -> None:
        """Write the stream out; an epoch's rows become visible when it is committed."""
        check_uid(uid, self._job._nodes)
        if not isinstance(sink, Sink):
            raise PlanError(f"sink {uid!r} is not a cairn.sinks.Sink but {type(sink).__name__}")
        self._job._nodes[uid] = SinkNode(uid, self._ports, sink)

    def __repr__(self) -> str:
        names = ", ".join(p.node if p.tag is None else f"{p.node}:{p.tag}" for p in self._ports)
        return f"<stream {names}: {', '.join(self.schema.names)}>"

    def _repr_html_(self) -> str:
        names = ", ".join(p.node if p.tag is None else f"{p.node}:{p.tag}" for p in self._ports)
        columns = [(field.name, type_ddl(field.type)) for field in self.schema]
        return self._job._html(f"stream {names} of job {self._job.name}", columns)


class RowsStream(Stream):
    """The rows that `.map`, `.filter` or `.flat_map` emit."""

    def side(self, tag: Literal["errors"]) -> Stream:
        """The rows that the function failed on, with `on_error="dead-letter"`.

        Columns are those of `cairn.protocol.letters.SCHEMA`. A function with this output runs
        in the slots, behind a shuffle if its rows come from a source.
        """
        if tag != ERRORS:
            raise PlanError(
                f"{self!r} has no side output {tag!r}\n  expected: {ERRORS!r}; a Process has "
                "further ones"
            )
        return Stream(self._job, take_errors(self._job._nodes, self._ports), LETTERS)


class ProcessStream(Stream):
    """The rows that a function emits, with its side outputs."""

    def side(self, tag: str, schema: SchemaLike | None = None) -> Stream:
        """The rows emitted with `ctx.output(tag, row)`.

        "late" is what came too late, or without a time: rows as they came in, no schema needed.
        Of connected streams it is "late.<name>", for each of them. "errors" is what the function
        failed on, with `on_error="dead-letter"`: `cairn.protocol.letters.SCHEMA`, no schema needed.
        """
        uid = self._ports[0].node
        node = self._job._nodes[uid]
        assert isinstance(node, ProcessNode)
        if tag == DUPLICATES and isinstance(node.function, Distinct | DistinctWithin):
            schema = self.schema
        late = next((inlet for inlet in node.row_inlets if inlet.late_tag == tag), None)
        parsed = None if late is None else self._late_schema(node, late, schema)
        if parsed is None:
            connected = [inlet.late_tag for inlet in node.row_inlets if inlet.name]
            if tag == LATE and connected:
                raise PlanError(
                    f"side output {tag!r} of {uid!r}: each of its inputs has late rows of its own\n"
                    f"  expected: {', '.join(connected)}"
                )
            if schema is None and tag != ERRORS:
                raise PlanError(
                    f"side output {tag!r} of {uid!r} needs a schema\n"
                    f"  next: .side({tag!r}, 'name type, ...')"
                )
            parsed = LETTERS if schema is None else parse_schema(schema)
        known = dict(node.sides).get(tag)
        if known is None:
            self._job._nodes[uid] = replace(node, sides=(*node.sides, (tag, parsed)))
        elif known != parsed:
            raise PlanError(
                f"side output {tag!r} of {uid!r} has two schemas\n  found: {known} and {parsed}"
            )
        return Stream(self._job, (Port(uid, tag),), parsed)

    def _late_schema(
        self, node: ProcessNode, inlet: Inlet, schema: SchemaLike | None
    ) -> pa.Schema | None:
        """None: the operator has no event time, and "late" is a tag like any other."""
        nodes = self._job._nodes
        if any(unite_times(nodes, each.ports) is None for each in node.row_inlets):
            if schema is None:
                raise PlanError(
                    f"operator {node.uid!r} has no event time, so nothing is late\n"
                    "  next: declare it, with job.source(..., event_time=, watermark=)"
                )
            return None
        rows = unite_schemas([port_schema(nodes, port) for port in inlet.ports])
        if schema is not None and parse_schema(schema) != rows:
            raise PlanError(
                f"side output {inlet.late_tag!r} of {node.uid!r} has the rows as they came in\n"
                f"  found: {schema_ddl(parse_schema(schema))}\n  expected: {schema_ddl(rows)}\n"
                "  next: leave the schema out, or give your own rows another tag"
            )
        return rows
