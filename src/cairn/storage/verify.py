"""Check that every file of a checkpoint exists and has the content that was written.

Damage is listed, not raised, so that one report shows all of it. Nothing is changed. The files
that a branch shares are checked in their own checkpoint. `checkers` check formats other than
segments. Spark's own folder is compared with the epochs (`verify_spark`), and notes for people
are read (`verify_notes`).

Always true here:
- a report without damage means that every epoch in the log can be restored;
- an orphan is not damage: it is an object that collection may not remove yet;
- a stale hold is not damage: it keeps files that nobody needs;
- a stale note is not damage: it leads to a savepoint that was moved or removed.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from cairn.errors import CairnError
from cairn.ids import content_id
from cairn.process_identity import is_pid_alive
from cairn.storage.files import open_segment
from cairn.storage.holds import Hold, branch_of_hold, find_holds
from cairn.storage.log import Log, read_job, record_path
from cairn.storage.manifest import Epoch, FileRef, JobInfo, Restore
from cairn.storage.paths import HOLDS_FOLDER, JOB_PATH, LOG_FOLDER, REMOVAL_PATH, STATE_FOLDER
from cairn.storage.references import files_of
from cairn.storage.source_logs import read_chunk
from cairn.storage.store import NotFoundError, Store, StoredObject, open_store, other_store
from cairn.storage.verify_notes import check_notes
from cairn.storage.verify_spark import check_spark

_WRITER: Final = re.compile(r"pid (\d+) on (.+)")


class Damage(NamedTuple):
    path: str
    what: str


Checker = Callable[[Store, FileRef], None]
"""Reads a file of one format; raises a CairnError that describes the damage."""


class Report(NamedTuple):
    job: JobInfo | None
    records: int
    epochs: int
    files: int
    bytes: int
    damage: list[Damage]
    orphans: list[StoredObject]
    stale_holds: Sequence[Damage] = ()
    stale_notes: Sequence[Damage] = ()

    @property
    def ok(self) -> bool:
        return not self.damage


def verify(
    store: Store,
    progress: Callable[[int, int], None] | None = None,
    *,
    checkers: Mapping[str, Checker] | None = None,
    spark_store: Store | None = None,
) -> Report:
    """Read and check all files that records of the log reference, then Spark's folder and notes.

    `progress(done, total)` counts files; `checkers` are by `FileRef.format`. `spark_store` has
    Spark's folder, if it is not in the checkpoint.
    """
    damage: list[Damage] = []
    job = _check_job(store, damage)
    log = Log(store)
    # Retired records may be half removed; nobody starts from them any more.
    numbers = _drop_retired(log, log.numbers(), damage)
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            damage.append(Damage(record_path(before + 1), f"records up to {after - 1} are missing"))
    epochs = _read_epochs(log, numbers, damage)
    refs = {
        (file.store, file.path, file.offset, file.length): file
        for epoch in epochs
        for file in files_of(epoch)
    }
    known = {"segment": _check_segment, "lines": _check_lines, **(checkers or {})}
    files = _Files(store, known)
    for done, ref in enumerate(refs.values(), start=1):
        for path, what in files.check(ref):
            found = Damage(f"{ref.store}/{path}" if ref.store else path, what)
            if found not in damage:
                damage.append(found)
        if progress is not None:
            progress(done, len(refs))
    referenced = {(r.store, path) for r in refs.values() for path in (r.path, *r.objects)}
    held, stale_holds = _check_holds(store, damage)
    orphans = [
        found
        for found in files.there("").values()
        if ("", found.path) not in referenced and found.path not in held
    ]
    bases = {(r.store, r.path): r for r in refs.values()}
    damage += _check_spark(spark_store or store, log, epochs, damage)
    stale_notes: list[Damage] = []
    for path, what, is_stale in check_notes(store):
        (stale_notes if is_stale else damage).append(Damage(path, what))
    return Report(
        job=job,
        records=len(numbers),
        epochs=len(epochs),
        files=len(referenced),
        bytes=sum(r.length for r in refs.values()) + sum(r.objects_bytes for r in bases.values()),
        damage=damage,
        orphans=orphans,
        stale_holds=stale_holds,
        stale_notes=stale_notes,
    )


def _check_job(store: Store, damage: list[Damage]) -> JobInfo | None:
    try:
        job = read_job(store)
    except CairnError as error:
        damage.append(Damage(JOB_PATH, error.message))
        return None
    if job is None:
        damage.append(Damage(JOB_PATH, "the file is missing"))
    if store.exists(REMOVAL_PATH):
        damage.append(Damage(REMOVAL_PATH, "its removal was interrupted; `cairn rm` continues it"))
    return job


def _drop_retired(log: Log, numbers: list[int], damage: list[Damage]) -> list[int]:
    try:
        oldest_kept = log.oldest_kept()
    except CairnError as error:
        damage.append(Damage(record_path(numbers[-1]), error.message))
        return numbers
    return [number for number in numbers if number >= oldest_kept]


def _read_epochs(log: Log, numbers: list[int], damage: list[Damage]) -> list[Epoch]:
    epochs = []
    known = set(numbers)
    for number in numbers:
        try:
            record = log.read(number)
        except CairnError as error:
            damage.append(Damage(record_path(number), error.message))
            continue
        if isinstance(record, Epoch):
            epochs.append(record)
        elif isinstance(record, Restore) and record.epoch >= numbers[0]:
            # Below the oldest record it is retired; above, it must exist.
            restored = record.epoch
            if restored not in known:
                damage.append(Damage(record_path(number), f"restores {restored}, not there"))
    return epochs


class _Files:
    """Checks files of state, in this checkpoint and in those it shares files with."""

    def __init__(self, store: Store, checkers: Mapping[str, Checker]) -> None:
        self._stores = {"": store}
        self._checkers = checkers
        self._there: dict[str, dict[str, StoredObject]] = {}
        self._packs: set[tuple[str, str]] = set()

    def there(self, url: str) -> dict[str, StoredObject]:
        """Return the objects below state/ of a store."""
        if url not in self._there:
            store = self._stores.setdefault(url, other_store(url)) if url else self._stores[url]
            self._there[url] = {found.path: found for found in store.list(STATE_FOLDER)}
        return self._there[url]

    def check(self, ref: FileRef) -> Iterator[tuple[str, str]]:
        """Yield (path, what is wrong) for each damaged object of a file."""
        try:
            there = self.there(ref.store)
        except CairnError as error:
            yield ref.path, error.message
            return
        missing = [path for path in (ref.path, *ref.objects) if path not in there]
        for path in missing:
            yield path, f"the file is missing; segment {ref.id} needs it"
        if missing:
            return
        end = ref.offset + ref.length
        if end > there[ref.path].size:
            yield ref.path, f"it has {there[ref.path].size} bytes; segment {ref.id} ends at {end}"
            return
        objects_bytes = sum(there[path].size for path in ref.objects)
        if objects_bytes != ref.objects_bytes and ref.format not in self._checkers:
            yield ref.path, f"its objects have {objects_bytes} bytes, not {ref.objects_bytes}"
        yield from self._read(ref)

    def _read(self, ref: FileRef) -> Iterator[tuple[str, str]]:
        store = self._stores[ref.store]
        checker = self._checkers.get(ref.format)
        try:
            if checker is not None:
                checker(store, ref)
            if ref.path.endswith(".pack") and (ref.store, ref.path) not in self._packs:
                self._packs.add((ref.store, ref.path))
                digest = content_id(store.get(ref.path))
                if digest not in ref.path:
                    yield ref.path, f"its content has the digest {digest}"
        except CairnError as error:
            # If it is a base, the damaged file may be one of its objects.
            file = str(error.facts.get("file", "")).removeprefix(f"{store.url}/")
            yield file if file in ref.objects else ref.path, error.message
        except NotFoundError:
            yield ref.path, "it vanished during the check"


def _check_segment(store: Store, ref: FileRef) -> None:
    open_segment(store, ref).verify()


def _check_lines(store: Store, ref: FileRef) -> None:
    read_chunk(store, msgspec.structs.replace(ref, store=""))


def _check_spark(
    store: Store, log: Log, epochs: Sequence[Epoch], damage: Sequence[Damage]
) -> list[Damage]:
    try:
        newest = log.newest_epoch()
    except CairnError:
        return []  # The damage is in the list already.
    if newest is None:
        return []
    found = (Damage(*each) for each in check_spark(store, log.store, epochs, newest))
    return [each for each in found if each.path not in {known.path for known in damage}]


def _check_holds(store: Store, damage: list[Damage]) -> tuple[frozenset[str], list[Damage]]:
    """Return the objects that are held, and the holds that nobody needs any more."""
    try:
        found = find_holds(store)
    except CairnError as error:
        damage.append(Damage(HOLDS_FOLDER, error.message))
        return frozenset(), []
    stale = []
    for path, hold in found.holds.items():
        why = _why_stale(path, hold)
        if why is not None:
            kept = f"{len(hold.paths)} objects" if hold.paths else f"epochs {hold.epochs}"
            advice = f"next: if it is gone for good, delete {store.url}/{path}"
            stale.append(Damage(path, f"{why}\n  it keeps {kept} from being collected\n  {advice}"))
    return found.all.paths, stale


def _why_stale(path: str, hold: Hold) -> str | None:
    job_id = branch_of_hold(path)
    if hold.until_ms:
        return None  # The hold has an end.
    if job_id is None or not hold.url:
        writer = _WRITER.fullmatch(hold.by)
        is_here = writer is not None and writer[2] == socket.gethostname()
        if writer and is_here and is_pid_alive(int(writer[1])) is False:
            return f"the process that wrote it is gone: {hold.by}"
        return None
    try:
        branch = open_store(hold.url, create=False)
        job = read_job(branch)
        has_epoch = bool(branch.list(LOG_FOLDER))
    except NotFoundError:
        return f"no branch at {hold.url}"
    except Exception as error:
        return f"the branch at {hold.url} cannot be read: {error}"
    if job is None or job.job_id != job_id:
        return f"no branch at {hold.url}"
    return None if has_epoch else f"the branch at {hold.url} was not finished"
