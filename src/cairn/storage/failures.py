"""Note the failures of a job beside its epochs: `failures/<wall_ms>-<count>-<id>.json`.

An epoch that fails is tried again, so one cause has one file. The file counts the attempts and
records if the run ended with this failure.

Always true here:
- noting a failure never waits for the store, and never hides the failure;
- each cause in an epoch has one file.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
import uuid
from typing import Final

import msgspec

from cairn.errors import CairnError, CommitConflictError
from cairn.storage.manifest import Epoch
from cairn.storage.notes import read_notes, write_note
from cairn.storage.paths import FAILURES_FOLDER
from cairn.storage.store import Store

FAILURES_KEPT: Final = 20
TEXT_CHARS_MAX: Final = 8000
SETTLE_S: Final = 5.0


class FailureNote(msgspec.Struct, frozen=True, kw_only=True):
    """A failure; the fields of older versions that are missing have their defaults."""

    job: str = ""
    wall_ms: int = 0
    epoch: int = 0
    attempts: int = 1
    ended_run: bool = False
    kind: str = ""
    operator: str | None = None
    key: str | None = None
    row: str | None = None
    timer: str | None = None
    message: str = ""
    traceback: str | None = None


class Failures:
    """Notes the failures of one run, on background threads."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._job = job
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._current: tuple[str, FailureNote] | None = None
        self._writer: threading.Thread | None = None

    def note(self, error: BaseException, epoch: int, attempt: int) -> None:
        """Note that an attempt at an epoch failed; the first attempt is 1."""
        self._note(error, epoch, attempts=attempt)

    def note_end(self, error: BaseException, epoch: int) -> None:
        """Note that the run failed with this error. Waits a little, as the process may end next."""
        if isinstance(error, CommitConflictError):
            return  # The checkpoint belongs to another driver by now, or is being removed.
        self._note(error, epoch, ended_run=True)
        self.settle()

    def attempts_after(self, committed: Epoch | None) -> int:
        """Return how many attempts at the epoch after this one have failed."""
        current = self._current
        number = 0 if committed is None else committed.number
        return 0 if current is None or current[1].epoch <= number else current[1].attempts

    def settle(self) -> None:
        """Wait a few seconds for notes that are being written."""
        writer = self._writer
        if writer is not None:
            writer.join(SETTLE_S)

    def _note(self, error: BaseException, epoch: int, **more: int | bool) -> None:
        failure = describe_failure(error, self._job)
        failure = msgspec.structs.replace(failure, epoch=failure.epoch or epoch)
        with self._lock:
            if self._current is not None and _is_same(self._current[1], failure):
                name, failure = self._current
            else:
                # The count orders failures of the same millisecond.
                count = next(self._count)
                name = f"{failure.wall_ms:013d}-{count:06d}-{uuid.uuid4().hex[:12]}"
            failure = msgspec.structs.replace(failure, **more)
            self._current = name, failure
            before = self._writer
            self._writer = threading.Thread(
                target=self._write, args=(before, name, failure), daemon=True, name="cairn-failure"
            )
            self._writer.start()

    def _write(self, before: threading.Thread | None, name: str, failure: FailureNote) -> None:
        if before is not None:
            before.join()
        write_note(self._store, FAILURES_FOLDER, name, failure, keep=FAILURES_KEPT)


def describe_failure(error: BaseException, job: str) -> FailureNote:
    given = error.facts if isinstance(error, CairnError) else {}
    trace = given.get("traceback") or given.get("text")
    if not trace:
        trace = "".join(traceback.format_exception(error))
    return FailureNote(
        job=job,
        wall_ms=time.time_ns() // 1_000_000,
        epoch=given.get("epoch") or 0,
        kind=type(error).__name__,
        operator=_text(given.get("operator") or given.get("sink")),
        key=_text(given.get("key")),
        row=_text(given.get("row")),
        timer=_text(given.get("timer")),
        message=_text(error) or type(error).__name__,
        traceback=_text(trace),
    )


def read_failures(store: Store) -> list[FailureNote]:
    """Return the failures, newest first."""
    return [note for _, note in read_notes(store, FAILURES_FOLDER, FailureNote)]


def _is_same(one: FailureNote, other: FailureNote) -> bool:
    return (one.kind, one.epoch, one.message) == (other.kind, other.epoch, other.message)


def _text(value: object) -> str | None:
    return None if value is None else str(value)[:TEXT_CHARS_MAX]
