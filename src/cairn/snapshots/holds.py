"""Keep an epoch from being collected while somebody reads it.

A hold is a file in the checkpoint. The reader writes it, then reads the log: either the running
job's collector sees the hold, or the reader sees that the epoch was retired first.

Always true here:
- while a `Reading` holds an epoch, all files of the epoch exist;
- a hold has an end, so a process that is killed keeps nothing for ever;
- `renew` raises in a process that slept past the end of its hold, if the epoch was retired;
- a reader that may not write to the checkpoint reads without a hold.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from cairn.errors import CorruptFileError, NoEpochError, RestoreError, StaleEpochError
from cairn.logs import logger
from cairn.storage.holds import Hold, reader_hold_path, write_hold
from cairn.storage.log import Log, record_path
from cairn.storage.manifest import Epoch
from cairn.storage.store import Store

READ_MS: Final = 10 * 60_000
"""The lifetime of a reader's hold, unless it is renewed."""
_ATTEMPTS_MAX: Final = 10


class Unheld:
    """An epoch that is read without a hold of this process."""

    def __init__(self, store: Store, epoch: Epoch) -> None:
        self._store = store
        self.number = epoch.number
        self.epoch = epoch

    def renew(self) -> None:
        """Do nothing: there is nothing to renew."""

    @property
    def hold_path(self) -> str | None:
        return None

    def release(self) -> None:
        """Do nothing: there is nothing to release."""

    def check_kept(self) -> None:
        """Raise StaleEpochError if the epoch was retired while it was read."""
        is_there = self._store.exists(record_path(self.number))
        check_kept(Log(self._store), self.number, is_gone=not is_there)


class Reading(Unheld):
    """An epoch that is read, and the hold on it until it is released."""

    def __init__(
        self,
        store: Store,
        number: int | None,
        hold_ms: int = READ_MS,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Raises StaleEpochError if the epoch is retired or does not exist.

        With `hold_ms=0` nothing is written: for short reads that can be repeated.
        """
        self._store = store
        self._hold_ms = hold_ms
        self._now_ms = now_ms
        self._path = ""
        self._until_ms = 0
        self._next_ms = 0
        """The time of the next renewal."""
        self._lock = threading.Lock()
        self.is_held = hold_ms > 0
        self.number = newest_number(store) if number is None else number
        attempts = 1 if number is not None else _ATTEMPTS_MAX
        for attempt in range(1, attempts + 1):
            try:
                self.epoch = self._begin()
                return
            except StaleEpochError:
                self._remove()
                if attempt == attempts:
                    raise
                # The job was faster: it has a newer epoch by now.
                self.number = newest_number(store)
            except BaseException:
                self._remove()
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
                f"epoch {self.number} does not exist\n  checkpoint: {self._store.url}\n"
                f"  found: {error.message.splitlines()[0]}\n"
                "  next: `cairn ls` shows the epochs that are kept",
                epoch=self.number,
            ) from error

    def _write(self) -> None:
        if not self.is_held:
            return
        until_ms = self._now_ms() + self._hold_ms
        hold = Hold(epochs=[self.number], by=_by(), until_ms=until_ms)
        # A new file each time: the collector may be removing the previous one, which has ended.
        path, before = reader_hold_path(), self._path
        try:
            write_hold(self._store, path, hold)
        except AssertionError:
            raise
        except Exception as error:
            if self._until_ms:
                # The previous hold still lasts: the store may be back before it ends.
                self._next_ms = self._now_ms() + self._hold_ms // _ATTEMPTS_MAX
                logger.warning("cairn could not renew a hold on %s: %s", self._store.url, error)
            else:
                self.is_held = False
                logger.info("cairn reads %s without a hold: %s", self._store.url, error)
            # It may have been written.
            with contextlib.suppress(Exception):
                self._store.delete([path])
            return
        self._path, self._until_ms = path, until_ms
        self._next_ms = until_ms - self._hold_ms // 2
        if before:
            with contextlib.suppress(Exception):
                self._store.delete([before])

    def renew(self) -> None:
        """Renew the hold if it ends soon; call this while reading.

        Raises StaleEpochError if it had ended and the epoch was retired since.
        """
        with self._lock:
            if not self.is_held:
                return
            until_ms = self._until_ms
            if self._now_ms() >= self._next_ms:
                self._write()
            # Also if it ended while the new one was written.
            if self._now_ms() >= until_ms:
                check_kept(Log(self._store), self.number)

    @property
    def hold_path(self) -> str | None:
        return self._path if self._until_ms else None

    def release(self) -> None:
        """Remove the hold, if possible; otherwise it ends later."""
        with self._lock:
            self.is_held = False
            self._remove()

    def _remove(self) -> None:
        if self._until_ms:
            with contextlib.suppress(Exception):
                self._store.delete([self._path])
            self._path, self._until_ms = "", 0


def check_kept(log: Log, number: int, *, is_gone: bool = False) -> None:
    """Raise StaleEpochError if an epoch is retired."""
    oldest_kept = log.oldest_kept()
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
        raise no_epoch(store)
    return newest.number


def no_epoch(store: Store) -> NoEpochError:
    """Return the error of a read before the first epoch."""
    return NoEpochError(
        f"no epoch is committed yet\n  checkpoint: {store.url}\n"
        "  next: wait for the first one; `cairn ls` shows the progress of the job"
    )


def _by() -> str:
    # For people who find the hold of a process that was killed.
    return f"pid {os.getpid()} on {socket.gethostname()}"
