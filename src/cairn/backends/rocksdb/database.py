"""One RocksDB database of a slot: sorted rows, written as whole SST files.

Keys are `key group (2 bytes, big endian) | state (1 byte) | key [| entry or index]`, so the rows
of a key group lie together, across states.

Writes do not go through the memtable: the rows are sorted anyway, and ingesting an SST file costs
a quarter of putting the same rows one by one. So a checkpoint has (almost) nothing to flush.

Always true here:
- the byte of a state is fixed when the state is first used in the database;
- a scan that meets a damaged file raises; it does not just end early.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import rocksdict

from cairn.backends.cached.database import Op, after
from cairn.errors import CorruptFileError

TARGET_FILE_BYTES: Final = 32 << 20
_WRITE_BUFFER_BYTES: Final = 4 << 20
_OPEN_FILES_MAX: Final = 512
_MANIFEST_BYTES_MAX: Final = 1 << 20
_STATES_MAX: Final = 254
_GROUP: Final = struct.Struct(">H")


@dataclass(frozen=True)
class StoredSst:
    """An SST file in the store."""

    digest: str
    path: str
    size: int


class Tuning:
    """The block cache and the options, shared by all databases of a slot."""

    def __init__(self, block_cache_bytes: int, *, some_files: bool = False) -> None:
        self.cache = rocksdict.Cache(block_cache_bytes)
        table = rocksdict.BlockBasedOptions()
        table.set_block_cache(self.cache)
        table.set_bloom_filter(10, False)
        # Counted as blocks, so that the cache's size bounds them too.
        table.set_cache_index_and_filter_blocks(True)
        # In parts: the filter of a whole file would not fit a shard of a small cache.
        table.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
        table.set_partition_filters(True)
        table.set_metadata_block_size(4 << 10)
        table.set_pin_top_level_index_and_filter(True)
        table.set_block_size(4 << 10)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(table)
        options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
        # A base uploads the files that flushes and compactions wrote since the last one. Eight
        # runs of the same size are merged, and all runs only when the newer ones have grown to
        # the size of the oldest: with 1 % of the keys changed in between, a few per cent.
        universal = rocksdict.UniversalCompactOptions()
        universal.size_ratio = 20
        universal.min_merge_width = 4
        universal.max_size_amplification_percent = 100
        options.set_universal_compaction_options(universal)
        options.set_level_zero_file_num_compaction_trigger(8)
        options.set_compression_type(rocksdict.DBCompressionType.lz4())
        options.set_target_file_size_base(TARGET_FILE_BYTES)
        options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
        options.set_max_background_jobs(2)
        options.set_max_open_files(_OPEN_FILES_MAX)
        options.set_max_manifest_file_size(_MANIFEST_BYTES_MAX)
        options.set_keep_log_file_num(1)
        options.set_max_log_file_size(1 << 20)
        options.set_stats_dump_period_sec(0)
        # A reader of some key groups fetches only their files; the checks would need all.
        options.set_paranoid_checks(not some_files)
        self.options = options


class RocksDatabase:
    """A folder with one RocksDB database. A read-only one may lack some of its files."""

    def __init__(
        self,
        folder: str,
        tuning: Tuning,
        *,
        states: dict[str, int] | None = None,
        stored: dict[str, StoredSst] | None = None,
        read_only: bool = False,
    ) -> None:
        self.folder = folder
        self.states = dict(states or {})
        self.stored = dict(stored or {})
        """Files known to be in the store, by local name."""
        self.rows_bound = 0
        """Number of `CachedRows` objects that keep their rows here."""
        self._tuning = tuning
        self._is_bounded = read_only
        self._runs = 0
        self._closing = threading.Lock()
        self._closed = False
        access = rocksdict.AccessType
        self._db = rocksdict.Rdict(
            folder,
            tuning.options,
            access_type=access.read_only(False) if read_only else access.read_write(),
        )
        if not read_only:
            write = rocksdict.WriteOptions()
            # The stubs declare a method, but it is an attribute.
            write.disable_wal = True  # type: ignore[method-assign,assignment]
            self._db.set_write_options(write)

    def prefix(self, state: str, group: int) -> bytes:
        number = self.states.get(state)
        if number is None:
            number = max(self.states.values(), default=-1) + 1
            assert number <= _STATES_MAX, "a database holds up to 255 states"
            self.states[state] = number
        return _GROUP.pack(group) + bytes([number])

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._db.get(key)
        return found

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = self._db.get(keys) if keys else []  # type: ignore[arg-type,assignment]
        return found

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield rows with this prefix, in order, from `start` on."""
        end = after(prefix)
        first = max(prefix, start)
        last: bytes | None = None
        options = rocksdict.ReadOptions()
        if self._is_bounded:
            # A reader may lack the next file. Elsewhere the row after the last one proves that
            # no error ended the scan; with a bound that would need a second look.
            options.set_iterate_upper_bound(end)
        for pair in self._db.items(from_key=first, read_opt=options):
            if pair[0] >= end:  # type: ignore[operator]
                return
            last = pair[0]  # type: ignore[assignment]
            yield pair  # type: ignore[misc]
        # The iterator swallows errors: look again at the place after the last row.
        check = self._db.iter(options)
        check.seek(last if last is not None else first)
        if last is not None and check.valid():
            check.next()
        try:
            check.status()
        except Exception as error:
            raise self.corrupt(error) from error
        if check.valid():
            raise self.corrupt("a scan ended early")

    def corrupt(self, why: object) -> CorruptFileError:
        return CorruptFileError(
            f"the slot's RocksDB database cannot be read: {why}\n"
            f"  folder: {self.folder}\n"
            "  next: check the disk; the slot restores from the last epoch",
            file=self.folder,
        )

    def delete(self, prefix: bytes) -> None:
        """Delete rows with this prefix."""
        self._db.delete_range(prefix, after(prefix))

    def write_sorted(self) -> SortedWriter:
        self._runs += 1
        return SortedWriter(self._db, self._tuning, f"{self.folder}.run{self._runs}")

    def live_files(self) -> dict[str, dict[str, Any]]:
        return {os.path.basename(file["name"]): file for file in self._db.live_files()}

    def size_bytes(self) -> int:
        return sum(file["size"] for file in self._db.live_files())

    def checkpoint(self, folder: str) -> None:
        """Hard-link all present files into a folder."""
        rocksdict.Checkpoint(self._db).create_checkpoint(folder)

    def compact(self) -> None:
        """Merge all files into one run. Slow, but other calls go on meanwhile."""
        with self._closing:
            if not self._closed:
                self._db.compact_range(None, None)

    def close(self) -> None:
        with self._closing:
            self._closed = True
            self._db.close()

    def destroy(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class SortedWriter:
    """Writes rows, in ascending order of their keys, to files that the database ingests."""

    def __init__(self, db: rocksdict.Rdict, tuning: Tuning, stem: str) -> None:
        self._db = db
        self._tuning = tuning
        self._stem = stem
        self._files: list[str] = []
        self._writer: rocksdict.SstFileWriter | None = None

    def add(self, ops: Iterable[Op]) -> None:
        writer = self._writer
        for key, value in ops:
            # Not before the first row: a file without rows cannot be finished.
            if writer is None:
                writer = self._open()
            if value is None:
                del writer[key]
            else:
                writer[key] = value
        if writer is not None and writer.file_size() >= TARGET_FILE_BYTES:
            writer.finish()
            self._writer = None

    def _open(self) -> rocksdict.SstFileWriter:
        writer = self._writer = rocksdict.SstFileWriter(self._tuning.options)
        self._files.append(f"{self._stem}-{len(self._files)}.sst")
        writer.open(self._files[-1])
        return writer

    def finish(self) -> None:
        """Ingest all rows into the database."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None
        if self._files:
            options = rocksdict.IngestExternalFileOptions()
            options.set_move_files(True)
            self._db.ingest_external_file(self._files, options)
        self.discard()

    def discard(self) -> None:
        self._writer = None
        for file in self._files:
            if os.path.exists(file):
                os.unlink(file)
        self._files = []
