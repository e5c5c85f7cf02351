"""Notes of the ends of runs: `endings/<term>.json`, written by a driver that ends by itself.

A driver that is killed leaves none. A driver that was superseded leaves none either: the
takeover of the next one shows it, and the checkpoint is not its own any more.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from cairn.report.status import Ending
from cairn.storage.notes import ENDINGS_FOLDER, read_notes, write_note
from cairn.storage.store import Store

ENDINGS_KEPT: Final = 5


class RunEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the run of a term."""

    term: int
    status: Ending
    wall_ms: int
    message: str | None = None
    """The error of a run that failed."""


def write_ending(store: Store, term: int, status: Ending, error: BaseException | None) -> None:
    """Note how a run has ended. Never raises."""
    ending = RunEnding(
        term=term,
        status=status,
        wall_ms=time.time_ns() // 1_000_000,
        message=None if error is None else str(error)[:2000],
    )
    write_note(
        store, ENDINGS_FOLDER, f"{term:012d}", msgspec.to_builtins(ending), keep=ENDINGS_KEPT
    )


def ending_of(store: Store, term: int) -> RunEnding | None:
    """Return the end of the run of a term; None if there is no note of it."""
    for note in read_notes(store, ENDINGS_FOLDER, limit=1):
        try:
            ending = msgspec.convert(note.facts, RunEnding)
        except msgspec.ValidationError:
            return None
        return ending if ending.term == term else None
    return None
