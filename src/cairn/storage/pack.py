"""Put segments into the store, under the digest of their content and their writer's term.

`state/<term>/<digest>.delta|base|pack`. The digest makes a repeated write harmless. The term
makes it safe to clean up: a leader removes orphans of older terms only, and nobody who can still
publish writes under an older term.

Always true here:
- an object is complete and durable when its path is returned;
- a segment that the parent manifest does not list is written, never assumed to exist.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from cairn.ids import content_id
from cairn.storage.files import StateFile
from cairn.storage.paths import STATE_FOLDER
from cairn.storage.store import Store

_TERM: Final = re.compile(rf"{STATE_FOLDER}/(\d{{12}})/")


def state_path(term: int, name: str) -> str:
    """Return the path of an object of this term; `name` begins with a digest."""
    return f"{STATE_FOLDER}/{term:012d}/{name}"


def writer_term(path: str) -> int | None:
    """Return the term in which an object was written; None when its name has none."""
    match = _TERM.match(path)
    return int(match[1]) if match else None


def write_segment(
    store: Store, segment: StateFile, term: int, *, inline_bytes_max: int = 0
) -> StateFile:
    """Write a segment as its own object; one of up to `inline_bytes_max` bytes stays inline."""
    assert segment.data is not None, f"segment {segment.id} is not in memory"
    if segment.length <= inline_bytes_max:
        return segment
    path = _segment_path(segment, term)
    store.put(path, segment.data)
    return msgspec.structs.replace(segment, data=None, path=path)


def write_parts(
    store: Store,
    segment: StateFile,
    parts: Sequence[Any],
    term: int,
    *,
    inline_bytes_max: int = 0,
) -> StateFile:
    """Like `write_segment`, for a segment whose bytes are in several buffers."""
    if segment.length <= inline_bytes_max:
        return msgspec.structs.replace(segment, data=b"".join(parts))
    path = _segment_path(segment, term)
    store.put_parts(path, parts)
    return msgspec.structs.replace(segment, path=path)


def write_segment_file(
    store: Store, segment: StateFile, local_file: str, term: int, *, inline_bytes_max: int = 0
) -> StateFile:
    """Like `write_segment`, for a segment that a SegmentWriter left in a local file."""
    if segment.length <= inline_bytes_max:
        with open(local_file, "rb") as file:
            return msgspec.structs.replace(segment, data=file.read())
    path = _segment_path(segment, term)
    store.put_file(path, local_file)
    return msgspec.structs.replace(segment, path=path)


def write_pack(store: Store, segments: Sequence[StateFile], term: int) -> list[StateFile]:
    """Write segments as one object and return them with their places in it, in the same order."""
    if not segments:
        return []
    data = b"".join(segment.data or b"" for segment in segments)
    path = state_path(term, f"{content_id(data)}.pack")
    store.put(path, data)
    offsets = itertools.accumulate((segment.length for segment in segments), initial=0)
    return [
        msgspec.structs.replace(segment, data=None, path=path, offset=offset)
        for segment, offset in zip(segments, offsets, strict=False)
    ]


def _segment_path(segment: StateFile, term: int) -> str:
    return state_path(term, f"{segment.id}.{segment.kind}")
