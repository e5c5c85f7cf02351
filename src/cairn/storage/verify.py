"""Check a checkpoint from end to end: is everything there, and is it what was written?

Damage is listed, not raised, so that one report shows all of it. Nothing is changed.

Always true here:
- a report without damage means that every epoch in the log can be restored;
- an orphan is no damage: it is an object that collection may not remove yet.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

from cairn.errors import CairnError
from cairn.storage.files import open_segment
from cairn.storage.log import JOB_PATH, Log, read_job, record_path
from cairn.storage.manifest import Epoch, FileRef, JobInfo, Restore
from cairn.storage.pack import STATE_FOLDER
from cairn.storage.retention import read_holds
from cairn.storage.store import NotFoundError, Store, StoredObject


class Damage(NamedTuple):
    path: str
    what: str


class Report(NamedTuple):
    job: JobInfo | None
    records: int
    epochs: int
    files: int
    bytes: int
    damage: list[Damage]
    orphans: list[StoredObject]

    @property
    def ok(self) -> bool:
        return not self.damage


def verify(store: Store, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read and check everything that a record of the log references.

    `progress(done, total)` counts segments.
    """
    damage: list[Damage] = []
    job = _check_job(store, damage)
    log = Log(store)
    # Retired records may be half way gone; nobody starts from them any more.
    numbers = _kept(log, log.numbers(), damage)
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            damage.append(Damage(record_path(before + 1), f"records up to {after - 1} are missing"))
    epochs = _read_epochs(log, numbers, damage)
    refs = {
        (file.path, file.offset, file.length): file
        for epoch in epochs
        for operator in epoch.operators.values()
        for state in operator.ranges
        for file in state.files
    }
    sizes = {found.path: found for found in store.list(STATE_FOLDER)}
    checked_packs: set[str] = set()
    for done, ref in enumerate(refs.values(), start=1):
        found = sizes.get(ref.path)
        what = _check_file(store, ref, found, checked_packs)
        if what is not None:
            damage.append(Damage(ref.path, what))
        if progress is not None:
            progress(done, len(refs))
    referenced = {ref.path for ref in refs.values()}
    held = _check_holds(store, damage)
    orphans = [o for o in sizes.values() if o.path not in referenced and o.path not in held]
    return Report(
        job=job,
        records=len(numbers),
        epochs=len(epochs),
        files=len(referenced),
        bytes=sum(ref.length for ref in refs.values()),
        damage=damage,
        orphans=orphans,
    )


def _check_job(store: Store, damage: list[Damage]) -> JobInfo | None:
    try:
        job = read_job(store)
    except CairnError as error:
        damage.append(Damage(JOB_PATH, error.message))
        return None
    if job is None:
        damage.append(Damage(JOB_PATH, "the file is missing"))
    return job


def _kept(log: Log, numbers: list[int], damage: list[Damage]) -> list[int]:
    try:
        retired_below = log.retired_below()
    except CairnError as error:
        damage.append(Damage(record_path(numbers[-1]), error.message))
        return numbers
    return [number for number in numbers if number >= retired_below]


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
            # Below the oldest record it is retired; above, it must be there.
            restored = record.epoch
            if restored not in known:
                damage.append(Damage(record_path(number), f"restores {restored}, not there"))
    return epochs


def _check_file(
    store: Store, ref: FileRef, found: StoredObject | None, checked_packs: set[str]
) -> str | None:
    if found is None:
        return f"the file is missing; segment {ref.id} needs it"
    if ref.offset + ref.length > found.size:
        return f"it has {found.size} bytes; segment {ref.id} ends at {ref.offset + ref.length}"
    try:
        if ref.path.endswith((".delta", ".base", ".pack")):
            open_segment(store, ref).verify()
        if ref.path.endswith(".pack") and ref.path not in checked_packs:
            checked_packs.add(ref.path)
            digest = hashlib.blake2b(store.get(ref.path), digest_size=16).hexdigest()
            if digest not in ref.path:
                return f"its content has the digest {digest}"
    except CairnError as error:
        return error.message
    except NotFoundError:
        return "it vanished during the check"
    return None


def _check_holds(store: Store, damage: list[Damage]) -> frozenset[str]:
    try:
        return read_holds(store).paths
    except CairnError as error:
        damage.append(Damage("holds", error.message))
        return frozenset()
