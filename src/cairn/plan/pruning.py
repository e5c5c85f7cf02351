"""The columns of sources that a job reads: the others are not even parsed.

Spark hands a batch over as finished rows, so its optimizer cannot take columns back out of the
source. The transforms of the first level are planned once, on no rows, and the optimizer shows
which columns they read.

Always true here:
- a column is left out only if no plan of the first level refers to it, with any value it may have;
- if Spark's plan is not understood, all columns are read;
- a column that was left out raises an error where it is read after all: a transform may plan
  something else in a later epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from cairn.logs import logger
from cairn.plan.deploy import lanes_in
from cairn.plan.graph import Graph, PartialNode, Port, SourceNode
from cairn.plan.parts import items
from cairn.plan.sql import escape, quote
from cairn.types import schema_ddl, type_ddl

Read = Mapping[str, frozenset[str]]
"""Per source, the columns that are read."""


def read_all(graph: Graph) -> Read:
    return {source.name: frozenset(source.schema.names) for source in graph.sources}


def find_whole(graph: Graph) -> set[str]:
    """Return the sources whose rows go as they are to an operator or a sink."""
    first = graph.levels[0]
    return {p.node for edge in (*lanes_in(first), *first.counted) for p in edge.inputs} & {
        source.name for source in graph.sources
    }


def find_read(planner: Any, session: SparkSession) -> Read:
    """Return the columns of each source that the first level reads."""
    graph = planner.graph
    whole = find_whole(graph)
    if len(whole) == len(graph.sources):
        return read_all(graph)
    try:
        return _find_read(planner, session, whole)
    except Exception as error:
        # An epoch that plans the same raises it, and says where.
        logger.debug("all columns of the sources are read: %s", error)
        return read_all(graph)


def _find_read(planner: Any, session: SparkSession, whole: Collection[str]) -> Read:
    graph = planner.graph
    everything = read_all(graph)
    leaves = {source.name: empty_rows(session, source) for source in graph.sources}
    found = {name: everything[name] if name in whole else frozenset() for name in everything}
    for name, node in graph.time_origins.items():
        for port in graph.bare((Port(name),)):
            if port.node in found and node.event_time is not None:
                found[port.node] |= {node.event_time}
    for plan in _plans(planner, leaves):
        read = _read_in(plan, leaves, graph)
        if read is None:
            return everything
        found = {name: found[name] | read[name] for name in found}
        if found == everything:
            return everything
    # Spark needs a column to count rows by.
    found = {s.name: found[s.name] or frozenset(s.schema.names[:1]) for s in graph.sources}
    filled = {s.name: fill_unread(leaves[s.name], s, found) for s in graph.sources}
    if any("raise_error" in plan.toString() for plan in _plans(planner, filled)):
        return everything
    return found


def _plans(planner: Any, leaves: Mapping[str, DataFrame]) -> Iterator[Any]:
    """Yield Spark's optimized plans of what the first level does with these rows of the sources."""
    partial = {n.uid for n in planner.graph.nodes.values() if isinstance(n, PartialNode)}
    for grouped in (frozenset(), frozenset(partial)) if partial else (frozenset(),):
        for frame in planner.plan_transforms(leaves, grouped):
            yield frame._jdf.queryExecution().optimizedPlan()


def _read_in(plan: Any, leaves: Mapping[str, DataFrame], graph: Graph) -> Read | None:
    """Return the columns that a plan reads of each source; None if that cannot be known."""
    if not plan.subqueriesAll().isEmpty():
        return None
    rdds = {name: leaf._jdf.queryExecution().logical().rdd() for name, leaf in leaves.items()}
    names = {source.name: source.schema.names for source in graph.sources}
    read, ours = plan.outputSet(), []
    for node in _walk(plan):
        children = items(node.children())
        if children:
            read = getattr(read, "$plus$plus")(node.references())
            if len(children) > 1:
                # A union refers to the columns of its inputs by their place.
                for child in children:
                    read = getattr(read, "$plus$plus")(child.outputSet())
            continue
        kind = node.getClass().getSimpleName()
        if kind == "LogicalRDD":
            found = [name for name, rdd in rdds.items() if node.rdd().equals(rdd)]
            if not found:
                return None  # Rows that the transform has computed, perhaps from ours.
            ours.append((found[0], node))
        elif kind in ("ExternalRDD", "InMemoryRelation"):
            return None
    if not ours:
        return None
    columns: dict[str, frozenset[str]] = dict.fromkeys(names, frozenset())
    for source, leaf in ours:
        attributes = zip(names[source], items(leaf.output()), strict=True)
        columns[source] |= {name for name, each in attributes if read.contains(each)}
    return columns


def _walk(plan: Any) -> Iterator[Any]:
    yield plan
    for child in items(plan.children()):
        yield from _walk(child)


def empty_rows(session: SparkSession, source: SourceNode) -> DataFrame:
    """Return no rows of a source, which Spark's optimizer does not know to be none."""
    jvm = session._jvm
    row = jvm.java.lang.Class.forName("org.apache.spark.sql.catalyst.InternalRow")
    rdd = session._jsparkSession.sparkContext().emptyRDD(jvm.scala.reflect.ClassTag.apply(row))
    # All nullable: nothing may follow from a column's never being null.
    ddl = schema_ddl(pa.schema([field.with_nullable(True) for field in source.schema]))
    schema = jvm.org.apache.spark.sql.types.StructType.fromDDL(ddl)
    made = session._jsparkSession.internalCreateDataFrame(rdd, schema, False)
    return DataFrame(made, session)


def fill_unread(rows: DataFrame, source: SourceNode, read: Read) -> DataFrame:
    """Return rows of a source with all its columns; those that are not read raise an error."""
    if len(read[source.name]) == len(source.schema):
        return rows
    columns = []
    for field in source.schema:
        column = quote(field.name)
        if field.name not in read[source.name]:
            text = (
                f"column {field.name!r} of source {source.name!r} was not read when the job began; "
                "a transform must plan the same in every epoch"
            )
            column = f"cast(raise_error('{escape(text)}') AS {type_ddl(field.type)}) AS {column}"
        columns.append(column)
    return rows.selectExpr(*columns)


__all__ = ["Read", "fill_unread", "find_read", "read_all"]
