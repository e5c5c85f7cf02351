"""A RocksDB base in the store: SST files that bases share, and an index that makes them one.

    state/<term>/<digest>.sst      files of a database, as RocksDB wrote them
    state/<term>/<digest>.rocks    the index: magic | checksum | msgpack

The index contains RocksDB's small files (manifest, options), the names of the SST files, the types
of the rows and the key groups that count.

Always true here:
- a fetched file has the digest that the index names, or CorruptFileError names the file;
- an index names only files that are in the store.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final, Self

import msgspec
import pyarrow as pa
import xxhash

from cairn.backends.cached.described import StoredState, visible_states
from cairn.backends.cached.rows import scan_rows
from cairn.backends.contract import Content
from cairn.backends.layout import RowsByGroup
from cairn.backends.rocksdb.database import RocksDatabase, StoredSst, Tuning
from cairn.errors import CorruptFileError
from cairn.ids import content_id
from cairn.storage.files import store_of
from cairn.storage.manifest import FileRef
from cairn.storage.store import NotFoundError, Store
from cairn.types.codec import Key

MAGIC: Final = b"CAIRNRK1"
_CHECKSUM_BYTES: Final = 16
_CHUNK_BYTES: Final = 4 << 20
_READER_CACHE_BYTES: Final = 32 << 20
_PIECE_ROWS: Final = 16 * 1024


class SstFile(msgspec.Struct, frozen=True, array_like=True):
    """An SST file: its name in the database, its object in the store."""

    name: str
    digest: str
    path: str
    size: int
    first_group: int
    last_group: int
    level: int


class StoredDatabase(msgspec.Struct, frozen=True, kw_only=True):
    groups: list[tuple[int, int]]
    """First and last of each run of key groups that count; the files may hold others."""
    states: dict[str, int]
    files: list[SstFile]
    meta: dict[str, bytes]

    def group_list(self) -> list[int]:
        return [group for first, last in self.groups for group in range(first, last + 1)]


class RocksIndex(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    operator: str
    epoch: int
    states: dict[str, StoredState]
    databases: list[StoredDatabase]

    @property
    def rows(self) -> int:
        return sum(self.states[name].rows for name in visible_states(self.states))


def encode_index(index: RocksIndex) -> tuple[str, bytes]:
    """Return the id and the bytes of an index."""
    body = msgspec.msgpack.encode(index)
    digest = content_id(body)
    return digest, MAGIC + xxhash.xxh3_128_digest(body) + body


def corrupt(file: str, why: str) -> CorruptFileError:
    return CorruptFileError(
        f"a state file is damaged: {why}\n"
        f"  file: {file}\n"
        "  next: run `cairn verify`, then roll back to an epoch that is whole",
        file=file,
    )


def read_index(store: Store, ref: FileRef) -> RocksIndex:
    """Read the index of a base; it must be exactly the one that the manifest names."""
    store = store_of(store, ref)
    name = f"{store.url}/{ref.path}"
    try:
        data = store.get_range(ref.path, ref.offset, ref.length)
    except NotFoundError as error:
        raise corrupt(name, "it is missing") from error
    start = len(MAGIC) + _CHECKSUM_BYTES
    body = data[start:]
    if len(data) != ref.length or data[: len(MAGIC)] != MAGIC:
        raise corrupt(
            name, f"{len(data)} of {ref.length} bytes, or not the index of a RocksDB base"
        )
    if xxhash.xxh3_128_digest(body) != data[len(MAGIC) : start]:
        raise corrupt(name, "the checksum does not match")
    if content_id(body) != ref.id:
        raise corrupt(name, f"it is not base {ref.id}")
    try:
        return msgspec.msgpack.decode(body, type=RocksIndex)
    except msgspec.MsgspecError as error:
        raise corrupt(name, str(error)) from error


def digest_file(path: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fetch_file(store: Store, entry: SstFile, folder: str) -> None:
    """Fetch an SST file into a folder and verify it."""
    target = os.path.join(folder, entry.name)
    local = store.local_path(entry.path)
    try:
        if local is not None:
            try:
                # Neither side writes to it again.
                os.link(local, target)
            except FileNotFoundError:
                raise NotFoundError(entry.path) from None
            except OSError:
                shutil.copyfile(local, target)
            found = digest_file(target)
        else:
            found = _download(store, entry, target)
    except NotFoundError as error:
        raise corrupt(f"{store.url}/{entry.path}", "it is missing") from error
    if found != entry.digest:
        os.unlink(target)
        raise corrupt(f"{store.url}/{entry.path}", "its digest does not match")


def _download(store: Store, entry: SstFile, target: str | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(target or os.devnull, "wb") as file:
        for offset in range(0, entry.size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, entry.size - offset)
            chunk = store.get_range(entry.path, offset, length)
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def files_of(files: Sequence[SstFile], groups: range) -> list[SstFile]:
    """Return the files that RocksDB opens to scan these key groups, one by one."""
    # Every scan opens the files of level 0.
    found = [file for file in files if file.level == 0]
    by_level: dict[int, list[SstFile]] = {}
    for file in files:
        if file.level > 0 and file.last_group >= groups.start:
            by_level.setdefault(file.level, []).append(file)
    for level in by_level.values():
        # To find a key RocksDB opens the first file that ends at or after it. That file may begin
        # after all groups asked for. Files of one group may be in any order.
        place = attrgetter("first_group", "last_group")
        end = min((place(f) for f in level if f.last_group >= groups.stop), default=None)
        found += [f for f in level if f.first_group < groups.stop or place(f) == end]
    return found


def write_meta(entry: StoredDatabase, folder: str) -> None:
    for name, data in entry.meta.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)


def fetch_database(
    store: Store, entry: StoredDatabase, folder: str, tuning: Tuning
) -> RocksDatabase:
    """Fetch a whole database and open it for reading and writing."""
    os.makedirs(folder)
    try:
        for file in entry.files:
            fetch_file(store, file, folder)
        write_meta(entry, folder)
        stored = {f.name: StoredSst(f.digest, f.path, f.size) for f in entry.files}
        return RocksDatabase(folder, tuning, states=entry.states, stored=stored)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def verify_rocksdb_base(store: Store, ref: FileRef) -> None:
    """Read and check the index and every file of a base."""
    index = read_index(store, ref)
    store = store_of(store, ref)
    for database in index.databases:
        for entry in database.files:
            name = f"{store.url}/{entry.path}"
            try:
                found = _download(store, entry, None)
            except NotFoundError as error:
                raise corrupt(name, "it is missing") from error
            if found != entry.digest:
                raise corrupt(name, "its digest does not match")
    listed = {file.path for database in index.databases for file in database.files}
    if listed != set(ref.objects):
        raise corrupt(f"{store.url}/{ref.path}", "the manifest lists other files than the index")


class RocksReader:
    """Reads the rows of a base in the layout of segments, and fetches only the files it needs."""

    def __init__(self, store: Store, ref: FileRef, scratch: str) -> None:
        self._index = read_index(store, ref)
        self._store = store_of(store, ref)
        self._listed = ref.groups
        self._folder = tempfile.mkdtemp(dir=scratch, prefix="rocks-")
        self._tuning = Tuning(_READER_CACHE_BYTES, some_files=True)
        self._open: dict[int, RocksDatabase] = {}
        self._fetched: set[tuple[int, str]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for database in self._open.values():
            database.close()
        self._open = {}
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def states(self) -> list[str]:
        return visible_states(self._index.states)

    def schema(self, state: str) -> pa.Schema:
        return self._index.states[state].layout(state).schema

    def read(self, state: str, groups: range | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these key groups, in order. An unknown state has no rows."""
        if state not in self._index.states:
            return
        wanted = self._listed if groups is None else groups
        layout = self._index.states[state].layout(state)
        yield from layout.pieces(self._scan(state, wanted), _PIECE_ROWS)

    def _scan(self, state: str, groups: range) -> RowsByGroup:
        where = {
            group: number
            for number, entry in enumerate(self._index.databases)
            if state in entry.states
            for group in entry.group_list()
            if group in groups
        }
        for number in set(where.values()):
            self._fetch(number, groups)
        packing = self._index.states[state].packing()
        for group in sorted(where):
            database = self._open[where[group]]
            part: dict[Key, Content] = {}
            for key, held in scan_rows(database, database.prefix(state, group), packing):
                part[key] = held
                if len(part) >= _PIECE_ROWS:
                    yield group, part
                    part = {}
            if part:
                yield group, part

    def _fetch(self, number: int, groups: range) -> None:
        """Fetch the files that these key groups need; RocksDB opens them when it reads."""
        entry = self._index.databases[number]
        folder = os.path.join(self._folder, str(number))
        if number not in self._open:
            os.makedirs(folder)
            write_meta(entry, folder)
        for file in files_of(entry.files, groups):
            if (number, file.name) not in self._fetched:
                fetch_file(self._store, file, folder)
                self._fetched.add((number, file.name))
        if number not in self._open:
            self._open[number] = RocksDatabase(
                folder, self._tuning, states=entry.states, read_only=True
            )
