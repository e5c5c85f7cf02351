"""From the graph to Spark: one DataFrame per epoch, a chain of levels, one action.

    rows of the epoch -> group, time, the row's columns, in a lane if there are several
      -> repartitionById(subtask) -> mapInArrow(forward)
      -> the next level ... -> acknowledgements

Rows that go different ways travel in one envelope through one shuffle, so the plan
is a chain and no operator runs twice because two branches pull on it. Only a
`.transform` makes a branch (`cairn.plan.transforms`).

With several executors, shuffled rows are joined to the pin table: one row per subtask, persisted.
The join zips shuffled partition i with cached partition i, so Spark prefers the executor that
holds it: subtask i stays where its slot is. One executor needs no pin table.

Always true here:
- the key group of a row is computed by Spark SQL, and `keygroups` computes the same in Python;
- partition i of a level is subtask i, and each one runs in every epoch, even without a row: no
  rule of Spark removes, joins or splits the partitions of a shuffle by number (see EPOCH_CONFIG);
- every subtask gets each broadcast row, before all others of the level, in one order;
- rows of a level with event time are sorted by it, ties by a hash of the row, where a function
  of the level wants that;
- the latest event time of an origin is observed where it is declared, whatever is filtered
  out later; a stage that runs twice observes the same.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.util import PythonEvalType

from cairn.key_groups import Starts
from cairn.plan.columns import Columns
from cairn.plan.cuts import Cuts
from cairn.plan.deploy import direct_inputs, lanes_in, outgoing
from cairn.plan.frames import lay_pin
from cairn.plan.graph import Edge, Graph, Level, Port, ProcessNode, TransformNode
from cairn.plan.measures import Observed, port_measures, source_fields, source_measures
from cairn.plan.observations import Observations
from cairn.plan.sql import SUBTASK, TIE, TIME, Feed, is_kept, is_sorted, quote
from cairn.plan.transforms import Transforms
from cairn.protocol.envelope import LANE
from cairn.types import schema_ddl
from cairn.worker.forward import Forward

TURN = "turn"
NEVER = "spark_partition_id() < 0"
"""A condition that no row meets, and that Spark cannot know."""


class Planner:
    """Builds an epoch's DataFrame. Made once per run: the Python functions are reused."""

    def __init__(
        self,
        graph: Graph,
        parallelism: int,
        forwards: Sequence[Forward],
        pin: DataFrame | None,
        starts: Starts = (),
    ) -> None:
        """`pin`: the pin table; None if there is one executor only."""
        self.graph = graph
        self.parallelism = parallelism
        self.forwards = list(forwards)
        self._columns = Columns()
        self._cuts = Cuts(self._columns, parallelism)
        self._observations = Observations(self._columns)
        self.transforms = Transforms(
            graph, parallelism, self._columns, self._cuts, self._observations
        )
        self.planned: list[DataFrame] = []
        """All frames of the epoch planned last."""
        self._is_apart = False
        self._feeds = [
            Feed(graph, level, parallelism, pin is not None, starts) for level in graph.levels
        ]
        self._functions: list[Any] = []
        for feed, forward in zip(self._feeds, forwards, strict=True):
            udf = pandas_udf(
                forward,
                returnType=schema_ddl(outgoing(graph, feed.level).schema),
                functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF,
            )
            # Pickling the function costs more than the rest of planning: done once.
            self._functions.append(udf(*(F.col(quote(name)) for name in feed.sent)))
        self.pin = pin

    def repin(self, spark: SparkSession) -> None:
        """Lay the pin table out again, over the executors that are there now."""
        assert self.pin is not None, "subtasks are pinned on several executors only"
        self.pin.unpersist(blocking=True)
        self.pin = lay_pin(spark, self.parallelism)

    def use_pin(self, pin: DataFrame) -> None:
        """Continue with another pin table of the same parallelism."""
        assert self.pin is not None, "subtasks are pinned on several executors only"
        self.pin.unpersist()
        self.pin = pin

    def epoch(
        self, rows: DataFrame, parts: Sequence[DataFrame] | None = None, *, observed: bool = True
    ) -> DataFrame:
        """Return a DataFrame whose rows are the acknowledgements of a batch.

        `parts` are the same rows, source by source, if they can be told apart. With
        `observed=False` the batch is empty, and `read_observed` finds nothing.
        """
        rows = self._open(rows, parts, observed=observed)
        for level in self.graph.levels:
            rows = self._run(self._feed(rows, level), level)
        self.planned = [*self._cuts.frames, rows]
        return rows

    def _open(
        self, rows: DataFrame, parts: Sequence[DataFrame] | None, *, observed: bool
    ) -> DataFrame:
        """Begin to plan an epoch: observe the rows of its sources."""
        self._observations.begin(is_on=observed)
        self._cuts.frames.clear()
        self._is_apart = parts is not None
        if parts is None:
            rows = self._observations.observe(rows, source_measures(self.graph))
            self.transforms.parts = [rows] * len(self.graph.sources)
        else:
            fields = source_fields(self.graph)
            self.transforms.parts = [
                self._observations.observe(
                    part, port_measures(self.graph, Port(source.name), fields[lane])
                )
                for lane, (part, source) in enumerate(zip(parts, self.graph.sources, strict=True))
            ]
        return rows

    def count(self, rows: DataFrame, parts: Sequence[DataFrame] | None = None) -> Observed:
        """Compute the rows of a batch, which sinks drop; return what was observed.

        For a job that needs no slots: one Spark action, without Python. A job with one stream of
        rows has no use for event times, and the action counts the rows.
        """
        level = self.graph.levels[0]
        dropped = self._find_dropped(level)
        ports = {port for edge in level.counted for port in edge.inputs}
        rows = self._open(rows, parts, observed=len(ports) > 1)
        found = self._share_sources(level, dropped)
        frames: dict[Port, DataFrame] = {}
        found += [self.transforms.apply(rows, port, frames) for port in dropped]
        self.planned = [*self._cuts.frames, *found]
        # Not `DataFrame.count`: Spark would compute only what the number needs.
        computed, *others = [frame._jdf.queryExecution().toRdd() for frame in found]
        for other in others:
            computed = computed.union(other)
        count = int(computed.count())
        if len(ports) > 1:
            return self.read_observed()
        return self.observe_count(count)

    def observe_count(self, count: int) -> Observed:
        """Return the observations of a batch of one stream, whose rows are all dropped."""
        return Observed({}, {edge.consumer: count for edge in self.graph.levels[0].counted})

    def read_observed(self) -> Observed:
        """Return what was observed, once the frames of an epoch are computed."""
        return self._observations.read(self.planned)

    def _run(self, rows: DataFrame, level: Level) -> DataFrame:
        feed = self._feeds[level.index]
        if self.pin is not None and self.parallelism == 1:
            # The size that Spark expects grows from level to level. Spark would divide a single
            # partition that it takes for too large among tasks without a pin.
            rows = self._cuts.cut(rows)
        rows = self._place(rows, feed) if feed.is_straight else self._shuffle(rows, feed)
        past = None
        if feed.passing:
            # Both parts read the files of the one shuffle.
            rows = self._cuts.cut(rows)
            others, mine = self._columns.parse(feed.is_passing, feed.is_taken)
            past = self._columns.project(
                rows.where(others), feed.pass_on(outgoing(self.graph, level))
            )
            rows = rows.where(mine)
        if self.pin is not None:
            # From the rows' side, so that the epoch's session and its settings plan the join; the
            # hash table is built on the hinted side, which has one row.
            side = self.pin.hint("shuffle_hash")
            rows = rows.join(side, F.col(SUBTASK) == F.col("pin"), "right")
        order = self._order(level)
        if order:
            rows = rows.sortWithinPartitions(*order)
        if rows.columns != feed.sent:
            rows = self._columns.project(rows, [quote(name) for name in feed.sent])
        function = self._functions[level.index]
        made = DataFrame(rows._jdf.mapInArrow(function._jc, False, None), rows.sparkSession)
        return made if past is None else made.union(past)

    def _shuffle(self, rows: DataFrame, feed: Feed) -> DataFrame:
        return rows.repartitionById(self.parallelism, *self._columns.parse(feed.subtask))

    def _place(self, rows: DataFrame, feed: Feed) -> DataFrame:
        """Rows that may go to any subtask: in one partition for each, and without a shuffle.

        Functions get a shuffle if the rows come in fewer partitions, so that all subtasks work.
        """
        cut = self._cuts.cut(rows)
        count = cut._jdf.queryExecution().logical().rdd().getNumPartitions()
        missing = self.parallelism - count
        if missing > 0 and any(isinstance(n, ProcessNode) for n in feed.consumers):
            return self._shuffle(cut, feed)
        if missing <= 0:
            return cut.coalesce(self.parallelism)
        empty = rows.sparkSession.range(0, missing, 1, missing).where(NEVER)
        nothing = [f"{feed.nothing(name)} AS {quote(name)}" for name in feed.columns]
        return (
            cut.union(self._columns.project(empty, nothing))
            if count
            else self._columns.project(empty, nothing)
        )

    def _order(self, level: Level) -> list[Any]:
        """By what the rows of a subtask are sorted; nothing: as they come."""
        has_turns = any(edge.way == "broadcast" for edge in level.edges)
        order: list[Any] = [F.col(TURN).isNull()] if has_turns else []
        columns = self._feeds[level.index].columns
        if TIME in columns and (has_turns or is_sorted(level)):
            order.append(TIME)
        if has_turns:
            order.append(TURN)
        # Rows of several inputs at one time: those of the first come first.
        if is_sorted(level):
            order += [name for name in (LANE, TIE) if name in columns]
        return order

    def _feed(self, rows: DataFrame, level: Level) -> DataFrame:
        """Bring rows of the sources, or of the level before, into a level's input."""
        transformed = self._find_transforms(level)
        dropped = [port for port in self._find_dropped(level) if port not in transformed]
        has_direct = self._has_direct(level)
        unread: list[DataFrame] = []
        if level.index == 0:
            unread = self._share_sources(level, [*transformed, *dropped])
            branches = self._feed_sources(level) if has_direct else []
        else:
            if len(transformed) + len(dropped) + has_direct > 1 and (transformed or dropped):
                rows = self._cuts.share(rows)
            branches = [self._feed_envelope(rows, level)] if has_direct else []
        frames: dict[Port, DataFrame] = {}
        for port, edges in transformed.items():
            branch = self.transforms.apply(rows, port, frames)
            fields = {0: {name: quote(name) for name in self.graph.schema(port).names}}
            branches.append(self._send(branch, fields, {0: edges}, level))
        unread += [self.transforms.apply(rows, port, frames) for port in dropped]
        branches += [self._drop(frame, level) for frame in unread]
        fed = branches[0]
        for branch in branches[1:]:
            fed = fed.union(branch)
        return self._broadcast(fed, level)

    def plan_transforms(
        self, sources: Mapping[str, DataFrame], grouped: frozenset[str]
    ) -> list[DataFrame]:
        """Plan all transforms before the first level; return frames that none of the others has."""
        level = self.graph.levels[0]
        self._cuts.frames.clear()
        self._observations.begin(is_on=True)
        self.transforms.grouped = grouped
        frames = {Port(name): rows for name, rows in sources.items()}
        rows = next(iter(sources.values()))
        found = []
        for port, edges in self._find_transforms(level).items():
            fields = {0: {name: quote(name) for name in self.graph.schema(port).names}}
            branch = self.transforms.apply(rows, port, frames)
            found.append(self._send(branch, fields, {0: edges}, level))
        counted = {port for edge in level.counted for port in edge.inputs if port not in frames}
        found += [self.transforms.apply(rows, port, frames) for port in counted]
        return [*self._cuts.frames, *found]

    def _drop(self, rows: DataFrame, level: Level) -> DataFrame:
        """No rows: Spark computes these, with all their columns, and has counted them."""
        feed = self._feeds[level.index]
        nothing = [f"{feed.nothing(name)} AS {quote(name)}" for name in feed.columns]
        return self._columns.project(
            self._cuts.cut(rows).where(*self._columns.parse(NEVER)), nothing
        )

    def _broadcast(self, fed: DataFrame, level: Level) -> DataFrame:
        """Broadcast rows to every subtask, each with its turn among them; others as they are."""
        lanes = [str(edge.index) for edge in level.edges if edge.way == "broadcast"]
        if not lanes:
            return fed
        names = [quote(name) for name in self._feeds[level.index].columns]
        is_theirs = f"lane IN ({', '.join(lanes)})"
        # Numbered before there is one for each subtask, so that all see the same order.
        turns = f"CASE WHEN {is_theirs} THEN monotonically_increasing_id() END AS {TURN}"
        everywhere = f"sequence(0, {self.parallelism - 1})"
        subtasks = f"explode(CASE WHEN {is_theirs} THEN {everywhere} ELSE array(subtask) END)"
        columns = [f"{subtasks} AS {SUBTASK}" if name == quote(SUBTASK) else name for name in names]
        return self._columns.project(self._columns.project(fed, [*names, turns]), [*columns, TURN])

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

    def _find_dropped(self, level: Level) -> list[Port]:
        """Transforms whose rows go to sinks that drop them."""
        ports = dict.fromkeys(port for edge in level.counted for port in edge.inputs)
        return [p for p in ports if isinstance(self.graph.nodes[p.node], TransformNode)]

    def _share_sources(self, level: Level, transforms: Sequence[Port]) -> list[DataFrame]:
        """Make sure that no source is read twice: rows that several branches read are shared.

        Return the rows that no branch reads, because sinks drop them as they are.
        """
        readers = collections.Counter(
            Port(source.name)
            for source in self.graph.sources
            if any(Port(source.name) in direct_inputs(self.graph, e) for e in lanes_in(level))
        )
        found, ahead = set(transforms), list(transforms)
        while ahead:
            node = self.graph.nodes[ahead.pop().node]
            for port in self.graph.read(node) if isinstance(node, TransformNode) else ():
                readers[port] += 1
                if port not in found:
                    found.add(port)
                    ahead.append(port)
        counts = [readers[Port(source.name)] for source in self.graph.sources]
        if self._is_apart:
            pairs = zip(self.transforms.parts, counts, strict=True)
            self.transforms.parts = [
                self._cuts.share(part) if count > 1 else part for part, count in pairs
            ]
            dropped = {port for edge in level.counted for port in edge.inputs}
            return [
                part
                for part, source, count in zip(
                    self.transforms.parts, self.graph.sources, counts, strict=True
                )
                if not count and Port(source.name) in dropped
            ]
        if transforms and sum(counts) > 1:
            self.transforms.parts = [self._cuts.share(self.transforms.parts[0])] * len(
                self.transforms.parts
            )
        return [] if any(counts) else self.transforms.parts[:1]

    def _feed_sources(self, level: Level) -> list[DataFrame]:
        """Rows of the sources that go as they are to operators and sinks."""
        fields = source_fields(self.graph)
        ways = {
            lane: [e for e in lanes_in(level) if Port(self.graph.sources[lane].name) in e.inputs]
            for lane in fields
        }
        if not self._is_apart:
            return [self._send(self.transforms.parts[0], fields, ways, level)]
        return [
            self._send(self.transforms.parts[lane], {lane: fields[lane]}, {lane: ways[lane]}, level)
            for lane in fields
            if ways[lane]
        ]

    def _send(
        self,
        rows: DataFrame,
        fields: Mapping[int, Mapping[str, str]],
        ways: Mapping[int, Sequence[Edge]],
        level: Level,
        *,
        has_acks: bool = False,
    ) -> DataFrame:
        """Rows of some lanes into the lanes of a level, in one pass, however many edges there are.

        `fields` has the SQL of the columns of each lane, `ways` the edges that its rows take.
        """
        feed = self._feeds[level.index]
        if any(len(edges) > 1 for edges in ways.values()):
            return self._columns.project(rows, [feed.fork(fields, ways)])
        edges = {lane: taken[0] for lane, taken in ways.items() if taken}
        if len(edges) < len(fields):
            kept = is_kept(list(fields), list(edges), has_acks=has_acks)
            rows = rows.where(*self._columns.parse(kept))
        return self._columns.project(rows, feed.label(fields, edges, has_acks=has_acks))

    def _feed_envelope(self, rows: DataFrame, level: Level) -> DataFrame:
        """Rows of the level before, and its acknowledgements."""
        before = outgoing(self.graph, self.graph.levels[level.index - 1])
        edges = {edge.index: [edge] for edge in lanes_in(level)}
        ways = {lane: edges.get(lane, []) for lane in before.schemas}
        return self._send(rows, before.fields, ways, level, has_acks=True)
