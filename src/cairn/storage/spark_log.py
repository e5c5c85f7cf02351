"""Read Spark's own streaming checkpoint, and lay out one from which Spark continues.

    <folder>/metadata, offsets/<batch>, commits/<batch>, sources/<i>/…

An offsets file has two lines of its own, then a line per source, in the order in which Spark
numbers them; "-" stands for a source without an offset yet. A source may also keep files under
sources/<i>/ (`source_logs`): the file source keeps a log of the files it has read. The epoch has
a copy of them, so a folder is laid out from the log of the checkpoint alone.

A position without offsets is the one before the first batch: nothing is laid out for it, and
every source starts at its beginning.

Always true here:
- from a folder that was laid out, Spark resumes right after its position;
- the folder that is read is never changed; the two may be in different stores;
- a layout that would read input twice is refused, unless the user asked for it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard

import msgspec

from cairn.errors import CorruptFileError, RestoreError
from cairn.storage.manifest import SourceLog, SparkPosition
from cairn.storage.paths import SPARK_FOLDER
from cairn.storage.source_files import source_lines
from cairn.storage.source_logs import source_files
from cairn.storage.store import NotFoundError, Store

NO_OFFSET: Final = "-"
NO_WATERMARK: Final = b'v1\n{"nextBatchWatermarkMs":0}'
"""The content of Spark's file for a committed batch."""
COMPACT_SETTING: Final = "spark.sql.streaming.fileSource.log.compactInterval"
_HEAD_LINES: Final = 2
_UNREAD: Final = "unread"
_VERSION: Final = re.compile(r"v\d+")


# Offsets


def spark_folder(term: int) -> str:
    """Return Spark's folder of a leader."""
    return f"{SPARK_FOLDER}/{term:012d}"


def read_offsets(store: Store, folder: str, batch_id: int) -> str:
    """Return the raw text of the offset file of a batch. CorruptFileError if it is malformed."""
    path = f"{folder}/offsets/{batch_id}"
    return check_file(store, path, store.get(path))


def check_file(store: Store, path: str, data: bytes) -> str:
    """Return the text of a file in offsets/ or commits/; CorruptFileError if it is malformed."""
    try:
        text = data.decode()
        version, _, rest = text.partition("\n")
        facts = rest.partition("\n")[0]
        if _VERSION.fullmatch(version) and isinstance(json.loads(facts), dict):
            return text
    except ValueError:
        pass
    raise CorruptFileError(
        f"a file of Spark's streaming checkpoint is damaged\n  file: {store.url}/{path}\n"
        f"  expected: a version and a line of JSON, found: {data[:40]!r}\n"
        "  next: restore the file from a backup, or start from a savepoint",
        file=f"{store.url}/{path}",
    )


def find_damaged_file(
    store: Store, position: SparkPosition, committed: Collection[int]
) -> str | None:
    """Return a file that Spark reads when it starts and that is missing or malformed, or None.

    `committed` has the batches with a file in commits/.
    """
    batch_id = position.batch_id
    folder = position.folder
    needed = [f"{folder}/offsets/{number}" for number in {max(0, batch_id - 1), batch_id}]
    needed += [f"{folder}/commits/{max(committed)}"] if committed else []
    for path in needed:
        try:
            check_file(store, path, store.get(path))
        except (NotFoundError, CorruptFileError):
            return path
    return None if names_query(read_metadata(store, folder)) else f"{folder}/metadata"


def names_query(metadata: bytes | None) -> TypeGuard[bytes]:
    """True if this is the content of Spark's file that names the query."""
    try:
        found = json.loads(metadata or b"")
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("id"), str)


def same_offsets(left: str, right: str) -> bool:
    """True if two offset files name the same input. Settings and clock are ignored."""
    return list(map(_canonical, source_lines(left))) == list(map(_canonical, source_lines(right)))


def _canonical(line: str) -> str:
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except ValueError:
        return line.strip()


# Laying out


def lay_out(
    position: SparkPosition,
    folder: str,
    *,
    source: Store,
    target: Store,
    checkpoint: Store | None = None,
    compact_interval: int | None = None,
) -> None:
    """Write a folder in `target` from which Spark resumes right after a position in `source`.

    `checkpoint` has the epoch of that position, if `source` does not. `compact_interval` is the
    value of COMPACT_SETTING in the session of the next query, if known.
    """
    metadata = None
    if source.url == target.url:
        # The query keeps its id. A copy elsewhere is another query: Spark stops a running query
        # when a second one with the same id starts.
        metadata = read_metadata(source, position.folder)
    files = source_files(source, position, checkpoint=checkpoint, compact_interval=compact_interval)
    lay_out_from(position, files, folder, target, metadata=metadata)


def lay_out_from(
    position: SparkPosition,
    sources: Mapping[str, bytes],
    folder: str,
    target: Store,
    *,
    metadata: bytes | None = None,
) -> SparkPosition:
    """Write a folder from which Spark resumes right after a position; return its new position.

    `sources` are the files under sources/, as `source_files` returns them. Without `metadata`, or
    if it is damaged, the query gets a new id.
    """
    if not source_lines(position.offsets):
        return msgspec.structs.replace(position, folder=folder)
    for name, data in sources.items():
        target.put(f"{folder}/sources/{name}", data)
    if not names_query(metadata):
        metadata = json.dumps({"id": str(uuid.uuid4())}).encode()
    target.put(f"{folder}/metadata", metadata)
    batch_id, offsets = position.batch_id, position.offsets.encode()
    target.put(f"{folder}/commits/{batch_id}", NO_WATERMARK)
    # Spark also reads the batch before the last one, for the start of the last one.
    for number in sorted({max(0, batch_id - 1), batch_id}):
        target.put(f"{folder}/offsets/{number}", offsets)
    return msgspec.structs.replace(position, folder=folder)


def read_metadata(store: Store, folder: str) -> bytes | None:
    """Return Spark's file that names the query; None if it does not exist."""
    try:
        return store.get(f"{folder}/metadata")
    except NotFoundError:
        return None


def leave_unread(store: Store, folder: str, batch_id: int) -> None:
    """Note that a batch which Spark has planned was not processed, and will not be from here."""
    store.put(f"{folder}/{_UNREAD}", str(batch_id).encode())


def last_planned(store: Store, folder: str, batch_ids: Collection[int]) -> int | None:
    """Return the last of these batches that may have been processed."""
    try:
        unread = int(store.get(f"{folder}/{_UNREAD}"))
    except NotFoundError:
        unread = None
    except ValueError:
        raise CorruptFileError(
            f"it is not known which batch was left unread\n  file: {store.url}/{folder}/{_UNREAD}\n"
            "  expected: the number of a batch\n"
            "  next: write it back, or delete the file: then the last batch counts as read",
            file=f"{store.url}/{folder}/{_UNREAD}",
        ) from None
    return max((batch_id for batch_id in batch_ids if batch_id != unread), default=None)


# Sources by name


class SourceChange(NamedTuple):
    """The sources of a program compared with a position; `kept` maps new indices to old ones."""

    kept: dict[int, int]
    dropped: list[str]
    is_same: bool


def match_sources(
    position: SparkPosition, sources: Sequence[str], reset_sources: Collection[str] = ()
) -> SourceChange | None:
    """Find a program's sources, in Spark's order, in a position; None if they cannot be matched.

    A position without names is assumed to have the same sources. Sources cannot be matched if one
    of them is several inputs to Spark.
    """
    if not source_lines(position.offsets):
        return SourceChange({}, [], is_same=False)
    held = position.sources or list(sources)
    if held == list(sources) and not set(sources) & set(reset_sources):
        return SourceChange({}, [], is_same=True)
    if len(source_lines(position.offsets)) != len(held) or len(set(held)) != len(held):
        return None
    old = {name: index for index, name in enumerate(held)}
    kept = {
        new: old[name]
        for new, name in enumerate(sources)
        if name in old and name not in reset_sources
    }
    return SourceChange(kept, [name for name in held if name not in sources], is_same=False)


def move_logs(
    position: SparkPosition, sources: Sequence[str], reset_sources: Collection[str] = ()
) -> dict[int, SourceLog]:
    """Return the logs in a position of a program's sources, by their new index."""
    change = match_sources(position, sources, reset_sources)
    if change is None or change.is_same:
        return position.logs
    logs = position.logs
    return {new: logs[old] for new, old in change.kept.items() if old in logs}


def lay_out_for(
    position: SparkPosition,
    folder: str,
    store: Store,
    sources: Sequence[str],
    reset_sources: Collection[str] = (),
    *,
    checkpoint: Store | None = None,
    target: Store | None = None,
    compact_interval: int | None = None,
) -> bool:
    """Like `lay_out`, for a program with other sources than the position; by default in one store.

    Sources keep their offsets when their order changes; new ones, and those in `reset_sources`,
    start at their beginning. Returns False, and writes nothing, if no source has an offset.
    """
    change = match_sources(position, sources, reset_sources)
    if change is None:
        raise RestoreError(
            f"cannot match Spark's offsets with the sources {', '.join(sources)}\n"
            f"  it was made from: {', '.join(position.sources) or 'unknown'}\n"
            "  next: start with the sources it had, in that order",
            batch=position.batch_id,
        )
    if change.is_same:
        lay_out(
            position,
            folder,
            source=store,
            target=target or store,
            checkpoint=checkpoint,
            compact_interval=compact_interval,
        )
        return True
    old = source_lines(position.offsets)
    kept = change.kept
    lines = [old[kept[new]] if new in kept else NO_OFFSET for new in range(len(sources))]
    if all(line.strip() == NO_OFFSET for line in lines):
        return False
    moved = {str(before): str(new) for new, before in kept.items()}
    files = {}
    found = source_files(
        store,
        position,
        checkpoint=checkpoint,
        only=kept.values(),
        compact_interval=compact_interval,
    )
    for name, data in found.items():
        index, _, file = name.partition("/")
        files[f"{moved[index]}/{file}"] = data
    head = position.offsets.strip().split("\n")[:_HEAD_LINES]
    moved_to = msgspec.structs.replace(
        position, offsets="\n".join([*head, *lines]), sources=list(sources)
    )
    target = target or store
    metadata = read_metadata(store, position.folder) if target is store else None
    lay_out_from(moved_to, files, folder, target, metadata=metadata)
    return True
