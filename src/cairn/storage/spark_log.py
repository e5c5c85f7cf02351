"""What Spark's own streaming checkpoint says: offsets, and what sources keep beside them.

    <folder>/metadata, offsets/<batch>, commits/<batch>, sources/<i>/…

Always true here:
- a folder of Spark's is read, never changed;
- what is read of a source is what it knew right after the epoch, not what it has read since.
"""

from __future__ import annotations

import json
import re
from typing import Final

from cairn.errors import RestoreError
from cairn.storage.manifest import Epoch
from cairn.storage.store import NotFoundError, Store

# Spark's default, spark.sql.streaming.fileSource.log.compactInterval.
COMPACT_INTERVAL: Final = 10
_NUMBERED: Final = re.compile(r"(\d+)(\.compact)?")
# A running query cleans its log up now and then, which may happen while it is read here.
_READ_ATTEMPTS_MAX: Final = 3


def read_offsets(store: Store, folder: str, batch_id: int) -> str:
    """The raw text of a batch's offset file. NotFoundError when there is none."""
    return store.get(f"{folder}/offsets/{batch_id}").decode()


def same_offsets(left: str, right: str) -> bool:
    """Whether two offset files name the same input. The line of settings and clock is not input."""
    return [*map(_canonical, source_lines(left))] == [*map(_canonical, source_lines(right))]


def source_lines(offsets: str) -> list[str]:
    """The offset of each source, in their order."""
    return offsets.strip().split("\n")[2:]


def _canonical(line: str) -> str:
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except ValueError:
        return line.strip()


def source_files(store: Store, epoch: Epoch) -> dict[str, bytes]:
    """The files under `sources/` as they must be right after this epoch, by name below it.

    For a file source that is the list of files already seen.
    """
    cuts = {
        index: _log_offset(line) for index, line in enumerate(source_lines(epoch.spark.offsets))
    }
    missing = ""
    for _ in range(_READ_ATTEMPTS_MAX):
        files, logs = _read_sources(store, epoch, cuts)
        missing = ""
        for index, last in cuts.items():
            if last is None or last < 0:
                continue
            cut = _cut_file_log(logs.get(index, {}), last)
            if cut is None:
                missing = f"{index}/{last}"
                break
            files.update({f"{index}/{entry}": data for entry, data in cut.items()})
        if not missing:
            return files
    path = f"{epoch.spark.folder}/sources/{missing}"
    raise RestoreError(
        f"Spark's list of files already read by source {missing.partition('/')[0]} is gone\n"
        f"  expected: {store.url}/{path}\n"
        "  going on without it would read every file again\n"
        "  next: restore that folder from a backup",
        file=path,
    )


def _read_sources(
    store: Store, epoch: Epoch, cuts: dict[int, int | None]
) -> tuple[dict[str, bytes], dict[int, dict[str, bytes]]]:
    """(files to be kept as they are, entries of logs that must be cut, by source)."""
    folder = f"{epoch.spark.folder}/sources/"
    files: dict[str, bytes] = {}
    logs: dict[int, dict[str, bytes]] = {}
    for found in store.list(folder):
        name = found.path[len(folder) :]
        source, _, entry = name.partition("/")
        try:
            data = store.get(found.path)
        except NotFoundError:
            continue  # Spark has cleaned it up since it was listed.
        if source.isdigit() and cuts.get(int(source)) is not None and _NUMBERED.fullmatch(entry):
            logs.setdefault(int(source), {})[entry] = data
        else:
            files[name] = data
    return files, logs


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
