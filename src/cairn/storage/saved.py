"""Which savepoints were taken of a checkpoint: `savepoints/<created_ms>-<id>.json`.

A savepoint is a folder of its own and needs nothing of this; whoever looks at the checkpoint
finds here where they are. One that was moved or removed since is still listed.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cairn.storage.notes import SAVEPOINTS_FOLDER, read_structs, write_note
from cairn.storage.store import Store

SAVED_KEPT: Final = 200


class SavedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A savepoint that was taken of the checkpoint."""

    id: str
    url: str
    epoch: int
    created_ms: int
    bytes: int


def note_savepoint(
    store: Store, *, id: str, url: str, epoch: int, created_ms: int, bytes: int
) -> None:
    """A savepoint is complete."""
    point = SavedPoint(id=id, url=url, epoch=epoch, created_ms=created_ms, bytes=bytes)
    write_note(store, SAVEPOINTS_FOLDER, f"{created_ms:013d}-{id}", point, keep=SAVED_KEPT)


def saved_points(store: Store) -> list[SavedPoint]:
    """Return the savepoints, newest first."""
    return read_structs(store, SAVEPOINTS_FOLDER, SavedPoint)
