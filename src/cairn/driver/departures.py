"""Executors that have notice to end, and the state of their subtasks, read ahead elsewhere.

Spark gives an executor that is decommissioned no task, and lets those that it runs come to their
end. The next epoch runs its subtasks elsewhere. Meanwhile the pin table is laid out without it, and
the slots at the new places read the newest epoch: they begin the next one with its changes at most.

Always true here:
- a slot at work is not touched: subtasks whose place stays are left out, and the message is older
  than any of the epoch that runs;
- a failure means only that the next epoch restores state itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from cairn.logs import logger
from cairn.protocol.messages import Begin, begin_encoder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cairn.worker.forward import Forward

POLL_S: Final = 0.5


class Departures:
    """Watches the executors of a run, and has subtasks moved away from those that will end."""

    def __init__(
        self,
        find: Callable[[], frozenset[str]],
        move: Callable[[], None],
        *,
        name: str = "",
    ) -> None:
        """`find` returns the ids of executors that have notice; `move` moves their subtasks."""
        self._find = find
        self._move = move
        self._known: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, daemon=True, name=f"cairn-{name}-departures"
        )

    @property
    def count(self) -> int:
        """The executors that have notice and are still there."""
        return len(self._known)

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float) -> None:
        """Watch no more; wait for a move that is under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def look(self) -> bool:
        """Look once. True if subtasks were moved."""
        found = self._find()
        new, self._known = found - self._known, found
        if not new:
            return False
        logger.info("%d executors have notice to end; their subtasks move", len(new))
        self._move()
        return True

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self.look()
            except Exception as error:
                text = str(error).partition("\n")[0]
                logger.warning("state was not read ahead for executors that end: %s", text)


def find_departing(spark: SparkSession) -> Callable[[], frozenset[str]] | None:
    """Return a function that finds executors with notice; None if Spark gives none."""
    context: Any = spark.sparkContext
    if not context._jsc.sc().conf().getBoolean("spark.decommission.enabled", False):
        return None

    def find() -> frozenset[str]:
        scala = context._jsc.sc()
        scheduler = scala.taskScheduler()
        if not scheduler.executorsPendingDecommission().size():
            return frozenset()  # Nearly always, and it costs no more than this.
        executors = scala.statusStore().executorList(True)
        ids = [executors.apply(index).id() for index in range(executors.size())]
        return frozenset(id for id in ids if scheduler.getExecutorDecommissionState(id).isDefined())

    return find


def read_ahead(
    pin: DataFrame, forwards: Sequence[Forward], begin: Begin, places: Mapping[int, str]
) -> int:
    """Have the slots at new places of a pin table follow an epoch; return their number.

    `places` has the executor of each subtask so far.
    """
    message = begin_encoder.encode(begin)

    def follow(subtask: int) -> bool:
        # It cannot be sent with the function, so the executor imports it.
        from cairn.protocol.messages import begin_decoder

        ahead, has_moved = begin_decoder.decode(message), False
        # One that has begun an epoch meanwhile refuses, and another one may have just ended.
        with suppress(Exception):
            for forward in forwards:
                has_moved |= forward.read_ahead(ahead, subtask, places.get(subtask))
        return has_moved

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            moved = [follow(subtask) for subtask in batch["pin"].to_pylist()]
            yield batch.filter(pa.array(moved, pa.bool_()))

    return len(pin.mapInArrow(run, "pin int").collect())
