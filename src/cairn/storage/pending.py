"""An epoch that is not in the log yet, written down for slots that have lost its state.

An epoch of several batches is committed after the last of them. A slot that dies before
is restored from what its batches have stored so far; which files these are is in no
manifest yet, so the driver writes one here.

Always true here:
- nothing here counts as committed: a driver that takes over removes it unread.
"""

from __future__ import annotations

from typing import Final

from cairn.errors import RestoreError
from cairn.storage.manifest import Epoch, StoredEpoch, decode_record, encode_epoch, resolve
from cairn.storage.store import NotFoundError, Store

PENDING_FOLDER: Final = "pending"


def write_pending(store: Store, epoch: Epoch, batch: int) -> str:
    """Where it is written: the epoch as of so many of its batches."""
    path = f"{PENDING_FOLDER}/{epoch.number:012d}-{epoch.term:012d}-{batch:06d}.json"
    store.put(path, encode_epoch(epoch, None, whole=True))
    return path


def read_pending(store: Store, path: str) -> Epoch:
    try:
        stored = decode_record(store.get(path), path)
    except NotFoundError:
        raise RestoreError(
            f"{path} is gone from {store.url}: another driver has taken over", file=path
        ) from None
    assert isinstance(stored, StoredEpoch)
    return resolve(stored, None, path)
