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

import json
import re
from enum import Enum
from typing import NamedTuple

from cairn.errors import RestoreError
from cairn.storage.manifest import Epoch
from cairn.storage.store import NotFoundError, Store

# Spark's default, spark.sql.streaming.fileSource.log.compactInterval.
COMPACT_INTERVAL = 10
_NUMBERED = re.compile(r"(\d+)(\.compact)?")


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


def read_offsets(store: Store, folder: str, batch_id: int) -> str:
    """The raw text of Spark's offset file of a batch."""
    return store.get(f"{folder}/offsets/{batch_id}").decode()


def same_offsets(left: str, right: str) -> bool:
    """Whether two offset files name the same input. The line of settings and clock is not input."""
    return _source_lines(left) == _source_lines(right)


def _source_lines(text: str) -> list[str]:
    return [_canonical(line) for line in text.strip().split("\n")[2:]]


def _canonical(line: str) -> str:
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except ValueError:
        return line.strip()


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
    _copy_sources(store, epoch, folder)
    try:
        store.put(f"{folder}/metadata", store.get(f"{old}/metadata"))
    except NotFoundError:
        pass  # Spark makes one; it only names the query.
    offsets = epoch.spark.offsets.encode()
    # Spark reads the batch before the last one too, but only to learn where the last began.
    for number in {max(0, batch_id - 1), batch_id}:
        store.put(f"{folder}/offsets/{number}", offsets)
    store.put(f"{folder}/commits/{batch_id}", b'v1\n{"nextBatchWatermarkMs":0}')


def _copy_sources(store: Store, epoch: Epoch, folder: str) -> None:
    """What sources keep beside their offsets: for files, the list of those already seen."""
    old = f"{epoch.spark.folder}/sources/"
    lines = epoch.spark.offsets.strip().split("\n")[2:]
    cuts = {index: _log_offset(line) for index, line in enumerate(lines)}
    logs: dict[int, dict[str, bytes]] = {}
    for found in store.list(old):
        name = found.path[len(old) :]
        source, _, entry = name.partition("/")
        data = store.get(found.path)
        if source.isdigit() and cuts.get(int(source)) is not None and _NUMBERED.fullmatch(entry):
            logs.setdefault(int(source), {})[entry] = data
        else:
            store.put(f"{folder}/sources/{name}", data)
    for index, last in cuts.items():
        if last is None or last < 0:
            continue
        cut = _cut_file_log(logs.get(index, {}), last)
        if cut is None:
            raise RestoreError(
                f"Spark's list of files already read by source {index} is gone\n"
                f"  expected: {store.url}/{old}{index}/{last}\n"
                "  going on without it would read every file again\n"
                "  next: restore that folder from a backup",
                file=f"{old}{index}/{last}",
            )
        for entry, data in cut.items():
            store.put(f"{folder}/sources/{index}/{entry}", data)


def _cut_file_log(log: dict[str, bytes], last: int) -> dict[str, bytes] | None:
    """The file source's log as it was after entry `last`; None if it cannot be told.

    Entries are files `n`, and every tenth is `n.compact`, which holds all before it.
    """
    start = (last + 1) // COMPACT_INTERVAL * COMPACT_INTERVAL - 1
    needed = [str(number) for number in range(start + 1, last + 1)]
    if start >= 0:
        needed.insert(0, f"{start}.compact")
    if all(name in log for name in needed):
        return {name: log[name] for name in needed}
    # Spark has cleaned them up since: a later compact file still lists what they held.
    later = [name for name in log if name.endswith(".compact") and int(name[:-8]) >= last]
    if not later:
        return None
    head, *entries = log[min(later, key=lambda name: int(name[:-8]))].decode().split("\n")
    kept = [line for line in entries if line and json.loads(line).get("batchId", 0) <= last]
    cut = {name: head.encode() for name in needed}
    cut[needed[0]] = "\n".join([head, *kept]).encode()
    return cut


def _log_offset(line: str) -> int | None:
    """The file source's offset; None for other sources."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    value = parsed.get("logOffset") if isinstance(parsed, dict) else None
    return value if isinstance(value, int) else None


def _numbers(store: Store, folder: str) -> set[int]:
    names = (found.path.rsplit("/", 1)[1] for found in store.list(folder))
    return {int(name) for name in names if name.isdigit()}
