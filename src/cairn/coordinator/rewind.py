"""Spark's own streaming checkpoint, compared with the log: the log wins.

    spark/<term>/metadata, offsets/<batch>, commits/<batch>, sources/<i>/…

After a takeover the newest epoch is compared with Spark's folder. If Spark is about to
run the batch that the epoch records, that batch is skipped; if Spark stands right
behind it, Spark goes on; in every other case a new folder is laid out from the offsets
in the manifest, and Spark resumes after them.

Always true here:
- a folder is laid out under the new leader's term, so nobody else writes to it;
- an old folder is read, never changed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from cairn.storage.manifest import Epoch
from cairn.storage.spark_log import COMPACT_INTERVAL, read_offsets, same_offsets, source_files
from cairn.storage.store import NotFoundError, Store

__all__ = [
    "COMPACT_INTERVAL",
    "Position",
    "Stand",
    "compare",
    "lay_out",
    "read_offsets",
    "same_offsets",
    "settle",
    "spark_folder",
]


class Stand(Enum):
    """Where Spark stands, seen from the newest epoch."""

    FRESH = "no epoch yet: a new folder"
    BEHIND = "Spark will run the epoch's batch again: it is skipped"
    EQUAL = "Spark has committed the epoch's batch: it goes on"
    AHEAD = "Spark has committed batches the log does not know"
    DIFFERENT = "the offsets of the batch differ"
    MISSING = "Spark does not know the batch"


class Position(NamedTuple):
    folder: str
    stand: Stand


def spark_folder(term: int) -> str:
    return f"spark/{term:012d}"


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


def settle(store: Store, newest: Epoch | None, term: int) -> Position:
    """The folder Spark is to run in: the one it has, or a new one laid out from the manifest."""
    stand = compare(store, newest)
    if stand in (Stand.EQUAL, Stand.BEHIND):
        assert newest is not None
        return Position(newest.spark.folder, stand)
    folder = spark_folder(term)
    if newest is not None:
        lay_out(store, newest, folder)
    return Position(folder, stand)


def lay_out(store: Store, epoch: Epoch, folder: str) -> None:
    """A folder from which Spark resumes right after an epoch."""
    old, batch_id = epoch.spark.folder, epoch.spark.batch_id
    for name, data in source_files(store, epoch).items():
        store.put(f"{folder}/sources/{name}", data)
    try:
        store.put(f"{folder}/metadata", store.get(f"{old}/metadata"))
    except NotFoundError:
        pass  # Spark makes one; it only names the query.
    offsets = epoch.spark.offsets.encode()
    # Spark reads the batch before the last one too, but only to learn where the last began.
    for number in {max(0, batch_id - 1), batch_id}:
        store.put(f"{folder}/offsets/{number}", offsets)
    store.put(f"{folder}/commits/{batch_id}", b'v1\n{"nextBatchWatermarkMs":0}')


def _numbers(store: Store, folder: str) -> set[int]:
    names = (found.path.rsplit("/", 1)[1] for found in store.list(folder))
    return {int(name) for name in names if name.isdigit()}
