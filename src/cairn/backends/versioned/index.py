"""A base in a database with versions: an index in the checkpoint that names its rows.

    state/<term>/<digest>.postgres    magic | checksum | msgpack

The index has the address of the database without secrets, the types of the rows, and the history
in which they count. Nothing is copied: a base of the next epoch names the same rows and a few more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, Self

import msgspec
import pyarrow as pa
import xxhash

from cairn.backends.cached.described import StoredState
from cairn.backends.cached.rows import scan_rows
from cairn.backends.contract import Content
from cairn.backends.layout import RowsByGroup
from cairn.backends.versioned.contract import VersionStore
from cairn.backends.versioned.database import History, VersionedDatabase
from cairn.backends.versioned.kinds import open_place
from cairn.errors import CorruptFileError
from cairn.ids import content_id
from cairn.storage.files import store_of
from cairn.storage.manifest import FileRef
from cairn.storage.store import NotFoundError, Store
from cairn.types.codec import Key

MAGIC: Final = b"CAIRNPG1"
FORMATS: Final = ("postgres", "versions")
"""Formats in manifests: PostgreSQL has one of its own."""
_CHECKSUM_BYTES: Final = 16
_PIECE_ROWS: Final = 16 * 1024


class StoredPart(msgspec.Struct, frozen=True, kw_only=True):
    """Key groups and states that have one history."""

    groups: list[int]
    states: dict[str, int]
    history: History


class VersionedIndex(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    operator: str
    epoch: int
    address: dict[str, str]
    states: dict[str, StoredState]
    parts: list[StoredPart]
    kind: str = "postgres"

    @property
    def rows(self) -> int:
        return sum(state.rows for state in self.states.values())

    def open(self, label: str) -> VersionStore:
        """Open the database, to read."""
        place = next((layer.schema for part in self.parts for layer in part.history), "")
        return open_place(self.kind, self.address, place, label)


def format_of(kind: str) -> Literal["postgres", "versions"]:
    return "postgres" if kind == "postgres" else "versions"


def encode_index(index: VersionedIndex) -> tuple[str, bytes]:
    """Return the id and the bytes of an index."""
    body = msgspec.msgpack.encode(index)
    return content_id(body), MAGIC + xxhash.xxh3_128_digest(body) + body


def read_index(store: Store, ref: FileRef) -> VersionedIndex:
    """Read the index of a base; it must be exactly the one that the manifest names."""
    store = store_of(store, ref)
    name = f"{store.url}/{ref.path}"
    try:
        data = store.get_range(ref.path, ref.offset, ref.length)
    except NotFoundError as error:
        raise _corrupt(name, "it is missing") from error
    index = decode_index(data, name)
    if content_id(data[len(MAGIC) + _CHECKSUM_BYTES :]) != ref.id:
        raise _corrupt(name, f"it is not base {ref.id}")
    return index


def decode_index(data: bytes, name: str) -> VersionedIndex:
    start = len(MAGIC) + _CHECKSUM_BYTES
    body = data[start:]
    if data[: len(MAGIC)] != MAGIC:
        raise _corrupt(name, "it is not the index of a base in a database")
    if xxhash.xxh3_128_digest(body) != data[len(MAGIC) : start]:
        raise _corrupt(name, "the checksum does not match")
    try:
        return msgspec.msgpack.decode(body, type=VersionedIndex)
    except msgspec.MsgspecError as error:
        raise _corrupt(name, str(error)) from error


def _corrupt(file: str, why: str) -> CorruptFileError:
    return CorruptFileError(
        f"a state file is damaged: {why}\n"
        f"  file: {file}\n"
        "  next: run `cairn verify`, then roll back to an epoch that is whole",
        file=file,
    )


class VersionedReader:
    """Reads the rows of a base in the layout of segments, from the database."""

    def __init__(self, store: Store, ref: FileRef) -> None:
        self._index = read_index(store, ref)
        self._listed = ref.groups
        self._versions = self._index.open("cairn:reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._versions.close()

    @property
    def states(self) -> list[str]:
        return list(self._index.states)

    def schema(self, state: str) -> pa.Schema:
        return self._index.states[state].layout(state).schema

    def read(self, state: str, groups: range | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these key groups, in order. An unknown state has no rows."""
        if state not in self._index.states:
            return
        wanted = self._listed if groups is None else groups
        layout = self._index.states[state].layout(state)
        yield from layout.pieces(self._scan(state, wanted), _PIECE_ROWS)

    def _scan(self, state: str, groups: Sequence[int]) -> RowsByGroup:
        packing = self._index.states[state].packing()
        where = {
            group: part
            for part in self._index.parts
            if state in part.states
            for group in part.groups
            if group in groups
        }
        for group in sorted(where):
            part = where[group]
            database = VersionedDatabase(self._versions, part.states, part.history)
            some: dict[Key, Content] = {}
            for key, held in scan_rows(database, database.prefix(state, group), packing):
                some[key] = held
                if len(some) >= _PIECE_ROWS:
                    yield group, some
                    some = {}
            if some:
                yield group, some


def verify_base(store: Store, ref: FileRef) -> None:
    """Read and decode all rows of a base, and check that the database has applied its epoch."""
    index = read_index(store, ref)
    name = f"{store_of(store, ref).url}/{ref.path}"
    versions = index.open("cairn:verify")
    try:
        for part in index.parts:
            why = ""
            for number, layer in enumerate(part.history):
                # Those of a parent's key groups may be other ones.
                groups = [] if number else part.groups
                why = why or versions.find_missing(layer.schema, index.operator, groups)
            if why:
                raise _corrupt(name, f"{versions.where} {why}")
    finally:
        versions.close()
    with VersionedReader(store, ref) as reader:
        for state in reader.states:
            for _ in reader.read(state):
                pass
