"""From the graph to Spark: one DataFrame per epoch, a chain of levels, one action.

    rows of the epoch -> lane, group, subtask, a struct per lane
      -> repartitionById(subtask) -> joined to the pin table -> mapInArrow(forward)
      -> the next level ... -> acknowledgements

Rows that go different ways travel in one envelope through one shuffle, so the plan
is a chain and no operator runs twice because two branches pull on it. Only a
`.transform` makes a branch; the rows it branches from go through a shuffle first, and
all branches read the files of that one.

The pin table has one row per subtask, persisted. Joining the epoch's rows to it zips
shuffled partition i with cached partition i, so Spark prefers the executor that
holds it: subtask i stays where its slot is.

Always true here:
- the key group of a row is computed by Spark SQL, and `keygroups` computes the same in Python;
- rows that several branches read were computed once: where Spark computes a part again and
  gets other rows, it runs all stages again that have read it;
- every subtask gets at least one row, the pin's, so each one runs in every epoch;
- every subtask gets each broadcast row, before all others of the level, in one order;
- rows of a level with event time are sorted by it, ties by a hash of the row, where a function
  of the level wants that;
- the latest event time of an origin is observed where it is declared, whatever is filtered
  out later; a stage that runs twice observes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.util import PythonEvalType

from cairn.errors import PlanError
from cairn.plan.deploy import direct_inputs, lanes_out, taps
from cairn.plan.graph import (
    Edge,
    Graph,
    Level,
    PartialNode,
    Port,
    RowsNode,
    SourceNode,
    TransformNode,
)
from cairn.plan.sql import input_columns, is_sorted, lane_values, lanes_in, quote, time_sql
from cairn.protocol.spec import ACK_LANE, envelope_schema, lane_name
from cairn.types import parse_schema, schema_ddl
from cairn.user_code import find_raise
from cairn.worker.forward import Forward
from cairn.worker.rows import RowStep, RowSteps

OBSERVED = "cairn"
TURN = "turn"


def dataframe_schema(df: DataFrame) -> pa.Schema:
    return parse_schema(df.schema)


def plan_schema(
    spark: SparkSession, schema: pa.Schema, function: Callable[[DataFrame], DataFrame]
) -> pa.Schema:
    """The schema a transform gives, found by planning it on no rows."""
    try:
        result = function(spark.createDataFrame([], schema_ddl(schema)))
    except Exception as error:
        # After a semicolon Spark goes on with its plan of it.
        why, at = str(error).partition(";\n")[0], find_raise(error, function)
        raise PlanError(
            f"transform cannot be planned: {why}\n  input: {schema_ddl(schema)}"
            + ("" if at is None else f"\n  at: {at}"),
            at=at,
        ) from error.with_traceback(None)
    if not isinstance(result, DataFrame):
        raise PlanError(f"transform must return a DataFrame, found {type(result).__name__}")
    return dataframe_schema(result)


def streaming_input(graph: Graph) -> DataFrame:
    """All sources as one streaming DataFrame: one query, one line of offsets per source."""
    if len(graph.sources) == 1:
        return graph.sources[0].dataframe
    rows: DataFrame | None = None
    for index, source in enumerate(graph.sources):
        columns = [F.lit(index).alias("source")]
        for other, node in enumerate(graph.sources):
            struct = F.struct(*(F.col(quote(name)) for name in node.schema.names))
            null = F.lit(None).cast(f"struct<{schema_ddl(node.schema)}>")
            columns.append((struct if other == index else null).alias(f"s{other}"))
        part = source.dataframe.select(*columns)
        rows = part if rows is None else rows.union(part)
    assert rows is not None
    return rows


def no_input(graph: Graph, session: SparkSession) -> DataFrame:
    """The rows of an epoch without a batch: none, with the columns of the sources."""
    schema = streaming_input(graph)._jdf.schema()
    # Python's createDataFrame would run a job of its own.
    none = session._jvm.java.util.ArrayList()
    return DataFrame(session._jsparkSession.createDataFrame(none, schema), session)


def lay_pin(spark: SparkSession, parallelism: int) -> DataFrame:
    """A pin table: one row per subtask, persisted where the subtask is to run."""
    pin = plan_pin(spark, parallelism)
    pin.count()
    return pin


def plan_pin(spark: SparkSession, parallelism: int) -> DataFrame:
    """A pin table that the first action on it will lay out."""
    pins = spark.range(parallelism).select(F.col("id").cast("int").alias("pin"))
    return pins.repartitionById(parallelism, F.col("pin")).persist()


class Planner:
    """Builds an epoch's DataFrame. Made once per run: the Python functions are reused."""

    def __init__(
        self,
        graph: Graph,
        parallelism: int,
        forwards: Sequence[Forward],
        pin: DataFrame,
    ) -> None:
        self.graph = graph
        self.parallelism = parallelism
        self._taps = taps(graph)
        self._cuts: list[DataFrame] = []
        """Frames of the epoch planned last that later frames begin with."""
        self.grouped: frozenset[str] = frozenset()
        """Operators that Spark aggregates ahead for, in the epoch at hand."""
        self._observes = True
        self._observations: dict[str, list[str]] = {}
        """For the epoch planned last: the origins whose times each observation holds."""
        self._parsed: dict[str, Column] = {}
        self._columns: list[list[str]] = []
        self._functions: list[Any] = []
        self._row_functions: dict[str, Any] = {}
        """Columns that call functions over rows, by the name of the last node; made once."""
        for level, forward in zip(graph.levels, forwards, strict=True):
            columns = [*input_columns(level), "pin"]
            udf = pandas_udf(
                forward,
                returnType=self._output_ddl(level),
                functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF,
            )
            self._columns.append(columns)
            # Pickling the function costs more than the rest of planning: done once.
            self._functions.append(udf(*(F.col(name) for name in columns)))
        self._use_pin(pin)

    def _output_ddl(self, level: Level) -> str:
        return schema_ddl(envelope_schema(lanes_out(self.graph, level)))

    def _use_pin(self, pin: DataFrame) -> None:
        self.pin = pin
        self._pin_side = pin.hint("shuffle_hash")

    def repin(self, spark: SparkSession) -> None:
        """Lay the pin table out again, over the executors that are there now."""
        self.pin.unpersist(blocking=True)
        self._use_pin(lay_pin(spark, self.parallelism))

    def epoch(self, rows: DataFrame, *, observed: bool = True) -> DataFrame:
        """Return a DataFrame whose rows are the acknowledgements of a batch.

        With `observed=False` the batch is empty, and `latest_times` finds nothing.
        """
        self._observations.clear()
        self._cuts.clear()
        self._observes = observed
        rows = self._observe(rows, self._source_times())
        for level in self.graph.levels:
            rows = self._run(self._feed(rows, level), level)
        return rows

    # The latest event times

    def latest_times(self, epoch: DataFrame) -> dict[str, int]:
        """Return the latest event time of each origin that had rows, once `epoch` is collected."""
        found: dict[str, int] = {}
        # Read from the query that ran: listeners are called later, and for failures too. The driver
        # collects it as tasks end, so an executor that is lost later takes nothing along, and a
        # task that runs again reports the same.
        for frame in (*self._cuts, epoch):
            metrics = frame._jdf.queryExecution().observedMetrics()
            for name, origins in self._observations.items():
                row = metrics.get(name)
                if row.isEmpty():
                    continue  # It belongs to another frame, or Spark knew of no rows.
                for index, origin in enumerate(origins):
                    if not row.get().isNullAt(index):
                        latest = row.get().getLong(index)
                        found[origin] = max(latest, found.get(origin, latest))
        return found

    def _observe(self, rows: DataFrame, times: Sequence[tuple[str, str]]) -> DataFrame:
        """Rows as they are; the latest of some times, each of an origin, is kept in mind."""
        if not times or not self._observes:
            return rows
        name = f"{OBSERVED}-{len(self._observations)}"
        self._observations[name] = [origin for origin, _ in times]
        latest = [F.expr(f"max({sql})").alias(f"t{n}") for n, (_, sql) in enumerate(times)]
        return rows.observe(name, *latest)

    def _source_times(self) -> list[tuple[str, str]]:
        """(origin, SQL) of event times that sources have by themselves."""
        found = []
        for index, source in enumerate(self.graph.sources):
            alone = len(self.graph.sources) == 1
            for origin, column in self._find_origins(Port(source.name)):
                type_ = source.schema.field(column).type
                sql = time_sql(quote(column) if alone else f"s{index}.{quote(column)}", type_)
                found.append((origin, sql if alone else f"CASE source WHEN {index} THEN {sql} END"))
        return found

    def _find_origins(self, port: Port) -> list[tuple[str, str]]:
        """(origin, column) of the watermarks declared for what comes from here."""
        return [
            (name, node.event_time)
            for name, node in self.graph.time_origins.items()
            if port in self.graph.bare((Port(name),)) and node.event_time is not None
        ]

    def _run(self, rows: DataFrame, level: Level) -> DataFrame:
        if self.parallelism == 1:
            # The size that Spark expects grows from level to level. Spark would divide a single
            # partition that it takes for too large among tasks without a pin.
            rows = self._cut(rows)
        shuffled = rows.repartitionById(self.parallelism, F.col("subtask"))
        # From the rows' side, so that the epoch's session and its settings plan the join; the
        # hash table is built on the hinted side, which has one row.
        joined = shuffled.join(self._pin_side, F.col("subtask") == F.col("pin"), "right")
        order = self._order(level)
        if order:
            joined = joined.sortWithinPartitions(*order)
        function = self._functions[level.index]
        jdf = joined._jdf.mapInArrow(function._jc, False, None)
        return DataFrame(jdf, rows.sparkSession)

    def _order(self, level: Level) -> list[Any]:
        """By what the rows of a subtask are sorted; nothing: as they come."""
        has_turns = any(edge.way == "broadcast" for edge in level.edges)
        order: list[Any] = [F.col(TURN).isNull()] if has_turns else []
        if "time" in input_columns(level) and (has_turns or is_sorted(level)):
            order.append("time")
        if has_turns:
            order.append(TURN)
        # Rows of several inputs at one time: those of the first come first.
        return [*order, "lane", "tie"] if is_sorted(level) else order

    def _project(self, rows: DataFrame, columns: Sequence[str]) -> DataFrame:
        """Like selectExpr, but SQL is parsed once per run, not once per epoch."""
        return rows.select(*self._columns_of(columns))

    def _columns_of(self, columns: Sequence[str]) -> list[Column]:
        for text in columns:
            if text not in self._parsed:
                self._parsed[text] = F.expr(text)
        return [self._parsed[text] for text in columns]

    def _feed(self, rows: DataFrame, level: Level) -> DataFrame:
        """Bring rows of the sources, or of the level before, into a level's input."""
        transformed = self._find_transforms(level)
        direct = self._feed_sources if level.index == 0 else self._feed_envelope
        if transformed and (len(transformed) > 1 or self._has_direct(level)):
            rows = self._share(rows)
        branches = [direct(rows, level)] if self._has_direct(level) else []
        frames: dict[Port, DataFrame] = {}
        for port, edges in transformed.items():
            branch = self._transform(rows, port, frames)
            branches.append(self._select(branch, [("", edges)], level))
        fed = branches[0]
        for branch in branches[1:]:
            fed = fed.union(branch)
        return self._broadcast(fed, level)

    def _share(self, rows: DataFrame) -> DataFrame:
        """The same rows, for several branches to read: behind a shuffle that they have in common.

        Not a cache: a block of it is computed again when it is lost, or when two executors ask
        for it at once, and an operator whose result depends on chance or on the order of its
        rows would have run twice, with one result for each branch. Lost files of a shuffle are
        computed again too, but then Spark compares, and runs every reader of them again.
        """
        return self._cut(rows.repartitionById(self.parallelism, F.expr(self._here)))

    def _cut(self, rows: DataFrame) -> DataFrame:
        """The same rows, as a plan that begins here.

        Otherwise the optimizer would push what each branch needs of rows and columns down, and
        make a shuffle for each of them.
        """
        self._cuts.append(rows)
        session, jdf = rows.sparkSession, rows._jdf
        cut = session._jsparkSession.internalCreateDataFrame(
            jdf.queryExecution().toRdd(), jdf.schema(), False
        )
        return DataFrame(cut, session)

    @property
    def _here(self) -> str:
        """SQL: the subtask whose number the partition at hand has."""
        return f"pmod(spark_partition_id(), {self.parallelism})"

    def _broadcast(self, fed: DataFrame, level: Level) -> DataFrame:
        """Broadcast rows to every subtask, each with its turn among them; others as they are."""
        lanes = [str(edge.index) for edge in level.edges if edge.way == "broadcast"]
        if not lanes:
            return fed
        names = input_columns(level)
        is_theirs = f"lane IN ({', '.join(lanes)})"
        # Numbered before there is one for each subtask, so that all see the same order.
        turns = f"CASE WHEN {is_theirs} THEN monotonically_increasing_id() END AS {TURN}"
        everywhere = f"sequence(0, {self.parallelism - 1})"
        subtasks = f"explode(CASE WHEN {is_theirs} THEN {everywhere} ELSE array(subtask) END)"
        columns = [f"{subtasks} AS subtask" if name == "subtask" else name for name in names]
        return self._project(self._project(fed, [*names, turns]), [*columns, TURN])

    def _has_direct(self, level: Level) -> bool:
        # Acknowledgements of the level before always pass.
        return level.index > 0 or any(direct_inputs(self.graph, edge) for edge in lanes_in(level))

    def _find_transforms(self, level: Level) -> dict[Port, list[Edge]]:
        """Transforms applied just before this level, with the edges they feed."""
        found: dict[Port, list[Edge]] = {}
        uids = (
            {node.name for node in self.graph.sources}
            if level.index == 0
            else {op.uid for op in self.graph.levels[level.index - 1].operators}
        )
        for edge in lanes_in(level):
            for port in edge.inputs:
                is_transform = isinstance(self.graph.nodes[port.node], TransformNode)
                if is_transform and self.graph.origins(port)[0].node in uids:
                    found.setdefault(port, []).append(edge)
        return found

    def _transform(self, rows: DataFrame, port: Port, frames: dict[Port, DataFrame]) -> DataFrame:
        if port in frames:
            return frames[port]
        node = self.graph.nodes[port.node]
        if isinstance(node, TransformNode):
            steps = self._row_steps(node) if isinstance(node, RowsNode) else [node]
            inputs = self.graph.read(steps[0])
            united, *others = [self._transform(rows, port, frames) for port in inputs]
            for other in others:
                united = united.unionByName(other)
            if isinstance(node, PartialNode):
                frame = self._partial(united, node)
            elif isinstance(node, RowsNode):
                frame = self._call_rows(united, [s for s in steps if isinstance(s, RowsNode)])
            else:
                frame = node.function(united)
            types = {field.name: field.type for field in node.schema}
            declared = self._find_origins(port)
            frame = self._observe(frame, [(o, time_sql(quote(c), types[c])) for o, c in declared])
            if self._is_read_again(port):
                frame = self._share(frame)
        elif isinstance(node, SourceNode):
            if len(self.graph.sources) == 1:
                frame = rows
            else:
                index = self.graph.sources.index(node)
                frame = rows.where(F.col("source") == index).select(f"s{index}.*")
        else:
            lane = self._taps[port]
            frame = rows.where(F.col("lane") == lane).select(f"{lane_name(lane)}.*")
        frames[port] = frame
        return frame

    def _row_steps(self, node: RowsNode) -> list[RowsNode]:
        """Return the row functions that run in one Python worker, the node's own last."""
        steps = [node]
        while True:
            inputs = self.graph.read(steps[0])
            before = self.graph.nodes[inputs[0].node]
            if len(inputs) > 1 or not isinstance(before, RowsNode):
                return steps
            if self._is_read_again(inputs[0]) or self._find_origins(inputs[0]):
                return steps
            steps.insert(0, before)

    def _call_rows(self, rows: DataFrame, steps: Sequence[RowsNode]) -> DataFrame:
        """Run plain Python functions over rows, in the stage that the rows are in."""
        name = steps[-1].name
        if name not in self._row_functions:
            udf = pandas_udf(
                RowSteps([RowStep(s.name, s.function, s.read_schema, s.schema) for s in steps]),
                returnType=schema_ddl(steps[-1].schema),
                functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF,
            )
            columns = (F.col(quote(field)) for field in steps[0].read_schema.names)
            self._row_functions[name] = udf(*columns)
        jdf = rows._jdf.mapInArrow(self._row_functions[name]._jc, False, None)
        return DataFrame(jdf, rows.sparkSession)

    def _is_read_again(self, port: Port) -> bool:
        """True if the output of a transform is, or may be, read more than once."""
        readers = [
            node
            for node in self.graph.nodes.values()
            if isinstance(node, TransformNode) and port in self.graph.read(node)
        ]
        if not readers:
            return False
        # These read their rows once.
        edges = [edge for edge in self.graph.edges if port in edge.inputs]
        return len(readers) + len(edges) > 1 or not isinstance(readers[0], PartialNode | RowsNode)

    def _partial(self, rows: DataFrame, node: PartialNode) -> DataFrame:
        """Return the partials of an aggregation: of each row, or of the epoch's groups."""
        partials = node.partials
        # Without a key one subtask would get all rows.
        is_grouped = node.uid in self.grouped or partials.layout.is_keyless
        if partials.grouping is None or not is_grouped:
            return self._project(rows, partials.rows)
        groups = rows.groupBy(*self._columns_of(partials.grouping))
        grouped = groups.agg(*self._columns_of(partials.grouped))
        # In as many tasks as there are subtasks, whatever the session's number for shuffles is.
        return grouped.coalesce(self.parallelism)

    def _feed_sources(self, rows: DataFrame, level: Level) -> DataFrame:
        per_source: list[tuple[str, list[Edge]]] = []
        for index, source in enumerate(self.graph.sources):
            edges = [e for e in lanes_in(level) if Port(source.name) in e.inputs]
            prefix = "" if len(self.graph.sources) == 1 else f"s{index}."
            per_source.append((prefix, edges))
        return self._select(rows, per_source, level)

    def _select(
        self, rows: DataFrame, per_source: list[tuple[str, list[Edge]]], level: Level
    ) -> DataFrame:
        """Rows into lanes in one pass, however many sources and edges there are."""
        names = input_columns(level)
        if len(per_source) == 1 and len(per_source[0][1]) == 1:
            prefix, (edge,) = per_source[0]
            values = self._values(edge, prefix, level)
            return self._project(rows, [f"{values[name]} AS {name}" for name in names])
        arrays = []
        for prefix, edges in per_source:
            structs = [
                "named_struct("
                + ", ".join(f"'{n}', {self._values(edge, prefix, level)[n]}" for n in names)
                + ")"
                for edge in edges
            ]
            arrays.append(f"array({', '.join(structs)})" if structs else "null")
        if len(arrays) == 1:
            return self._project(rows, [f"inline({arrays[0]})"])
        cases = " ".join(f"WHEN {index} THEN {array}" for index, array in enumerate(arrays))
        return self._project(rows, [f"inline(CASE source {cases} END)"])

    def _values(self, edge: Edge, prefix: str, level: Level) -> dict[str, str]:
        return lane_values(self.graph, self.parallelism, edge, prefix, level)

    def _feed_envelope(self, rows: DataFrame, level: Level) -> DataFrame:
        """Rows that are in lanes already: say where each one goes now."""
        edges = lanes_in(level)
        held = {lane for lane, _ in lanes_out(self.graph, self.graph.levels[level.index - 1])}
        values = {
            edge.index: self._values(edge, f"{lane_name(edge.index)}.", level)
            for edge in edges
            if edge.index in held
        }
        columns = []
        for name in input_columns(level):
            if name == "lane" or name == "ack":
                columns.append(name)
            elif name.startswith("l"):
                lane = int(name[1:])
                schema = next(e.schema for e in edges if e.index == lane)
                null = f"cast(null AS struct<{schema_ddl(schema)}>)"
                columns.append(name if lane in held else f"{null} AS {name}")
            else:
                other = {"group": "0", "subtask": self._here}.get(name, "cast(null AS bigint)")
                cases = " ".join(f"WHEN {lane} THEN {v[name]}" for lane, v in values.items())
                case = f"CASE lane {cases} ELSE {other} END" if cases else other
                columns.append(
                    f"coalesce({case}, 0) AS {name}" if name == "subtask" else f"{case} AS {name}"
                )
        kept = ", ".join(str(lane) for lane in [ACK_LANE, *values])
        return self._project(rows.where(f"lane IN ({kept})"), columns)
