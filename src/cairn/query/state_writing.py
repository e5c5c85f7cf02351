"""State written by Spark: rows of before and DataFrames, brought to the groups of their keys.

    rows kept, read by key group  ┐
    DataFrames that were given    ┴─ key group ─ shuffle by ranges of them ─ sort ─ Parquet files

Always true here:
- executors write the files, the driver learns what they are called; none has a row in memory
  longer than its place, or its list, is being looked at;
- a task that runs twice writes files of its own; those that nobody was told of are removed.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from cairn.errors import CairnError
from cairn.ids import new_id
from cairn.key_groups import groups_of, spark_key_group_sql
from cairn.plan.sql import quote
from cairn.snapshots.columns import PARQUET_GROUP
from cairn.snapshots.destination import open_claimed, put_file
from cairn.snapshots.savepoint import SavedFile, SavedStateFile, state_folder
from cairn.snapshots.table_rows import COPY, RANK
from cairn.snapshots.writer import StateTask
from cairn.storage.store import open_store
from cairn.types import all_nullable, parse_schema, schema_ddl, type_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PART: Final = "_cairn_part"
_BYTES: Final = pa.binary()
_Batches = Iterator[pa.RecordBatch]
_decode_files: Final = msgspec.json.Decoder(list[SavedStateFile]).decode


class InExecutors:
    """A `Rewriter` for DataFrames, and for Arrow tables too."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def collect(self, given: Any) -> pa.Table:
        return given if isinstance(given, pa.Table) else given.toArrow()

    def rewrite(self, task: StateTask, given: Sequence[Any]) -> list[SavedStateFile] | None:
        from pyspark.sql import functions as F

        rows = self._stage(task, given)
        types = {field.name: field.type for field in task.rows.staged}
        keys = [(quote(name), types[name]) for name in task.rows.key_names]
        parts = min(task.group_count, self._spark.sparkContext.defaultParallelism)
        group = F.expr(spark_key_group_sql(keys, task.group_count)).alias(PARQUET_GROUP)
        part = F.expr(f"CAST({PARQUET_GROUP} * {parts}L DIV {task.group_count} AS INT)")
        files = (
            rows.select(group, "*")
            .select("*", part.alias(_PART))
            .repartitionById(parts, F.col(_PART))
            .drop(_PART)
            .sortWithinPartitions(*self._order(task))
            .mapInArrow(_write_files(task), "files string, error binary")
            .collect()
        )
        for row in files:
            if row["error"] is not None:
                raise pickle.loads(row["error"])
        found = [file for row in files for file in _decode_files(row["files"])]
        self._remove_others(task, {file.path for file in found})
        return sorted(found, key=lambda file: file.first_group)

    def _stage(self, task: StateTask, given: Sequence[Any]) -> DataFrame:
        """Return all rows, in columns of the declared types without NOT NULL."""
        from pyspark.sql import functions as F

        staged: DataFrame | None = self._read_kept(task) if task.kept is not None else None
        for rank, table in enumerate(given, start=task.first_rank):
            frame = self._frame(table) if isinstance(table, pa.Table) else table
            columns = []
            for field in task.rows.staged:
                column = F.lit(None)
                if field.name == RANK:
                    column = F.lit(rank)
                elif field.name in frame.columns:
                    column = F.col(quote(field.name))
                assert field.name != COPY, "lists of subtasks are little"
                ddl = type_ddl(all_nullable(field.type))
                columns.append(column.cast(ddl).alias(field.name))
            frame = frame.select(*columns)
            staged = frame if staged is None else staged.unionAll(frame)
        if staged is None:
            staged = self._spark.createDataFrame([], _ddl(task))
        return staged

    def _frame(self, table: pa.Table) -> DataFrame:
        # With explicit types: Spark would take a time without a zone for one with.
        ddl = schema_ddl(parse_schema(table.schema))
        return self._spark.createDataFrame(table, ddl)

    def _read_kept(self, task: StateTask) -> DataFrame:
        parts = min(task.kept_group_count, self._spark.sparkContext.defaultParallelism)
        ranges = self._spark.range(0, parts, 1, parts)
        return ranges.mapInArrow(_read(task, parts), _ddl(task))

    @staticmethod
    def _order(task: StateTask) -> list[Any]:
        from pyspark.sql import functions as F

        rows = task.rows
        rank = F.col(RANK).desc()
        keys = [F.col(PARQUET_GROUP), *(F.col(quote(name)) for name in rows.key_names)]
        second = [F.col(name) for name in rows.order]
        return [*keys, rank, *second] if rows.is_whole else [*keys, *second, rank]

    @staticmethod
    def _remove_others(task: StateTask, paths: set[str]) -> None:
        """Remove the files of failed attempts."""
        store = open_store(task.dest_url)
        there = [found.path for found in store.list(f"{state_folder(task.uid, task.name)}/")]
        store.delete([path for path in there if path not in paths])


def _ddl(task: StateTask) -> str:
    fields = task.rows.staged
    return ", ".join(f"{quote(f.name)} {type_ddl(all_nullable(f.type))}" for f in fields)


def _read(task: StateTask, parts: int) -> Callable[[_Batches], _Batches]:
    """Return a function that reads rows of the edited savepoint, in an executor."""
    types = [all_nullable(field.type) for field in task.rows.staged]

    def read(batches: _Batches) -> _Batches:
        for batch in batches:
            for part in batch["id"].to_pylist():
                for rows in task.read_kept_rows(groups_of(part, parts, task.kept_group_count)):
                    pairs = zip(rows.columns, types, strict=True)
                    columns = [c if c.type == type else c.cast(type) for c, type in pairs]
                    yield pa.RecordBatch.from_arrays(columns, names=rows.schema.names)

    return read


def _write_files(task: StateTask) -> Callable[[_Batches], _Batches]:
    """Return a function that writes sorted rows to files of the new savepoint, in an executor."""

    def write(batches: _Batches) -> _Batches:
        rows = task.rows

        grouped = (rows.with_groups(batch[PARQUET_GROUP], rows.stage(batch)) for batch in batches)
        files: list[SavedStateFile] = []
        error: bytes | None = None
        try:
            store = open_claimed(task.dest_url)

            def put(path: str, local_file: str) -> SavedFile:
                return put_file(store, path, local_file)

            with tempfile.TemporaryDirectory(prefix="cairn-savepoint-") as folder:
                files = task.write(grouped, put, folder, part=f"{new_id()}-")
        except CairnError as refused:
            # As an answer: rows that do not fit fit no better in the next attempt.
            error = pickle.dumps(refused)
        answer = {
            "files": [msgspec.json.encode(files).decode()],
            "error": pa.array([error], _BYTES),
        }
        yield pa.RecordBatch.from_pydict(answer)

    return write
