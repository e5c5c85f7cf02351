"""Keep an epoch from being collected while somebody reads it.

A hold is a file in the checkpoint. Written first and the log looked at afterwards, it is
either seen by the running job's collector, or we see that the collector was faster.

Always true here:
- inside `held` everything the epoch references is there, and stays;
- the hold is gone afterwards, also after an error;
- a reader's hold ends by itself, so one that is killed keeps nothing for ever;
- where nothing can be written a reader has no hold, and goes on without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cairn.errors import CorruptFileError, RestoreError, StaleEpochError
from cairn.storage.holds import HOLDS_FOLDER, Hold, write_hold
from cairn.storage.log import Log, record_path
from cairn.storage.manifest import Epoch
from cairn.storage.store import Store

READ_MS: Final = 10 * 60_000
"""How long a reader's hold counts, unless it is renewed."""
_ATTEMPTS_MAX: Final = 10

logger = logging.getLogger("cairn")


@contextmanager
def held(store: Store, number: int | None, name: str) -> Iterator[Epoch]:
    """An epoch, by default the newest, that nobody removes meanwhile."""
    number = newest_number(store) if number is None else number
    path = f"{HOLDS_FOLDER}/{name}.json"
    write_hold(store, path, Hold(epochs=[number], by=_by()))
    try:
        # A log of our own, made after the hold: nothing in it is from before.
        log = Log(store)
        check_kept(log, number)
        yield log.epoch(number)
    finally:
        store.delete([path])


class Unheld:
    """An epoch that is read, and that somebody else holds, or nobody."""

    def __init__(self, store: Store, epoch: Epoch) -> None:
        self._store = store
        self.number = epoch.number
        self.epoch = epoch

    def renew(self) -> None:
        """Called while reading."""

    def release(self) -> None:
        """Called at the end."""

    def lost(self, error: Exception) -> Exception:
        """What to raise when a file of the epoch cannot be read: was it retired meanwhile?"""
        log = Log(self._store)
        try:
            is_there = self._store.exists(record_path(self.number))
            check_kept(log, self.number, is_gone=not is_there)
        except StaleEpochError as stale:
            return stale
        return error


class Reading(Unheld):
    """An epoch that is read, and the hold on it for as long as that takes."""

    def __init__(
        self,
        store: Store,
        number: int | None,
        hold_ms: int = READ_MS,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """StaleEpochError when the epoch is not kept any more, or not there.

        With `hold_ms=0` nothing is written: for short reads, of who is ready to begin again.
        """
        self._store = store
        self._hold_ms = hold_ms
        self._now_ms = now_ms
        self._path = f"{HOLDS_FOLDER}/reader-{uuid.uuid4().hex}.json"
        self._until_ms = 0
        self._lock = threading.Lock()
        self.is_held = hold_ms > 0
        self.number = newest_number(store) if number is None else number
        attempts = 1 if number is not None else _ATTEMPTS_MAX
        for attempt in range(1, attempts + 1):
            try:
                self.epoch = self._begin()
                return
            except StaleEpochError:
                self.release()
                if attempt == attempts:
                    raise
                # The job was faster: it has a newer one by now.
                self.number = newest_number(store)
            except BaseException:
                self.release()
                raise

    def _begin(self) -> Epoch:
        self._write()
        log = Log(self._store)
        check_kept(log, self.number)
        try:
            return log.epoch(self.number)
        except CorruptFileError:
            raise
        except RestoreError as error:
            raise StaleEpochError(
                f"there is no epoch {self.number}\n  checkpoint: {self._store.url}\n"
                f"  found: {error.message.splitlines()[0]}\n"
                "  next: `cairn ls` shows the epochs that are kept",
                epoch=self.number,
            ) from error

    def _write(self) -> None:
        if not self.is_held:
            return
        until_ms = self._now_ms() + self._hold_ms
        hold = Hold(epochs=[self.number], by=_by(), until_ms=until_ms)
        try:
            write_hold(self._store, self._path, hold)
            self._until_ms = until_ms
        except AssertionError:
            raise
        except Exception as error:
            self.is_held = False
            logger.info("cairn reads %s without a hold: %s", self._store.url, error)

    def renew(self) -> None:
        """Called while reading: the hold is written again before it ends."""
        with self._lock:
            now_ms = self._now_ms()
            if not self.is_held or now_ms < self._until_ms - self._hold_ms // 2:
                return
            was_over = now_ms >= self._until_ms
            self._write()
            if was_over:
                check_kept(Log(self._store), self.number)

    def release(self) -> None:
        """Best effort: what is left ends by itself."""
        if self._until_ms:
            with contextlib.suppress(Exception):
                self._store.delete([self._path])
            self._until_ms = 0


def check_kept(log: Log, number: int, *, is_gone: bool = False) -> None:
    """StaleEpochError when an epoch is retired."""
    oldest_kept = log.retired_below()
    if number < oldest_kept or is_gone:
        raise StaleEpochError(
            f"epoch {number} is retired; its files may be gone\n"
            f"  checkpoint: {log.store.url}, where the oldest record kept is {oldest_kept}\n"
            "  next: `cairn ls` shows the epochs that are kept",
            epoch=number,
        )


def newest_number(store: Store) -> int:
    newest = Log(store).newest_epoch()
    if newest is None:
        raise StaleEpochError(
            f"no epoch is committed yet\n  checkpoint: {store.url}\n"
            "  next: `cairn ls --all` shows who has started the job"
        )
    return newest.number


def _by() -> str:
    # Host and pid are for people who find the hold of a process that was killed.
    return f"pid {os.getpid()} on {socket.gethostname()}"
