"""The slots of a run, started ahead of its epochs and ended by Spark tasks.

Always true here:
- a slot that is not started ahead is started by the first task that needs it;
- slots that could not be started ahead fail one attempt only;
- slots on machines that no task reaches end by themselves.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from cairn.driver.roster import Roster
from cairn.logs import logger
from cairn.protocol.lookups import DoorSpec, this_host
from cairn.protocol.messages import Report, Token
from cairn.slot.process import end_slots, start_slot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START_PATIENCE_S = 10.0


class SparkSlots:
    """Starts, finds and ends the slots of one run."""

    def __init__(
        self,
        spark: SparkSession,
        job: str,
        run_id: str,
        find_pin: Callable[[], DataFrame | None],
    ) -> None:
        """`find_pin` returns the pin table that epochs run on, if they have one."""
        self._spark = spark
        self._job = job
        self._run_id = run_id
        self._find_pin = find_pin
        self.door = DoorSpec(
            secrets.token_bytes(32), this_host(), spark.conf.get("spark.driver.host", "") or ""
        )
        self.doors: dict[int, str] = {}
        """Per subtask, where its slot is asked for state: as of the last epoch that ran."""
        self.roster = Roster(self.door.key)
        self._started: Future[None] | None = None
        """The first slots and the first pin table, while they are being started and laid out."""
        self._ending = threading.Lock()

    @property
    def are_starting(self) -> bool:
        """True until an epoch has waited for the first slots."""
        return self._started is not None

    def start(self, places: DataFrame, slots: Sequence[int]) -> None:
        """Start the first slots in the background, and lay the first pin table out.

        Meanwhile Spark starts the query, and the first epoch finds its workers and slots there.
        """
        run_id, started = self._run_id, Future[None]()
        self._started = started

        def start(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import cairn.worker.forward  # noqa: F401  # The first epoch's tasks will need it.

            for batch in batches:
                for subtask in batch["pin"].to_pylist():
                    # A forwarder that finds no slot starts one, and says why it cannot.
                    with suppress(Exception):
                        start_slot(run_id, slots[subtask])
                yield batch

        def run() -> None:
            try:
                self._spark.sparkContext.setJobDescription(f"cairn: {self._job}, subtasks")
                places.mapInArrow(start, "pin int").collect()
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=run, daemon=True, name=f"cairn-{self._job}-slots").start()

    def wait(self) -> None:
        """Wait for the first slots and the first pin table. Raises why they failed, once."""
        if self._started is not None:
            try:
                self._started.result()
            finally:
                # If it failed, the next attempt starts slots and lays the table out itself.
                self._started = None

    def start_here(self, slots: Sequence[int]) -> None:
        """Start slots on this machine, which is the only one."""
        executor = self._spark._jvm.java.lang.ProcessHandle.current().pid()
        with ThreadPoolExecutor() as pool:
            started = [pool.submit(start_slot, self._run_id, slot, executor) for slot in slots]
            for each in started:
                each.result()

    def start_at(self, pin: DataFrame, slots: Sequence[int]) -> None:
        """Start slots on the places of a pin table."""
        run_id = self._run_id

        def start(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for subtask in batch["pin"].to_pylist():
                    start_slot(run_id, slots[subtask])
                yield batch

        pin.mapInArrow(start, "pin int").collect()

    def note_doors(self, reports: Sequence[Report], parallelism: int) -> None:
        """Note the doors that slots have reported."""
        # A new dict: other threads keep reading the old one.
        doors = self.doors | {report.subtask: report.door for report in reports}
        # One that could open no door has none, whatever the slot before it had.
        self.doors = {at: door for at, door in doors.items() if door and at < parallelism}

    def end_left_behind(self) -> None:
        """End the slots that the newest attempt has not used, beside the epochs to come."""
        if self.roster.has_left_behind:
            # Not waited for: one may be stuck.
            threading.Thread(target=self._end_left_behind, daemon=True, name="cairn-slots").start()

    def _end_left_behind(self) -> None:
        if not self._ending.acquire(blocking=False):
            return  # The thread of an epoch before is still at it; a later one looks again.
        try:
            self.roster.end_left_behind(self._look_and_end)
        except Exception:
            job = {"job": self._job}
            logger.warning("slots that are not in use could not be ended", exc_info=True, extra=job)
        finally:
            self._ending.release()

    def end_all(self, *, is_cluster: bool) -> None:
        """End the slots on every executor; those that are not reached end by themselves."""
        if self._started is not None:
            with suppress(Exception):
                self._started.result(START_PATIENCE_S)
        if is_cluster:
            # Also where no subtask is any more.
            self.roster.end_all()
        self._look_and_end()

    def _look_and_end(self, keep: Collection[str] = (), as_of: Token | None = None) -> None:
        """Look for slots of the run on all machines that have subtasks, and end them."""
        run_id = self._run_id
        end_slots(run_id, keep, as_of)
        pin = self._find_pin()
        if pin is not None:
            pin.foreach(lambda _: end_slots(run_id, keep, as_of) and None)


__all__ = ["SparkSlots"]
