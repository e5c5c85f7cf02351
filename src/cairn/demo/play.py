"""The demo, step by step: payments flow, a slot and drivers are killed, all is counted.

Always true here:
- a kill counts as "in mid-epoch" only with proof: the epoch took a second attempt, or Spark
  had planned a batch that no epoch records;
- the demo succeeds only if these kills did, a standby went on, and no row differs.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.cli.job_file import UsageError
from cairn.cli.spark_log import stderr_to
from cairn.demo.check import Comparison, check
from cairn.demo.driver import LEASE, SHORT_LIFE, Driver, Slot, wait_for_leftovers
from cairn.demo.payments import Arrivals, Stream
from cairn.demo.stage import Stage, Standing
from cairn.demo.watch import Watch
from cairn.errors import EpochError
from cairn.report.epoch import EpochReport
from cairn.session import session

PARALLELISM = 2
MARKER = ".cairn-demo"
PAYMENTS_PER_ACCOUNT = 40
KILL_SLOT_AT = 0.2
KILL_DRIVER_AT = 0.45
KILL_TRIES = 3
PATIENCE_S = 120.0
IDLE_S = 15.0


def play(*, events: int, seconds: float, seed: int, folder: str | None, tamper: bool) -> bool:
    """Run the demo. True if nothing was lost, duplicated or changed."""
    home = _home(folder)
    # Its own folder for the slots' sockets: slots of other runs are not in it.
    runtime = Path(tempfile.mkdtemp(prefix="cairn-demo-"))
    stream = Stream(events, max(1, events // PAYMENTS_PER_ACCOUNT), seconds, seed)
    stage = Stage(Standing(events))
    stage.title(
        "cairn demo: kill it, start it again, count every payment",
        f"{events:,} payments on {stream.accounts:,} accounts arrive over {seconds:.0f} s "
        f"(seed {seed}), in {home}",
    )
    ok = False
    try:
        with (
            Driver(home, runtime, parallelism=PARALLELISM) as driver,
            Driver(home, runtime, parallelism=PARALLELISM, name="standby") as standby,
        ):
            play = Play(home, stream, stage, driver, standby)
            with stage:
                play.stream_and_kill()
            leftovers = wait_for_leftovers(runtime)
        if leftovers:
            stage.print_event(f"{leftovers} slots have outlived their driver", "bad")
        if tamper:
            stage.print_event(f"tampered with the output: {_spoil(home / 'out' / 'ledger')}", "bad")
        comparisons = _compare(home, stage)
        stage.verdict(comparisons, play.kills, play.gaps_s)
        ok = all(found.ok for found in comparisons) and play.went_well and not leftovers
    finally:
        if ok:
            shutil.rmtree(runtime, ignore_errors=True)
        else:
            stage.print_event(f"logs of the drivers: {home}; of the slots: {runtime}", "bad")
    took = f"took {stage.elapsed_s:.0f} s; look around with `{_cairn()} ls {home / 'checkpoint'}`"
    stage.console.print(took, style="dim", soft_wrap=True)
    return ok


class Play:
    """The steps with a driver, and those with a standby."""

    def __init__(
        self, home: Path, stream: Stream, stage: Stage, driver: Driver, standby: Driver
    ) -> None:
        self.kills = {"slot": 0, "driver": 0}
        self.gaps_s: dict[str, float] = {}
        """Seconds from a driver's end to the next epoch, by what went on."""
        self._standby = standby
        self.went_well = False
        self._stage = stage
        self._driver = driver
        self._watch = Watch(home / "checkpoint")
        self._arrivals = Arrivals(stream, home / "payments")
        self._total = stream.payments
        self._attempts: dict[int, EpochReport] = {}

    def stream_and_kill(self) -> None:
        stage, watch = self._stage, self._watch
        try:
            self._driver.start()
            stage.print_event(f"driver started, pid {self._driver.pid}")
            stage.set_step("Spark is starting")
            self._until(lambda: watch.record > 0, "the driver's first record in the log")
            stage.set_step("payments arrive; Spark plans the first epoch")
            self._arrivals.start()
            self._until(lambda: watch.epochs > 0, "the first epoch")
            stage.print_event(f"first epoch committed: {watch.rows:,} payments")
            stage.set_step("payments flow; soon a slot will be killed")
            self._until(lambda: self._share() >= KILL_SLOT_AT, "a fifth of the payments")
            self._kill_a_slot()
            stage.set_step("payments flow; soon the driver will be killed")
            self._until(lambda: self._share() >= KILL_DRIVER_AT, "half of the payments")
            self._kill_the_driver()
            self._kill_before_a_standby()
            stage.set_step("waiting until every payment is in a committed epoch")
            self._drain()
            code = self._driver.stop()
            self._look()
        finally:
            self._arrivals.end()
        stage.print_event(f"all input is through; driver stopped by Ctrl-C, exit code {code}")
        self.went_well = code == 0 and all(self.kills.values()) and "standby" in self.gaps_s

    def _kill_a_slot(self) -> None:
        for _ in range(KILL_TRIES):
            slot = self._busy_slot()
            number = self._newest() + 1
            slot.kill()
            pid = slot.process.pid
            self._stage.print_event(
                f"SIGKILL slot {slot.subtask} (pid {pid}) while epoch {number} is under way", "kill"
            )
            self._stage.set_step("the epoch is tried again in a new slot")
            self._until(lambda n=number: self._newest() >= n, f"epoch {number}")  # type: ignore[misc]
            epoch = self._attempts[number]
            if epoch.attempts > 1:
                self.kills["slot"] += 1
                self._stage.print_event(
                    f"epoch {number} committed at attempt {epoch.attempts}, "
                    f"{epoch.restored} slot restored from epoch {epoch.parent}",
                    "good",
                )
                return
            self._stage.print_event("that slot had done its part of the epoch already; once more")

    def _kill_the_driver(self) -> None:
        stage, driver, watch = self._stage, self._driver, self._watch
        for _ in range(KILL_TRIES):
            self._busy_slot()
            pid = driver.pid
            driver.kill()
            killed_s = time.monotonic()
            self._look()
            last, batch = self._newest(), watch.find_planned()
            if batch is None:
                stage.print_event(f"SIGKILL driver (pid {pid})", "kill")
                stage.print_event(f"epoch {last} had been committed just before; once more")
            else:
                self.kills["driver"] += 1
                under_way = f"while epoch {last + 1} is under way"
                stage.print_event(f"SIGKILL driver (pid {pid}) {under_way}", "kill")
                stage.print_event(
                    f"epoch {last + 1} never happened: Spark had planned batch {batch}, "
                    f"the log ends with epoch {last}"
                )
            self._arrivals.is_paced = batch is None
            driver.start()
            stage.print_event(f"driver started again, pid {driver.pid}")
            stage.set_step("Spark is starting again; payments do not wait for it")
            if batch is not None:
                # Not later: it starts a Spark too, and has to wait for the first act anyway.
                self._until(lambda n=last: watch.record > n, "the takeover")  # type: ignore[misc]
                self._standby.start()
                stage.print_event(
                    f"it has taken over; a hot standby is started too, pid {self._standby.pid}"
                )
            self._until(lambda n=last: self._newest() > n, "the new driver's first epoch")  # type: ignore[misc]
            self.gaps_s["restart"] = time.monotonic() - killed_s
            epoch = watch.report
            assert epoch is not None
            takeover = f" (record {last + 1} is its takeover)" if epoch.epoch > last + 1 else ""
            stage.print_event(
                f"goes on with epoch {epoch.epoch}{takeover}, {epoch.restored} slots "
                f"restored from epoch {epoch.parent}",
                "good",
            )
            stage.print_event(f"no epoch for {self.gaps_s['restart']:.1f} s: Spark had to start")
            if batch is not None:
                return

    def _kill_before_a_standby(self) -> None:
        """The second act: a standby holds the state when the driver is killed."""
        stage, watch, standby = self._stage, self._watch, self._standby
        stage.print_event("second act: a driver is killed while a hot standby waits")
        stage.set_step("the standby starts Spark and restores the state")
        self._until(lambda: watch.find_standby(standby.pid) is not None, "the standby")
        held = watch.find_standby(standby.pid)
        stage.print_event(f"the standby waits; its slots hold epoch {held}")
        pid, term = self._driver.pid, self._term()
        self._driver.kill()
        killed_s, self._driver = time.monotonic(), standby
        # Not before: the driver that dies must not have them all.
        self._arrivals.release()
        stage.print_event(f"SIGKILL driver (pid {pid}); nobody starts it again", "kill")
        stage.set_step("the standby notices that the driver is gone")
        self._until(lambda: self._term() > term, "the standby's first epoch")
        self.gaps_s["standby"] = time.monotonic() - killed_s
        epoch = watch.report
        assert epoch is not None
        stage.print_event(
            f"the standby goes on with epoch {epoch.epoch}, {epoch.restored} slots restored", "good"
        )
        stage.print_event(
            f"no epoch for {self.gaps_s['standby']:.1f} s: {LEASE} to notice, the rest to take over"
        )

    def _term(self) -> int:
        return 0 if self._watch.newest is None else self._watch.newest.term

    def _drain(self) -> None:
        idle_since_s = time.monotonic()
        rows = -1
        while self._arrivals.is_alive() or time.monotonic() - idle_since_s < self._patience_s():
            self._look()
            if self._watch.rows != rows:
                idle_since_s, rows = time.monotonic(), self._watch.rows
            time.sleep(0.1)
        if self._arrivals.error is not None:
            raise self._arrivals.error

    def _patience_s(self) -> float:
        """Return a short time if all payments are in: some may still come twice."""
        return 1.0 if self._watch.rows == self._total else IDLE_S

    def _busy_slot(self) -> Slot:
        """Return a slot that works on an epoch."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._look()
            batch = self._watch.find_planned()
            before = [(slot, slot.cpu_s()) for slot in self._driver.slots()]
            time.sleep(0.02)
            busy = [slot for slot, cpu_s in before if slot.cpu_s() > cpu_s]
            self._look()
            # The batch is still the same, so the slot worked on it.
            if busy and batch is not None and self._watch.find_planned() == batch:
                return busy[0]
        raise self._stuck("a slot at work")

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._look()
            if reached():
                return
            if time.monotonic() > deadline:
                raise self._stuck(what)
            time.sleep(0.05)

    def _look(self) -> None:
        for epoch in self._watch.new_epochs():
            self._attempts[epoch.epoch] = epoch
            self._stage.epoch(epoch)
        self._stage.standing.arrived = self._arrivals.arrived
        self._stage.standing.committed = self._arrivals.committed = self._watch.rows
        self._stage.tick()
        code = self._driver.exit_code()
        if code is not None and code > 0:
            raise self._stuck(f"the driver, which ended with exit code {code}")

    def _stuck(self, what: str) -> EpochError:
        return EpochError(
            f"the demo timed out waiting for {what}\n"
            f"  driver's log: {self._driver.log}\n{self._driver.log_tail()}"
        )

    def _share(self) -> float:
        return self._watch.rows / self._total

    def _newest(self) -> int:
        return 0 if self._watch.newest is None else self._watch.newest.number


def _compare(home: Path, stage: Stage) -> list[Comparison]:
    stage.print_event("a plain Spark batch job computes the same from all payments …")
    with stage.busy("starting Spark"), stderr_to(home / "check.log"):
        settings = {**SHORT_LIFE, "spark.sql.adaptive.enabled": "false"}
        spark = session("cairn-demo-check", master=f"local[{PARALLELISM}]", **settings)
    try:
        with stage.busy("comparing output and state, row by row"):
            found = check(spark, home / "payments", home / "out", home / "checkpoint")
    finally:
        spark.stop()
    stage.print_event("… and output and state are compared with it, row by row")
    return found


def _cairn() -> str:
    """Return the command to type: in a virtual environment it may not be on the path."""
    beside = Path(sys.executable).with_name("cairn")
    if shutil.which("cairn") is not None or not beside.exists():
        return "cairn"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _spoil(folder: Path) -> str:
    """Drop a row of the output and double another, to test the check."""
    for file in sorted(folder.glob("*.parquet")):
        rows = pq.read_table(file)
        if rows.num_rows >= 2:
            pq.write_table(pa.concat_tables([rows.slice(1), rows.slice(rows.num_rows - 1)]), file)
            return f"one row dropped and one doubled in {file.name}"
    raise EpochError(f"{folder} has no output to tamper with")


def _home(folder: str | None) -> Path:
    """Return a new folder, or the emptied folder of an earlier demo."""
    home = Path(folder or tempfile.mkdtemp(prefix="cairn-demo-")).resolve()
    if home.exists() and any(home.iterdir()):
        if not (home / MARKER).exists():
            raise UsageError(f"{home} is not empty, and not from a demo\n  next: name another one")
        shutil.rmtree(home)
    home.mkdir(parents=True, exist_ok=True)
    (home / MARKER).touch()
    (home / "payments").mkdir()
    return home
