"""On several executors: subtasks stay where they are, survive a loss, and spread out again."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from pyspark.sql import functions as F

from cairn.driver import departures, spark_driver
from cairn.plan.frames import lay_again, lay_pin
from cairn.slot.folders import living_slots, run_folder
from tests.spark.programs import lots
from tests.spark.programs.ledger import SCHEMA, build, payments
from tests.spark.support import Input, Program, eventually, slot_pids, stored_state
from tests.spark.test_crashes import Undisturbed

FILES = 7
KILLED_IN = 2


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_executor_killed_in_mid_epoch_changes_nothing_and_subtasks_spread_out_again(
    spark, tmp_path
):
    expected = Undisturbed(spark, tmp_path / "expected", FILES)
    files = payments(FILES)
    work = tmp_path / "work"
    source = Input(work / "in", SCHEMA).add_all(files[:KILLED_IN])
    arguments = ("--trigger", "0 seconds", "--parallelism", 4)
    arguments += ("--master", "local-cluster[2,1,1024]")
    # The epoch in which it happens is slow, to be hit in the middle.
    trap = f"sleep {files[KILLED_IN][9][0]} 3"
    with Program("ledger", source.folder, work, *arguments, TRAP=trap) as program:
        run_id = program.await_report()["run"]
        reports = [program.await_report(epoch=2 + n) for n in range(KILLED_IN)]
        before = reports[-1]["placement"]
        assert len(set(before.values())) == 2, "subtasks are spread over executors"
        assert [r["placement"] for r in reports] == [before] * KILLED_IN, "and stay where they are"
        assert reports[-1]["asked"] == ["slot", 1 + KILLED_IN, ["a0", "a1", "a4"]]

        source.add(*files[KILLED_IN])
        victim = psutil.Process(int(before["0"].rpartition(":")[2]))
        assert "java" in victim.name()
        assert eventually(lambda: is_in_epoch(work, 2 + KILLED_IN), within_s=30)
        victim.kill()
        report = program.await_report(epoch=2 + KILLED_IN)
        assert before["0"] not in report["placement"].values()
        assert expected.check_prefix(work) == KILLED_IN + 1

        # The executor is replaced, and subtasks come to live there, now or an epoch or two on.
        for number in range(KILLED_IN + 1, FILES):
            source.add(*files[number])
            report = program.await_report(epoch=2 + number)
        assert len(set(report["placement"].values())) == 2
        # Those that subtasks have moved away from have ended, on both executors.
        assert eventually(lambda: len(living_slots(run_folder(run_id))) == 4, within_s=20)
        os.killpg(program.process.pid, signal.SIGINT)
        program.end()
    expected.check(work)
    assert eventually(lambda: not slot_pids(run_id), within_s=20)


def test_subtasks_that_crowd_while_an_executor_is_free_are_laid_out_anew(
    spark, tmp_path, monkeypatch
):
    """As if there were two executors here: the pin is made again, and nothing else changes."""
    expected = Undisturbed(spark, tmp_path / "expected", 5)
    monkeypatch.setattr(spark_driver, "is_cluster", lambda spark: True)
    monkeypatch.setattr(spark_driver.SparkDriver, "_executor_count", lambda self: 2)
    job = build(spark, expected.input.folder, tmp_path / "work")
    at = str(tmp_path / "work" / "checkpoint")
    with job.start(checkpoint=at, parallelism=2, trigger="available-now") as run:
        run.wait(60)
    # Not at the first sight of it, in case an executor is only late.
    assert run._engine.driver.repinned == 2
    assert len(set(run._engine.driver.placement.values())) == 1
    expected.check(tmp_path / "work")


@pytest.mark.soak
def test_subtasks_whose_executor_has_notice_are_laid_out_again_and_nothing_else_changes(
    spark, tmp_path, monkeypatch
):
    """As on a cluster, with a notice before each of the first epochs; slots here stay in use."""
    expected = Undisturbed(spark, tmp_path / "expected", 4)
    monkeypatch.setattr(spark_driver, "is_cluster", lambda spark: True)
    monkeypatch.setattr(spark_driver.SparkDriver, "_executor_count", lambda self: 1)
    notices = iter(range(1_000))
    monkeypatch.setattr(
        spark_driver, "find_departing", lambda spark: lambda: frozenset([str(next(notices) // 2)])
    )
    monkeypatch.setattr(departures, "POLL_S", 0.2)
    job = build(spark, expected.input.folder, tmp_path / "work")
    at = str(tmp_path / "work" / "checkpoint")
    with job.start(checkpoint=at, parallelism=2, trigger="available-now") as run:
        run.wait(60)
    driver = run._engine.driver
    assert driver._moves > 1 and driver.repinned == 0
    again = lay_again(lay_again(lay_pin(spark, 2)))
    assert "\n+- InMemoryTableScan [pin" in joined(driver._new_session(), again), "not shuffled"
    expected.check(tmp_path / "work")


def joined(session, pin):
    """The physical plan of rows joined to a pin table, as an epoch plans it."""
    rows = session.range(8).selectExpr("cast(id % 2 AS int) AS subtask")
    rows = rows.repartitionById(2, F.col("subtask"))
    plan = rows.join(pin.hint("shuffle_hash"), F.col("subtask") == F.col("pin"), "right")
    return plan._jdf.queryExecution().executedPlan().toString()


# test_fork.py has it in one process.
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_transform_reads_the_run_of_its_operator_that_is_committed(spark, tmp_path):
    """Stages of the branches run at once, on two executors that could each run the operator."""
    source = Input(tmp_path / "in", lots.SCHEMA)
    source.add_all([[(k,) for k in range(at, at + 20)] for at in (0, 20, 40)])
    with Program("lots", source.folder, tmp_path, "--master", "local-cluster[2,1,1024]") as program:
        (report,) = program.end(timeout_s=300)
    assert report == {"end": "finished", "error": None}, program.errors[-3000:]
    kept = stored_state(lots.build(spark, source.folder), tmp_path / "checkpoint")
    assert len(kept["draw"]["lot"]) == 60
    for way in ("direct", "over-2", "over-3"):
        assert kept[way]["lot"] == kept["draw"]["lot"], way


def is_in_epoch(work, number):
    """Whether Spark has planned the batch of an epoch that is not committed yet."""
    batches = {int(path.name) for path in work.glob("checkpoint/spark/*/offsets/[0-9]*")}
    return number - 2 in batches
