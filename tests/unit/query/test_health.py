"""The health of a job, from its checkpoint alone."""

from __future__ import annotations

import os
import re
import time

import psutil
import pytest

from cairn.cli.tables import status_text
from cairn.errors import EpochError, FunctionError
from cairn.process_identity import identify, pid_namespace
from cairn.query.health import checkpoint_health, read_declared
from cairn.report.job_graph import GraphSource, GraphTime, JobGraph
from cairn.report.status import SEEN_MS, Ending, Restart
from cairn.storage.failures import Failures
from cairn.storage.log import Log
from cairn.storage.notes import ending_of, write_ending, write_graph, write_restart
from tests.unit.snapshots.checkpoints import Checkpoint, value


@pytest.fixture
def made() -> Checkpoint:
    return Checkpoint({"n": value("bigint")})


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def started(made: Checkpoint, *, host: str = "elsewhere", pid: int = 1, ago_ms: int = 0) -> int:
    """Another driver takes over."""
    return made.log.take_over(host=host, pid=pid, wall_ms=now_ms() - ago_ms).term


def health(made: Checkpoint):  # type: ignore[no-untyped-def]
    return checkpoint_health(Log(made.store))


def failed(made: Checkpoint, epoch: int, *, ended: bool) -> None:
    failures = Failures(made.store, "shop")
    error = FunctionError(
        "process() of operator 'score' raised ValueError: bad\n  key: 7\n  row: Row(k=7)\n"
        "  at: job.py:12 in process\n  log: /tmp/slot.log",
        operator="score", key="7", row="Row(k=7)",
    )  # fmt: skip
    for attempt in range(1, 5):
        failures.note(error, epoch, attempt)
    if ended:
        failures.note_end(error, epoch)
    failures.settle()


def test_a_job_that_failed_before_its_first_epoch_says_with_what(made: Checkpoint) -> None:
    term = started(made)
    failed(made, 3, ended=True)
    write_ending(made.store, term, "failed", EpochError("x"))
    found = health(made)
    failure = found.failure
    assert found.status == "failed" and failure is not None
    assert found.why == failure.cause == "process() of operator 'score' raised ValueError: bad"
    assert (failure.operator, failure.key, failure.row) == ("score", "7", "Row(k=7)")
    assert (failure.at, failure.log) == ("job.py:12 in process", "/tmp/slot.log")
    assert (failure.attempts, failure.epoch, failure.times, failure.ended_run) == (4, 3, 1, True)
    assert "start the job again" in failure.next
    assert abs(failure.wall_ms - now_ms()) < 60_000


def test_a_failure_that_left_no_ending_is_found_by_its_note(made: Checkpoint) -> None:
    started(made)
    failed(made, 3, ended=True)
    assert health(made).status == "failed"


def test_a_failure_of_the_run_before_is_not_one_of_this_run(made: Checkpoint) -> None:
    failed(made, 3, ended=True)
    time.sleep(0.01)
    started(made)
    found = health(made)
    assert (found.status, found.failure) == ("starting", None)


def test_an_epoch_that_is_tried_again_is_failing_until_it_is_committed(made: Checkpoint) -> None:
    started(made, ago_ms=5)
    failed(made, 3, ended=False)
    found = health(made)
    assert found.status == "failing" and found.failure is not None and found.failure.attempts == 4
    made.commit({"n": {1: 1}})
    assert health(made).status != "failing"


@pytest.mark.parametrize("ending", ["stopped", "finished", "failed"])
def test_a_run_that_ended_by_itself_has_said_how(made: Checkpoint, ending: Ending) -> None:
    term = started(made, host=os.uname().nodename, pid=os.getpid())
    write_ending(made.store, term, ending, None)
    assert health(made).status == ending
    started(made)
    assert health(made).status == "starting", "the next driver has begun"
    assert ending_of(made.store, term) is not None


def test_a_driver_of_this_machine_that_is_gone_was_killed(made: Checkpoint) -> None:
    started(made, host=os.uname().nodename, pid=2**22 + 1)
    found = health(made)
    assert found.status == "failed" and "was killed" in str(found.why)
    # A process that has its number by now is another one.
    started(made, host=os.uname().nodename, pid=os.getpid(), ago_ms=10**12)
    assert health(made).status == "failed"


def test_a_driver_of_this_machine_that_lives_and_is_silent_is_idle(made: Checkpoint) -> None:
    age_ms = round((time.time() - psutil.Process().create_time()) * 1000)
    made.log.take_over(host=os.uname().nodename, pid=os.getpid(), wall_ms=now_ms() - age_ms)
    write_graph(made.store, 1, JobGraph(trigger="1 hour"))
    assert health(made).status == "starting", "its trigger is once an hour"
    write_graph(made.store, 1, JobGraph(trigger="1 second"))
    found = checkpoint_health(Log(made.store), now_ms() + 11_000)
    assert found.status == "idle"


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_kills_no_driver(
    made: Checkpoint, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = f"{pid_namespace()}-{identify()}"
    made.log.take_over(host=os.uname().nodename, pid=os.getpid(), wall_ms=now_ms(), process=process)
    boot_s = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_s + step_s)
    assert health(made).status == "starting"


def test_a_driver_in_a_container_with_the_name_of_this_host_is_not_looked_for(
    made: Checkpoint,
) -> None:
    host = os.uname().nodename
    made.log.take_over(host=host, pid=1, wall_ms=now_ms(), process=f"0-{2**22 + 1}-7")
    assert health(made).status == "starting"
    process = f"{pid_namespace()}-{2**22 + 1}-7"
    made.log.take_over(host=host, pid=1, wall_ms=now_ms(), process=process)
    assert health(made).status == "failed"


def test_a_driver_elsewhere_that_is_silent_for_long_is_not_known(made: Checkpoint) -> None:
    started(made, ago_ms=30_000)
    assert health(made).status == "idle"
    started(made, ago_ms=90_000)
    assert health(made).status == "unknown"


def test_a_watermark_declared_after_the_sources_has_its_delay_too(made: Checkpoint) -> None:
    sources = [GraphSource(name="clicks", watermark_ms=5_000)]
    times = [GraphTime(name="later", watermark_ms=600_000)]
    write_graph(made.store, 1, JobGraph(sources=sources, event_times=times, trigger="2 seconds"))
    assert read_declared(Log(made.store)) == (600_000, 2_000)


def restarted(made: Checkpoint, *, pid: int = 1, ago_ms: int = 0, pause_ms: int = 60_000) -> None:
    write_restart(
        made.store,
        Restart(
            number=3, wall_ms=now_ms() - ago_ms, pause_ms=pause_ms, kind="FunctionError",
            cause="bad", host="elsewhere", pid=pid,
        ),
    )  # fmt: skip


def test_a_run_that_pauses_before_it_begins_again_is_restarting_with_its_cause(
    made: Checkpoint,
) -> None:
    term = started(made)
    failed(made, 3, ended=True)
    write_ending(made.store, term, "failed", EpochError("x"))
    restarted(made)
    found = health(made)
    assert found.status == "restarting" and found.restart is not None and found.failure is not None
    assert (found.restart.number, found.failure.operator) == (3, "score")
    assert re.search(r"restart 3 on elsewhere, pid 1: begins in \d+ s", status_text(found).plain)
    started(made)
    assert health(made).status == "starting", "its next life has begun"


def test_a_restart_of_an_earlier_end_or_that_never_came_is_a_failure(made: Checkpoint) -> None:
    restarted(made)
    term = started(made, ago_ms=1000)
    time.sleep(0.002)
    write_ending(made.store, term, "failed", EpochError("x"))
    assert health(made).status == "failed", "the note is older than the end"
    found = checkpoint_health(Log(made.store), now_ms() + 1)
    restarted(made, pause_ms=10)
    late = checkpoint_health(Log(made.store), now_ms() + SEEN_MS + 1000)
    assert (found.status, late.status) == ("failed", "failed")
    assert late.restart is not None, "the history of the driver that failed"
    assert re.search(r"restart 3 on elsewhere, pid 1: 20\d\d-", status_text(late).plain)


def test_a_restart_of_another_driver_is_not_shown_with_a_failure(made: Checkpoint) -> None:
    restarted(made, pid=2)
    term = started(made, pid=1)
    write_ending(made.store, term, "failed", EpochError("x"))
    restarted(made, pid=2)
    found = health(made)
    assert (found.status, found.restart) == ("failed", None)
