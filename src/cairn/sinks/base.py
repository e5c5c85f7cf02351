"""The contract of a sink: prepared in the slots, published by the driver.

    slot     writer(epoch, subtask, execution) -> write(batch)... -> prepare() -> committable
    driver   manifest written -> commit(epoch, committables), again after any restart

Always true of a sink:
- after `prepare` the data is durable and no reader sees it;
- `commit` is idempotent; it proves itself by a mark written with it, keyed by job, sink, epoch
  and batch, which together never mean two things;
- `commit` is called again until it succeeds, by whichever driver leads;
- a committable is plain JSON, equal for equal rows, and enough to commit from another machine,
  also for a program with other columns or settings of the sink;
- a mark of an epoch that the log does not have is found by `newest_mark` before a takeover: a
  new epoch is never taken for published because of it;
- what was prepared and never named in a manifest is removed by `recover`, after a takeover;
- a sink says what a reader sees (`shows`) and what a repeated commit does (`promise`).
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
    """Who writes: fixed for the life of the job."""

    job_id: str
    job_name: str
    uid: str
    schema: pa.Schema
    scratch: str | None = None
    """A private local directory, in a slot. None in the driver."""
    checkpoint: str = ""
    """The url of the job's checkpoint, for what rides in the epoch until it is published."""
    spark: Any = None
    """The Spark session, in the driver of a real run."""


class Writer(ABC):
    """Writes one subtask's rows of one attempt at an epoch."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None: ...

    @abstractmethod
    def prepare(self) -> Committable | None:
        """Make the rows durable but invisible. None when there were none."""

    @abstractmethod
    def abort(self) -> None:
        """Forget the rows; called instead of prepare.

        What is durable already and may be shared with a later attempt is left to `recover`.
        """


class Sink(ABC):
    """Where a stream ends. Objects are pickled to the slots, so they hold settings only."""

    promise: Promise = "exactly-once"
    """What a reader finds of each row, when a commit is repeated until it succeeds."""
    shows: Shows = "epochs"
    """Readers see whole epochs, in order; or an epoch may appear piece by piece."""

    context: SinkContext

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "context"}

    def open(self, context: SinkContext) -> None:
        """Once in the driver and once in each slot, before anything else."""
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
        """After a takeover and the repeated commit: remove what abandoned attempts left behind.

        Only of epochs below this number. Those from there on belong to this driver, or to
        one that has taken over from it since, unnoticed.
        """

    def newest_mark(self) -> int | None:
        """The newest epoch of this job and sink that is marked as published in the target.

        Asked in the driver before a takeover: a mark of an epoch that is not in the log ends
        the start. None when there is no mark, or the sink keeps none.
        """
        return None

    @property
    def target(self) -> str:
        """The place an open sink publishes to, in words and without secrets, for the driver.

        It is noted with each epoch. At a start, a sink publishes the newest epoch again only if
        that was prepared for an equal target. "" is a target that ends with the driver.
        """
        return type(self).__name__

    def is_away(self, error: Exception) -> bool:
        """Whether the target cannot be reached now, and may be later: then the job waits for it."""
        return any(isinstance(each, ConnectionError | TimeoutError) for each in causes(error))

    def on_epoch_committed(self, epoch: int) -> None:
        """In a slot, at the beginning of the next epoch: this one is committed for good."""

    def close(self) -> None:
        """When the run or the slot ends; also after an `open` that failed."""


def without_password(url: str) -> str:
    """Return a url as it can be shown: a password in it is left out."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1@", url)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what caused it, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


@contextmanager
def reached_at_start(uid: str, sink: Sink) -> Iterator[None]:
    """Raise CommitError if the target is away: then the job is right, and the world is not."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        is_told = isinstance(error, CommitError) and bool(error.facts.get("is_away"))
        if is_told or not sink.is_away(error):
            raise
        raise away_at_start(uid, error) from error


def away_at_start(uid: str, error: Exception) -> CommitError:
    """Return what a start raises while the target of a sink is away."""
    why = str(error).strip().replace("\n", "\n  ") or type(error).__name__
    return CommitError(
        f"sink {uid!r} cannot be reached, so the job does not start\n  cause: {why}\n"
        "  next: bring the target back, or correct where the sink looks for it, and start the "
        "job again; nothing is lost",
        sink=uid,
        is_away=True,
    )


def close_all(sinks: Iterable[Sink]) -> None:
    """Close each of them, whatever becomes of the others: what is committed does not need it."""
    for sink in sinks:
        with suppress(Exception):
            sink.close()


@contextmanager
def closed_on_error(sinks: Iterable[Sink]) -> Iterator[None]:
    """Around what comes after they are opened: if it fails, nobody else closes them."""
    try:
        yield
    except BaseException:
        close_all(sinks)
        raise
