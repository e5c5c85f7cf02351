"""Read the rows of an operator's state as of an epoch, base and deltas merged.

Rows come in chunks of a few key groups, so memory is bounded by CHUNK_ROWS stored rows (or by one
key group, if that is larger), however large the state is.

Always true here:
- each key has its last value; deleted and expired rows are left out;
- only the blocks of the key groups that a file counts for are read;
- key groups are in ascending order, and the order of keys in a group depends on the keys alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends import Backend, HeapBackend
from cairn.backends.files import RowsReader, open_rows
from cairn.backends.overlay import Table, make_table
from cairn.errors import StateNotFoundError
from cairn.key_groups import overlap
from cairn.snapshots.columns import GROUP, StateColumns, is_plain
from cairn.storage.manifest import Epoch, EpochOperator, FileRef, RangeState, operator_uids
from cairn.storage.store import Store

CHUNK_ROWS: Final = 1 << 18
# Arrow can sort a column of text only up to 2 GiB.
SORT_BYTES_MAX: Final = 512 << 20
# Fibonacci hashing: the high bits of a product with it are well distributed.
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


class Chunk(NamedTuple):
    """All states of an operator in a few key groups."""

    groups: range
    rows: dict[str, list[pa.RecordBatch]]


class _HasStates(Protocol):
    @property
    def states(self) -> Collection[str]: ...


def uid_with_state(operators: Mapping[str, _HasStates], uid: str, state: str) -> str:
    """Return the uid under which an operator, or a loop, has a state; `uid` itself if none has."""
    having = [each for each in operator_uids(operators, uid) if state in operators[each].states]
    if uid in having or not having:
        return uid
    if len(having) > 1:
        raise StateNotFoundError(
            f"{uid!r} has several states {state!r}\n"
            f"  found: {', '.join(having)}\n  next: use one of these names",
            operator=uid,
            state=state,
        )
    return having[0]


class EpochReader:
    """Reads one epoch. Close it, or use it in a `with`: files stay open between chunks.

    Files that must be fetched are put in a new folder in `scratch`.
    """

    def __init__(self, store: Store, epoch: Epoch, scratch: str | None = None) -> None:
        self.epoch = epoch
        self._store = store
        self._scratch = scratch
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._open: dict[tuple[str, str], RowsReader] = {}

    def __enter__(self) -> EpochReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._keep_open(set())
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def columns(self, uid: str) -> dict[str, StateColumns]:
        """Return the states of an operator, by name."""
        operator = self._operator(uid)
        # By event time: rows that timers of the next epoch can still read are included.
        floor_ms = {"processing": self.epoch.now_ms, "event": self.epoch.passed_ms}
        return {
            name: StateColumns(name, decl, operator.key_types, floor_ms)
            for name, decl in operator.states.items()
        }

    def rows(self, uid: str, state: str, groups: range | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a state: `group, key, value`, or `group, key, entry, value` for maps.

        State that expires also has `at`, the time of the last write. State of another scope of
        the operator, such as broadcast state, is found under its uid too.
        """
        operators = self.epoch.operators
        uids = operator_uids(operators, uid)
        uid = uid_with_state(operators, uid, state)
        if state not in self._operator(uid).states:
            known = ", ".join(name for each in uids for name in operators[each].states) or "none"
            raise StateNotFoundError(
                f"operator {uid!r} has no state {state!r} in epoch {self.epoch.number}\n"
                f"  found: {known}",
                operator=uid,
                state=state,
            )
        for chunk in self.chunks(uid, groups, states=[state]):
            yield from chunk.rows[state]

    def chunks(
        self,
        uid: str,
        groups: range | None = None,
        states: list[str] | None = None,
        keys: dict[str, pa.Array] | None = None,
        *,
        ordered: bool = True,
    ) -> Iterator[Chunk]:
        """Yield the states of an operator (or those named), a few groups at a time.

        `keys` selects keys, by state; for keys of several columns a few others may be among the
        rows. Without `ordered`, the keys within a chunk are in any order, which is faster.
        """
        operator = self._operator(uid)
        wanted = _groups_of(operator) if groups is None else groups
        columns = {n: c for n, c in self.columns(uid).items() if states is None or n in states}
        if not columns:
            return
        tables = {
            name: _make_table(each, max(wanted.stop, _groups_of(operator).stop))
            for name, each in columns.items()
        }
        for part in sorted(operator.ranges, key=lambda part: part.first_group):
            for few in _chunks_of(part, overlap(part.groups, wanted)):
                yield Chunk(few, self._read(part, few, tables, columns, keys or {}, ordered))

    def keys_in(self, refs: list[FileRef], groups: range, states: list[str]) -> dict[str, pa.Array]:
        """Return the keys that occur in these files, by state."""
        found: dict[str, list[pa.Array]] = {name: [] for name in states}
        for ref in refs:
            reader = self._reader(ref)
            for name in reader.states:
                if name in found:
                    batches = reader.read(name, overlap(ref.groups, groups))
                    found[name] += [batch["key"] for batch in batches]
        return {name: pc.unique(pa.chunked_array(keys)) for name, keys in found.items() if keys}

    def _read(
        self,
        part: RangeState,
        groups: range,
        tables: dict[str, Table],
        columns: dict[str, StateColumns],
        keys: dict[str, pa.Array],
        ordered: bool,
    ) -> dict[str, list[pa.RecordBatch]]:
        # A file may be listed twice, if two deltas have the same content.
        self._keep_open({(ref.id, ref.path) for ref in part.files})
        files: dict[str, list[list[pa.RecordBatch]]] = {name: [] for name in tables}
        for ref in part.files:
            counted = overlap(ref.groups, groups)
            if not counted:
                continue
            reader = self._reader(ref)
            for name in reader.states:
                if name in tables:
                    batches = reader.read(name, counted)
                    if name in keys:
                        batches = [b.filter(_are_among(b["key"], keys[name])) for b in batches]
                    files[name].append(list(batches))
        return {
            name: _merge(table, columns[name], files[name], groups, ordered=ordered)
            for name, table in tables.items()
        }

    def _reader(self, ref: FileRef) -> RowsReader:
        name = (ref.id, ref.path)
        if name not in self._open:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="cairn-", dir=self._scratch)
            self._open[name] = open_rows(self._store, ref, self._folder.name)
        return self._open[name]

    def _keep_open(self, wanted: set[tuple[str, str]]) -> None:
        for name in self._open.keys() - wanted:
            self._open.pop(name).close()

    def _operator(self, uid: str) -> EpochOperator:
        operator = self.epoch.operators.get(uid)
        if operator is None:
            known = ", ".join(self.epoch.operators) or "none"
            raise StateNotFoundError(
                f"epoch {self.epoch.number} has no operator {uid!r}\n  found: {known}",
                operator=uid,
            )
        return operator


def _backend() -> Backend:
    return HeapBackend()


def _make_table(columns: StateColumns, group_count: int) -> Table:
    return make_table(columns.declaration, columns.key_type, _backend(), group_count)


def _merge(
    table: Table,
    columns: StateColumns,
    files: list[list[pa.RecordBatch]],
    groups: range,
    *,
    ordered: bool,
) -> list[pa.RecordBatch]:
    """Return the rows of a state, given the stored rows of each file, oldest first."""
    plain: list[pa.RecordBatch] = []
    if files and _is_small(files):
        if columns.is_merged_by_arrow and _are_alike(files):
            plain, files = _last_words(columns, files), []
        elif columns.is_ordered_by_arrow:
            plain, files = _split_unchanged(columns, files)
    table.assign(groups)
    for batches in files:
        for batch in batches:
            table.apply(batch)
    merged = [columns.of_stored(batch) for batch in table.dump()]
    table.assign(range(0))
    if not plain or not ordered:
        return [batch for batch in (*plain, *merged) if batch.num_rows]
    rows = pa.Table.from_batches([*plain, *merged]).combine_chunks()
    by = [rows[GROUP]]
    for column in columns.places(rows):
        # Nulls first, as tables have them.
        by += [column.is_valid(), column] if column.null_count else [column]
    places = pa.table(by, names=[str(at) for at in range(len(by))])
    order = pc.sort_indices(places, sort_keys=[(n, "ascending") for n in places.column_names])
    in_order = rows.take(order).combine_chunks().to_batches()
    return [batch for batch in in_order if batch.num_rows]


def _last_words(columns: StateColumns, files: list[list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
    """Return the last live row of each place; each row replaces earlier ones of its place."""
    batches = [batch for each in files for batch in each if batch.num_rows]
    if sum(1 for each in files if any(batch.num_rows for batch in each)) <= 1:
        return [columns.of_stored(batch.filter(batch["live"])) for batch in batches]
    first, *later = files
    if len(columns.places(batches[0])) == 1 and _row_count(first) > 4 * _row_count(*later):
        # A large base and few changes: the rows of the base need not be compared with each other.
        return [*_split_unchanged(columns, files)[0], *_last_words(columns, later)]
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    keep = _are_last(columns.places(whole), [_row_count(each) for each in files])
    keep &= whole["live"].to_numpy(zero_copy_only=False)
    return [columns.of_stored(whole.filter(pa.array(keep)))]


def _are_last(places: list[pa.Array], file_rows: list[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the rows that no later file replaces; `file_rows` counts rows per file."""
    count = len(places[0])
    if len(places) > 1 or not pa.types.is_integer(places[0].type) or places[0].null_count:
        return _are_last_by(_codes(places), count)
    # Most rows of different files have different keys. A row whose hash occurs in no later file
    # is the last of its key. Only the others are compared, which costs a fraction.
    keys = places[0].to_numpy().astype(np.int64, copy=False).view(np.uint64)
    bits = max(8, int(count).bit_length() + 3)
    hashes = keys * _ODD
    hashes >>= np.uint64(64 - bits)
    slots = hashes.view(np.int64)
    # A file has a key once, so the number of the file is enough, and a byte fits in the cache.
    newest = np.empty(1 << bits, np.uint8 if len(file_rows) <= 1 << 8 else np.uint32)
    ends = np.cumsum(file_rows).tolist()
    parts = [slots[end - rows : end] for end, rows in zip(ends, file_rows, strict=True)]
    for number, part in enumerate(parts):
        newest[part] = number
    is_last = np.concatenate([newest[part] == number for number, part in enumerate(parts)])
    if not is_last.all():
        is_shared = np.zeros(1 << bits, np.bool_)
        is_shared[slots[~is_last]] = True
        unsure = np.flatnonzero(is_shared[slots])
        codes = _codes([places[0].take(pa.array(unsure))])
        is_last[unsure] = _are_last_by(codes, len(unsure))
    return is_last


def _are_last_by(
    codes: np.ndarray[Any, np.dtype[np.int64]], count: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    rows = np.arange(count)
    newest = np.empty(codes.max(initial=-1) + 1, np.int64)
    newest[codes] = rows
    is_last: np.ndarray[Any, np.dtype[np.bool_]] = newest[codes] == rows
    return is_last


def _row_count(*files: list[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batches in files for batch in batches)


def _codes(columns: list[pa.Array]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number for each row, equal for rows that are equal in all columns."""
    found: Any = None
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy().astype(np.int64)
        if found is not None:
            both = pa.array(found * len(encoded.dictionary) + codes).dictionary_encode()
            codes = both.indices.to_numpy().astype(np.int64)
        found = codes
    numbers: np.ndarray[Any, np.dtype[np.int64]] = found
    return numbers


def _are_alike(files: list[list[pa.RecordBatch]]) -> bool:
    """True if all files have one schema. After a change of type they may have two."""
    schemas = [batch.schema for batches in files for batch in batches]
    return all(schema == schemas[0] for schema in schemas)


def _split_unchanged(
    columns: StateColumns, files: list[list[pa.RecordBatch]]
) -> tuple[list[pa.RecordBatch], list[list[pa.RecordBatch]]]:
    """Return (rows of keys that only the first file has, stored rows that must be merged).

    Most keys are only in the first file, and Arrow copies them ten times faster than a table
    merges them.
    """
    first, *later = files
    changed = [batch["key"] for batches in later for batch in batches]
    plain, rest = [], []
    for batch in first:
        keep = batch["live"]
        if changed:
            is_changed = pc.is_in(batch["key"], pa.chunked_array(changed))
            rest.append(batch.filter(is_changed))
            keep = pc.and_(keep, pc.invert(is_changed))
        plain.append(columns.of_stored(batch.filter(keep)))
    return plain, [rest, *later]


def _are_among(column: pa.Array, keys: pa.Array) -> pa.Array:
    """Return a mask of the keys among these; keys of several columns are compared by column."""
    if not pa.types.is_struct(keys.type):
        return pc.is_in(column, keys)
    found = pa.array(np.ones(len(column), np.bool_))
    for mine, theirs in zip(column.flatten(), keys.flatten(), strict=True):
        if is_plain(mine.type):
            found = pc.and_(found, pc.is_in(mine, theirs))
    return found


def _is_small(files: list[list[pa.RecordBatch]]) -> bool:
    stored_bytes: int = sum(batch.nbytes for batches in files for batch in batches)
    return stored_bytes <= SORT_BYTES_MAX


def _groups_of(operator: EpochOperator) -> range:
    return range(0, max((part.groups.stop for part in operator.ranges), default=0))


def _chunks_of(part: RangeState, groups: range) -> Iterator[range]:
    """Yield runs of key groups with about CHUNK_ROWS stored rows, assuming an even spread."""
    row_count = sum(ref.rows for ref in part.files)
    step = max(1, CHUNK_ROWS * part.group_count // max(1, row_count))
    for start in range(groups.start, groups.stop, step):
        yield range(start, min(start + step, groups.stop))
