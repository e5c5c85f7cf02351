"""Notes: small JSON files in a checkpoint, for people who look at it later.

    graph/<term>.json                       sources, operators and sinks of the job, from each start
    savepoints/<created_ms>-<id>.json       a savepoint that was taken; it may be gone by now
    endings/<term>.json                     how a run ended; a driver that was killed or superseded
                                            leaves none
    restarts/<wall_ms>-<pid>.json           a run that failed and begins again, after which pause
    group/<term>.json                       the group of drivers that the leader belongs to
    failures/<wall_ms>-<count>-<id>.json    see `failures`

A job needs none of them to go on. So a note that cannot be written is a line in the log, and one
that cannot be read is left out.

Always true here:
- writing or reading notes never raises, whatever the store does;
- the last few notes of each kind are kept: names sort by time, and the oldest go.
"""

from __future__ import annotations

import time
from typing import Final, TypeVar

import msgspec

from cairn.logs import logger
from cairn.report.job_graph import JobGraph
from cairn.report.status import Ending, Restart
from cairn.storage.paths import (
    ENDINGS_FOLDER,
    GRAPHS_FOLDER,
    GROUP_FOLDER,
    RESTARTS_FOLDER,
    SAVEPOINTS_FOLDER,
)
from cairn.storage.store import Store

GRAPHS_KEPT: Final = 5
SAVEPOINTS_KEPT: Final = 200
ENDINGS_KEPT: Final = 5
RESTARTS_KEPT: Final = 50

N = TypeVar("N")


class SavepointNote(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    url: str
    epoch: int
    created_ms: int
    bytes: int = 0


class RunEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the run of a term."""

    term: int
    status: Ending
    wall_ms: int
    message: str | None = None
    """The error of a run that failed."""


class GroupNote(msgspec.Struct, frozen=True, kw_only=True):
    """The group of drivers of a job."""

    url: str
    """Without secrets: the argument `ha` as it may be shown."""


def write_note(store: Store, folder: str, name: str, note: object, *, keep: int) -> bool:
    """Write a note and remove the oldest beyond `keep`. False when it failed."""
    try:
        store.put(f"{folder}/{name}.json", msgspec.json.encode(note))
        paths = sorted(found.path for found in store.list(folder))
        if len(paths) > keep:
            store.delete(paths[:-keep])
    except Exception as error:
        logger.warning("a note for %s/ could not be written: %s", folder, error)
        return False
    return True


def read_notes(
    store: Store, folder: str, kind: type[N], limit: int | None = None
) -> list[tuple[str, N]]:
    """Return the name and content of the notes in a folder, newest first."""
    found = []
    try:
        paths = sorted((found.path for found in store.list(folder)), reverse=True)
    except Exception as error:
        logger.warning("notes in %s/ could not be listed: %s", folder, error)
        return []
    for path in paths[:limit]:
        try:
            note = msgspec.json.decode(store.get(path), type=kind)
        except Exception:
            continue  # Removed since it was listed, or damaged.
        found.append((path.rpartition("/")[2].removesuffix(".json"), note))
    return found


def write_graph(store: Store, term: int, graph: JobGraph) -> None:
    """Note the graph of the job that this term runs. Never raises."""
    write_note(store, GRAPHS_FOLDER, f"{term:012d}", graph, keep=GRAPHS_KEPT)


def newest_graph(store: Store) -> tuple[int, JobGraph] | None:
    """Return the graph of the last start and its term; None without a note."""
    graphs = read_notes(store, GRAPHS_FOLDER, JobGraph)
    return next(((int(name), graph) for name, graph in graphs if name.isdecimal()), None)


def write_savepoint_note(store: Store, note: SavepointNote) -> None:
    """Note a savepoint that is complete. Never raises."""
    name = f"{note.created_ms:013d}-{note.id}"
    write_note(store, SAVEPOINTS_FOLDER, name, note, keep=SAVEPOINTS_KEPT)


def read_savepoint_notes(store: Store) -> list[SavepointNote]:
    """Return the savepoints that were taken of a checkpoint, newest first."""
    return [note for _, note in read_notes(store, SAVEPOINTS_FOLDER, SavepointNote)]


def write_ending(store: Store, term: int, status: Ending, error: BaseException | None) -> None:
    """Note how a run has ended. Never raises."""
    ending = RunEnding(
        term=term,
        status=status,
        wall_ms=time.time_ns() // 1_000_000,
        message=None if error is None else str(error)[:2000],
    )
    write_note(store, ENDINGS_FOLDER, f"{term:012d}", ending, keep=ENDINGS_KEPT)


def ending_of(store: Store, term: int) -> RunEnding | None:
    """Return the end of the run of a term; None without a note."""
    for _, ending in read_notes(store, ENDINGS_FOLDER, RunEnding, limit=1):
        if ending.term == term:
            return ending
    return None


def write_restart(store: Store, restart: Restart) -> None:
    """Note that a run begins again. Never raises."""
    name = f"{restart.wall_ms:013d}-{restart.pid}"
    write_note(store, RESTARTS_FOLDER, name, restart, keep=RESTARTS_KEPT)


def read_restarts(store: Store, limit: int | None = None) -> list[Restart]:
    """Return the restarts of a job, of all its drivers, newest first."""
    return [note for _, note in read_notes(store, RESTARTS_FOLDER, Restart, limit)]


def write_group(store: Store, term: int, url: str | None) -> None:
    """Note the group of the driver that leads; None if it has none. Never raises."""
    name = f"{term:012d}"
    if url is not None:
        write_note(store, GROUP_FOLDER, name, GroupNote(url=url), keep=1)
        return
    try:
        # Without a note the job has no group, so most starts write nothing here.
        found = (stored.path for stored in store.list(GROUP_FOLDER))
        earlier = [path for path in found if path.rpartition("/")[2] < name]
        if earlier:
            store.delete(earlier)
    except Exception as error:
        logger.warning("the note of an earlier group could not be removed: %s", error)


def read_group(store: Store) -> str | None:
    """Return the group of the driver that led last, as `ha` names it; None without one."""
    notes = read_notes(store, GROUP_FOLDER, GroupNote, limit=1)
    return notes[0][1].url if notes else None
