"""Spark's own streaming checkpoint, compared with the log: the log wins.

After a takeover the newest epoch is compared with Spark's folder. If Spark is about to
run the batch that the epoch records, that batch is skipped; if Spark stands right
behind it, Spark goes on; in every other case, and where the program reads other sources
than the epoch was made from, a new folder is laid out from the offsets in the manifest,
and Spark resumes after them.

Always true here:
- a folder is laid out under the new leader's term, so nobody else writes to it;
- an old folder is read, never changed;
- a source keeps its position by its name, wherever it stands among the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

from cairn.storage.manifest import Epoch
from cairn.storage.spark_log import (
    lay_out,
    lay_out_for,
    match_sources,
    read_offsets,
    same_offsets,
    spark_folder,
)
from cairn.storage.store import NotFoundError, Store


class Stand(Enum):
    """Where Spark stands, seen from the newest epoch."""

    FRESH = "no epoch yet: a new folder"
    BEHIND = "Spark will run the epoch's batch again: it is skipped"
    EQUAL = "Spark has committed the epoch's batch: it goes on"
    AHEAD = "Spark has committed batches the log does not know"
    DIFFERENT = "the offsets of the batch differ"
    MISSING = "Spark does not know the batch"
    SOURCES = "the program reads other sources, or some from their beginning"


class Position(NamedTuple):
    folder: str
    stand: Stand


def compare(store: Store, newest: Epoch | None) -> Stand:
    """Where Spark's folder stands against the newest epoch."""
    if newest is None:
        return Stand.FRESH
    position = newest.spark
    try:
        offsets = read_offsets(store, position.folder, position.batch_id)
    except NotFoundError:
        return Stand.MISSING
    if not same_offsets(offsets, position.offsets):
        return Stand.DIFFERENT
    committed = _numbers(store, f"{position.folder}/commits/")
    if committed and max(committed) > position.batch_id:
        return Stand.AHEAD
    return Stand.EQUAL if position.batch_id in committed else Stand.BEHIND


def settle(
    epoch: Epoch | None,
    term: int,
    *,
    store: Store,
    sources: Sequence[str],
    reset_sources: Collection[str] = (),
) -> Position:
    """The folder Spark is to run in: the one it has, or a new one laid out from the manifest.

    `store` is the one with Spark's folders; `sources` are the program's, in the order in
    which Spark numbers them. Those in `reset_sources` start from their beginning, whatever
    of them the state holds already. A source that is gone is forgotten here: whether it
    may be is asked before the takeover, by `resume.check_sources`.
    """
    folder = spark_folder(term)
    if epoch is None:
        return Position(folder, Stand.FRESH)
    change = match_sources(epoch.spark, sources, reset_sources)
    if change is None or not change.is_same:
        lay_out_for(epoch, folder, store, sources, reset_sources)
        return Position(folder, Stand.SOURCES)
    stand = compare(store, epoch)
    if stand in (Stand.EQUAL, Stand.BEHIND):
        return Position(epoch.spark.folder, stand)
    lay_out(epoch, folder, source=store, target=store)
    return Position(folder, stand)


def _numbers(store: Store, folder: str) -> set[int]:
    names = (found.path.rsplit("/", 1)[1] for found in store.list(folder))
    return {int(name) for name in names if name.isdigit()}
