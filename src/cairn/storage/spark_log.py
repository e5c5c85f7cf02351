"""Spark's own streaming checkpoint: read, and laid out anew where Spark is to go on.

    <folder>/metadata, offsets/<batch>, commits/<batch>, sources/<i>/…

An offsets file has two lines of its own, then a line per source, in the order in which
Spark numbers them; "-" stands for a source that has given nothing yet. Beside its offset a
source may keep files under sources/<i>/: the file source, the list of files it has seen.

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
from typing import Final, NamedTuple

import msgspec

from cairn.errors import RestoreError
from cairn.storage.manifest import SparkPosition
from cairn.storage.seen_files import cut_file_log
from cairn.storage.store import NotFoundError, Store

SPARK_FOLDER: Final = "spark"
NO_OFFSET: Final = "-"
NO_WATERMARK: Final = b'v1\n{"nextBatchWatermarkMs":0}'
"""A batch as committed, in Spark's words."""
COMPACT_SETTING: Final = "spark.sql.streaming.fileSource.log.compactInterval"
_HEAD_LINES: Final = 2
_UNREAD: Final = "unread"
_READ_ATTEMPTS_MAX: Final = 3
_NUMBERED: Final = re.compile(r"(\d+)(\.compact)?")


# Offsets


def spark_folder(term: int) -> str:
    """Where Spark's log of a leader lies."""
    return f"{SPARK_FOLDER}/{term:012d}"


def read_offsets(store: Store, folder: str, batch_id: int) -> str:
    """The raw text of Spark's offset file of a batch."""
    return store.get(f"{folder}/offsets/{batch_id}").decode()


def source_lines(offsets: str) -> list[str]:
    """The line of each source."""
    return offsets.strip().split("\n")[_HEAD_LINES:]


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
    compact_interval: int | None = None,
) -> None:
    """A folder in `target` from which Spark resumes right after a position in `source`.

    `compact_interval`: what COMPACT_SETTING is in the session of the query to come, if known.
    """
    metadata = None
    if source.url == target.url:
        # The query keeps its id. A copy elsewhere is another query: Spark stops whichever
        # runs when a second one of the same id starts beside it.
        metadata = read_metadata(source, position.folder)
    files = source_files(source, position, compact_interval=compact_interval)
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
    `metadata` the query gets an id of its own.
    """
    if not source_lines(position.offsets):
        return msgspec.structs.replace(position, folder=folder)
    for name, data in sources.items():
        target.put(f"{folder}/sources/{name}", data)
    target.put(f"{folder}/metadata", metadata or json.dumps({"id": str(uuid.uuid4())}).encode())
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
    return max((batch_id for batch_id in batch_ids if batch_id != unread), default=None)


# What sources keep beside their offsets


def source_files(
    store: Store,
    position: SparkPosition,
    *,
    only: Collection[int] | None = None,
    compact_interval: int | None = None,
) -> dict[str, bytes]:
    """The files under sources/ as they must be right after a position, by path below sources/.

    `only`: the indices of the sources that matter. RestoreError where a list of files seen
    is gone: without it, every file would be read again.
    """
    cuts = {
        index: last
        for index, last in _file_offsets(position).items()
        if only is None or index in only
    }
    missing: tuple[int, int] | None = None
    for _ in range(_READ_ATTEMPTS_MAX):
        files, logs = _read_sources(store, position, cuts, only)
        missing = None
        for index, last in cuts.items():
            if last < 0:
                continue
            cut = cut_file_log(logs.get(index, {}), last, compact_interval)
            if cut is None:
                # Spark may just have compacted it: the list was of before, the files of after.
                missing = (index, last)
                break
            files.update({f"{index}/{entry}": data for entry, data in cut.items()})
        if missing is None:
            return files
    assert missing is not None
    index, last = missing
    file = f"{position.folder}/sources/{index}/{last}"
    raise RestoreError(
        f"Spark's list of files already read by source {_shown(position, index)} is gone\n"
        f"  expected: {store.url}/{file}\n"
        "  going on without it would read every file again\n"
        "  next: say where Spark's log is, if elsewhere (spark_checkpoint=, --spark-checkpoint), "
        "or restore that folder from a backup",
        file=file,
    )


def _read_sources(
    store: Store,
    position: SparkPosition,
    cuts: Mapping[int, int],
    only: Collection[int] | None,
) -> tuple[dict[str, bytes], dict[int, dict[str, bytes]]]:
    """(files to be kept as they are, entries of logs that must be cut, by source)."""
    root = f"{position.folder}/sources/"
    files: dict[str, bytes] = {}
    logs: dict[int, dict[str, bytes]] = {}
    for found in store.list(root):
        name = found.path[len(root) :]
        source, _, entry = name.partition("/")
        index = int(source) if source.isdigit() else None
        if only is not None and index not in only:
            continue
        try:
            data = store.get(found.path)
        except NotFoundError:
            continue  # Spark has cleaned it up since it was listed.
        if index in cuts and _NUMBERED.fullmatch(entry):
            logs.setdefault(int(source), {})[entry] = data
        else:
            files[name] = data
    return files, logs


def _shown(position: SparkPosition, index: int) -> str:
    names = position.sources
    return f"{index} ({names[index]!r})" if index < len(names) else str(index)


def for_setting(
    files: Mapping[str, bytes], position: SparkPosition, compact_interval: int
) -> dict[str, bytes]:
    """The files under sources/ of a position, for a session with another COMPACT_SETTING."""
    found = dict(files)
    for index, last in _file_offsets(position).items():
        prefix = f"{index}/"
        entries = {name.removeprefix(prefix): name for name in files if name.startswith(prefix)}
        log = {entry: found[name] for entry, name in entries.items() if _NUMBERED.fullmatch(entry)}
        cut = cut_file_log(log, last, compact_interval) if last >= 0 else None
        if cut is not None:
            for entry in log:
                del found[f"{prefix}{entry}"]
            found.update({f"{prefix}{entry}": data for entry, data in cut.items()})
    return found


def _file_offsets(position: SparkPosition) -> dict[int, int]:
    """Per file source, by its index: the last entry of its list."""
    offsets = {i: _log_offset(line) for i, line in enumerate(source_lines(position.offsets))}
    return {index: last for index, last in offsets.items() if last is not None}


def _log_offset(line: str) -> int | None:
    """The file source's offset; None for other sources."""
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    value = parsed.get("logOffset") if isinstance(parsed, dict) else None
    return value if isinstance(value, int) else None


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


def lay_out_for(
    position: SparkPosition,
    folder: str,
    store: Store,
    sources: Sequence[str],
    reset_sources: Collection[str] = (),
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
        lay_out(position, folder, source=store, target=store, compact_interval=compact_interval)
        return True
    old = source_lines(position.offsets)
    kept = change.kept
    lines = [old[kept[new]] if new in kept else NO_OFFSET for new in range(len(sources))]
    if all(line.strip() == NO_OFFSET for line in lines):
        return False
    moved = {str(before): str(new) for new, before in kept.items()}
    files = {}
    found = source_files(store, position, only=kept.values(), compact_interval=compact_interval)
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
