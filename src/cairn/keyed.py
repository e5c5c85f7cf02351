"""Streams partitioned by key, and cut into windows: where state and aggregates begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cairn.connected import ConnectedStreams
from cairn.errors import PlanError
from cairn.functions import LATE, BatchProcess, KeyedProcess
from cairn.operators.idle import parse_ttl
from cairn.operators.latest import Latest
from cairn.operators.triggers import FINAL, Trigger, parse_emit, running_interval_ms
from cairn.operators.window_functions import (
    WindowApply,
    WindowFunction,
    WindowReduce,
    check_window_function,
)
from cairn.operators.window_process import WindowPlan
from cairn.plan.aggregation import Output, aggregation, partial_node
from cairn.plan.check import NO_UID, check_bound, check_same_schema, check_uid
from cairn.plan.graph import Inlet, Port, ProcessNode, unite_times
from cairn.state import Declaration, TTLLike
from cairn.stream import ProcessStream, Stream
from cairn.types import SchemaLike, parse_schema
from cairn.types.durations import Duration, duration_ms
from cairn.user_code import check_arguments
from cairn.windows import Global, WindowSpec

if TYPE_CHECKING:
    from cairn.job import Job
    from cairn.operators.aggregates.partial import Partials
    from cairn.operators.aggregates.running import Aggregation


class KeyedStream:
    """A stream partitioned by key, ready for functions with keyed state."""

    def __init__(self, stream: Stream, columns: tuple[str, ...]) -> None:
        self._stream = stream
        self._columns = columns

    def __repr__(self) -> str:
        return f"<{self._stream!r} by {', '.join(self._columns)}>"

    def filter(self, function: Callable[[Any], Any], *, uid: str | None = None) -> KeyedStream:
        """Keep the rows for which a Python function returns something true, by the same key."""
        return KeyedStream(self._stream.filter(function, uid=uid), self._columns)

    def process(
        self,
        function: KeyedProcess[Any],
        *,
        schema: SchemaLike,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Run a function over every row of every key. `uid` names its state, for good.

        With `parallelism`, only that many subtasks have keys, of those that the job has. It may
        change from start to start, and all operators have it.
        """
        made = self._connect()
        return made.process(function, schema=schema, uid=uid, parallelism=parallelism)

    def broadcast(self, rows: Stream, declaration: Declaration | None = None) -> ConnectedStreams:
        """Let a function see each of these rows in every subtask: rules, settings, small tables.

        `events.key_by("k").broadcast(rules, state.Broadcast("string", "long")).process(...)`
        """
        return self._connect().broadcast(rows, declaration)

    def _connect(self) -> ConnectedStreams:
        inlet = Inlet(self._stream._ports, self._columns)
        return ConnectedStreams(self._stream._job, (inlet,))

    def process_batch(
        self,
        function: BatchProcess,
        *,
        schema: SchemaLike,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Run a function over Arrow batches of rows of many keys."""
        made = self._connect()
        return made.process_batch(function, schema=schema, uid=uid, parallelism=parallelism)

    def latest(
        self, *, uid: str = NO_UID, ttl: TTLLike = None, parallelism: int | None = None
    ) -> ProcessStream:
        """The newest row of each key: a key with a newer row is emitted at the end of the epoch.

        Newest is by event time where there is one, else by arrival. Of rows with the same time,
        the greatest counts, compared column by column from the left. Late rows count like all
        others. With `ttl` a key is forgotten when it has had no row for that long.
        """
        stream = self._stream
        is_timed = unite_times(stream._job._nodes, stream._ports) is not None
        parsed = parse_ttl(ttl, f"latest {uid!r}", is_timed=is_timed)
        function = Latest(stream.schema, parsed, is_timed=is_timed)
        return self.process_batch(function, schema=stream.schema, uid=uid, parallelism=parallelism)

    def window(
        self,
        spec: WindowSpec,
        *,
        allowed_lateness: Duration = "0 seconds",
        emit: str | None = None,
        early_every_rows: int | None = None,
        early_every: Duration | None = None,
    ) -> WindowedStream:
        """Cut the rows of each key into windows: `windows.tumbling("1 hour")` and others.

        A window emits when it is complete, and again for each row that comes no more than
        `allowed_lateness` after that; rows later still go to `.side("late")`. `emit` is "final"
        for nothing else, "change" for a result after every change too, and "every 10 seconds",
        "every 100 rows" or "every 100 rows or 10 seconds" for a result after that many rows, or
        that long, in processing time, after the first row since the last result. `.aggregate`
        emits at the end of an epoch, `.reduce` and `.process` after the row. Each result is of
        all rows so far, so a later one replaces those before it. `early_every_rows` and
        `early_every` are older forms of `emit`, and mean the same.
        """
        if not isinstance(spec, WindowSpec):
            raise PlanError(
                f"window: {spec!r} is not a description of windows\n"
                "  next: take windows.tumbling, sliding, session, count or global_"
            )
        stream = self._stream
        is_timed = unite_times(stream._job._nodes, stream._ports) is not None
        if spec.time == "event" and not isinstance(spec, Global) and not is_timed:
            raise PlanError(
                "windows by event time need one, and the stream has none\n"
                "  next: give the source event_time=, or the windows time='processing'"
            )
        early = Trigger(
            early_every_rows,
            None if early_every is None else duration_ms(early_every, "early_every of windows"),
        )
        if emit is not None:
            if early != FINAL:
                raise PlanError(
                    "windows have emit= as well as early_every= or early_every_rows=\n"
                    "  next: use emit= alone, as in emit='every 100 rows or 10 seconds'"
                )
            early = parse_emit(emit, "windows")
        lateness_ms = duration_ms(allowed_lateness, "allowed_lateness of windows")
        plan = WindowPlan(spec, lateness_ms, early.rows, early.ms)
        return WindowedStream(self, plan)

    def aggregate(
        self,
        *,
        uid: str = NO_UID,
        emit: str = "change",
        changes: bool | str = False,
        parallelism: int | str | None = None,
        **aggregates: str,
    ) -> ProcessStream:
        """Aggregates of all rows of a key so far: `total="sum(v)", n="count(*)"`.

        A key that got rows in an epoch is emitted at its end: the key columns, then the
        aggregates. In a job with rounds it is emitted at the end of each round that has rows of
        it. `emit="every 10 seconds"` emits a key at most once in that time, at the end of an
        epoch. Arguments are Spark SQL over the stream's columns; types and nulls are
        Spark's. `first` and `last` go by event time where there is one, else by arrival.
        An aggregate added later begins with the rows that come then.

        With `changes`, the result before is emitted too, with -1 in a last column `_change`, and
        the result after with 1. An aggregate of a stream with this column takes rows with -1 back:
        count, count(distinct ...), sum, avg, min and max do. A key that has no rows left
        is emitted with the counts 0 and nulls, or, with `changes`, is taken back.
        """
        every_ms = running_interval_ms(emit, f"aggregation {uid!r}")
        output = Output(changes=_check_changes(changes, uid), every_ms=every_ms)
        return aggregate(self._stream, self._columns, uid, aggregates, None, output, parallelism)


class WindowedStream:
    """A stream cut into windows. Results carry key, `window_start` and `window_end`."""

    def __init__(self, keyed: KeyedStream, plan: WindowPlan) -> None:
        self.keyed = keyed
        self.plan = plan

    @property
    def spec(self) -> WindowSpec:
        return self.plan.windows

    @property
    def allowed_lateness_ms(self) -> int:
        return self.plan.allowed_lateness_ms

    @property
    def early_rows(self) -> int | None:
        return self.plan.early_rows

    @property
    def early_ms(self) -> int | None:
        return self.plan.early_ms

    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        *,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Fold the rows of a window into one: `function(row, row)` gives a row of their schema.

        Results: the key columns, `window_start`, `window_end`, and the other columns.
        """
        if not callable(function):
            raise PlanError(f"operator {uid!r}: reduce needs a function, found {function!r}")
        check_arguments(function, f"operator {uid!r}: the function of reduce ", "left", "right")
        schema, keys = self.keyed._stream.schema, self._keys(uid)
        made = WindowReduce(self.plan, schema, keys, function)
        return self.keyed.process(made, schema=made.schema, uid=uid, parallelism=parallelism)

    def process(
        self,
        function: WindowFunction,
        *,
        schema: SchemaLike,
        uid: str = NO_UID,
        parallelism: int | None = None,
    ) -> ProcessStream:
        """Give all rows of a window to a function at once; they are kept until then.

        Results: the key columns, `window_start`, `window_end`, and the columns of `schema`.
        """
        check_window_function(function, uid)
        keyed = self.keyed
        made = WindowApply(self.plan, keyed._stream.schema, self._keys(uid), function, schema)
        return keyed.process(made, schema=made.schema, uid=uid, parallelism=parallelism)

    def aggregate(
        self,
        *,
        uid: str = NO_UID,
        changes: bool | str = False,
        parallelism: int | str | None = None,
        **aggregates: str,
    ) -> ProcessStream:
        """Aggregates of each window: `total="sum(v)", n="count(*)"`, as on a keyed stream.

        Results: the key columns, `window_start`, `window_end`, and the aggregates. They come at
        the end of an epoch, also those of early triggers; in a job with rounds, of a round.
        Without a key they are about all rows: Spark aggregates where the rows are, and one subtask
        merges what is left. With `changes`, the result before comes too, as on a keyed stream.
        """
        if "emit" in aggregates:
            raise PlanError(
                f"aggregation {uid!r}: windows have emit=\n"
                f"  next: write .window(..., emit={aggregates['emit']!r}).aggregate(...)"
            )
        keyed = self.keyed
        output = Output(changes=_check_changes(changes, uid))
        return aggregate(
            keyed._stream, keyed._columns, uid, aggregates, self.plan, output, parallelism
        )

    def _keys(self, uid: str) -> tuple[str, ...]:
        """Return the key columns, for code that runs per key."""
        if not self.keyed._columns:
            raise PlanError(
                f"operator {uid!r}: windows without a key have aggregates only\n"
                "  next: use .aggregate(...), or .key_by(...) before .window(...)"
            )
        return self.keyed._columns


def _check_changes(changes: bool | str, uid: str) -> bool:
    """Return the option; text is an aggregate that was given its name, maybe in a dict."""
    if not isinstance(changes, bool):
        raise PlanError(
            f"aggregation {uid!r}: changes={changes!r}\n  expected: True or False\n"
            "  next: give the aggregate another name"
        )
    return changes


def aggregate(
    stream: Stream,
    keys: tuple[str, ...],
    uid: str,
    asked: dict[str, str],
    plan: WindowPlan | None,
    output: Output,
    parallelism: int | str | None = None,
) -> ProcessStream:
    """Add the two nodes of an aggregation; `plan` has the windows, None for a running one."""
    job = stream._job
    check_uid(uid, job._nodes)
    bound = check_bound(uid, parallelism)

    def make(*, carries_rows: bool) -> tuple[Aggregation, Partials]:
        return aggregation(
            job._spark(),
            job._nodes,
            stream._ports,
            keys,
            asked,
            plan,
            output,
            carries_rows=carries_rows,
        )

    function, partials = make(carries_rows=False)
    name = f"partial:{uid}"
    job._nodes[name] = partial_node(name, stream._ports, uid, partials)
    inlet = Inlet((Port(name),), partials.layout.keys)
    job._nodes[uid] = ProcessNode(uid, (inlet,), function, function.schema, parallelism=bound)

    def keep_late_rows() -> None:
        function, partials = make(carries_rows=True)
        sides = ((LATE, stream.schema),)
        job._nodes[name] = partial_node(name, stream._ports, uid, partials)
        job._nodes[uid] = ProcessNode(
            uid, (inlet,), function, function.schema, sides, parallelism=bound
        )

    is_late = plan is not None and plan.has_late_rows
    return AggregateStream(job, uid, stream, function.schema, keep_late_rows if is_late else None)


class AggregateStream(ProcessStream):
    """The rows that an aggregation emits; windows by event time also have late rows."""

    def __init__(
        self,
        job: Job,
        uid: str,
        stream: Stream,
        schema: pa.Schema,
        keep_late_rows: Callable[[], None] | None,
    ) -> None:
        super().__init__(job, (Port(uid),), schema)
        self._input = stream
        self._keep_late_rows = keep_late_rows

    def side(self, tag: str, schema: SchemaLike | None = None) -> Stream:
        """`.side("late")`: the rows that came too late for all their windows, as they were."""
        uid = self._ports[0].node
        if tag != LATE:
            raise PlanError(f"aggregation {uid!r} has no side output {tag!r}\n  expected: {LATE!r}")
        if self._keep_late_rows is None:
            raise PlanError(
                f"aggregation {uid!r} has no late rows: only windows by event time do\n"
                "  next: leave the side output out"
            )
        if schema is not None:
            check_same_schema(self._input.schema, parse_schema(schema))
        node = self._job._nodes[uid]
        assert isinstance(node, ProcessNode)
        if not node.sides:
            self._keep_late_rows()
        return Stream(self._job, (Port(uid, LATE),), self._input.schema)
