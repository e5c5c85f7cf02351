"""The rows behind transforms: what users write in Spark SQL, and row functions in Spark's workers.

Only a `.transform` makes a branch in the plan of an epoch. The rows that several branches read go
through a shuffle first, and all branches read the files of that one.

Always true here:
- rows that several branches read were computed once: where Spark computes a part again and
  gets other rows, it runs all stages again that have read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.util import PythonEvalType

from cairn.plan.columns import Columns
from cairn.plan.cuts import Cuts
from cairn.plan.deploy import outgoing, source_envelope, taps
from cairn.plan.graph import (
    Graph,
    PartialNode,
    Port,
    RowsNode,
    SourceNode,
    TransformNode,
)
from cairn.plan.measures import port_measures
from cairn.plan.observations import Observations
from cairn.plan.pruning import fill_unread, read_all
from cairn.plan.sql import quote
from cairn.protocol.envelope import ACK, LANE, Envelope
from cairn.types import schema_ddl
from cairn.worker.rows import RowStep, RowSteps


class Transforms:
    """Makes the frames behind transforms. Made once per run: Python functions are reused."""

    def __init__(
        self,
        graph: Graph,
        parallelism: int,
        columns: Columns,
        cuts: Cuts,
        observations: Observations,
    ) -> None:
        self._graph = graph
        self._parallelism = parallelism
        self._columns = columns
        self._cuts = cuts
        self._observations = observations
        self._taps = taps(graph)
        self._row_functions: dict[str, Any] = {}
        """Columns that call functions over rows, by the name of the last node; made once."""
        self.parts: list[DataFrame] = []
        """The rows of each source in the epoch at hand; all the same if they are not apart."""
        self.grouped: frozenset[str] = frozenset()
        """Operators that Spark aggregates ahead for, in the epoch at hand."""
        self.read = read_all(graph)
        """The columns of the sources that the rows of an epoch have."""

    def apply(self, rows: DataFrame, port: Port, frames: dict[Port, DataFrame]) -> DataFrame:
        """Return the rows of an output, from those of a source or of the level before.

        `frames` has the outputs that this epoch has planned.
        """
        if port in frames:
            return frames[port]
        node = self._graph.nodes[port.node]
        if isinstance(node, TransformNode):
            steps = self._row_steps(node) if isinstance(node, RowsNode) else [node]
            inputs = self._graph.read(steps[0])
            united, *others = [self.apply(rows, port, frames) for port in inputs]
            for other in others:
                united = united.unionByName(other)
            if isinstance(node, PartialNode):
                frame = self._partial(united, node)
            elif isinstance(node, RowsNode):
                frame = self._call_rows(united, [s for s in steps if isinstance(s, RowsNode)])
            else:
                frame = node.function(united)
            frame = self._observations.observe(frame, port_measures(self._graph, port))
            if self._is_read_again(port):
                frame = self._cuts.share(frame)
        elif isinstance(node, SourceNode):
            lane = self._graph.sources.index(node)
            frame = self.parts[lane]
            if len(self._graph.sources) > 1:
                frame = self._unpack(frame, source_envelope(self._graph), lane)
            frame = fill_unread(frame, node, self.read)
        else:
            level = self._graph.levels[self._graph.level_of(port.node)]
            frame = self._unpack(rows, outgoing(self._graph, level), self._taps[port])
        frames[port] = frame
        return frame

    def _unpack(self, rows: DataFrame, envelope: Envelope, lane: int) -> DataFrame:
        """Return the rows of a lane, with the names of its columns."""
        is_mine = f"{LANE} = {lane}" if envelope.has_lanes else f"{ACK} IS NULL"
        pairs = zip(envelope.names[lane], envelope.schemas[lane].names, strict=True)
        columns = [f"{column} AS {quote(name)}" for column, name in pairs]
        return self._columns.project(rows.where(*self._columns.parse(is_mine)), columns)

    def _row_steps(self, node: RowsNode) -> list[RowsNode]:
        """Return the row functions that run in one Python worker, the node's own last."""
        steps = [node]
        while True:
            inputs = self._graph.read(steps[0])
            before = self._graph.nodes[inputs[0].node]
            if len(inputs) > 1 or not isinstance(before, RowsNode):
                return steps
            if self._is_read_again(inputs[0]) or port_measures(self._graph, inputs[0]):
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
            for node in self._graph.nodes.values()
            if isinstance(node, TransformNode) and port in self._graph.read(node)
        ]
        if not readers:
            return False
        # These read their rows once.
        edges = [edge for edge in self._graph.edges if port in edge.inputs]
        return len(readers) + len(edges) > 1 or not isinstance(readers[0], PartialNode | RowsNode)

    def _partial(self, rows: DataFrame, node: PartialNode) -> DataFrame:
        """Return the partials of an aggregation: of each row, or of the epoch's groups."""
        partials = node.partials
        # Without a key one subtask would get all rows.
        is_grouped = node.uid in self.grouped or partials.layout.is_keyless
        if partials.grouping is None or not is_grouped:
            return self._columns.project(rows, partials.rows)
        groups = rows._jdf.groupBy(self._columns.sequence(rows, partials.grouping))
        first, *others = partials.grouped
        (column,) = self._columns.parse(first)
        made = groups.agg(column._jc, self._columns.sequence(rows, others))
        grouped = DataFrame(made, rows.sparkSession)
        # In as many tasks as there are subtasks, whatever the session's number for shuffles is.
        return grouped.coalesce(self._parallelism)
