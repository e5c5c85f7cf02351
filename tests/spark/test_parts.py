"""The rows of a batch, out of Spark's own plan of it."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.driver.spark_config import set_epoch_config
from cairn.plan.parts import count_rows, open_batch

ROWS = "k bigint, s string"


def run_stream(spark: Any, stream: Any, folder: Any) -> tuple[list[Any], list[int], list[int]]:
    """Read a stream batch by batch; return its rows, scans replaced, and rows in the progress."""
    found: list[Any] = []
    scans: list[int] = []

    def run_batch(rows: Any, _: int) -> None:
        set_epoch_config(rows.sparkSession)
        batch = open_batch(spark, rows, 1)
        frame = batch.rows.where("k > 1")
        found.extend(tuple(row) for row in frame.collect())
        count_rows(batch, [frame])
        scans.append(len(batch.scans))

    writer = stream.writeStream.foreachBatch(run_batch).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder)).start()
    query.awaitTermination()
    read = [progress["numInputRows"] for progress in query.recentProgress]
    return sorted(found), scans, read


@pytest.fixture
def rows(make_input: Any) -> Any:
    return make_input(ROWS).add((1, "a"), (2, "b")).add((3, "c"))


def test_batches_of_files_are_planned_with_the_job_and_counted_by_spark(spark, rows, tmp_path):
    stream = rows.stream(spark).where("s <> 'x'").select("k")
    # The scan has no rows of which a filter knows that they are not wanted: as Spark counts them.
    assert run_stream(spark, stream, tmp_path / "q") == ([(2,), (3,)], [1, 1], [2, 1])


def test_a_source_with_random_values_goes_on_from_the_rows_that_spark_computed(
    spark, rows, tmp_path
):
    stream = rows.stream(spark).selectExpr("k", "rand() < 2 AS certain")
    assert run_stream(spark, stream, tmp_path / "q") == ([(2, True), (3, True)], [0, 0], [2, 1])


def test_a_source_with_state_of_sparks_goes_on_from_the_rows_that_spark_computed(
    spark, rows, tmp_path
):
    rows.add((2, "b"), (4, "d"))
    stream = rows.stream(spark).dropDuplicates(["k"]).select("k")
    found, scans, _ = run_stream(spark, stream, tmp_path / "q")
    assert found == [(2,), (3,), (4,)], "a row of an earlier batch is known"
    assert set(scans) == {0}


def test_a_source_that_plans_its_reads_is_asked_once(spark, tmp_path):
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    scans: list[int] = []

    def run_batch(rows: Any, _: int) -> None:
        scans.append(len(open_batch(spark, rows, 1).scans))

    writer = stream.writeStream.foreachBatch(run_batch).trigger(processingTime="10 milliseconds")
    query = writer.option("checkpointLocation", str(tmp_path / "q")).start()
    try:
        while len(scans) < 2 and query.isActive:
            query.awaitTermination(1)
    finally:
        query.stop()
    assert set(scans) == {0}
