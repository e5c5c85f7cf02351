"""The rows of a batch, source by source.

Spark runs several sources as one query and hands their rows over together, in a lane each.
Picking the rows of one source out of them would read all sources. Spark's own plan of the batch
still has them apart: a union, whose parts begin with the number of their lane.

Always true here:
- a part has the rows of one source, because its plan says so; if the plan looks otherwise,
  the rows stay together;
- each part is run once, as a part of Spark's plan, so that Spark counts what its sources read.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession

from cairn.logs import logger
from cairn.protocol.envelope import LANE

QUERY_PROPERTY = "sql.streaming.queryId"


def take_apart(spark: SparkSession, rows: DataFrame, count: int) -> list[DataFrame] | None:
    """Return the rows of each of `count` sources; None if Spark's plan does not tell.

    `rows` are those of the batch that the thread at hand runs, and `spark` started the query.
    """
    try:
        query_id = spark.sparkContext.getLocalProperty(QUERY_PROPERTY)
        query = spark._jsparkSession.streams().get(query_id)
        plan = query.streamingQuery().lastExecution().executedPlan()
        found = _find_parts(plan)
    except Exception as error:
        logger.debug("the rows of all sources are read together: %s", error)
        return None
    if found is None:
        return None
    return [_frame(rows, found.get(lane, [])) for lane in range(count)]


def _find_parts(plan: Any) -> dict[int, list[Any]] | None:
    """Return the physical plans of each lane; None if one of them has no number."""
    found: dict[int, list[Any]] = {}
    root = _open(plan)
    for part in items(root.children()) if _kind(root) == "UnionExec" else [plan]:
        inner = _open(part)
        if _kind(inner) == "LocalTableScanExec" and inner.rows().isEmpty():
            continue  # Its source has no new rows.
        lane = _lane_of(inner)
        if lane is None:
            return None
        found.setdefault(lane, []).append(part)
    return found


def _lane_of(plan: Any) -> int | None:
    """Return the number that all rows of a plan begin with; None if it is not known."""
    if _kind(plan) != "ProjectExec":
        return None
    first = plan.projectList().apply(0)
    is_number = _kind(first) == "Alias" and _kind(first.child()) == "Literal"
    return int(first.child().value()) if is_number and first.name() == LANE else None


def _frame(rows: DataFrame, plans: list[Any]) -> DataFrame:
    """Return the rows of some plans as one frame, with the schema of all rows."""
    session, schema = rows.sparkSession, rows._jdf.schema()
    jvm, jsession = session._jvm, session._jsparkSession
    frame: DataFrame | None = None
    for plan in plans:
        made = DataFrame(jsession.internalCreateDataFrame(plan.execute(), schema, False), session)
        frame = made if frame is None else frame.union(made)
    if frame is not None:
        return frame
    return DataFrame(jsession.createDataFrame(jvm.java.util.ArrayList(), schema), session)


def _open(plan: Any) -> Any:
    """Return the plan inside of those that only say how it is run."""
    while _kind(plan) in ("WholeStageCodegenExec", "InputAdapter"):
        plan = plan.child()
    return plan


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def items(sequence: Any) -> list[Any]:
    """Return the elements of a Scala sequence."""
    return [sequence.apply(index) for index in range(sequence.size())]
