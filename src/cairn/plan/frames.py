"""DataFrames and schemas of a job that do not depend on the epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cairn.errors import PlanError
from cairn.plan.deploy import source_envelope
from cairn.plan.graph import Graph
from cairn.plan.parts import items, kind_of
from cairn.plan.pruning import Read
from cairn.plan.sql import quote
from cairn.protocol.envelope import LANE
from cairn.types import parse_schema, schema_ddl, type_ddl
from cairn.user_code import find_raise

_TIME_MARK = "cairn.time"
"""In the metadata of the event time column, while a transform is planned."""


def dataframe_schema(df: DataFrame) -> pa.Schema:
    return parse_schema(df.schema)


def plan_schema(
    spark: SparkSession, schema: pa.Schema, function: Callable[[DataFrame], DataFrame]
) -> pa.Schema:
    """The schema a transform gives, found by planning it on no rows."""
    return plan_transform(spark, schema, function, None).schema


class Planned(NamedTuple):
    """A transform, as planned on no rows."""

    schema: pa.Schema
    time: str | None
    """The first column that has the values of the event time."""
    calls_python: bool


def unreadable_rows(spark: SparkSession, schema: pa.Schema) -> DataFrame:
    """Return rows to plan with: to read one raises an error."""
    raising = spark.range(1).where("raise_error('a transform reads rows while it plans') IS NULL")
    # The plan begins here, so that the optimizer sees no more than the columns.
    rows = raising._jdf.queryExecution().toRdd()
    planned = spark.createDataFrame([], schema_ddl(schema))._jdf.schema()
    made = spark._jsparkSession.internalCreateDataFrame(rows, planned, False)
    return DataFrame(made, spark)


def plan_transform(
    spark: SparkSession,
    schema: pa.Schema,
    function: Callable[[DataFrame], DataFrame],
    time: str | None,
) -> Planned:
    """Plan a transform of rows with an event time in the column `time`.

    Spark keeps the metadata of a column that is only renamed or moved, and of no other.
    """
    try:
        rows = spark.createDataFrame([], schema_ddl(schema))
        if time is not None:
            marked = {time: {_TIME_MARK: True}}
            columns = [(name, F.col(quote(name))) for name in schema.names]
            rows = rows.select(
                *(
                    c.alias(name, metadata=marked[name]) if name in marked else c
                    for name, c in columns
                )
            )
        result = function(rows)
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
    kept = (field.name for field in result.schema if _TIME_MARK in field.metadata)
    return Planned(dataframe_schema(result), next(kept, None), calls_python(result))


def calls_python(frame: DataFrame) -> bool:
    """True if Spark calls Python functions for a frame."""
    patterns = frame.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    plan = frame._jdf.queryExecution().analyzed()
    return bool(plan.containsPattern(patterns.PYTHON_UDF()))


def streaming_input(
    graph: Graph, read: Read, frames: Sequence[DataFrame] | None = None
) -> DataFrame:
    """All sources as one streaming DataFrame: one query, one line of offsets per source.

    Of columns that are not read, a single source has none, and several have nulls. `frames` replace
    those of the sources.
    """
    frames = [source.dataframe for source in graph.sources] if frames is None else frames
    if len(graph.sources) == 1:
        (source,), (frame,) = graph.sources, frames
        names = [name for name in source.schema.names if name in read[source.name]]
        if len(names) == len(source.schema):
            return frame
        return frame.select(*(F.col(quote(name)) for name in names))
    envelope = source_envelope(graph)
    rows: DataFrame | None = None
    for lane, (source, frame) in enumerate(zip(graph.sources, frames, strict=True)):
        fields = {column: name for name, column in envelope.fields[lane].items()}
        columns = [F.lit(lane).alias(LANE)]
        for name, type_ in envelope.columns.items():
            is_read = fields.get(name) in read[source.name]
            value = F.col(quote(fields[name])) if is_read else F.lit(None)
            columns.append(value.cast(type_ddl(type_)).alias(name))
        part = frame.select(*columns)
        rows = part if rows is None else rows.union(part)
    assert rows is not None
    return rows


def find_file_format(graph: Graph) -> str | None:
    """Return the format of the first source that reads files; None if no source does."""
    for source in graph.sources:
        for leaf in items(source.dataframe._jdf.queryExecution().analyzed().collectLeaves()):
            if kind_of(leaf) == "StreamingRelation":
                name = str(leaf.dataSource().className()).lower()
                if name in ("csv", "json", "orc", "parquet", "text"):
                    return name
    return None


def no_input(graph: Graph, session: SparkSession, read: Read) -> DataFrame:
    """The rows of an epoch without a batch: none, with the columns of the sources."""
    schema = streaming_input(graph, read)._jdf.schema()
    # Python's createDataFrame would run a job of its own.
    none = session._jvm.java.util.ArrayList()
    return DataFrame(session._jsparkSession.createDataFrame(none, schema), session)


def lay_pin(spark: SparkSession, parallelism: int) -> DataFrame:
    """A pin table: one row per subtask, persisted where the subtask is to run."""
    pin = plan_pin(spark, parallelism)
    pin.count()
    return pin


def lay_again(pin: DataFrame) -> DataFrame:
    """Return a pin table of the same rows, each where it is if its executor still gets tasks."""
    # A plan of its own, or Spark would take it for the one that is persisted.
    again = pin.where("pin >= 0").persist()
    again.count()
    return again


def plan_pin(spark: SparkSession, parallelism: int) -> DataFrame:
    """A pin table that the first action on it will lay out."""
    places = plan_places(spark, parallelism)
    return places.repartitionById(parallelism, F.col("pin")).persist()


def plan_places(spark: SparkSession, parallelism: int) -> DataFrame:
    """One row per subtask, in a partition each."""
    return spark.range(0, parallelism, 1, parallelism).select(F.col("id").cast("int").alias("pin"))
