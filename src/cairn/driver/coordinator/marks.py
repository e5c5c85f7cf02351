"""Marks of published epochs, compared with the log before a driver takes over.

A sink skips an epoch whose mark it finds in its target. The log may not have an epoch with a
mark, because records were removed or the checkpoint is an older copy. Then a new epoch of that
number would be skipped, and the rows of the marked one would be published again.

With exactly-once a mark is written after the record of its epoch. With a weaker guarantee it is
written before: a driver that dies in between leaves a mark of the number after its last record.
The next driver's takeover record gets that number, so no epoch has it.

Always true here:
- marks are read first, then the log: epochs that a driver publishes meanwhile are in the log;
- only marks after the newest epoch count: epochs with older marks were in the log.
"""

from __future__ import annotations

from collections.abc import Mapping

from cairn.errors import CommitError, RestoreError
from cairn.sinks.base import Sink, refuse_if_away
from cairn.storage.log import FIRST_NUMBER, Log, record_path
from cairn.storage.manifest import Epoch, Restore, Takeover
from cairn.storage.store import Store


def check_marks(sinks: Mapping[str, Sink], store: Store) -> None:
    """Raise RestoreError if a sink has published an epoch that the log does not have."""
    marks = {}
    for uid, sink in sinks.items():
        with refuse_if_away(uid, sink):
            try:
                epoch = sink.newest_mark()
            except OSError as error:
                if sink.is_away(error):
                    raise
                raise CommitError(
                    f"sink {uid!r} cannot read its marks of published epochs: {error}\n"
                    "  next: let the driver read the sink's target, then start the job again",
                    sink=uid,
                ) from error
        if epoch is not None:
            marks[uid] = epoch
    if not marks:
        return
    log = Log(store)
    last = log.newest_number() or FIRST_NUMBER - 1
    for uid, epoch in marks.items():
        if not _may_be_published(log, last, epoch):
            raise _unknown_mark_error(store, uid, epoch, last)


def _may_be_published(log: Log, last: int, epoch: int) -> bool:
    """True if a driver of this log may have published an epoch of that number."""
    for number in range(last, FIRST_NUMBER - 1, -1):
        record = log.read(number)
        if number >= epoch:
            if isinstance(record, Epoch):
                return True
        elif not isinstance(record, Restore):
            # This is the last record of the driver that may have published it.
            return epoch == number + 1 and _publishes_first(log, record)
    return False


def _publishes_first(log: Log, record: Epoch | Takeover) -> bool:
    """True if the driver of a record may publish a batch before the batch is in the log."""
    if isinstance(record, Takeover):
        return record.guarantee != "exactly-once"
    if record.metrics.published is not None or record.parent is not None:
        return record.metrics.published is not None
    # The epoch of a savepoint has no batch. The takeover of its driver is right before it.
    try:
        before = log.read(record.number - 1)
    except RestoreError:
        return False  # It is retired, or this is the first epoch of a branch.
    return isinstance(before, Takeover) and _publishes_first(log, before)


def _unknown_mark_error(store: Store, uid: str, epoch: int, last: int) -> RestoreError:
    return RestoreError(
        f"sink {uid!r} has published epoch {epoch} of this job, which is not in the log\n"
        f"  expected: {store.url}/{record_path(epoch)}\n"
        f"  found: records up to {last}\n"
        "  records were removed, or this is an older copy of the checkpoint: rows would be "
        "published twice, or taken for published\n"
        "  next: put the newest records back; or go on as another job, which publishes the rows "
        "after its first epoch once more: `cairn branch`",
        sink=uid,
        epoch=epoch,
        url=store.url,
    )
