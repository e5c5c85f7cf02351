"""Runs that begin again: after a failure, and on another driver."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from cairn import Job, KeyedProcess, sinks, state
from cairn.driver import rehearsal
from cairn.driver.coordinator.leadership.in_store import StoreLeadership
from cairn.driver.options import Options
from cairn.driver.standby import Standby
from cairn.errors import EpochError, StateSchemaError
from cairn.plan.frames import find_file_format
from cairn.storage.log import Log
from cairn.storage.manifest import Takeover
from cairn.storage.store import open_store
from tests.contract.leaderships import wait_for
from tests.marks import for_soak
from tests.spark.live import Undisturbed
from tests.spark.programs.ledger import build, payments
from tests.spark.support import (
    Input,
    Program,
    by_id,
    epochs,
    eventually,
    finish,
    published,
    stored_state,
)
from tests.zookeeper import ZooKeeper

ROWS = "id bigint"


class Flaky(KeyedProcess[Any]):
    """Fails with an error of the system a number of times, counted in a file."""

    def __init__(self, mark: Path, times: int) -> None:
        self.mark, self.times = str(mark), times

    def process(self, row: Any, ctx: Any) -> Any:
        mark = Path(self.mark)
        done = len(mark.read_bytes()) if mark.exists() else 0
        if done < self.times:
            with mark.open("ab") as file:
                file.write(b"x")
            raise ConnectionError("the service is away")
        yield row


def flaky_job(spark: Any, folder: Path, times: int) -> tuple[Job, Any]:
    source = Input(folder / "in", ROWS).add((1,), (2,)).add((3,))
    kept, job = sinks.Collect(), Job("flaky", max_parallelism=16)
    rows = job.source("rows", source.stream(spark)).key_by("id")
    rows.process(Flaky(folder / "mark", times), schema=ROWS, uid="flaky").sink_to(kept, uid="kept")
    return job, kept


def test_a_run_that_failed_begins_again_and_loses_nothing(spark, tmp_path):
    # A life tries a batch four times.
    job, kept = flaky_job(spark, tmp_path, times=6)
    run = finish(job, tmp_path / "checkpoint", parallelism=1, restart="fixed(2, 100 ms)")
    assert (run.restarts, run.status, run.error) == (1, "finished", None)
    assert sorted(row.id for row in kept.rows) == [1, 2, 3]


def test_a_run_ends_with_its_cause_when_its_restarts_are_used_up(spark, tmp_path):
    job, kept = flaky_job(spark, tmp_path, times=100)
    options = {"checkpoint": str(tmp_path / "checkpoint"), "trigger": "available-now"}
    with pytest.raises(Exception, match="the service is away"):
        job.start(parallelism=1, restart="fixed(1, 100 ms)", **options).wait()
    assert kept.rows == []


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    return Undisturbed(spark, tmp_path_factory.mktemp("undisturbed"), payments(6))


def check(undisturbed: Any, work: Path) -> None:
    assert by_id(published(work / "booked")) == undisturbed.booked()
    assert stored_state(undisturbed.job, work / "checkpoint") == undisturbed.state()
    numbers = [epoch.number for epoch in epochs(work / "checkpoint")]
    assert numbers == sorted(set(numbers))


def records(work: Path) -> list[Any]:
    return [*Log(open_store(str(work / "checkpoint"))).records()]


def terms(work: Path) -> int:
    """Return how many drivers have committed epochs."""
    return len({epoch.term for epoch in epochs(work / "checkpoint")})


def test_a_standby_continues_the_job_of_a_leader_that_was_killed(spark, undisturbed, tmp_path):
    arguments = (undisturbed.source.folder, tmp_path, "--ha", "store:?lease=2s", "--retained", 100)
    leader = Program("ledger", *arguments, on=spark, CAIRN_CRASH_AT="driver.epoch.ended:3")
    with leader:
        leader.await_report()
        with Program("ledger", *arguments, on=spark) as standby:
            leader.end()
            assert leader.killed, leader.errors[-2000:]
            reports = standby.end()
    assert reports[-1]["end"] == "finished", standby.errors[-2000:]
    assert terms(tmp_path) == 2
    check(undisturbed, tmp_path)


def test_a_hot_standby_restores_nothing_when_it_takes_over(spark, undisturbed, tmp_path):
    source = Input(tmp_path / "in", undisturbed.source.schema)
    source.add_all(undisturbed.files[:4])
    arguments = (source.folder, tmp_path, "--ha", "store:?lease=2s", "--retained", 100)
    arguments = (*arguments, "--trigger", "100 milliseconds", "--standby", "hot")
    with Program("ledger", *arguments, on=spark) as leader:
        leader.await_report()
        with Program("ledger", *arguments, "--parallelism", 3, on=spark) as standby:
            before = await_epochs(tmp_path, 4)
            await_hot(tmp_path, before[-1].number)
            leader.kill()
            standby.await_report()
            source.add_all(undisturbed.files[4:])
            after = await_epochs(tmp_path, 6)[4:]
            # The last epoch is published some time after its manifest is there.
            rows = len(undisturbed.booked())
            assert eventually(lambda: len(published(tmp_path / "booked")) == rows)
            standby.kill()
    assert after[0].term > before[-1].term
    assert [epoch.metrics.restored for epoch in after] == [0, 0]
    check(undisturbed, tmp_path)


def test_a_standby_rehearses_an_epoch_and_reads_no_source(spark, undisturbed, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="cairn")
    source = Input(tmp_path / "in", undisturbed.source.schema)
    options = Options(checkpoint=str(undisturbed.checkpoint), ha="store:", standby="hot")
    before = records(undisturbed.checkpoint.parent)
    standby, granted = Standby(build(spark, source.folder, tmp_path).graph(), options), Event()
    try:
        standby.begin(granted)
        wait_for(lambda: standby.epoch is not None)
    finally:
        granted.set()
        standby.close()
    assert standby.epoch == before[-1].number == records(undisturbed.checkpoint.parent)[-1].number
    assert "standby: an epoch is rehearsed" in caplog.text, caplog.text
    assert not [query for query in spark.streams.active if "rehearsal" in (query.name or "")]


@pytest.mark.parametrize(
    "file_format", ["csv", *map(for_soak, ("json", "orc", "parquet", "text", None))]
)
def test_made_up_rows_are_rehearsed_in_the_format_of_the_source(
    spark, tmp_path, monkeypatch, file_format
):
    batches: list[Any] = []
    monkeypatch.setattr(rehearsal, "set_epoch_config", batches.append)
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 60.0)
    stream = spark.readStream.format(file_format or "rate")
    rows = stream.schema("value string").load(str(tmp_path)) if file_format else stream.load()
    job = Job("formats")
    job.source("rows", rows).key_by("value").process(Flaky(tmp_path, 0), schema=ROWS, uid="flaky")
    found = find_file_format(job.graph())
    assert found == file_format
    rehearsal.rehearse_rows(spark, "rehearsed", 2, found, Event())
    # A batch at the end of the first run may be repeated.
    assert len(batches) >= rehearsal.RUNS * rehearsal.BATCHES


def await_epochs(work: Path, count: int) -> list[Any]:
    deadline = time.monotonic() + 60
    while len(found := epochs(work / "checkpoint")) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def await_hot(work: Path, epoch: int) -> None:
    """Wait until a standby shows that its slots hold this epoch."""
    group = StoreLeadership(open_store(str(work / "checkpoint")))
    deadline = time.monotonic() + 60
    while [member.epoch for member in group.waiting()] != [epoch]:
        assert time.monotonic() < deadline, group.waiting()
        time.sleep(0.1)


def test_a_leader_that_resigns_goes_on_as_a_standby_and_takes_over_again(
    spark, undisturbed, tmp_path
):
    """Two runs in one process: each passes the lead to the other, with a file in between."""
    source = Input(tmp_path / "in", undisturbed.source.schema)
    options = {
        "checkpoint": str(tmp_path / "checkpoint"),
        "ha": "store:?lease=1s",
        "trigger": "50 milliseconds",
        "parallelism": 2,
        "retained_epochs": 100,
    }
    first = build(spark, source.folder, tmp_path).start(**options)
    started: list[Any] = []
    other = build(spark, source.folder, tmp_path)
    waiting = threading.Thread(target=lambda: started.append(other.start(**options)))
    try:
        source.add(*undisturbed.files[0])
        first.process_all_available()
        assert first.leader is not None and first.leader.pid > 0
        with pytest.raises(EpochError, match="no standby"):
            first.resign()
        waiting.start()
        resign(first)
        waiting.join(60)
        (second,) = started
        await_status(first, "standby")
        assert first.leader == second.leader
        source.add_all(undisturbed.files[1:4])
        second.process_all_available()
        resign(second)
        await_lead(first)
        source.add_all(undisturbed.files[4:])
        first.process_all_available()
        assert (first.failovers, second.failovers) == (1, 1)
    finally:
        for run in (*started, first):
            run.stop()
    assert first.status == "stopped"
    check(undisturbed, tmp_path)


def resign(run: Any) -> None:
    """Resign as soon as a standby is there."""
    deadline = time.monotonic() + 60
    while True:
        try:
            run.resign()
            return
        except EpochError:
            assert time.monotonic() < deadline, "no standby came"
            time.sleep(0.1)


def await_status(run: Any, status: str) -> None:
    deadline = time.monotonic() + 60
    while run.status != status:
        assert time.monotonic() < deadline, run.status
        time.sleep(0.05)


def await_lead(run: Any) -> None:
    deadline = time.monotonic() + 60
    while run.status in ("standby", "superseded", "stopped"):
        assert time.monotonic() < deadline, run.status
        time.sleep(0.05)


def test_a_run_that_is_stopped_in_standby_ends_at_once(spark, undisturbed, tmp_path):
    arguments = (undisturbed.source.folder, tmp_path, "--ha", "store:?lease=30s")
    with Program("ledger", *arguments, "--trigger", "1 second", on=spark) as leader:
        leader.await_report()
        job = build(spark, undisturbed.source.folder, tmp_path)
        from cairn.run import Run

        asked = threading.Event()
        threading.Timer(3, asked.set).start()
        options = Options(checkpoint=str(tmp_path / "checkpoint"), ha="store:?lease=30s")
        run = Run(job.graph(), options, is_interrupted=asked.is_set)
        assert (run.status, run.is_active, run.error) == ("stopped", False, None)
        deadline = time.monotonic() + 60
        while terms(tmp_path) == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        leader.kill()
    assert terms(tmp_path) == 1


def test_a_leader_without_zookeeper_waits_and_goes_on_when_it_is_back(spark, undisturbed, tmp_path):
    source = Input(tmp_path / "in", undisturbed.source.schema)
    server = ZooKeeper()
    run: Any = None
    try:
        run = build(spark, source.folder, tmp_path).start(
            checkpoint=str(tmp_path / "checkpoint"),
            ha=f"zookeeper://{server.hosts}/job?session=2s",
            trigger="50 milliseconds",
            parallelism=2,
            retained_epochs=100,
        )
        source.add_all(undisturbed.files[:2])
        run.process_all_available()
        server.stop()
        source.add_all(undisturbed.files[2:4])
        await_status(run, "standby")
        assert run.leader is None and run.is_active
        server.start()
        await_lead(run)
        source.add_all(undisturbed.files[4:])
        run.process_all_available()
        assert (run.failovers, run.restarts, run.leader.pid) == (0, 0, os.getpid())
    finally:
        if run is not None:
            run.stop()
        server.close()
    assert terms(tmp_path) == 2
    check(undisturbed, tmp_path)


class OtherLedger(KeyedProcess[Any]):
    """Another version of the program, which does not fit the state."""

    count = state.Value("string", default="")

    def process(self, row: Any, ctx: Any) -> Any:
        return None


def test_a_standby_with_another_program_shows_its_refusal_and_never_leads(
    spark, undisturbed, tmp_path
):
    options = {
        "checkpoint": str(tmp_path / "checkpoint"),
        "ha": "store:?lease=1s",
        "trigger": "50 milliseconds",
        "parallelism": 2,
        "retained_epochs": 100,
    }
    source = undisturbed.source
    other = build(spark, source.folder, tmp_path, OtherLedger())
    run = build(spark, source.folder, tmp_path).start(**options)
    ended: list[BaseException] = []
    waiting = threading.Thread(target=lambda: ended.append(error_of(other, options)))
    try:
        run.process_all_available()
        waiting.start()
        deadline = time.monotonic() + 60
        while not (found := run.group().standbys):
            assert time.monotonic() < deadline, "no standby came"
            time.sleep(0.1)
        assert "operator 'ledger', state 'count'" in (found[0].refusal or "")
        with pytest.raises(EpochError, match="would be refused"):
            run.resign()
        assert run.status in ("running", "idle") and waiting.is_alive()
    finally:
        run.stop()
    waiting.join(60)
    assert isinstance(ended[0], StateSchemaError)
    assert not isinstance(records(tmp_path)[-1], Takeover), "a refused program fences nobody"
    check(undisturbed, tmp_path)


def error_of(job: Job, options: Any) -> BaseException:
    with pytest.raises(StateSchemaError) as raised:
        job.start(**options)
    return raised.value
