"""The batches of Spark's query: the folder of its log, and the batches that are committed.

Always true here:
- a batch whose epoch is committed does not run again;
- while another driver writes to Spark's folder, this one uses another folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.rewind import Position
from cairn.driver.spark_place import SparkPlace
from cairn.errors import EpochError
from cairn.storage.manifest import SparkPosition
from cairn.storage.source_logs import advance
from cairn.storage.spark_log import (
    lay_out_for,
    leave_unread,
    move_logs,
    read_offsets,
    same_offsets,
    spark_folder,
)


class StoppingError(Exception):
    """Raised in Spark's thread to keep it from starting another epoch.

    Spark takes an error with this text for its own interruption of a stopped query, and does
    not report it as a failure.
    """

    def __init__(self) -> None:
        super().__init__(
            "py4j.protocol.Py4JJavaError: An error occurred while calling stop.\n"
            ": java.lang.InterruptedException"
        )


class BatchFailedError(Exception):
    """Raised in Spark's thread to end the query: the run itself has the error, and raises it.

    Spark writes the error to its log, with all its traces.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error).partition("\n")[0])


class SparkBatches:
    def __init__(
        self,
        coordinator: Coordinator,
        place: SparkPlace,
        position: Position,
        sources: Sequence[str],
        *,
        gives_up: bool,
        reset_sources: Sequence[str] = (),
        compact_interval: int | None = None,
    ) -> None:
        """`gives_up`: planned batches are never read again.

        `compact_interval` is that of Spark's file sources, in the session that runs the query.
        """
        self.stand = position.stand
        """The position of Spark when the run began."""
        self._coordinator = coordinator
        self._place = place
        self._store = place.store
        self._folder = position.folder
        self._sources = list(sources)
        self._gives_up = gives_up
        self._reset_sources = reset_sources
        self._compact_interval = compact_interval
        newest = coordinator.newest
        self._logs = {} if newest is None else move_logs(newest.spark, sources, reset_sources)
        """Return what the sources keep, as of the epoch from which the folder was laid out."""

    @property
    def url(self) -> str:
        """The url of Spark's folder."""
        return f"{self._store.url}/{self._folder}"

    def to_run(self, batch_id: int) -> SparkPosition | None:
        """Return the position of a batch; None if it was committed before a crash."""
        if self._gives_up:
            self._place.keep(self._folder)
        offsets = read_offsets(self._store, self._folder, batch_id)
        newest = self._coordinator.newest
        logs = self._logs
        if newest is not None and newest.spark.folder == self._folder:
            last, logs = newest.spark, newest.spark.logs
            if last.batch_id == batch_id and same_offsets(last.offsets, offsets):
                return None
            if batch_id != last.batch_id + 1 and not self._gives_up:
                raise EpochError(
                    f"Spark runs batch {batch_id} of {self._folder} after epoch {newest.number}, "
                    f"which is batch {last.batch_id}\n"
                    f"  expected: batch {last.batch_id + 1}\n"
                    "  next: start the job again; it goes on after the newest epoch"
                )
        position = SparkPosition(
            folder=self._folder, batch_id=batch_id, offsets=offsets, sources=self._sources
        )
        coordinator = self._coordinator
        return advance(
            logs, self._store, position, checkpoint=coordinator.store, term=coordinator.term
        )

    def leave_unread(self, batch_id: int) -> None:
        """Note that a planned batch was not processed, so that the next run reads it."""
        if self._gives_up:
            # In the place where the next run looks for batches that were planned.
            self._place.keep(self._folder)
            leave_unread(self._place.kept, self._folder, batch_id)

    def go_elsewhere(self) -> bool:
        """Use another folder, because a fenced driver still writes to Spark's folder.

        False if the job has no epoch to continue from, or this driver was fenced itself.
        """
        coordinator = self._coordinator
        if coordinator.newest is None or self._gives_up:
            return False
        if not coordinator.log.is_leading():
            return False
        folder = f"{spark_folder(coordinator.term)}-{coordinator.newest.number}"
        if folder == self._folder:
            return False
        # An epoch of this run has them behind it: a reset is done once.
        # One without a batch may have come before, and has not.
        is_ours = (
            coordinator.newest.term == coordinator.term
            and coordinator.newest.spark.folder == self._folder
        )
        reset = () if is_ours else self._reset_sources
        newest = coordinator.newest.spark
        lay_out_for(
            newest,
            folder,
            self._store,
            self._sources,
            reset,
            checkpoint=coordinator.store,
            compact_interval=self._compact_interval,
        )
        self._folder, self._logs = folder, move_logs(newest, self._sources, reset)
        return True
