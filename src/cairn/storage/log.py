"""The log: numbered records. Creating the next number is the only way to change anything.

`epochs/000000000042.json` is created by put-if-absent. A driver appends after the last record
that it has read, without listing; if another driver was first, it is fenced.

Always true here:
- CommitConflictError means certainly not published; CommitUnknownError means it may be;
- after either of them this Log appends nothing more;
- records are removed oldest first, one by one, and never the newest; so a number whose
  predecessor still exists was not created a second time.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import msgspec

from cairn.backoff import backoff_s
from cairn.errors import (
    CairnError,
    CommitConflictError,
    CommitUnknownError,
    CorruptFileError,
    KeyGroupCountError,
    RestoreError,
)
from cairn.storage import manifest
from cairn.storage.manifest import Ancestor, Epoch, JobInfo, Record, Restore, StoredEpoch, Takeover
from cairn.storage.paths import JOB_PATH, LOG_FOLDER, REMOVAL_PATH
from cairn.storage.store import NotFoundError, Store

FIRST_NUMBER: Final = 1
SETTLE_ATTEMPTS_MAX: Final = 5
TAKEOVER_ATTEMPTS_MAX: Final = 100
_NUMBERED: Final = re.compile(rf"{LOG_FOLDER}/(\d{{12}})\.json")

R = TypeVar("R", Epoch, Takeover, Restore)


def record_path(number: int) -> str:
    return f"{LOG_FOLDER}/{number:012d}.json"


def new_nonce() -> str:
    return uuid.uuid4().hex


class Log:
    """The records of one checkpoint. One Log belongs to one thread."""

    def __init__(
        self,
        store: Store,
        *,
        cache_records_max: int = 64,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self._cache: OrderedDict[int, Record] = OrderedDict()
        self._cache_records_max = cache_records_max
        self._sleep = sleep
        self._last: int | None = None
        self._closed_by: type[CommitConflictError] | type[CommitUnknownError] | None = None

    # Reading

    def numbers(self) -> list[int]:
        """Return the numbers of all records, ascending. Lists the store."""
        found = (_NUMBERED.fullmatch(o.path) for o in self.store.list(LOG_FOLDER))
        return sorted(int(match[1]) for match in found if match)

    def newest_number(self) -> int | None:
        """Return the newest record's number; None in an empty log. Lists the store."""
        numbers = self.numbers()
        return numbers[-1] if numbers else None

    def read(self, number: int) -> Record:
        """Return a whole record. RestoreError when it does not exist."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        pending: list[StoredEpoch] = []
        whole: Epoch | None = None
        wanted = number
        while True:
            stored = self._read_stored(wanted)
            if not isinstance(stored, StoredEpoch):
                if pending:
                    raise self._not_an_epoch(wanted, pending[-1].number)
                return self._remember(stored)
            pending.append(stored)
            if stored.relative_to is None:
                break
            if stored.relative_to >= stored.number:
                raise self._not_an_epoch(stored.relative_to, stored.number)
            cached = self._cache.get(stored.relative_to)
            if isinstance(cached, Epoch):
                whole = cached
                break
            wanted = stored.relative_to
        while pending:
            stored = pending.pop()
            whole = manifest.resolve(stored, whole, self._name(stored.number))
            self._remember(whole)
        assert whole is not None
        return whole

    def epoch(self, number: int) -> Epoch:
        """Return a whole epoch. RestoreError when that number is not an epoch."""
        record = self.read(number)
        if not isinstance(record, Epoch):
            raise RestoreError(
                f"record {number} is a {type(record).__name__.lower()}, not an epoch\n"
                f"  file: {self._name(number)}\n"
                "  next: `cairn ls` shows the epochs",
                number=number,
            )
        return record

    def records(self, start: int | None = None) -> Iterator[Record]:
        """Yield all records from `start` on, oldest first.

        Records that are removed meanwhile are left out, and so are retired ones that cannot be
        read: a leader that died while removing them may have left them incomplete.
        """
        for number in self.numbers():
            if start is None or number >= start:
                try:
                    yield self.read(number)
                except RestoreError:
                    is_there = self.store.exists(record_path(number))
                    if is_there and number >= self.oldest_kept():
                        raise

    def newest_epoch(self) -> Epoch | None:
        """Return the newest epoch of the current lineage: the last one appended or restored."""
        number = self._last if self._last is not None else self.newest_number()
        while number is not None and number >= FIRST_NUMBER:
            record = self.read(number)
            if isinstance(record, Epoch):
                return record
            if isinstance(record, Restore):
                return self.epoch(record.epoch)
            number = record.previous
        return None

    def last_restore(self) -> int | None:
        """Return the number of the restore that chose the newest epoch; None without one."""
        number = self._last if self._last is not None else self.newest_number()
        while number is not None and number >= FIRST_NUMBER:
            record = self.read(number)
            if not isinstance(record, Takeover):
                return record.number if isinstance(record, Restore) else None
            number = record.previous
        return None

    def oldest_kept(self) -> int:
        """Return the number below which records are retired: nobody may start from them any more.

        The epoch with the highest number has it, on the current lineage or not: retired
        records stay retired after a rollback.
        """
        number = self._last if self._last is not None else self.newest_number()
        while number is not None and number >= FIRST_NUMBER and self._is_there(number):
            record = self.read(number)
            if isinstance(record, Epoch):
                return record.oldest_kept
            number -= 1
        return 0

    def lineage(self) -> Iterator[Epoch]:
        """Yield the epochs of the current lineage that are not retired, newest first."""
        epoch = self.newest_epoch()
        oldest_kept = self.oldest_kept()
        while epoch is not None:
            yield epoch
            # The parent of a branch's first epoch was never in this log.
            parent = epoch.parent
            if parent is None or parent < oldest_kept or not self._is_there(parent):
                return
            epoch = self.epoch(parent)

    # Appending

    @property
    def last(self) -> int | None:
        """The number of the last record that this Log has appended or found."""
        return self._last

    def append(self, make_record: Callable[[int], R]) -> R:
        """Publish a record at exactly the next number.

        Any error but CommitUnknownError means that nothing was published.
        """
        if self._closed_by is not None:
            raise self._closed_by("this log is closed: an earlier record of it was not settled")
        if self._last is None:
            self._last = self.newest_number() or FIRST_NUMBER - 1
        number = self._last + 1
        record = make_record(number)
        assert record.number == number, "a record must carry the number it is given"
        record = self._check_record(record)
        data = self._encode(record)
        try:
            self._publish(number, record.nonce, data)
        except (CommitConflictError, CommitUnknownError) as error:
            self._closed_by = type(error)
            raise
        self._last = number
        self._remember(record)
        return record

    def take_over(
        self,
        *,
        host: str,
        pid: int,
        wall_ms: int,
        guarantee: str = "",
        process: str = "",
        only_if_last: int | None = None,
        is_held: Callable[[], bool] | None = None,
    ) -> Takeover:
        """Become the leader, which is the first act of a driver. Earlier drivers are fenced.

        With `only_if_last` the takeover follows exactly that record (0: an empty log), or it is a
        CommitConflictError without a second try. `is_held` is asked before each try: a driver
        that has lost its lease fences nobody.
        """
        for _ in range(TAKEOVER_ATTEMPTS_MAX):
            self._last = self.newest_number() or FIRST_NUMBER - 1
            self._closed_by = None
            # After the number is read: nobody else takes over while the lead is held. A driver that
            # does so later, during a pause of this one, creates this number first.
            if is_held is not None and not is_held():
                raise self._takeover_refused("the lease was lost before the takeover")
            if only_if_last is not None and self._last != only_if_last:
                raise self._takeover_refused(
                    f"the takeover must follow record {only_if_last}, "
                    f"the newest record is {self._last}"
                )
            previous = self._last if self._last >= FIRST_NUMBER else None
            nonce = new_nonce()

            def make(number: int, nonce: str = nonce, previous: int | None = previous) -> Takeover:
                return Takeover(
                    number=number, term=number, nonce=nonce, wall_ms=wall_ms,
                    host=host, pid=pid, previous=previous, guarantee=guarantee, process=process,
                )  # fmt: skip

            try:
                return self.append(make)
            except CommitConflictError:
                if only_if_last is not None:
                    raise
                # The previous leader still runs. It is fenced once we win a number.
                continue
        raise CommitConflictError(
            f"another driver keeps publishing to {self.store.url}\n"
            "  next: stop the other driver, or give this job a checkpoint of its own",
            url=self.store.url,
        )

    def _takeover_refused(self, why: str) -> CommitConflictError:
        self._closed_by = CommitConflictError
        return CommitConflictError(
            f"{why}; nothing was published\n"
            f"  checkpoint: {self.store.url}\n"
            "  next: wait in standby for the lead again",
            url=self.store.url,
        )

    def is_leading(self) -> bool:
        """True if nobody has appended after the last record of this Log.

        Records are removed oldest first, so the order of the two checks matters: while the last
        record exists, a later one cannot have been added and removed.
        """
        assert self._last is not None, "a leader has a record in the log"
        is_free = not self.store.exists(record_path(self._last + 1))
        return is_free and self.store.exists(record_path(self._last))

    def _check_record(self, record: R) -> R:
        if isinstance(record, Epoch):
            kept = max(record.oldest_kept, self.oldest_kept())
            assert kept <= (record.parent or record.number), "a parent cannot be retired"
            return msgspec.structs.replace(record, oldest_kept=kept)
        if isinstance(record, Restore):
            self.epoch(record.epoch)
            if record.epoch < self.oldest_kept():
                raise RestoreError(
                    f"epoch {record.epoch} is retired; its files may be gone\n"
                    f"  the oldest record kept is {self.oldest_kept()}\n"
                    "  next: `cairn ls` shows the epochs that can be restored",
                    epoch=record.epoch,
                )
        return record

    def _publish(self, number: int, nonce: str, data: bytes) -> None:
        path = record_path(number)
        cause: Exception | None = None
        for attempt in range(SETTLE_ATTEMPTS_MAX):
            if attempt:
                self._sleep(backoff_s(attempt))
            try:
                won = self.store.put_if_absent(path, data)
            except CommitUnknownError as error:
                cause, won = error, False
            except Exception as error:
                if cause is None:
                    raise
                # An earlier try may still have succeeded, so this one proves nothing.
                cause, won = error, False
            if not won:
                # Also when the record exists: it may be our own put, repeated by the network.
                try:
                    found = manifest.decode_record(self.store.get(path), self._name(number))
                except NotFoundError as error:
                    # Ours may still be on its way. Putting the same bytes again is harmless:
                    # the first of them to arrive has our nonce.
                    cause = cause or error
                    continue
                except Exception as error:
                    cause = error
                    continue
                if found.nonce != nonce:
                    raise self._conflict(number, found)
            self._check_not_reused(number)
            return
        raise CommitUnknownError(
            f"record {number} may or may not be published\n"
            f"  file: {self._name(number)}\n"
            "  next: restart the driver; its takeover will find out",
            number=number,
        ) from cause

    def _check_not_reused(self, number: int) -> None:
        """Raise if the number is retired: a leader that slept for long would create it again."""
        try:
            if number == FIRST_NUMBER:
                fresh = self.newest_number() == number
            else:
                fresh = self.store.exists(record_path(number - 1))
        except Exception as error:
            raise CommitUnknownError(
                f"record {number} was created, but its place in the log could not be checked\n"
                "  next: check the store, then start the job again; it will find out",
                number=number,
            ) from error
        if not fresh:
            raise CommitUnknownError(
                f"record {number} was created, but the log has moved on past it\n"
                f"  file: {self._name(number)}\n"
                "  next: stop this driver; another one has taken over long ago",
                number=number,
            )

    def _encode(self, record: Record) -> bytes:
        if not isinstance(record, Epoch):
            return manifest.encode_record(record)
        if manifest.is_full(record.number, record.parent):
            return manifest.encode_epoch(record, None)
        assert record.parent is not None
        return manifest.encode_epoch(record, self.epoch(record.parent))

    # Helpers

    def _read_stored(self, number: int) -> manifest.StoredRecord:
        try:
            data = self.store.get(record_path(number))
        except NotFoundError:
            raise RestoreError(
                f"the log has no record {number}\n"
                f"  file: {self._name(number)}\n"
                "  next: `cairn ls` shows what is kept",
                number=number,
            ) from None
        stored = manifest.decode_record(data, self._name(number))
        if stored.number != number:
            raise CorruptFileError(
                f"this record says it is number {stored.number}\n"
                f"  file: {self._name(number)}\n"
                "  next: `cairn verify` shows what else is damaged; restore the file from a backup",
                file=self._name(number),
            )
        return stored

    def _is_there(self, number: int) -> bool:
        return number in self._cache or self.store.exists(record_path(number))

    def _remember(self, record: Record) -> Record:
        self._cache[record.number] = record
        if len(self._cache) > self._cache_records_max:
            self._cache.popitem(last=False)
        return record

    def forget(self, number: int) -> None:
        """Drop a record from the cache: it was removed from the store."""
        self._cache.pop(number, None)

    def _name(self, number: int) -> str:
        return f"{self.store.url}/{record_path(number)}"

    def _not_an_epoch(self, number: int, needed_by: int) -> CorruptFileError:
        return CorruptFileError(
            f"record {number} is not the epoch that epoch {needed_by} was written against\n"
            f"  file: {self._name(needed_by)}\n"
            "  next: `cairn verify` shows what else is damaged; restore the file from a backup",
            file=self._name(needed_by),
        )

    def _conflict(self, number: int, found: manifest.StoredRecord) -> CommitConflictError:
        return CommitConflictError(
            f"another driver has published record {number}; this one has published nothing\n"
            f"  found: {type(found).__name__} of term {found.term}, nonce {found.nonce}\n"
            f"  file: {self._name(number)}\n"
            "  next: leave the job to the other driver, or stop that one and start again",
            number=number,
            term=found.term,
        )


def read_job(store: Store) -> JobInfo | None:
    """Return the content of job.json; None when the checkpoint is empty."""
    try:
        return manifest.decode_job(store.get(JOB_PATH), f"{store.url}/{JOB_PATH}")
    except NotFoundError:
        return None


def job_of(store: Store) -> JobInfo | None:
    """Return the job of a checkpoint; None if it cannot be read: `cairn verify` says why."""
    try:
        return read_job(store)
    except CairnError:
        return None


def create_or_open_job(
    store: Store, name: str, max_parallelism: int, *, ancestor: Ancestor | None = None
) -> JobInfo:
    """Return the job of a checkpoint; in an empty one, create it."""
    _check_not_removed(store)
    job = read_job(store)
    if job is not None and job.ancestor is not None and job.ancestor.kind == "branch":
        _check_finished(store, job.ancestor)
    if job is None:
        _check_unused(store)
        job = JobInfo(
            name=name,
            job_id=uuid.uuid4().hex,
            max_parallelism=max_parallelism,
            created_ms=time.time_ns() // 1_000_000,
            ancestor=ancestor,
        )
        won = False
        try:
            won = store.put_if_absent(JOB_PATH, manifest.encode_record(job))
        except CommitUnknownError:
            if read_job(store) is None:
                raise
        if not won:
            job = read_job(store) or job
    where = f"{store.url}/{JOB_PATH}"
    if job.name != name:
        raise RestoreError(
            f"this checkpoint belongs to another job\n"
            f"  it holds job {job.name!r}, this is job {name!r}\n"
            f"  file: {where}\n"
            "  next: pass the checkpoint of this job, an empty one, or branch that job",
            expected=name,
            found=job.name,
        )
    if job.max_parallelism != max_parallelism:
        raise KeyGroupCountError(
            f"cannot restore job {name!r} with another number of key groups\n"
            f"  the checkpoint has max_parallelism={job.max_parallelism}, "
            f"the job declares {max_parallelism}\n"
            f"  file: {where}\n"
            f"  next: declare max_parallelism={job.max_parallelism}; "
            "parallelism can change freely below it",
            expected=max_parallelism,
            found=job.max_parallelism,
        )
    return job


def _check_unused(store: Store) -> None:
    """Raise if there are epochs: a job with a new id would publish their output again.

    Takeovers alone are left by drivers that never ran an epoch; one of them may have started
    after the checkpoint was removed.
    """
    if any(not isinstance(record, Takeover) for record in Log(store).records()):
        raise RestoreError(
            f"this checkpoint has epochs, but not the file that names its job\n"
            f"  expected: {store.url}/{JOB_PATH}\n"
            "  next: put the file back; with another job id, sinks would publish "
            "the same rows again",
            file=f"{store.url}/{JOB_PATH}",
        )


def check_job(store: Store, job: JobInfo) -> None:
    """Raise RestoreError if the job's checkpoint was removed meanwhile."""
    _check_not_removed(store)
    found = read_job(store)
    if found is None or found.job_id != job.job_id:
        raise RestoreError(
            f"the checkpoint of job {job.name!r} was removed while the job started\n"
            f"  file: {store.url}/{JOB_PATH}\n"
            f"  expected: job id {job.job_id}, found: {found.job_id if found else 'no file'}\n"
            "  next: start the job again; it begins with an empty checkpoint",
            url=store.url,
        )


def _check_not_removed(store: Store) -> None:
    if store.exists(REMOVAL_PATH):
        raise RestoreError(
            f"this checkpoint was being removed, and only a part of it may be left\n"
            f"  file: {store.url}/{REMOVAL_PATH}\n"
            "  next: finish with `cairn rm`, or pass another checkpoint",
            url=store.url,
        )


def _check_finished(store: Store, ancestor: Ancestor) -> None:
    """Raise if the branch has no epoch: creating it was interrupted."""
    if not store.list(LOG_FOLDER):
        raise RestoreError(
            f"this branch of {ancestor.url} was not finished\n"
            f"  expected: epoch {ancestor.epoch} of that checkpoint as its first record, "
            "found none\n"
            f"  checkpoint: {store.url}\n"
            "  next: remove it with `cairn rm`, then branch again",
            url=store.url,
        )
