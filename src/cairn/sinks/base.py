"""The contract of a sink: prepared in the slots, published by the driver.

    slot     writer(epoch, subtask, execution) -> write(batch)... -> prepare() -> committable
    driver   manifest written -> commit(epoch, committables), again after any restart

Always true of a sink:
- after `prepare` the data is durable and no reader sees it;
- `commit` is idempotent: it writes a mark in the same step, keyed by job, sink, epoch and batch,
  a key that never repeats;
- `commit` is called again until it succeeds, by the driver that leads;
- a committable is plain JSON, equal for equal rows, and enough to commit from another machine,
  also for a program with other columns or settings of the sink;
- `newest_mark` finds a mark of an epoch that is not in the log before a takeover, so a new epoch
  never counts as published because of an old mark;
- `recover` removes prepared data that no manifest names, after a takeover;
- `shows` declares what a reader sees, `promise` what a repeated commit does.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from cairn.errors import CommitError

Committable = dict[str, Any]

Promise = Literal["exactly-once", "at-least-once"]
Shows = Literal["epochs", "pieces"]

ROUNDS_MAX: Final = 1 << 20
"""Limit of the rounds of a batch."""


class Execution(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One run of the job's graph within an epoch: a round of a batch, in one attempt at it.

    Executions compare in the order in which they run. A batch that fails runs again from its
    first round, so a later attempt compares greater than every round of an earlier one.
    """

    batch: int = 0
    """Number of the batch in its epoch, from 0."""
    attempt: int = 0
    """Number of the attempt at the batch, from 0."""
    round: int = 0
    """Number of the round in a job with loops, from 0."""


@dataclass(frozen=True)
class SinkContext:
    """The job and the place of an open sink, fixed for the life of the job."""

    job_id: str
    job_name: str
    uid: str
    schema: pa.Schema
    scratch: str | None = None
    """A private local directory, in a slot. None in the driver."""
    checkpoint: str = ""
    """The url of the job's checkpoint, for rows that are staged there."""
    spark: Any = None
    """The Spark session, in the driver of a real run."""


class Writer(ABC):
    """Writes one subtask's rows of one attempt at an epoch."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def prepare(self) -> Committable | None:
        """Make the rows durable but invisible; return None if there were none."""

    @abstractmethod
    def abort(self) -> None:
        """Forget the rows; called instead of prepare.

        Durable data that a later attempt may share is left to `recover`.
        """


class Sink(ABC):
    """A target of a stream. Sinks are pickled to the slots, so they hold only settings."""

    promise: Promise = "exactly-once"
    """The number of copies of a row that readers find after repeated commits."""
    shows: Shows = "epochs"
    """With "epochs" readers see whole epochs, in order; with "pieces" an epoch appears in parts."""

    drops_rows: bool = False
    """True if the sink needs no rows: those that come to it without an operator are only counted,
    in Spark, and `writer` never gets them. Without any other row, `writer` is not called."""

    context: SinkContext

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "context"}

    def open(self, context: SinkContext) -> None:
        """Open the sink; called once in the driver and once in each slot, before anything else."""
        self.context = context

    @abstractmethod
    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        """Return a writer for the rows of one subtask in one execution.

        An epoch may have several batches, and a batch several rounds. All of them are published,
        so a name made from the content must contain `execution.batch` and `execution.round` too.
        Only one attempt at a batch is published.
        """

    @abstractmethod
    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        """Publish an epoch. A repeated call for the same epoch and batch changes nothing.

        With exactly-once, one call publishes the whole epoch, and `batch` is 0. With a weaker
        guarantee the job publishes before it commits: one call for each batch.
        """

    def recover(self, before_epoch: int) -> None:
        """Remove data of abandoned attempts; called after a takeover and the repeated commit.

        Only of epochs below this number. Later ones belong to this driver, or to a newer one
        that has taken over from it since.
        """

    def newest_mark(self) -> int | None:
        """Return the newest epoch of this job and sink with a mark in the target, or None.

        Called in the driver before a takeover: a mark of an epoch that is not in the log ends
        the start. Sinks without marks return None.
        """
        return None

    @property
    def target(self) -> str:
        """The place an open sink publishes to, as text without secrets.

        The driver stores it with each epoch. At a start, a sink publishes the newest epoch again
        only if it was prepared for an equal target. "" is a target that ends with the driver.
        """
        return type(self).__name__

    def is_away(self, error: Exception) -> bool:
        """True if the target cannot be reached now, and may be later: then the job waits for it."""
        return any(isinstance(each, ConnectionError | TimeoutError) for each in causes(error))

    def on_epoch_committed(self, epoch: int) -> None:
        """Called in a slot at the beginning of the next epoch, when this one is final."""

    def close(self) -> None:
        """Close the sink; called when the run or the slot ends, also after a failed `open`."""


def without_password(url: str) -> str:
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1@", url)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


@contextmanager
def refuse_if_away(uid: str, sink: Sink) -> Iterator[None]:
    """Raise CommitError for an error that means that the target is unreachable."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        is_refused = isinstance(error, CommitError) and bool(error.facts.get("is_away"))
        if is_refused or not sink.is_away(error):
            raise
        raise away_error(uid, error) from error


def away_error(uid: str, error: Exception) -> CommitError:
    """Return the error of a start while the target of a sink is unreachable."""
    why = str(error).strip().replace("\n", "\n  ") or type(error).__name__
    return CommitError(
        f"sink {uid!r} cannot be reached, so the job does not start\n  cause: {why}\n"
        "  next: repair the target, or correct its address in the sink, and start the job again; "
        "nothing is lost",
        sink=uid,
        is_away=True,
    )


def close_all(sinks: Iterable[Sink]) -> None:
    """Close all sinks, even if some fail to close: committed output does not depend on it."""
    for sink in sinks:
        with suppress(Exception):
            sink.close()


@contextmanager
def closed_on_error(sinks: Iterable[Sink]) -> Iterator[None]:
    """Close the sinks if the block fails, since no caller has them yet."""
    try:
        yield
    except BaseException:
        close_all(sinks)
        raise
