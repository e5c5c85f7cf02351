"""Segments: the rows of a delta or a base, by state and key group, verified on every read.

    magic | blocks | index | trailer

A block is one Arrow record batch (an IPC message) and can be read on its own. It holds
consecutive whole key groups of about BLOCK_ROWS_MAX rows; a larger group has several blocks
of its own. The index (msgpack) locates the blocks, the trailer locates the index.

Always true here:
- equal rows give equal bytes, however the Arrow arrays were built: the id names the content;
- the id is a digest of the index, and the index has the checksum of every block;
- a reader returns rows that were verified, or raises CorruptFileError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol, Self

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from cairn.errors import CorruptFileError
from cairn.ids import content_id
from cairn.storage.manifest import FileRef
from cairn.storage.store import NotFoundError, Store, other_store

MAGIC: Final = b"CAIRNSG1"
GROUP_COLUMN: Final = "group"
BLOCK_ROWS_MAX: Final = 1 << 16
# The end of a segment is read at once, and with it the whole of a small segment.
TAIL_BYTES: Final = 64 << 10
# Reading a gap this small costs less than another request.
GAP_BYTES_MAX: Final = 64 << 10
_TRAILER: Final = struct.Struct("<QQ16s8s")

Kind = Literal["base", "delta"]
ReadRange = Callable[[int, int], bytes]


class Block(msgspec.Struct, frozen=True, array_like=True):
    first_group: int
    last_group: int
    offset: int
    length: int
    rows: int
    checksum: bytes


class StateIndex(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    schema: bytes
    blocks: list[Block]
    groups: list[int]
    group_rows: list[int]

    @property
    def rows(self) -> int:
        return sum(self.group_rows)


class SegmentIndex(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    kind: Kind
    operator: str
    first_epoch: int
    last_epoch: int
    states: list[StateIndex]
    meta: dict[str, str] = {}

    @property
    def rows(self) -> int:
        return sum(state.rows for state in self.states)


class StateFile(msgspec.Struct, frozen=True, gc=False):
    """A file of state that was written but that no manifest lists yet.

    Its bytes are in the store at `path`, or travel as `data` until the driver packs them. It has
    neither when another writer stores the same content: then only its id and rows count.
    """

    id: str
    kind: Kind
    length: int
    rows: int
    data: bytes | None = None
    path: str | None = None
    offset: int = 0
    format: Literal["segment", "rocksdb", "postgres", "versions"] = "segment"
    objects: tuple[str, ...] = ()
    """The other objects it is made of, shared with other bases."""
    objects_bytes: int = 0
    uploaded_bytes: int = 0
    """The bytes of the file and its objects that were not in the store before."""

    def list_for(
        self, groups: range, *, first_epoch: int, last_epoch: int, tier: int = 0
    ) -> FileRef:
        """Return the file as a manifest lists it, for these key groups."""
        assert self.path is not None, f"file {self.id} is not in the store"
        return FileRef(
            id=self.id,
            path=self.path,
            offset=self.offset,
            length=self.length,
            kind=self.kind,
            tier=tier,
            rows=self.rows,
            first_epoch=first_epoch,
            last_epoch=last_epoch,
            first_group=groups.start,
            group_count=len(groups),
            format=self.format,
            objects=self.objects,
            objects_bytes=self.objects_bytes,
        )


class _Sink(Protocol):
    def write(self, data: Any, /) -> Any: ...


def encode_segment(
    kind: Kind,
    operator: str,
    states: Mapping[str, pa.RecordBatch],
    *,
    first_epoch: int = 0,
    last_epoch: int = 0,
) -> StateFile:
    """Return a whole segment in memory. Equal rows give equal bytes."""
    segment, parts = encode_parts(
        kind, operator, states, first_epoch=first_epoch, last_epoch=last_epoch
    )
    return msgspec.structs.replace(segment, data=b"".join(parts))


def encode_parts(
    kind: Kind,
    operator: str,
    states: Mapping[str, pa.RecordBatch],
    *,
    first_epoch: int = 0,
    last_epoch: int = 0,
) -> tuple[StateFile, list[Any]]:
    """Return a segment without its bytes, and the buffers that these are made of.

    A copy of a large delta into one buffer would cost more than encoding it.
    """
    out = _Parts()
    writer = SegmentWriter(out, kind, operator, first_epoch=first_epoch, last_epoch=last_epoch)
    for name, batch in states.items():
        writer.begin_state(name, batch.schema)
        writer.write(batch)
    return writer.finish(), out.parts


class _Parts:
    """Collects the parts of a segment."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def write(self, data: Any) -> None:
        self.parts.append(data)


class SegmentWriter:
    """Writes a segment while rows arrive, with about one block in memory.

    Call `begin_state` for each state, `write` its batches in ascending group order, then
    `finish`. The bytes do not depend on how the rows were cut into batches.
    """

    def __init__(
        self,
        out: _Sink,
        kind: Kind,
        operator: str,
        *,
        first_epoch: int = 0,
        last_epoch: int = 0,
    ) -> None:
        self._out = out
        self._states: list[StateIndex] = []
        self._index = SegmentIndex(
            format=1,
            kind=kind,
            operator=operator,
            first_epoch=first_epoch,
            last_epoch=last_epoch,
            states=self._states,
        )
        self._offset = 0
        self._name: str | None = None
        self._schema = pa.schema([])
        self._emit(MAGIC)

    def begin_state(self, name: str, schema: pa.Schema) -> None:
        if not schema.names or schema.field(0).name != GROUP_COLUMN:
            raise ValueError(f"state {name!r}: the first column must be {GROUP_COLUMN!r}")
        if schema.field(0).type != pa.int32():
            raise ValueError(f"state {name!r}: column {GROUP_COLUMN!r} must be int32")
        self._end_state()
        if any(state.name == name for state in self._states):
            raise ValueError(f"state {name!r} is written twice")
        self._name = name
        # Schema metadata (from pandas, from Spark) must not change the id.
        self._schema = schema.remove_metadata()
        self._blocks: list[Block] = []
        self._counts: dict[int, int] = {}
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._last_group = -1
        self._big_group = -1

    def write(self, batch: pa.RecordBatch) -> None:
        if self._name is None:
            raise ValueError("begin_state comes before write")
        if batch.num_rows == 0:
            return
        groups = _groups_of(batch)
        if groups[0] < self._last_group or np.any(groups[1:] < groups[:-1]):
            raise ValueError(f"state {self._name!r}: rows must be sorted by group")
        self._last_group = int(groups[-1])
        start = 0
        for end in _run_ends(groups):
            group = int(groups[start])
            self._counts[group] = self._counts.get(group, 0) + end - start
            start = end
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        if self._pending_rows > BLOCK_ROWS_MAX:
            self._cut(closed=False)

    def finish(self) -> StateFile:
        """Write the index. The bytes are now where `out` put them."""
        self._end_state()
        index = self._index
        data = msgspec.msgpack.encode(index)
        index_offset = self._offset
        self._emit(data)
        self._emit(_TRAILER.pack(index_offset, len(data), _checksum(data), MAGIC))
        length = self._offset
        return StateFile(content_id(data), index.kind, length, index.rows, uploaded_bytes=length)

    def _end_state(self) -> None:
        if self._name is None:
            return
        self._cut(closed=True)
        groups = sorted(self._counts)
        self._states.append(
            StateIndex(
                name=self._name,
                schema=self._schema.serialize().to_pybytes(),
                blocks=self._blocks,
                groups=groups,
                group_rows=[self._counts[group] for group in groups],
            )
        )
        self._name = None

    def _cut(self, *, closed: bool) -> None:
        """Write the complete blocks. Unless `closed`, more rows of the last group may follow."""
        if not self._pending:
            return
        rows = pa.concat_batches(self._pending) if len(self._pending) > 1 else self._pending[0]
        groups = _groups_of(rows)
        ends = _run_ends(groups)
        start = 0
        for position, end in enumerate(ends):
            is_open = not closed and position == len(ends) - 1
            group_start = ends[position - 1] if position else 0
            if start < group_start and end - start > BLOCK_ROWS_MAX:
                self._block(rows, start, group_start)
                start = group_start
            while end - start > BLOCK_ROWS_MAX:
                self._block(rows, start, start + BLOCK_ROWS_MAX)
                start += BLOCK_ROWS_MAX
                self._big_group = int(groups[end - 1])
            if start < end and not is_open and int(groups[end - 1]) == self._big_group:
                # The rest of a large group gets its own block, like its other rows.
                self._block(rows, start, end)
                start = end
        if closed and start < len(groups):
            self._block(rows, start, len(groups))
            start = len(groups)
        rest = rows.slice(start)
        self._pending = [rest] if rest.num_rows else []
        self._pending_rows = rest.num_rows

    def _block(self, rows: pa.RecordBatch, start: int, end: int) -> None:
        batch = _canonical(rows.slice(start, end - start), self._schema)
        data = batch.serialize()
        groups = _groups_of(batch)
        first, last = int(groups[0]), int(groups[-1])
        self._blocks.append(
            Block(first, last, self._offset, data.size, end - start, _checksum(data))
        )
        self._emit(data)

    def _emit(self, data: Any) -> None:
        self._out.write(data)
        self._offset += memoryview(data).nbytes


class SegmentReader:
    """Reads the index of a segment, then only the blocks that are needed."""

    def __init__(
        self, read_range: ReadRange, length: int, name: str, expected_id: str | None = None
    ) -> None:
        self._read_range = read_range
        self._length = length
        self._name = name
        if length < len(MAGIC) + _TRAILER.size:
            raise self._corrupt("trailer", f"{length} bytes are too few for a segment")
        tail_bytes = min(length, TAIL_BYTES)
        self._tail = self._read(length - tail_bytes, tail_bytes, "trailer")
        self._tail_offset = length - tail_bytes
        self._header_checked = False
        data = self._read_index()
        self.id = content_id(data)
        if expected_id is not None and self.id != expected_id:
            raise self._corrupt("index", f"this is segment {self.id}, expected {expected_id}")
        try:
            self.index = msgspec.msgpack.decode(data, type=SegmentIndex)
        except msgspec.MsgspecError as error:
            raise self._corrupt("index", str(error)) from error
        self._states = {state.name: state for state in self.index.states}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no file stays open between reads. Other readers need it."""

    @property
    def states(self) -> list[str]:
        return list(self._states)

    def schema(self, state: str) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(self._states[state].schema))

    def read(self, state: str, groups: range | None = None) -> list[pa.RecordBatch]:
        """Return the rows of these key groups, in order; none for an unknown state."""
        index = self._states.get(state)
        if index is None:
            return []
        first, end = (groups.start, groups.stop) if groups is not None else (0, 1 << 31)
        assert groups is None or groups.step == 1, "key groups are read as a contiguous range"
        wanted = [b for b in index.blocks if b.first_group < end and b.last_group >= first]
        if not wanted:
            return []
        schema = self.schema(state)
        batches = []
        for block, data in zip(wanted, self._read_blocks(wanted), strict=True):
            what = f"state {state!r}, block at {block.offset}"
            if _checksum(data) != block.checksum:
                raise self._corrupt(what, "the checksum does not match")
            try:
                batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
            except (pa.ArrowException, OSError) as error:
                raise self._corrupt(what, str(error)) from error
            if block.first_group < first or block.last_group >= end:
                low, high = np.searchsorted(_groups_of(batch), [first, end]).tolist()
                batch = batch.slice(low, high - low)
            if batch.num_rows:
                batches.append(batch)
        return batches

    def verify(self) -> None:
        """Read and check all blocks."""
        self._check_header()
        for state in self._states:
            self.read(state)

    def _read_index(self) -> bytes:
        offset, length, checksum, magic = _TRAILER.unpack(self._tail[-_TRAILER.size :])
        if magic != MAGIC:
            raise self._corrupt("trailer", f"it ends with {magic!r}, not {MAGIC!r}")
        if offset < len(MAGIC) or offset + length + _TRAILER.size != self._length:
            raise self._corrupt("trailer", "it does not point to the index")
        if offset >= self._tail_offset:
            data = self._tail[offset - self._tail_offset : -_TRAILER.size]
        else:
            data = self._read(offset, length, "index")
        if _checksum(data) != checksum:
            raise self._corrupt("index", "the checksum does not match")
        return data

    def _read_blocks(self, blocks: list[Block]) -> list[memoryview]:
        self._check_header()
        runs: list[list[Block]] = []
        for block in blocks:
            if runs and block.offset - (runs[-1][-1].offset + runs[-1][-1].length) <= GAP_BYTES_MAX:
                runs[-1].append(block)
            else:
                runs.append([block])
        found: list[memoryview] = []
        for run in runs:
            start, end = run[0].offset, run[-1].offset + run[-1].length
            if start >= self._tail_offset:
                data, start = self._tail, self._tail_offset
            else:
                data = self._read(start, end - start, f"block at {start}")
            view = memoryview(data)
            found.extend(view[b.offset - start : b.offset - start + b.length] for b in run)
        return found

    def _check_header(self) -> None:
        if self._header_checked:
            return
        if self._tail_offset == 0:
            magic = self._tail[: len(MAGIC)]
        else:
            magic = self._read(0, len(MAGIC), "header")
        if magic != MAGIC:
            raise self._corrupt("header", f"it starts with {magic!r}, not {MAGIC!r}")
        self._header_checked = True

    def _read(self, offset: int, length: int, what: str) -> bytes:
        try:
            data = self._read_range(offset, length)
        except NotFoundError as error:
            raise self._corrupt(what, "the file is missing") from error
        if len(data) != length:
            raise self._corrupt(what, f"read {len(data)} of {length} bytes at offset {offset}")
        return data

    def _corrupt(self, what: str, why: str) -> CorruptFileError:
        return CorruptFileError(
            f"a state file is damaged: {what}: {why}\n"
            f"  file: {self._name}\n"
            "  next: run `cairn verify`, then roll back to an epoch that is whole",
            file=self._name,
            part=what,
        )


def store_of(store: Store, ref: FileRef) -> Store:
    """Return the store that holds a file: this checkpoint's, or that of a branch's parent."""
    return other_store(ref.store) if ref.store else store


def open_segment(store: Store, ref: FileRef) -> SegmentReader:
    """Open a segment of a manifest. CorruptFileError if it has another id."""
    store = store_of(store, ref)
    return SegmentReader(
        lambda offset, length: store.get_range(ref.path, ref.offset + offset, length),
        ref.length,
        f"{store.url}/{ref.path}",
        expected_id=ref.id,
    )


def _groups_of(batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.int32]]:
    column = batch.column(0)
    if column.null_count:
        raise ValueError(f"column {GROUP_COLUMN!r} has nulls")
    groups: np.ndarray[Any, np.dtype[np.int32]] = column.to_numpy(zero_copy_only=True)
    return groups


def _run_ends(groups: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Return the end of each run of equal groups."""
    return [*(np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist(), len(groups)]


def _checksum(data: Any) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _canonical(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the same rows in a form that depends on the rows alone.

    Slices carry bits of their neighbours, and values under a null are arbitrary; both would
    change the bytes, and so the id.
    """
    columns = [_fresh(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _fresh(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_dictionary(kind):
        raise ValueError("dictionary-encoded columns cannot be stored: decode them first")
    if not array.null_count and (whole := _cut_buffers(array)) is not None:
        return whole
    if pa.types.is_struct(kind) and kind.num_fields:
        # flatten() pushes the struct's nulls down into its fields.
        children = [_fresh(child) for child in array.flatten()]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    # take() builds new arrays with zeros under each null, but for one level of nulls only:
    # the items of a null list are copied unchanged.
    array = array.take(pa.array(np.arange(len(array), dtype=np.int32)))
    mask = array.is_null() if array.null_count else None
    if pa.types.is_map(kind):
        keys, items = _fresh(array.keys), _fresh(array.items)
        return pa.MapArray.from_arrays(array.offsets, keys, items, kind, mask=mask)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, _fresh(array.values), type=kind, mask=mask)
    return array


def _cut_buffers(array: pa.Array) -> pa.Array | None:
    """Return the same values with buffers of exactly their size, without a copy of values.

    None if there is more to it: values of less than a byte, in lists, or none at all.
    """
    kind, offset, count = array.type, array.offset, len(array)
    buffers = array.buffers()
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        if not count or buffers[1] is None or buffers[2] is None:
            return None
        offsets = np.frombuffer(buffers[1], np.int32, offset + count + 1)[offset:]
        start, stop = int(offsets[0]), int(offsets[-1])
        data = [pa.py_buffer(offsets - start), buffers[2].slice(start, stop - start)]
        return pa.Array.from_buffers(kind, count, [None, *data])
    is_fixed = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    if not count or not is_fixed or pa.types.is_boolean(kind):
        return None
    width = kind.bit_width // 8
    return pa.Array.from_buffers(
        kind, count, [None, buffers[1].slice(offset * width, count * width)]
    )
