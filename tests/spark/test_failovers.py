"""Three drivers and a real ZooKeeper: leaders are killed and paused at random, and nothing shows.

`make test` has two fail-overs: a driver with a Spark of its own is paused, then one on the Spark of
the tests is killed. `make soak` has a hundred, with a Spark for each driver, which dies and pauses
with it. SEED= repeats what is disturbed and when; FAULTS= is for a shorter trial.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cairn.driver.coordinator.leadership.zookeeper import ZooKeeperLeadership
from cairn.storage.manifest import Epoch
from tests.spark.live import Undisturbed
from tests.spark.programs.ledger import payments
from tests.spark.support import Input, Program, by_id, epochs, published, stored_state
from tests.zookeeper import ZooKeeper

SESSION_S = 2.0
START_UP_S = 60.0
"""A new leader commits an epoch within the session and this time, on a busy machine too."""
PATIENCE_S = 240.0
DRIVERS = 3
RETAINED = 10_000


class Driver:
    """One program of the group; its output is read, so that it never waits for a reader."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[str] = []
        for pipe in (program.process.stdout, program.process.stderr):
            threading.Thread(target=self._drain, args=(pipe,), daemon=True).start()

    def _drain(self, pipe: Any) -> None:
        try:
            for line in pipe:
                self.lines = [*self.lines[-200:], line]
        except ValueError:
            pass  # The pipe was closed.

    @property
    def pid(self) -> int:
        return self.program.process.pid

    @property
    def is_alive(self) -> bool:
        return self.program.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)


class Group:
    """The drivers of one job, and the view of somebody who looks at it from outside."""

    def __init__(self, work: Path, url: str, chance: random.Random, on: Any) -> None:
        self.work, self.chance = work, chance
        self.source = Input(work / "in", "id bigint, account string, amount bigint")
        self.drivers: list[Driver] = []
        self._url, self._on = url, on
        self._opened = ExitStack()
        self._view = ZooKeeperLeadership(url, session_s=SESSION_S)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self._view.close()
        self._opened.close()

    def start_driver(self, *, has_spark: bool) -> None:
        """Start a driver with a Spark of its own, or on the Spark of the tests."""
        program = Program(
            "ledger",
            *(self.source.folder, self.work, "--ha", self._url, "--retained", RETAINED),
            *("--trigger", "100 milliseconds", "--standby", self.chance.choice(["warm", "hot"])),
            on=None if has_spark else self._on,
        )
        self.drivers.append(Driver(self._opened.enter_context(program)))

    def await_leader(self, besides: int = 0) -> Driver:
        """Return the driver that leads, once it is another one than this."""

        def look() -> Driver | None:
            member = self._view.leader()
            pid = None if member is None or member.pid == besides else member.pid
            return next((driver for driver in self.drivers if driver.pid == pid), None)

        return self.wait_for(look, "no driver leads")

    def await_standby(self) -> None:
        self.wait_for(lambda: self._view.waiting() or None, "no driver waits")

    def await_epoch(self, after_term: int) -> Epoch:
        """Return the newest epoch, once it is of a later term."""

        def look() -> Epoch | None:
            found = self.epochs()
            return found[-1] if found and found[-1].term > after_term else None

        return self.wait_for(look, f"no epoch after term {after_term}")

    def epochs(self) -> list[Epoch]:
        checkpoint = self.work / "checkpoint"
        return epochs(checkpoint) if (checkpoint / "epochs").exists() else []

    def wait_for(self, look: Callable[[], Any], failure: str) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := look()) is None:
            ended = [driver for driver in self.drivers if not driver.is_alive]
            assert not ended, f"a driver has ended by itself: {''.join(ended[0].lines)[-4000:]}"
            if time.monotonic() > deadline_s:
                told = [f"--- {d.pid}\n{''.join(d.lines)[-2000:]}" for d in self.drivers]
                raise AssertionError(f"{failure}\n" + "\n".join(told))
            time.sleep(0.05)
        return found

    # Faults

    def kill_leader(self) -> None:
        leader = self.await_leader()
        leader.program.kill()
        self.drivers.remove(leader)
        self.start_driver(has_spark=self._on is None)

    def pause_leader(self) -> Iterator[None]:
        """Pause the leader until the next one has committed an epoch; it becomes a standby."""
        leader = self.await_leader()
        leader.send(signal.SIGSTOP)
        try:
            self.await_leader(besides=leader.pid)
            yield
        finally:
            leader.send(signal.SIGCONT)


def disturb(work: Path, url: str, seed: int, on: Any, faults: list[str]) -> list[Epoch]:
    """Run the job through these faults; return its epochs. A file comes after each fault."""
    chance = random.Random(seed)
    gaps_s = []
    files = payments(len(faults) + 2)
    with Group(work, url, chance, on) as group:
        group.source.add(*files[0])
        group.start_driver(has_spark=True)
        newest = group.await_epoch(after_term=0)
        for _ in range(1, DRIVERS):
            group.start_driver(has_spark=on is None)
        for fault, rows in zip(faults, files[1:], strict=False):
            group.await_standby()
            time.sleep(chance.random())
            term, disturbed_s = newest.term, time.monotonic()
            if fault == "kill":
                group.kill_leader()
                group.source.add(*rows)
                newest = group.await_epoch(after_term=term)
            else:
                for _ in group.pause_leader():
                    group.source.add(*rows)
                    newest = group.await_epoch(after_term=term)
            gaps_s.append(round(time.monotonic() - disturbed_s, 1))
        print(f"from each fault to the next epoch, in seconds: {gaps_s}")
        assert gaps_s[-1] <= SESSION_S + START_UP_S, gaps_s
        group.source.add(*files[-1])
        wanted = sum(len(rows) for rows in files)
        group.wait_for(
            lambda: len(published(work / "booked")) >= wanted or None, "rows are missing"
        )
        return group.epochs()


def check(spark: Any, work: Path, folder: Path, found: list[Epoch], faults: int) -> None:
    """Compare with a run that nobody disturbed."""
    undisturbed = Undisturbed(spark, folder, payments(faults + 2))
    for sink in ("booked", "large", "spread"):
        # What `spread` and the others tell of a row depends on the order of all rows before it.
        assert by_id(published(work / sink)) == by_id(published(folder / sink)), sink
    assert stored_state(undisturbed.job, work / "checkpoint") == undisturbed.state()
    numbers, terms = [e.number for e in found], [e.term for e in found]
    assert numbers == sorted(set(numbers)) and terms == sorted(terms)
    assert [epoch.parent for epoch in found] == [None, *numbers[:-1]]
    assert len(set(terms)) >= faults + 1, "each fault was followed by an epoch of another driver"


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeper]:
    server = ZooKeeper()
    yield server
    server.close()


def test_a_leader_that_is_paused_and_then_goes_on_leaves_no_trace(spark, zookeeper, tmp_path):
    """Leaders that are killed are in test_standby."""
    url, faults = f"zookeeper://{zookeeper.hosts}/short?session=2s", ["pause"]
    found = disturb(tmp_path, url, 1, spark, faults)
    check(spark, tmp_path, tmp_path / "undisturbed", found, len(faults))


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_fail_overs_leave_no_trace(spark, zookeeper, tmp_path):
    seed = int(os.environ.get("SEED") or time.time())
    print(f"SEED={seed}")
    chance = random.Random(seed)
    faults = chance.choices(["kill", "pause"], [2, 1], k=int(os.environ.get("FAULTS") or 100))
    url = f"zookeeper://{zookeeper.hosts}/long?session=2s"
    found = disturb(tmp_path, url, seed, None, faults)
    check(spark, tmp_path, tmp_path / "undisturbed", found, len(faults))
