"""Guarantees to choose from, epochs of several batches, and a sink that cannot publish."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader

from cairn import CommitError, Job, PlanError, sinks
from cairn.plan.explain import explain_graph
from cairn.sinks.base import Committable
from tests.marks import for_soak
from tests.spark.live import Live
from tests.spark.programs.ledger import SCHEMA, build, payments
from tests.spark.support import (
    Input,
    Program,
    by_id,
    epochs,
    eventually,
    finish,
    published,
    slot_pids,
)

FILES, ROWS = 8, 30


def ids(folder: Path) -> Counter[int]:
    return Counter(row["id"] for row in published(folder))


# Epochs of several batches


def test_an_epoch_of_several_batches_is_committed_once(spark: Any, ledger: Any, tmp_path: Path):
    source = Input(tmp_path / "in", SCHEMA).add_all(ledger.files)
    job = build(spark, source.folder, tmp_path)
    run = finish(job, tmp_path / "checkpoint", checkpoint_every=3)
    made = epochs(tmp_path / "checkpoint")
    assert [epoch.spark.batch_id for epoch in made] == [2, 5, 7]
    assert [epoch.metrics.operators["ledger"].rows_in for epoch in made] == [300, 300, 200]
    assert by_id(published(tmp_path / "booked")) == ledger.booked()
    assert run.status == "finished"


# tests/simulation/test_guarantees.py has it without Spark.
@pytest.mark.soak
def test_a_slot_that_dies_between_two_batches_of_an_epoch_is_restored(
    spark: Any, ledger: Any, tmp_path: Path
):
    with Live(spark, tmp_path, ledger.files, checkpoint_every=1000) as live:
        coordinator = live.run._engine.coordinator
        for file in ledger.files[:2]:
            live.source.add(*file)
        assert eventually(lambda: coordinator.batches == 2 or coordinator.committed)
        for pid in slot_pids(live.run._engine.driver.run_id).values():
            os.kill(pid, signal.SIGKILL)
        for file in ledger.files[2:]:
            live.source.add(*file)
        live.run.process_all_available()
        assert by_id(published(tmp_path / "booked")) == ledger.booked()


def test_an_epoch_whose_batches_do_not_come_is_committed(spark: Any, ledger: Any, tmp_path: Path):
    with Live(spark, tmp_path, ledger.files, checkpoint_every=1000) as live:
        live.source.add(*ledger.files[0])
        assert eventually(lambda: published(tmp_path / "booked"))
        assert live.run.is_active


def test_a_stop_commits_the_epoch_under_way(spark: Any, ledger: Any, tmp_path: Path):
    with Live(spark, tmp_path, ledger.files, checkpoint_every=1000) as live:
        live.source.add(*ledger.files[0])
        assert eventually(lambda: live.run._engine.coordinator.newest is not None)
    assert by_id(published(tmp_path / "booked")) == ledger.booked(0, 1)


# tests/simulation/test_guarantees.py has it without Spark, at every point of a driver.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "guarantee", [for_soak(each) for each in ("exactly-once", "at-least-once", "at-most-once")]
)
def test_a_killed_driver_does_to_the_output_what_the_guarantee_allows(
    spark: Any, guarantee: str, tmp_path: Path
):
    """Killed in the second epoch, after a batch that was published, if it is before the commit."""
    source = Input(tmp_path / "in", SCHEMA).add_all(payments(FILES, ROWS))
    weak = guarantee != "exactly-once"
    point = "driver.batch.published:5" if weak else "driver.epoch.ended:5"
    options = ("--guarantee", guarantee, "--checkpoint-every", 3)
    arguments = (source.folder, tmp_path, *options)
    with Program("ledger", *arguments, on=spark, CAIRN_CRASH_AT=point) as program:
        program.end()
    assert program.killed, program.errors[-2000:]
    before = ids(tmp_path / "booked")
    assert set(before) == set(range((5 if weak else 3) * ROWS)) and set(before.values()) == {1}

    job = build(spark, source.folder, tmp_path)
    finish(job, tmp_path / "checkpoint", guarantee=guarantee, checkpoint_every=3)
    after = ids(tmp_path / "booked")
    assert set(after) == set(range(FILES * ROWS)), "nothing was lost that had not been planned"
    repeated = {id for id, times in after.items() if times > 1}
    # Batches four and five of the epoch under way were published, and are run again.
    again = set(range(3 * ROWS, 5 * ROWS)) if guarantee == "at-least-once" else set()
    assert repeated == again


# A sink that cannot publish


class Gate(sinks.Files):
    """Publishes only while a file is there."""

    def __init__(self, path: str, gate: str) -> None:
        super().__init__(path)
        self.gate = gate

    def commit(self, epoch: int, committables: Any, batch: int = 0) -> None:
        if not Path(self.gate).exists():
            raise ConnectionError("the gate is closed")
        super().commit(epoch, committables, batch)


def gated(spark: Any, source: Input, folder: Path, out: str = "out") -> Job:
    job = Job("gated", max_parallelism=4)
    rows = job.source("rows", source.stream(spark))
    rows.sink_to(Gate(str(folder / out), str(folder / "gate")), uid="out")
    return job


def test_a_sink_that_cannot_publish_pauses_the_job_until_it_can(spark: Any, tmp_path: Path):
    source = Input(tmp_path / "in", "id bigint").add((1,), (2,))
    with gated(spark, source, tmp_path).start(
        checkpoint=str(tmp_path / "checkpoint"), trigger="100 milliseconds", parallelism=1
    ) as run:
        assert eventually(lambda: run.status == "paused"), run.status
        assert run.paused == ("sink 'out' cannot take epoch 2, tried 5 times: the gate is closed")
        source.add((3,))
        (tmp_path / "gate").touch()
        run.process_all_available()
        assert run.is_active and run.paused is None
        assert ids(tmp_path / "out") == Counter([1, 2, 3])


@pytest.mark.soak
def test_a_paused_run_can_be_stopped_and_the_next_start_publishes(spark: Any, tmp_path: Path):
    source = Input(tmp_path / "in", "id bigint").add((1,), (2,))
    job = gated(spark, source, tmp_path)
    with job.start(
        checkpoint=str(tmp_path / "checkpoint"), trigger="100 milliseconds", parallelism=1
    ) as run:
        assert eventually(lambda: run.status == "paused")
    assert run.status == "stopped" and run.error is None
    with pytest.raises(CommitError, match="the gate is closed"):
        gated(spark, source, tmp_path).start(checkpoint=str(tmp_path / "checkpoint"))
    (tmp_path / "gate").touch()
    with pytest.raises(PlanError, match=r"prepared for: .*/out\n.*/moved\n"):
        finish(gated(spark, source, tmp_path, "moved"), tmp_path / "checkpoint")
    finish(gated(spark, source, tmp_path), tmp_path / "checkpoint")
    assert ids(tmp_path / "out") == Counter([1, 2])
    # Now it is known to be published, and the target may be another one.
    source.add((3,))
    finish(gated(spark, source, tmp_path, "moved"), tmp_path / "checkpoint")
    assert ids(tmp_path / "out") == Counter([1, 2]) and ids(tmp_path / "moved") == Counter([3])


@pytest.mark.soak
def test_a_sink_that_cannot_publish_for_long_fails_the_run_if_it_is_told_so(
    spark: Any, tmp_path: Path
):
    source = Input(tmp_path / "in", "id bigint").add((1,))
    run = gated(spark, source, tmp_path).start(
        checkpoint=str(tmp_path / "checkpoint"), trigger="available-now", commit_timeout="1 second"
    )
    with pytest.raises(CommitError, match="'out' did not take epoch 2: the gate is closed"):
        run.wait(60)
    assert run.status == "failed"


# A slow sink


class Slow(sinks.Files):
    def commit(self, epoch: int, committables: list[Committable], batch: int = 0) -> None:
        import time

        time.sleep(0.3)
        super().commit(epoch, committables, batch)


def test_a_slow_sink_slows_the_job_and_each_source_keeps_to_its_limit(spark: Any, tmp_path: Path):
    few = Input(tmp_path / "few", "id bigint").add_all([[(i,)] for i in range(4)])
    many = Input(tmp_path / "many", "id bigint").add_all([[(100 + i,)] for i in range(8)])
    job = Job("slow", max_parallelism=4)
    rows = job.source("few", few.stream(spark, 1)).union(job.source("many", many.stream(spark, 2)))
    rows.sink_to(Slow(str(tmp_path / "out")), uid="out")
    graph = explain_graph(job.graph())
    assert [source.limits for source in graph.sources] == [
        {"maxFilesPerTrigger": "1"},
        {"maxFilesPerTrigger": "2"},
    ]
    finish(job, tmp_path / "checkpoint")
    made = epochs(tmp_path / "checkpoint")
    assert len(made) == 4
    assert ids(tmp_path / "out") == Counter([*range(4), *range(100, 108)])


# Sources that throw rows away


class Forgetting(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def read(self, start: dict[str, int]) -> Any:
        return iter([(1,)]), {"at": start["at"] + 1}

    def commit(self, end: dict[str, int]) -> None:
        """What is before `end` goes."""


class Forgetful(DataSource):
    @classmethod
    def name(cls) -> str:
        return "forgetful"

    def schema(self) -> str:
        return "id bigint"

    def simpleStreamReader(self, schema: Any) -> Any:
        return Forgetting()


def test_sources_that_cannot_be_read_again_are_refused_where_they_would_have_to(
    spark: Any, tmp_path: Path
):
    def start(dataframe: Any, **options: Any) -> None:
        job = Job("refused", max_parallelism=4)
        job.source("rows", dataframe, **options).sink_to(sinks.Noop(), uid="out")
        job.start(checkpoint=str(tmp_path / "checkpoint"), checkpoint_every=2).stop()

    source = Input(tmp_path / "in", "id bigint").add((1,))
    socket = spark.readStream.format("socket").option("host", "localhost").option("port", 9).load()
    with pytest.raises(PlanError, match="a socket cannot be read again"):
        start(socket)
    cleaned = (
        spark.readStream.schema("id bigint")
        .option("cleanSource", "delete")
        .parquet(str(source.folder))
    )
    with pytest.raises(PlanError, match="cleanSource=delete removes files"):
        start(cleaned)
    spark.dataSource.register(Forgetful)
    with pytest.raises(PlanError, match="the reader of 'forgetful' may throw away"):
        start(spark.readStream.format("forgetful").load())
    with pytest.raises(PlanError, match="the job says that it cannot be read again"):
        start(source.stream(spark), replayable=False)
    assert not (tmp_path / "checkpoint" / "epochs").exists()
    start(cleaned, replayable=True)


def test_a_guarantee_that_does_not_exist_is_refused(spark: Any, tmp_path: Path):
    job = Job("refused", max_parallelism=4)
    source = Input(tmp_path / "in", "id bigint").add((1,))
    job.source("rows", source.stream(spark)).sink_to(sinks.Noop(), uid="out")
    for wrong in ({"guarantee": "once"}, {"checkpoint_every": 0}, {"commit_timeout": "soon"}):
        with pytest.raises(PlanError):
            job.start(checkpoint=str(tmp_path / "checkpoint"), **wrong)
