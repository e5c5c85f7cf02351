"""The rows of a batch, out of Spark's own plan of it.

`foreachBatch` hands over finished rows: Spark has planned the batch up to there. A job that goes on
from those rows copies each row once more, and none of its filters and columns reaches the files.
Where a batch only reads files, its logical plan is taken instead, and planned together with the
job. All other batches go on from the rows.

Spark runs several sources as one query and hands their rows over together, in a lane each.
Picking the rows of one source out of them would read all sources. Spark's own plan of the batch
still has them apart: a union, whose parts begin with the number of their lane.

Always true here:
- a plan is run again only if that gives the same rows: it reads files that never change, and
  all of its expressions are deterministic; so sources that plan their reads are asked once;
- a part has the rows of one source, because its plan says so; if the plan looks otherwise,
  the rows stay together;
- each part is run once, and Spark counts what its sources read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from cairn.logs import logger
from cairn.protocol.envelope import LANE

QUERY_PROPERTY = "sql.streaming.queryId"
_WRAPPERS = ("WholeStageCodegenExec", "InputAdapter")
_REPEATABLE = frozenset(
    ("Project", "Filter", "SubqueryAlias", "Union", "LogicalRelation", "LocalRelation")
)
"""Kinds of logical plans that keep nothing between batches."""
_ROWS_METRIC = "numOutputRows"


class Batch(NamedTuple):
    """The rows of a batch, in the form that is cheapest to go on from."""

    rows: DataFrame
    parts: list[DataFrame] | None
    """The rows source by source; None if there is one source, or it cannot be known."""
    scans: list[Any]
    """Spark's scans of the batch if other scans run in their place: they count no rows."""


def open_batch(spark: SparkSession, rows: DataFrame, count: int) -> Batch:
    """Return the rows of the batch that the thread at hand runs, read from `count` sources.

    `spark` started the query, which has handed over `rows`.
    """
    try:
        execution = _execution_of(spark)
        logical = _logical_of(execution)
        is_repeatable = _is_repeatable(logical)
        found = None
        if count > 1:
            found = _find_parts(logical if is_repeatable else execution.executedPlan())
        make = _plan_rows if is_repeatable else _compute_rows
        parts = None if found is None else _frames(rows, found, count, make)
        if not is_repeatable or (count > 1 and parts is None):
            return Batch(rows, parts, [])
        return Batch(_plan_rows(rows, logical), parts, list(_scans(execution.executedPlan())))
    except Exception as error:
        logger.debug("the rows of all sources are read together: %s", error)
        return Batch(rows, None, [])


def open_source(spark: SparkSession, rows: DataFrame, depth: int) -> Batch | None:
    """Return the rows that the batch at hand reads, below `depth` nodes of the query's plan.

    None if they cannot be read again.
    """
    execution = _execution_of(spark)
    logical = _logical_of(execution)
    for _ in range(depth):
        logical = logical.child()
    if not _is_repeatable(logical):
        return None
    return Batch(_plan_rows(rows, logical), None, list(_scans(execution.executedPlan())))


def _execution_of(spark: SparkSession) -> Any:
    """Return Spark's execution of the batch that the thread at hand runs."""
    query_id = spark.sparkContext.getLocalProperty(QUERY_PROPERTY)
    return spark._jsparkSession.streams().get(query_id).streamingQuery().lastExecution()


def _logical_of(execution: Any) -> Any:
    """Return the logical plan of a batch, without the node for its sink."""
    return execution.analyzed().children().apply(0)


def count_rows(batch: Batch, frames: Iterable[DataFrame]) -> None:
    """Set the numbers of rows that the scans of Spark's own plan would have counted.

    `frames` were computed in their place. Spark's progress and its listeners show the numbers.
    """
    try:
        ran = [scan for f in frames for scan in _scans(f._jdf.queryExecution().executedPlan())]
        for scan in batch.scans:
            relation, metric = scan.relation(), _metric(scan)
            metric.set(0)  # A failed attempt may have set it.
            for other in ran:
                if other.relation().equals(relation):
                    metric.add(_metric(other).value())
    except Exception as error:
        logger.debug("Spark's progress of a batch has no number of rows: %s", error)


def _metric(scan: Any) -> Any:
    return scan.metrics().apply(_ROWS_METRIC)


def _scans(plan: Any) -> Iterator[Any]:
    """Yield the scans of files in a physical plan."""
    for leaf in items(plan.collectLeaves()):
        if kind_of(leaf) == "FileSourceScanExec":
            yield leaf


def _is_repeatable(plan: Any) -> bool:
    """True if a logical plan gives the same rows whenever it is run."""
    if not plan.deterministic():
        return False
    ahead = [plan]
    while ahead:
        node = ahead.pop()
        kind = kind_of(node)
        if kind not in _REPEATABLE:
            return False
        if kind == "LogicalRelation" and kind_of(node.relation()) != "HadoopFsRelation":
            return False
        ahead += items(node.children())
    return True


def _find_parts(plan: Any) -> dict[int, list[Any]] | None:
    """Return the plans of each lane, logical or physical; None if one of them has no number."""
    found: dict[int, list[Any]] = {}
    root = _open(plan)
    is_union = kind_of(root) in ("Union", "UnionExec")
    for part in items(root.children()) if is_union else [plan]:
        inner = _open(part)
        if kind_of(inner) == "LocalTableScanExec" and inner.rows().isEmpty():
            continue  # Its source has no new rows.
        lane = _lane_of(inner)
        if lane is None:
            return None
        found.setdefault(lane, []).append(part)
    return found


def _lane_of(plan: Any) -> int | None:
    """Return the number that all rows of a plan begin with; None if it is not known."""
    if kind_of(plan) not in ("Project", "ProjectExec"):
        return None
    first = plan.projectList().apply(0)
    is_number = kind_of(first) == "Alias" and kind_of(first.child()) == "Literal"
    return int(first.child().value()) if is_number and first.name() == LANE else None


def _frames(rows: DataFrame, found: dict[int, list[Any]], count: int, make: Any) -> list[DataFrame]:
    """Return the rows of each lane as one frame, with the schema of all rows."""
    return [_unite(rows, [make(rows, plan) for plan in found.get(at, [])]) for at in range(count)]


def _unite(rows: DataFrame, made: Sequence[DataFrame]) -> DataFrame:
    if not made:
        session, schema = rows.sparkSession, rows._jdf.schema()
        none = session._jvm.java.util.ArrayList()
        return DataFrame(session._jsparkSession.createDataFrame(none, schema), session)
    frame = made[0]
    for other in made[1:]:
        frame = frame.union(other)
    return frame


def _plan_rows(rows: DataFrame, plan: Any) -> DataFrame:
    """Return the rows of a logical plan."""
    session = rows.sparkSession
    made = _dataset_class(session._jvm).ofRows(session._jsparkSession, plan)
    return DataFrame(made, session)


@functools.lru_cache(maxsize=1)
def _dataset_class(jvm: Any) -> Any:
    # Each part of the name is looked for among all classes of the JVM.
    return jvm.org.apache.spark.sql.classic.Dataset


def _compute_rows(rows: DataFrame, plan: Any) -> DataFrame:
    """Return the rows of a physical plan."""
    session, schema = rows.sparkSession, rows._jdf.schema()
    made = session._jsparkSession.internalCreateDataFrame(plan.execute(), schema, False)
    return DataFrame(made, session)


def _open(plan: Any) -> Any:
    """Return the plan inside of those that only say how it is run."""
    while kind_of(plan) in _WRAPPERS:
        plan = plan.child()
    return plan


def kind_of(node: Any) -> str:
    """Return the name of the class of a plan or an expression."""
    return str(node.getClass().getSimpleName())


def items(sequence: Any) -> list[Any]:
    """Return the elements of a Scala sequence."""
    return [sequence.apply(index) for index in range(sequence.size())]
