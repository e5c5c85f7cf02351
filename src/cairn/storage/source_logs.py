"""Copy the files that Spark's sources keep beside their offsets into the epoch.

Spark's own files have no checksum: a log that lost its lines looks like one without files, and
Spark would read every file again. So each epoch keeps the lines that its batch added. The last
few are in the manifest; older ones are in objects of the checkpoint
(`state/<term>/<digest>.lines`), which are merged ten at a time, so manifests stay small.

Always true here:
- a batch adds its own lines: earlier files of the log are not read again;
- a file of the log has lines, or the batch is refused: Spark never writes an empty one;
- lines are read back as they were written, or a CorruptFileError names the object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from cairn.errors import CorruptFileError, RestoreError
from cairn.ids import content_id
from cairn.storage.manifest import FileRef, SourceLog, SparkPosition
from cairn.storage.pack import state_path
from cairn.storage.seen_files import cut_file_log, find_missing_file, lay_out_list
from cairn.storage.source_files import (
    describe_source,
    in_order,
    is_kept,
    is_log_file,
    lines_of,
    list_is_gone,
    listing_of,
    log_file_name,
    log_offset,
    new_lines,
    read_sources,
    small_files,
    source_lines,
)
from cairn.storage.store import NotFoundError, Store, other_store

LINES_BYTES_MAX: Final = 8 * 1024
"""Limit of the lines in a manifest; beyond it all of them go into an object."""
_MERGED_CHUNKS: Final = 10
_READ_ATTEMPTS_MAX: Final = 3


# Keeping


def advance(
    logs: Mapping[int, SourceLog],
    store: Store,
    position: SparkPosition,
    *,
    checkpoint: Store,
    term: int,
) -> SparkPosition:
    """Return the position with the logs of its sources, given the logs of the position before.

    `store` has Spark's folder; lines that do not fit into a manifest are written to `checkpoint`.
    """
    found = {}
    for index, line in enumerate(source_lines(position.offsets)):
        before, last = logs.get(index), log_offset(line)
        if last is not None and last >= 0:
            found[index] = _advance_list(before, store, position, index, last, checkpoint, term)
        elif before is not None:
            found[index] = before
        elif last is None and line.strip() != "-":
            found[index] = SourceLog(files=small_files(store, position.folder, index))
    return msgspec.structs.replace(position, logs=found)


def _advance_list(
    before: SourceLog | None,
    store: Store,
    position: SparkPosition,
    index: int,
    last: int,
    checkpoint: Store,
    term: int,
) -> SourceLog:
    after = -1 if before is None else before.last
    if last == after and before is not None:
        return before
    if last < after:
        raise RestoreError(
            f"Spark's offset of source {describe_source(position, index)} goes back\n"
            f"  found: file {last} of its log, expected: file {after} or later\n"
            f"  file: {store.url}/{position.folder}/offsets/{position.batch_id}\n"
            "  next: start the job again; it continues after the newest epoch",
            file=f"{position.folder}/offsets/{position.batch_id}",
        )
    lines = new_lines(store, position, index, after, last, is_known=before is not None)
    return _with_lines(before or SourceLog(), lines, last, checkpoint, term)


def log_of_files(
    files: Mapping[str, bytes], position: SparkPosition, *, checkpoint: Store, term: int
) -> dict[int, SourceLog]:
    """Return the logs of a position, given its files under sources/, as a savepoint has them."""
    found = {}
    for index, line in enumerate(source_lines(position.offsets)):
        last = log_offset(line)
        by_source = ((name.partition("/"), data) for name, data in files.items())
        mine = {name: data for (of, _, name), data in by_source if of == str(index)}
        if last is not None and last >= 0:
            lines = [text for name in in_order(mine) for text in lines_of(mine[name], name)]
            found[index] = _with_lines(SourceLog(), lines, last, checkpoint, term)
        elif mine:
            kept = {name: data for name, data in mine.items() if is_kept(name, len(data))}
            found[index] = SourceLog(files=kept)
    return found


def _with_lines(
    log: SourceLog, lines: Iterable[str], last: int, checkpoint: Store, term: int
) -> SourceLog:
    chunks, lines = log.chunks, [*log.lines, *lines]
    if sum(map(len, lines)) > LINES_BYTES_MAX:
        tier, others = 0, _MERGED_CHUNKS - 1
        # Merged before anything is written, so that no orphan is left.
        while len(chunks) >= others and chunks[-others].tier == chunks[-1].tier == tier:
            older = [line for ref in chunks[-others:] for line in read_chunk(checkpoint, ref)]
            chunks, lines, tier = chunks[:-others], older + lines, tier + 1
        chunks, lines = [*chunks, _write_chunk(checkpoint, lines, tier, term)], []
    return msgspec.structs.replace(log, last=last, chunks=chunks, lines=lines)


def _write_chunk(checkpoint: Store, lines: Sequence[str], tier: int, term: int) -> FileRef:
    data = "\n".join(lines).encode()
    digest = content_id(data)
    path = state_path(term, f"{digest}.lines")
    checkpoint.put(path, data)
    return FileRef(
        id=digest,
        path=path,
        offset=0,
        length=len(data),
        kind="delta",
        tier=tier,
        rows=len(lines),
        first_epoch=0,
        last_epoch=0,
        first_group=0,
        group_count=0,
        format="lines",
    )


def read_chunk(checkpoint: Store, ref: FileRef) -> list[str]:
    """Return the lines of an object. CorruptFileError when it is not what was written."""
    store = other_store(ref.store) if ref.store else checkpoint
    name = f"{store.url}/{ref.path}"
    try:
        data = store.get(ref.path)
    except NotFoundError:
        raise _damage_error(name, "it is missing") from None
    if content_id(data) != ref.id:
        raise _damage_error(name, f"its content has the digest {content_id(data)}")
    return data.decode().split("\n")


def _damage_error(name: str, what: str) -> CorruptFileError:
    return CorruptFileError(
        f"a list of files that a source has read is damaged: {what}\n"
        f"  file: {name}\n"
        "  next: `cairn verify` shows what else is damaged; restore the file, or start from "
        "a savepoint",
        file=name,
    )


def read_lines(checkpoint: Store, log: SourceLog) -> list[str]:
    """Return all lines of a file source's log, oldest first."""
    return [line for ref in log.chunks for line in read_chunk(checkpoint, ref)] + log.lines


def find_differing_file(
    store: Store, position: SparkPosition, *, checkpoint: Store, is_running: bool = False
) -> str | None:
    """Return a file under sources/ that differs from the epoch's copy; None if all are equal, or
    the epoch has no copy.

    With `is_running`, files after those of the epoch do not count as a difference.
    """
    for index, log in position.logs.items():
        root = f"{position.folder}/sources/{index}"
        for name, data in log.files.items():
            if _get(store, f"{root}/{name}") != data:
                return f"{root}/{name}"
        if log.last >= 0:
            expected = read_lines(checkpoint, log)
            path = _find_differing_file_of_log(store, root, log.last, expected, is_running)
            if path is not None:
                return path
    return None


def _find_differing_file_of_log(
    store: Store, root: str, last: int, expected: Sequence[str], is_running: bool
) -> str | None:
    names = in_order(found.path[len(root) + 1 :] for found in store.list(root))
    # Without a compact file, the log begins with its first file.
    number = int(names[0].partition(".")[0]) if names and names[0].endswith(".compact") else 0
    at = 0
    for name in names:
        path = f"{root}/{name}"
        found = int(name.partition(".")[0])
        if found != number:
            return f"{root}/{log_file_name(found - 1)}"
        if number > last and not is_running:
            return path
        try:
            lines = lines_of(_get(store, path) or b"", path)
        except CorruptFileError:
            return path
        if number > last:
            lines = [line for line in lines if (listing_of(line) or 0) <= last]
        if lines != expected[at : at + len(lines)]:
            return path
        at += len(lines)
        if at < len(expected) and (listing_of(expected[at]) or 0) <= number:
            return path
        number += 1
    return f"{root}/{log_file_name(number)}" if number <= last else None


def _get(store: Store, path: str) -> bytes | None:
    try:
        return store.get(path)
    except NotFoundError:
        return None


# Laying out


def source_files(
    store: Store,
    position: SparkPosition,
    *,
    checkpoint: Store | None = None,
    only: Collection[int] | None = None,
    compact_interval: int | None = None,
) -> dict[str, bytes]:
    """Return the files under sources/ right after a position, by path below sources/.

    They come from the epoch's copy; without one, from Spark's folder in `store`. `only` has the
    indices of the sources that matter. RestoreError when the log of a file source is lost:
    without it, every file would be read again.
    """
    cuts = {i: log_offset(line) for i, line in enumerate(source_lines(position.offsets))}
    cuts = {index: last for index, last in cuts.items() if only is None or index in only}
    known = {index: log for index, log in position.logs.items() if index in cuts}
    missing: tuple[int, int] | None = None
    for _ in range(_READ_ATTEMPTS_MAX):
        files, logs = read_sources(store, position, cuts, only)
        missing = None
        for index, last in cuts.items():
            if last is None or last < 0 or index in known:
                continue
            cut = cut_file_log(logs.get(index, {}), last, compact_interval)
            if cut is None:
                # Spark may have compacted it between listing and reading.
                missing = (index, last)
                break
            files.update({f"{index}/{name}": data for name, data in cut.items()})
        if missing is None:
            break
    if missing is not None:
        raise list_is_gone(store, position, *missing)
    for index, log in known.items():
        files.update({f"{index}/{name}": data for name, data in log.files.items()})
        if log.last >= 0:
            lines = read_lines(checkpoint or store, log)
            laid = lay_out_list(lines, log.last, compact_interval)
            files.update({f"{index}/{name}": data for name, data in laid.items()})
    return files


def for_setting(
    files: Mapping[str, bytes], position: SparkPosition, compact_interval: int
) -> dict[str, bytes]:
    """Return the files under sources/, for a session with another compact interval."""
    found = dict(files)
    for index, last in _list_ends(position).items():
        prefix = f"{index}/"
        names = (name.removeprefix(prefix) for name in files if name.startswith(prefix))
        log = {name: found[prefix + name] for name in names if is_log_file(name)}
        cut = cut_file_log(log, last, compact_interval)
        if cut is not None:
            for name in log:
                del found[prefix + name]
            found.update({prefix + name: data for name, data in cut.items()})
    return found


def find_misplaced_file(store: Store, position: SparkPosition, compact_interval: int) -> str | None:
    """Return a file that Spark expects with this compact interval but does not find."""
    for index, last in _list_ends(position).items():
        root = f"{position.folder}/sources/{index}"
        names = {found.path[len(root) + 1 :] for found in store.list(root)}
        logs = {name for name in names if is_log_file(name)}
        missing = find_missing_file(logs, last, compact_interval)
        if missing is not None:
            return f"{root}/{missing}"
    return None


def _list_ends(position: SparkPosition) -> dict[int, int]:
    """Return the number of the last file in the log of each file source, by its index."""
    offsets = {i: log_offset(line) for i, line in enumerate(source_lines(position.offsets))}
    return {index: last for index, last in offsets.items() if last is not None and last >= 0}
