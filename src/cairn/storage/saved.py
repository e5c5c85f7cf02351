"""Which savepoints were taken of a checkpoint: `savepoints/<created_ms>-<id>.json`.

A savepoint is a folder of its own and needs nothing of this; whoever looks at the checkpoint
finds here where they are. One that was moved or removed since is still listed.
"""

from __future__ import annotations

from typing import Any, Final

from cairn.storage.notes import SAVEPOINTS_FOLDER, read_notes, write_note
from cairn.storage.store import Store

Facts = dict[str, Any]

SAVED_KEPT: Final = 200


def note_savepoint(
    store: Store, *, id: str, url: str, epoch: int, created_ms: int, bytes: int
) -> None:
    """A savepoint is complete."""
    facts = {"id": id, "url": url, "epoch": epoch, "created_ms": created_ms, "bytes": bytes}
    write_note(store, SAVEPOINTS_FOLDER, f"{created_ms:013d}-{id}", facts, keep=SAVED_KEPT)


def saved_points(store: Store) -> list[Facts]:
    """Newest first."""
    return [note.facts for note in read_notes(store, SAVEPOINTS_FOLDER)]
