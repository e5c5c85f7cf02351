"""Spark's own streaming checkpoint: read, and laid out anew where Spark is to go on.

    <folder>/metadata, offsets/<batch>, commits/<batch>, sources/<i>/…

An offsets file has two lines of its own, then a line per source, in the order in which
Spark numbers them; "-" stands for a source that has given nothing yet. Beside its offset a
source may keep files under sources/<i>/ (`source_logs`): the file source, the list of files
it has seen. The epoch has a copy of them, so a folder is laid out from the log alone.

A position without offsets is one before anything was read: there is nothing to lay out for it,
and every source starts at its beginning.

Always true here:
- from a folder that was laid out, Spark resumes right after the position it was laid out for;
- the folder that is read is never changed; the two may lie in different stores;
- input that would be read twice without anybody's wish is refused, never read.
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
"""A batch as committed, in Spark's words."""
COMPACT_SETTING: Final = "spark.sql.streaming.fileSource.log.compactInterval"
_HEAD_LINES: Final = 2
_UNREAD: Final = "unread"
_VERSION: Final = re.compile(r"v\d+")


# Offsets


def spark_folder(term: int) -> str:
    """Where Spark's log of a leader lies."""
    return f"{SPARK_FOLDER}/{term:012d}"


def read_offsets(store: Store, folder: str, batch_id: int) -> str:
    """The raw text of Spark's offset file of a batch. CorruptFileError when it is none."""
    path = f"{folder}/offsets/{batch_id}"
    return check_file(store, path, store.get(path))


def check_file(store: Store, path: str, data: bytes) -> str:
    """The text of a file in offsets/ or commits/: a version, then JSON. Or CorruptFileError."""
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
        "  next: bring the file back from a backup, or start from a savepoint",
        file=f"{store.url}/{path}",
    )


def find_damaged_file(
    store: Store, position: SparkPosition, committed: Collection[int]
) -> str | None:
    """The path of a file that Spark reads when it starts and that is missing or malformed.

    `committed`: the batches with a file in commits/. None when all is well.
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
    """Whether two offset files name the same input. The line of settings and clock is not input."""
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
    """A folder in `target` from which Spark resumes right after a position in `source`.

    `checkpoint` has the epoch of that position, where that is not `source`. `compact_interval` is
    what COMPACT_SETTING is in the session of the query to come, if that is known.
    """
    metadata = None
    if source.url == target.url:
        # The query keeps its id. A copy elsewhere is another query: Spark stops whichever
        # runs when a second one of the same id starts beside it.
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
    """A folder from which Spark resumes right after a position; the position in that folder.

    `sources` are the files under sources/, as `source_files` gives them. Without
    `metadata`, or with one that is damaged, the query gets an id of its own.
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
    # Spark reads the batch before the last one too, but only to learn where the last began.
    for number in sorted({max(0, batch_id - 1), batch_id}):
        target.put(f"{folder}/offsets/{number}", offsets)
    return msgspec.structs.replace(position, folder=folder)


def read_metadata(store: Store, folder: str) -> bytes | None:
    """Spark's file that names the query, if it is there."""
    try:
        return store.get(f"{folder}/metadata")
    except NotFoundError:
        return None


def leave_unread(store: Store, folder: str, batch_id: int) -> None:
    """Note that a batch which Spark has planned was not processed, and will not be from here."""
    store.put(f"{folder}/{_UNREAD}", str(batch_id).encode())


def last_planned(store: Store, folder: str, batch_ids: Collection[int]) -> int | None:
    """The last of these batches that may have been processed."""
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
    """What a program's sources are to a position: `kept` maps new indices to old ones."""

    kept: dict[int, int]
    dropped: list[str]
    is_same: bool


def match_sources(
    position: SparkPosition, sources: Sequence[str], reset_sources: Collection[str] = ()
) -> SourceChange | None:
    """A program's sources, in Spark's order, found in a position; None where that cannot be told.

    A position that does not know the names is taken to be of the same sources. It cannot
    be told which is which where a source is several inputs to Spark.
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
    """Return the logs of a program's sources that a position keeps, by their index now."""
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
    compact_interval: int | None = None,
) -> bool:
    """Like `lay_out`, for a program with other sources than the position is of.

    Sources keep their positions wherever they stand now; new ones, and those in
    `reset_sources`, start at their beginning. False, and nothing is laid out, where no
    source has a position to keep.
    """
    change = match_sources(position, sources, reset_sources)
    if change is None:
        raise RestoreError(
            f"cannot tell which of Spark's offsets are those of {', '.join(sources)}\n"
            f"  it was made from: {', '.join(position.sources) or 'unknown'}\n"
            "  next: start with the sources it had, in that order",
            batch=position.batch_id,
        )
    if change.is_same:
        lay_out(
            position,
            folder,
            source=store,
            target=store,
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
        index, _, entry = name.partition("/")
        files[f"{moved[index]}/{entry}"] = data
    head = position.offsets.strip().split("\n")[:_HEAD_LINES]
    moved_to = msgspec.structs.replace(
        position, offsets="\n".join([*head, *lines]), sources=list(sources)
    )
    metadata = read_metadata(store, position.folder)
    lay_out_from(moved_to, files, folder, store, metadata=metadata)
    return True
