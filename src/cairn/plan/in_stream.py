"""Transforms that Spark's streaming query runs itself, so that a batch is planned once.

`foreachBatch` has planned a batch before it hands it over. A job that needs no slots only counts
its rows; planning them again, behind its transforms, would take as long as planning the batch. So
the query reads the stream behind the transforms, and what it hands over is counted.

Always true here:
- the query does this for one stream only, and if the transforms are filters and projections that
  give the same rows in a stream as in a batch;
- transforms are called for every batch all the same; if one plans something else than at the
  start, its batch is planned from the rows of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cairn.errors import PlanError
from cairn.logs import logger
from cairn.plan.graph import Graph, PartialNode, Port, RowsNode, SourceNode, TransformNode
from cairn.plan.parts import Batch, kind_of, open_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KINDS = frozenset(("Project", "Filter", "SubqueryAlias"))


class InStream:
    """The one stream of a job without slots, from its source to the sinks that drop its rows."""

    def __init__(self, source: SourceNode, steps: Sequence[TransformNode]) -> None:
        self._source = source.dataframe
        self._steps = steps
        self.rows: DataFrame = self._apply()
        """The stream that the query reads."""
        if steps and _depends_on_batch(self.rows):
            raise ValueError("expressions are evaluated batch by batch")
        self._plan = _plan_of(self.rows)
        self._depth = _depth_above(self._plan, _plan_of(self._source))

    def _apply(self) -> DataFrame:
        rows = self._source
        for step in self._steps:
            rows = step.function(rows)
        return rows

    def is_current(self) -> bool:
        """True if the transforms still plan what the query runs."""
        if not self._steps:
            return True
        try:
            return bool(_plan_of(self._apply()).sameResult(self._plan))
        except Exception:
            return False  # Planned from the rows of the source it raises the same, and says where.

    def open_source(self, spark: SparkSession, rows: DataFrame) -> Batch:
        """Return the rows of the source in a batch that the query has handed over.

        `spark` started the query.
        """
        batch = open_source(spark, rows, self._depth)
        if batch is None:
            raise PlanError(
                "a transform plans something else than when the job began, and the rows of its "
                "source cannot be read again\n"
                "  next: plan the same in every epoch, or start the job again"
            )
        return batch


def find_in_stream(graph: Graph) -> InStream | None:
    """Return the stream that the query can transform itself; None if there is none."""
    if graph.needs_slots or len(graph.sources) != 1:
        return None
    ports = {port for edge in graph.levels[0].counted for port in edge.inputs}
    if len(ports) != 1:
        return None
    steps = _steps_to(graph, ports.pop())
    if steps is None:
        return None
    try:
        return InStream(graph.sources[0], steps)
    except Exception as error:
        logger.debug("transforms are planned batch by batch: %s", error)
        return None


def count_rows_of(rows: DataFrame) -> int:
    """Compute the rows of a batch as the query hands them over; return their number."""
    return int(rows._jdf.queryExecution().logical().rdd().count())


def _steps_to(graph: Graph, port: Port) -> list[TransformNode] | None:
    """Return the transforms from the source to a port; None if other steps are between them."""
    steps: list[TransformNode] = []
    node = graph.nodes[port.node]
    while not isinstance(node, SourceNode):
        if not isinstance(node, TransformNode) or isinstance(node, PartialNode | RowsNode):
            return None
        inputs = graph.read(node)
        if len(inputs) != 1:
            return None
        steps.insert(0, node)
        node = graph.nodes[inputs[0].node]
    return steps


def _plan_of(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed()


def _depth_above(plan: Any, source: Any) -> int:
    """Return the number of nodes above the source. ValueError if a stream may not have them."""
    depth = 0
    while not plan.fastEquals(source):
        if kind_of(plan) not in _KINDS or not plan.deterministic():
            raise ValueError(f"{kind_of(plan)} is planned batch by batch")
        plan = plan.child()
        depth += 1
    return depth


def _depends_on_batch(rows: DataFrame) -> bool:
    """True if expressions have another value in a stream, or come from another plan."""
    patterns = rows.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    plan = _plan_of(rows)
    return any(
        plan.containsPattern(pattern)
        for pattern in (patterns.CURRENT_LIKE(), patterns.PLAN_EXPRESSION(), patterns.PYTHON_UDF())
    )


__all__ = ["InStream", "count_rows_of", "find_in_stream"]
