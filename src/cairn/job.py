"""A job: sources, streams, and how to start it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cairn.connected import ConnectedStreams, connect
from cairn.driver.coordinator.autoscale import Autoscale
from cairn.driver.coordinator.guarantees import Guarantee
from cairn.driver.serving import Serve, as_serve
from cairn.errors import PlanError
from cairn.keyed import KeyedStream
from cairn.plan.check import check_event_time, check_name, check_uid, check_watermark
from cairn.plan.graph import Graph, Node, Port, SourceNode
from cairn.plan.levels import build_graph
from cairn.protocol.letters import OnError
from cairn.stream import Stream
from cairn.types.durations import Duration, duration_ms, span_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cairn.run import Run


class Job:
    """A named graph of operators. `max_parallelism` is fixed for the life of its state."""

    def __init__(self, name: str, *, max_parallelism: int = 128, chaining: bool = True) -> None:
        """`chaining`: functions that need no shuffle run in the process of the one that feeds them.

        Without it each of them is a stage of its own, behind a shuffle.
        """
        check_name("job", name)
        self.name = name
        self.max_parallelism = max_parallelism
        self.chaining = chaining
        self._nodes: dict[str, Node] = {}

    def source(
        self,
        name: str,
        dataframe: DataFrame,
        *,
        event_time: str | None = None,
        watermark: Duration | None = None,
        idle_after: Duration | None = "1 minute",
        replayable: bool | None = None,
    ) -> Stream:
        """A streaming DataFrame. With `event_time`, rows of a key are processed in that order.

        `event_time` is a timestamp, a date, a string that is one, or a number of milliseconds
        since 1970. `watermark` ("10 seconds") is how late rows may come: what is later still,
        or has no time, goes to `.side("late")`. A source without rows for `idle_after` does
        not hold back the watermark of the others; None: it always does.

        `replayable` says whether rows can be read again once Spark has told the source that it is
        done with them; `checkpoint_every` needs that. None: told by what the source is.
        """
        from cairn.plan.frames import dataframe_schema

        check_uid(name, self._nodes)
        if not getattr(dataframe, "isStreaming", False):
            raise PlanError(
                f"source {name!r} is not a streaming DataFrame\n"
                "  next: read it with spark.readStream"
            )
        for other in self._sources():
            if other.dataframe.sparkSession is not dataframe.sparkSession:
                raise PlanError(
                    f"sources {other.name!r} and {name!r} are of two Spark sessions\n"
                    "  next: read all sources of a job with one session"
                )
        schema = dataframe_schema(dataframe)
        where = f"source {name!r}"
        check_event_time(event_time, schema, where)
        mark = check_watermark(watermark, idle_after, event_time, where)
        self._nodes[name] = SourceNode(name, dataframe, schema, event_time, mark, replayable)
        return Stream(self, (Port(name),), schema)

    def connect(self, **streams: KeyedStream) -> ConnectedStreams:
        """Keyed streams into one function: `job.connect(orders=..., payments=...).process(...)`.

        The function is a KeyedProcess with a method `on_<name>(row, ctx)` for each of them. Rows
        with equal keys share state and timers, whatever the key columns are called. Where all
        streams have an event time, an epoch's rows of a key come in its order across them.
        """
        return connect(self, streams)

    def __repr__(self) -> str:
        return f"<job {self.name}: {', '.join(self._nodes) or 'nothing yet'}>"

    def _repr_html_(self) -> str:
        return self._html(f"job {self.name}")

    def _html(self, title: str, columns: Sequence[tuple[str, str]] = ()) -> str:
        """The graph as it stands, under a title; of a stream with its columns."""
        from cairn.report.notebook import graph_html

        try:
            return graph_html(title, self.explain("svg"), columns, "")
        except PlanError as error:  # A job that is being written is not whole yet.
            return graph_html(title, None, columns, str(error))

    def graph(self, on_error: OnError = "fail") -> Graph:
        """The job as it stands, checked and cut into levels; `on_error` as for `start`."""
        return build_graph(
            self.name,
            self.max_parallelism,
            dict(self._nodes),
            chaining=self.chaining,
            rows_in_slots=on_error == "dead-letter",
        )

    def explain(self, format: Literal["text", "svg", "json"] = "text") -> str:
        """The graph: stages, operators, states, shuffles, chains. Nothing is started.

        As text it is also printed. "svg" is a picture of it, "json" the same for programs.
        """
        from cairn.plan.explain import explain_graph
        from cairn.report.drawing import draw_graph
        from cairn.report.graph_text import graph_text

        graph = explain_graph(self.graph())
        if format == "svg":
            return draw_graph(graph)
        if format == "json":
            return msgspec.json.format(msgspec.json.encode(graph), indent=2).decode()
        if format != "text":
            raise PlanError(
                f"explain: unknown format {format!r}\n  expected: one of text, svg, json"
            )
        text = graph_text(graph)
        print(text)
        return text

    def start(
        self,
        *,
        checkpoint: str,
        parallelism: int | str | None = None,
        autoscale: Autoscale = "off",
        backend: str = "heap",
        backend_memory_mb: int = 512,
        slot_memory_mb: int | None = None,
        trigger: Duration = "1 second",
        savepoint: str | None = None,
        reset_sources: Sequence[str] = (),
        allow_dropped_state: bool = False,
        allow_dropped_output: bool = False,
        retained_epochs: int = 10,
        retained_for: Duration | None = None,
        on_stop: Literal["retain", "delete"] = "retain",
        spark_checkpoint: str | None = None,
        drain: bool = False,
        on_error: OnError = "fail",
        guarantee: Guarantee = "exactly-once",
        checkpoint_every: int = 1,
        commit_timeout: Duration | None = None,
        serve: Serve | str | bool | None = None,
        ha: str | None = None,
        standby: Literal["warm", "hot"] = "warm",
        restart: str = "none",
    ) -> Run:
        """Run the job, from its newest epoch if the checkpoint has one.

        `trigger` is an interval between epochs, or "available-now" to process what is there
        and end. With `drain` such a run ends with the watermark at infinity: every timer
        fires, every window closes. `backend="rocksdb"` keeps state on local disk,
        `backend="postgresql://…"` or `"redis://…"` in a database (`"env:NAME"` names a variable
        that has the URL), each with at most `backend_memory_mb` of memory per slot and operator.

        With `autoscale="on"` and a range such as `parallelism="2..16"`, the job changes the number
        of its subtasks by its backlog and the busy time of its busiest subtask; "observe" only
        reports what it would do.

        `slot_memory_mb` is the memory that a slot may use: one that comes near it is reported, with
        its largest states. On a cluster the default is a slot's share of the memory that an
        executor has beside its heap.

        An empty checkpoint may start from a `savepoint`. Sources may be added and reordered;
        `reset_sources` are read from their beginning, once per run. `allow_dropped_state` goes on
        without operators, states and sources that the program no longer has.
        `allow_dropped_output` goes on although a sink that the program no longer has, or has with
        another target, may not have published the newest epoch.

        An epoch is kept while it is among the last `retained_epochs`, or younger than
        `retained_for` ("7 days"). `on_stop="delete"` removes the checkpoint when the run ends
        without an error. `spark_checkpoint` is where Spark keeps its own log: by default the
        checkpoint, or the driver's disk if the checkpoint is an object store.

        With `on_error="dead-letter"` a row (or timer) that a function raises on does not fail the
        epoch: what it did is undone, and it goes to the operator's `.side("errors")`.

        `guarantee` says what a crash may do to the output: see
        `cairn.driver.coordinator.guarantees`. An epoch has `checkpoint_every` batches of Spark's:
        it is committed after the last of them, or when no more come; a crash runs them again. A
        sink that cannot publish pauses the job until it can, or for `commit_timeout` ("1 hour"),
        after which the run fails.

        With `serve` the run answers over HTTP, and shows its dashboard, at `run.url`: True for
        any free port of this machine, "HOST:PORT", or a `cairn.Serve` with tokens.

        `ha` names a group of drivers ("store:", "zookeeper://host:2181/path" or
        "kubernetes:lease/NAME"): one of them runs the job, and the others wait. `start` returns
        when this one leads; if it loses the lead later, it waits again. While it waits, Spark and
        its slots are running; with `standby="hot"` the slots also follow the state, epoch by epoch.

        `restart` says when a run that failed begins again: "none", "fixed(3, 10 seconds)",
        "exponential(1 second, 5 minutes)" or "rate(5 per 10 minutes)". A failure that repetition
        cannot fix ends the run all the same.
        """
        from cairn.driver.options import Options
        from cairn.run import Run

        return Run.start(
            self.graph(on_error),
            Options(
                checkpoint=str(checkpoint),
                parallelism=parallelism,
                autoscale=autoscale,
                backend=backend,
                backend_memory_mb=backend_memory_mb,
                slot_memory_mb=slot_memory_mb,
                trigger=trigger if isinstance(trigger, str) else _interval_text(trigger),
                savepoint=None if savepoint is None else str(savepoint),
                reset_sources=tuple(reset_sources),
                allow_dropped_state=allow_dropped_state,
                allow_dropped_output=allow_dropped_output,
                retained_epochs=retained_epochs,
                retained_for=retained_for,
                on_stop=on_stop,
                spark_checkpoint=None if spark_checkpoint is None else str(spark_checkpoint),
                drain=drain,
                on_error=on_error,
                guarantee=guarantee,
                checkpoint_every=checkpoint_every,
                commit_timeout=commit_timeout,
                serve=as_serve(serve),
                ha=ha,
                standby=standby,
                restart=restart,
            ),
        )

    def _sources(self) -> list[SourceNode]:
        return [node for node in self._nodes.values() if isinstance(node, SourceNode)]

    def _spark(self) -> SparkSession:
        session: Any = self._sources()[0].dataframe.sparkSession
        return session


def _interval_text(trigger: dt.timedelta) -> str:
    """Write the interval of a trigger as Spark reads it."""
    return span_text(duration_ms(trigger, "trigger"))
