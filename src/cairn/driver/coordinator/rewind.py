"""Bring Spark's streaming checkpoint to the newest epoch of the log.

After a takeover the newest epoch is compared with Spark's folder. If Spark is about to
run the batch that the epoch records, that batch is skipped; if Spark has committed that batch
last, Spark continues. Otherwise a new folder is written from the manifest, and Spark resumes
after the epoch: also if a Spark file is missing or damaged, or if the program reads other
sources than the epoch was made from. A batch that Spark has planned
and that is not in the log is planned again, because Spark's files carry no checksum. If the folder
of each run is on the driver's disk, it is always written.

A job that never reads twice (at-most-once) continues after the last batch that any driver has
planned, in a new folder. A fenced driver may plan another batch in its own folder, but it reads
the log before it publishes, and finds the takeover there.

Always true here:
- a new folder has the new leader's term in its name, so no other driver writes to it;
- an old folder is read, never changed;
- a source keeps its position by its name, even if the order of sources changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from cairn.errors import CorruptFileError
from cairn.logs import logger
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.paths import SPARK_FOLDER
from cairn.storage.source_logs import advance, find_differing_file, find_misplaced_file
from cairn.storage.spark_log import (
    find_damaged_file,
    last_planned,
    lay_out,
    lay_out_for,
    match_sources,
    read_offsets,
    same_offsets,
    spark_folder,
)
from cairn.storage.store import NotFoundError, Store

_PLANNED: Final = re.compile(rf"({SPARK_FOLDER}/[^/]+)/offsets/(\d+)")


class Stand(Enum):
    """The position of Spark relative to the newest epoch."""

    FRESH = "no epoch yet: a new folder"
    BEHIND = "Spark will run the epoch's batch again: it is skipped"
    EQUAL = "Spark has committed the epoch's batch: it goes on"
    AHEAD = "Spark has committed batches that are not in the log"
    DIFFERENT = "the offsets of the batch differ"
    MISSING = "Spark does not have the batch"
    PLANNED = "Spark has planned a batch that is not in the log"
    DAMAGED = "a Spark file is missing, damaged, or differs from the one of the epoch"
    MISPLACED = "the session compacts lists of files at another interval than the folder"
    GIVEN_UP = "all planned batches count as read, processed or not"
    ELSEWHERE = "Spark's folder is on the driver's disk: every start writes it"
    SOURCES = "the program reads other sources, or some from their beginning"


class Position(NamedTuple):
    folder: str
    stand: Stand


def compare(
    store: Store,
    newest: Epoch | None,
    *,
    checkpoint: Store | None = None,
    compact_interval: int | None = None,
) -> Stand:
    """Compare Spark's folder, in `store`, with the newest epoch, in `checkpoint`."""
    if newest is None:
        return Stand.FRESH
    position = newest.spark
    try:
        offsets = read_offsets(store, position.folder, position.batch_id)
    except NotFoundError:
        return Stand.MISSING
    except CorruptFileError as error:
        _warn_of_damage(error.facts["file"])
        return Stand.DAMAGED
    if not same_offsets(offsets, position.offsets):
        return Stand.DIFFERENT
    committed = _numbers(store, f"{position.folder}/commits/")
    if committed and max(committed) > position.batch_id:
        return Stand.AHEAD
    if max(_numbers(store, f"{position.folder}/offsets/")) > position.batch_id:
        return Stand.PLANNED
    damaged = find_damaged_file(store, position, committed) or find_differing_file(
        store, position, checkpoint=checkpoint or store
    )
    if damaged is not None:
        _warn_of_damage(f"{store.url}/{damaged}")
        return Stand.DAMAGED
    if compact_interval is not None and find_misplaced_file(store, position, compact_interval):
        return Stand.MISPLACED
    return Stand.EQUAL if position.batch_id in committed else Stand.BEHIND


def _warn_of_damage(file: str) -> None:
    logger.warning("%s differs from the file of the newest epoch: it is written again", file)


def settle(
    epoch: Epoch | None,
    term: int,
    *,
    store: Store,
    sources: Sequence[str],
    reset_sources: Collection[str] = (),
    checkpoint: Store | None = None,
    target: Store | None = None,
    compact_interval: int | None = None,
) -> Position:
    """Return the folder for Spark: its present one, or a new one written from the manifest.

    `store` has Spark's folders; `checkpoint` has the log, if that is another store. A `target` that
    is not `store` gets the new folder. `sources` are those of the program, in Spark's order.
    Sources in `reset_sources` start from their beginning, even if the state contains rows of them.
    Sources that the program no longer has are dropped; `resume.check_sources` has checked before
    the takeover that this is allowed. `compact_interval` is that of Spark's file sources in the
    session that runs the query.
    """
    folder = spark_folder(term)
    if epoch is None:
        return Position(folder, Stand.FRESH)
    change = match_sources(epoch.spark, sources, reset_sources)
    is_elsewhere = target is not None and target is not store
    if change is None or not change.is_same or is_elsewhere:
        lay_out_for(
            epoch.spark,
            folder,
            store,
            sources,
            reset_sources,
            checkpoint=checkpoint,
            target=target,
            compact_interval=compact_interval,
        )
        return Position(folder, Stand.ELSEWHERE if is_elsewhere else Stand.SOURCES)
    stand = compare(store, epoch, checkpoint=checkpoint, compact_interval=compact_interval)
    if stand in (Stand.EQUAL, Stand.BEHIND):
        return Position(epoch.spark.folder, stand)
    lay_out(
        epoch.spark,
        folder,
        source=store,
        target=store,
        checkpoint=checkpoint,
        compact_interval=compact_interval,
    )
    return Position(folder, stand)


def give_up(
    epoch: Epoch | None,
    term: int,
    *,
    store: Store,
    sources: Sequence[str],
    reset_sources: Collection[str] = (),
    since: int = 0,
    checkpoint: Store | None = None,
    target: Store | None = None,
    compact_interval: int | None = None,
) -> Position:
    """Like `settle`, for a job that never reads twice: it continues after all planned batches.

    `since` is the record of the last rollback: positions before it do not count.
    """
    folder = spark_folder(term)
    planned = _last_planned(epoch, store, since, checkpoint or store, term)
    if planned is None:
        return Position(folder, Stand.FRESH)
    if not planned.sources:
        planned = msgspec.structs.replace(planned, sources=list(sources))
    lay_out_for(
        planned,
        folder,
        store,
        sources,
        reset_sources,
        checkpoint=checkpoint,
        target=target,
        compact_interval=compact_interval,
    )
    return Position(folder, Stand.GIVEN_UP)


def _last_planned(
    epoch: Epoch | None, store: Store, since: int, checkpoint: Store, term: int
) -> SparkPosition | None:
    """Return the last batch that a driver has planned after an epoch, or since a rollback."""
    first = (since, 0) if since or epoch is None else _order(epoch.spark.folder)
    folders: dict[str, set[int]] = {}
    for there in store.list(SPARK_FOLDER):
        match = _PLANNED.fullmatch(there.path)
        if match and _order(match[1]) >= first:
            folders.setdefault(match[1], set()).add(int(match[2]))
    names = [] if epoch is None else epoch.spark.sources
    for folder in sorted(folders, key=_order, reverse=True):
        batch_id = last_planned(store, folder, folders[folder])
        if batch_id is not None:
            offsets = read_offsets(store, folder, batch_id)
            planned = SparkPosition(
                folder=folder, batch_id=batch_id, offsets=offsets, sources=names
            )
            # Another start may have had the sources in another order.
            is_same = epoch is not None and epoch.spark.folder == folder
            known = epoch.spark.logs if epoch is not None and is_same else {}
            return advance(known, store, planned, checkpoint=checkpoint, term=term)
    return None if epoch is None else epoch.spark


def _order(folder: str) -> tuple[int, int]:
    """Return a sort key: later leaders compare greater, and so do later folders of a leader."""
    term, _, suffix = folder.rpartition("/")[2].partition("-")
    return int(term), int(suffix) if suffix.isdigit() else 0


def _numbers(store: Store, folder: str) -> set[int]:
    names = (found.path.rsplit("/", 1)[1] for found in store.list(folder))
    return {int(name) for name in names if name.isdigit()}
