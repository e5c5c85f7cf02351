"""A slot is one process per number, found while it may be called, and in nobody's way after."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cairn.protocol.channel import connect
from cairn.protocol.lookups import DoorSpec, ended_decoder, this_host
from cairn.protocol.messages import End, Report, Token, find_failure, report_decoder
from cairn.slot.folders import Living
from cairn.slot.process import end_slots
from cairn.slot.server import Call
from cairn.storage.log import create_or_open_job
from cairn.storage.store import open_store
from cairn.worker.forward import Forward, SubtaskError
from tests.unit.slot.executors import Executor, eventually, is_gone, runtime_folder
from tests.unit.slot.one_level import GROUP_COUNT, Checkpoint, Count, batch_of

KEY = b"k" * 32


@pytest.fixture(scope="module")
def shared() -> Iterator[Executor]:
    """With one nursery for all tests."""
    with runtime_folder():
        one = Executor()
        yield one
        one.end()


@pytest.fixture
def executor(shared: Executor) -> Iterator[Executor]:
    yield shared
    end_slots("nursery-test-run")


class SlowToClose(Count):
    """Closing it takes until a file is there."""

    def __init__(self, until: str) -> None:
        self.until = until

    def close(self) -> None:
        while not os.path.exists(self.until):
            time.sleep(0.02)


class Job:
    """The driver's side of slots that are processes: a checkpoint, and a forwarder."""

    def __init__(self, folder: Path, function: Count | None = None) -> None:
        store = open_store(str(folder / "checkpoint"))
        info = create_or_open_job(store, "count", GROUP_COUNT)
        self.checkpoint = Checkpoint(store, function)
        door = DoorSpec(KEY, this_host(), "127.0.0.1")
        self.spec = dataclasses.replace(self.checkpoint.spec, job_id=info.job_id, door=door)
        self.reports: list[Report] = []

    def add(self, parts: list[bytes]) -> None:
        self.reports += map(report_decoder.decode, parts)

    def forward(self) -> Forward:
        spec_id, pickled = self.spec.pickle()
        (level,) = self.spec.levels
        ways = (0,), level.incoming, level.outgoing
        return Forward("nursery-test-run", 0, *ways, GROUP_COUNT, spec_id, pickled, self)

    def run(
        self, executor: Executor, rows: list[Any], *, slot: int = 0, attempt: int = 0
    ) -> Report:
        """An attempt at the next epoch, by one subtask."""
        begin = self.checkpoint.begin(attempt)
        call = Call(begin.token(attempt), self.forward().spec_id, 0, 0)
        home = executor.home(slot)
        forward = self.forward()
        client = forward._begin(home, call, begin)
        list(forward._forward(client, call, range(GROUP_COUNT), iter([batch_of(rows)])))
        return self.reports[-1]

    def as_of(self, attempt: int = 0) -> Token:
        return self.checkpoint.begin(attempt).token()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def living(executor: Executor, slot: int = 0) -> Living:
    found = executor.home(slot).find()
    assert found is not None
    return found


# Ending


def test_slot_that_is_closing_is_not_found_and_another_takes_its_place(
    executor: Executor, tmp_path: Path
) -> None:
    """Down and up again while a function closes: the new process is a slot like any other."""
    job = Job(tmp_path, SlowToClose(str(tmp_path / "closed")))
    job.run(executor, [(1, 1)])
    first = living(executor)
    assert end_slots("nursery-test-run") == 1
    assert executor.home(0).find() is None
    report = job.run(executor, [(1, 1)], attempt=1)
    second = living(executor)
    assert report.slot_id == second.folder.name != first.folder.name
    assert first.process.is_alive and second.process.is_alive
    (tmp_path / "closed").touch()
    assert eventually(lambda: not first.process.is_alive)
    assert not first.folder.exists()
    assert job.run(executor, [(1, 1)], attempt=2).slot_id == second.folder.name


def test_slot_that_was_told_to_end_begins_nothing(executor: Executor, tmp_path: Path) -> None:
    """A forwarder that has found it just before gets another one."""
    job = Job(tmp_path, SlowToClose(str(tmp_path / "closed")))
    job.run(executor, [(1, 1)])
    first = living(executor)
    end_slots("nursery-test-run")
    home = executor.home(0)
    looks = [first]
    real_find = home.find
    home.find = lambda: looks.pop() if looks else real_find()  # type: ignore[method-assign]
    begin = job.checkpoint.begin(1)
    call = Call(begin.token(), job.forward().spec_id, 0, 0)
    job.forward()._begin(home, call, begin)
    assert not looks and living(executor).process != first.process
    (tmp_path / "closed").touch()


def test_order_to_end_that_comes_late_does_not_end_a_slot_in_use(
    executor: Executor, job: Job
) -> None:
    job.run(executor, [(1, 1)])
    then = job.as_of()
    job.run(executor, [(1, 1)], attempt=1)
    assert end_slots("nursery-test-run", as_of=then) == 0
    assert living(executor).process.is_alive
    assert end_slots("nursery-test-run", as_of=job.as_of(1)) == 1
    assert executor.home(0).find() is None


def test_slots_that_are_kept_and_those_that_were_made_ready_do_not_end(
    executor: Executor, job: Job
) -> None:
    kept = job.run(executor, [(1, 1)], slot=0).slot_id
    job.run(executor, [(1, 1)], slot=1)
    executor.slot(2)
    assert end_slots("nursery-test-run", [kept], job.as_of()) == 1
    assert executor.home(1).find() is None
    assert living(executor, 0) and living(executor, 2)
    assert end_slots("nursery-test-run") == 2


def test_slot_is_told_to_end_by_its_door(executor: Executor, job: Job) -> None:
    """From another machine there is no other way to it."""
    door = job.run(executor, [(1, 1)]).door
    then = job.as_of()
    job.run(executor, [(1, 1)], attempt=1)
    channel = connect(door, KEY, 5)
    for as_of, ends in ((then, False), (job.as_of(1), True)):
        channel.send(msgspec.msgpack.encode(End(as_of)))
        assert ended_decoder.decode(channel.receive(100)) is ends
    channel.close()
    assert executor.home(0).find() is None


def test_slot_whose_place_another_process_has_taken_ends(executor: Executor) -> None:
    """As when whoever started it was killed before it was ready, and somebody else came."""
    late = executor.slot(0)
    home = executor.home(0)
    fresh = home.folder / "fresh"
    fresh.symlink_to("p-none")
    fresh.replace(home.link)
    assert executor.slot(0).pid != late.pid
    assert eventually(lambda: is_gone(late))
    assert "another process has taken its place" in executor.log(0)


def test_state_of_a_slot_that_was_killed_goes_when_the_next_one_starts(
    executor: Executor, job: Job
) -> None:
    job.run(executor, [(1, 1)])
    dead = living(executor)
    psutil.Process(dead.process.pid).kill()
    assert eventually(lambda: not dead.process.is_alive)
    assert dead.folder.exists()
    executor.slot(0)
    assert not dead.folder.exists()


def test_folder_of_a_slot_is_locked_while_it_lives(shared: Executor) -> None:
    executor = Executor()
    executor.slot(0)
    with_lock = os.open(executor.home(0).folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(with_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    executor.end()

    def is_free() -> bool:
        try:
            fcntl.flock(with_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    assert eventually(is_free)
    os.close(with_lock)


# The checkpoint


def refusal(job: Job, executor: Executor) -> str:
    with pytest.raises(SubtaskError) as raised:
        job.run(executor, [(1, 1)])
    failure = find_failure(str(raised.value))
    assert failure is not None and failure.kind == "RestoreError"
    assert "log" in failure.facts
    return failure.message


def test_slot_without_the_mount_is_refused_and_makes_no_folder(
    executor: Executor, job: Job, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    assert "found: no folder" in refusal(job, executor)
    assert not (tmp_path / "checkpoint").exists()
