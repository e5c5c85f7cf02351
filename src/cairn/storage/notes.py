"""Notes: small JSON files in a checkpoint, for people who look at it later.

What a job looks like, what failed, which savepoints were taken, how runs ended: nothing that a
job needs to go on. So a note that cannot be written is a line in the log, and one that cannot be
read is left out.

Always true here:
- writing or reading notes never raises, whatever the store does;
- of each kind the last few are kept: names sort by time, and the oldest go.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from cairn.logs import logger
from cairn.storage.store import Store

Facts = dict[str, Any]

GRAPHS_FOLDER: Final = "graph"
FAILURES_FOLDER: Final = "failures"
SAVEPOINTS_FOLDER: Final = "savepoints"
ENDINGS_FOLDER: Final = "endings"
S = TypeVar("S", bound=msgspec.Struct)
NOTE_FOLDERS: Final = (GRAPHS_FOLDER, FAILURES_FOLDER, SAVEPOINTS_FOLDER, ENDINGS_FOLDER)


class Note(NamedTuple):
    name: str
    facts: Facts


def write_note(store: Store, folder: str, name: str, facts: object, *, keep: int) -> bool:
    """Write it, replacing one of that name; the oldest beyond `keep` go. False when it failed."""
    try:
        store.put(f"{folder}/{name}.json", msgspec.json.encode(facts))
        paths = sorted(found.path for found in store.list(folder))
        if len(paths) > keep:
            store.delete(paths[:-keep])
    except Exception as error:
        logger.warning("a note for %s/ could not be written: %s", folder, error)
        return False
    return True


def read_structs(store: Store, folder: str, type: type[S]) -> list[S]:
    """Return the notes of a kind as structs, newest first; those that do not fit are left out."""
    found = []
    for note in read_notes(store, folder):
        with suppress(msgspec.ValidationError):
            found.append(msgspec.convert(note.facts, type))
    return found


def read_notes(store: Store, folder: str, limit: int | None = None) -> list[Note]:
    """The notes of a kind, newest first."""
    found = []
    try:
        paths = sorted((found.path for found in store.list(folder)), reverse=True)
    except Exception as error:
        logger.warning("notes in %s/ could not be listed: %s", folder, error)
        return []
    for path in paths[:limit]:
        try:
            facts = msgspec.json.decode(store.get(path))
        except Exception:
            continue  # Removed since it was listed, or damaged.
        if isinstance(facts, dict):
            name = path.rpartition("/")[2].removesuffix(".json")
            found.append(Note(name, facts))
    return found
