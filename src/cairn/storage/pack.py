"""Put segments into the store, under names that say their content and their writer's term.

`state/<term>/<digest>.delta|base|pack`. The digest makes a repeated write harmless. The term
makes it safe to clean up: a leader removes orphans of older terms only, and nobody who
can still publish writes under an older term, so no orphan comes back to life.

Always true here:
- an object is complete and durable when its path is returned;
- a segment that the parent manifest does not list is written, never assumed to be there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from cairn.storage.files import EncodedSegment, Written
from cairn.storage.store import Store

STATE_FOLDER: Final = "state"
_TERM: Final = re.compile(rf"{STATE_FOLDER}/(\d{{12}})/")


class Slice(NamedTuple):
    """Where a segment lies."""

    path: str
    offset: int
    length: int


class Stored(msgspec.Struct, frozen=True):
    """A file of state: in the store under `path`, or small enough to travel as `data`."""

    id: str
    length: int
    rows: int
    path: str | None = None
    data: bytes | None = None
    format: Literal["segment", "rocksdb"] = "segment"
    objects: tuple[str, ...] = ()
    objects_bytes: int = 0
    uploaded_bytes: int = 0
    """Of `length` and `objects_bytes`, what the store did not have yet."""


def state_path(term: int, name: str) -> str:
    """Where a writer of this term puts an object; `name` begins with a digest."""
    return f"{STATE_FOLDER}/{term:012d}/{name}"


def writer_term(path: str) -> int | None:
    """The term an object was written in, or None when its name does not say."""
    match = _TERM.match(path)
    return int(match[1]) if match else None


def write_segment(store: Store, segment: EncodedSegment, term: int) -> Slice:
    """One segment as an object of its own."""
    path = state_path(term, f"{segment.id}.{segment.index.kind}")
    store.put(path, segment.data)
    return Slice(path, 0, len(segment.data))


def write_segment_file(store: Store, local_file: str, written: Written, term: int) -> Slice:
    """Like `write_segment`, for what a SegmentWriter has left in a local file."""
    path = state_path(term, f"{written.id}.{written.index.kind}")
    store.put_file(path, local_file)
    return Slice(path, 0, written.length)


def write_pack(store: Store, segments: Sequence[bytes], term: int) -> list[Slice]:
    """Many small segments as one object; a slice for each, in the same order."""
    if not segments:
        return []
    data = b"".join(segments)
    path = state_path(term, f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.pack")
    store.put(path, data)
    slices = []
    offset = 0
    for segment in segments:
        slices.append(Slice(path, offset, len(segment)))
        offset += len(segment)
    return slices
