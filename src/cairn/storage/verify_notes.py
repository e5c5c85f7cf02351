"""Check the notes for people in a checkpoint: graph/, failures/, endings/ and their kind.

No job depends on them, and readers leave out unreadable ones. So damage would go unnoticed: a
savepoint would be missing in a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from cairn.errors import CairnError
from cairn.report.status import Restart
from cairn.storage.manifest import unseal
from cairn.storage.notes import GroupNote, RunEnding, SavepointNote
from cairn.storage.paths import (
    ENDINGS_FOLDER,
    FAILURES_FOLDER,
    GRAPHS_FOLDER,
    GROUP_FOLDER,
    RESTARTS_FOLDER,
    SAVEPOINT_PATH,
    SAVEPOINTS_FOLDER,
)
from cairn.storage.store import NotFoundError, Store, open_store


class _Graph(msgspec.Struct):
    """The fields that every version of cairn writes."""

    job: str
    sources: list[dict[str, Any]]
    operators: list[dict[str, Any]]
    sinks: list[dict[str, Any]]


class _Failure(msgspec.Struct):
    kind: str
    epoch: int
    message: str
    wall_ms: int


_KINDS: Final[dict[str, Any]] = {
    GRAPHS_FOLDER: _Graph,
    FAILURES_FOLDER: _Failure,
    SAVEPOINTS_FOLDER: SavepointNote,
    ENDINGS_FOLDER: RunEnding,
    RESTARTS_FOLDER: Restart,
    GROUP_FOLDER: GroupNote,
}


class _Id(msgspec.Struct):
    id: str


_decode_id: Final = msgspec.json.Decoder(_Id).decode


def check_notes(store: Store) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, what is wrong, is_stale) for each damaged or stale note."""
    for folder, kind in _KINDS.items():
        for found in store.list(folder):
            try:
                note = msgspec.json.decode(store.get(found.path), type=kind)
            except NotFoundError:
                continue  # Old notes go when new ones are written.
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                yield found.path, f"this note cannot be read: {error}", False
                continue
            if isinstance(note, SavepointNote):
                why = _why_stale(note)
                if why is not None:
                    advice = f"next: if it is gone for good, delete {store.url}/{found.path}"
                    yield found.path, f"{why}\n  {advice}", True


def _why_stale(note: SavepointNote) -> str | None:
    """Return why a note is stale; None if its savepoint exists."""
    nothing = f"no savepoint at {note.url}"
    try:
        data = open_store(note.url, create=False).get(SAVEPOINT_PATH)
        found = unseal(data, f"{note.url}/{SAVEPOINT_PATH}", _decode_id)
    except NotFoundError:
        return nothing
    except CairnError as error:
        return error.message
    except Exception as error:
        return f"the savepoint at {note.url} cannot be read: {error}"
    return None if found.id == note.id else f"there is another savepoint at {note.url}"
