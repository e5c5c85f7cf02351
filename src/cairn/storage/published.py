"""Determine from the checkpoint alone if an epoch's output is published.

A sink publishes after the epoch is in the log, so the record itself proves nothing. There are
three proofs:

- the epoch has nothing to publish: no sink prepared output, or the batches were published
  before the record (a guarantee weaker than exactly-once);
- the log holds a child of it: a driver appends an epoch only after its sinks have published
  the parent, or after a start with `allow_dropped_output`;
- a note, `published/<epoch>.json`. A driver writes it when no child follows soon: after a start
  has published the newest epoch again, when the job is idle, and when the run ends cleanly.

So an epoch of a busy job costs no extra write. A driver keeps one note: the next replaces it.

Always true here:
- a note is written after every sink of the epoch has published it;
- no note means "not known to be published", never "not published";
- without a note, a start publishes the epoch again.
"""

from __future__ import annotations

import msgspec

from cairn.logs import logger
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.paths import PUBLISHED_FOLDER
from cairn.storage.store import NotFoundError, Store


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    nonce: str
    """The nonce of the epoch's record."""


def note_path(epoch: int) -> str:
    return f"{PUBLISHED_FOLDER}/{epoch:012d}.json"


def note_published(store: Store, epoch: int, nonce: str) -> None:
    """Note that all sinks have published an epoch. `nonce` is that of its record."""
    store.put(note_path(epoch), msgspec.json.encode(_Note(epoch=epoch, nonce=nonce)))


def is_published(store: Store, epoch: int, nonce: str) -> bool:
    """True if a note says that all sinks have published this epoch."""
    try:
        note = msgspec.json.decode(store.get(note_path(epoch)), type=_Note)
    except NotFoundError:
        return False
    except msgspec.MsgspecError as error:
        logger.warning("%s/%s cannot be read: %s", store.url, note_path(epoch), error)
        return False
    return note == _Note(epoch=epoch, nonce=nonce)


def has_output(epoch: Epoch) -> bool:
    """True if a sink has prepared something that is published after the record."""
    return any(epoch.committables.values())


def is_known_published(log: Log, epoch: Epoch) -> bool:
    """True if the checkpoint proves that this epoch is published."""
    if not has_output(epoch) or is_published(log.store, epoch.number, epoch.nonce):
        return True
    return any(
        isinstance(record, Epoch) and record.parent == epoch.number
        for record in log.records(epoch.number + 1)
    )


def remove_notes(store: Store, below: int) -> None:
    """Remove the notes of epochs with lower numbers: their records are gone."""
    first = note_path(below)
    old = [there.path for there in store.list(PUBLISHED_FOLDER) if there.path < first]
    if old:
        store.delete(old)
