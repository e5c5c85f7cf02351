"""Objects that slots read while an epoch is not committed: `pending/`.

An epoch of several batches is committed after the last of them. A slot that dies before that is
restored from the files of the batches so far. No manifest in the log lists these files yet, so
the driver writes one here. With many subtasks the driver also writes here what each of them needs
to begin (see `protocol/parts`).

Always true here:
- nothing here is committed: a driver that takes over removes it unread.
"""

from __future__ import annotations

from cairn.errors import RestoreError
from cairn.logs import logger
from cairn.storage.manifest import Epoch, StoredEpoch, decode_record, encode_epoch, resolve
from cairn.storage.paths import PENDING_FOLDER
from cairn.storage.store import NotFoundError, Store


class Pending:
    """The pending objects of a driver, removed when the epoch is in the log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._paths: list[str] = []

    def write(self, epoch: Epoch, batch: int) -> str:
        """Write the epoch after this number of batches, and return the path for slots."""
        path = f"{PENDING_FOLDER}/{epoch.number:012d}-{epoch.term:012d}-{batch:06d}.json"
        return self._put(path, encode_epoch(epoch, None, whole=True))

    def write_parts(self, epoch: int, term: int, execution: tuple[int, ...], data: bytes) -> str:
        """Write what the subtasks of an execution need to begin, and return the path for slots.

        `execution` has the numbers of batch, attempt and round.
        """
        numbers = "-".join(f"{number:06d}" for number in execution)
        return self._put(f"{PENDING_FOLDER}/{epoch:012d}-{term:012d}-{numbers}.parts", data)

    def _put(self, path: str, data: bytes) -> str:
        # Noted first: a failed put may have written it.
        if path not in self._paths:
            self._paths.append(path)
        self._store.put(path, data)
        return path

    def forget(self) -> None:
        """Remove the objects: the epoch is in the log."""
        if not self._paths:
            return
        try:
            self._store.delete(self._paths)
            self._paths.clear()
        except OSError as error:
            # The next epoch, or the next driver, tries again.
            logger.warning("objects in pending/ could not be removed: %s", error)

    def clear(self) -> None:
        """Remove the objects of earlier drivers."""
        left = [found.path for found in self._store.list(PENDING_FOLDER)]
        if left:
            self._store.delete(left)


def read_pending(store: Store, path: str) -> Epoch:
    try:
        stored = decode_record(store.get(path), path)
    except NotFoundError:
        raise RestoreError(
            f"{path} is gone from {store.url}: another driver has taken over\n"
            "  next: leave the job to it, or stop it and start again",
            file=path,
        ) from None
    assert isinstance(stored, StoredEpoch)
    return resolve(stored, None, path)
