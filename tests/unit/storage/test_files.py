"""Segments: the same rows back, the same bytes for the same rows, and no damage unseen."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import CorruptFileError
from cairn.storage import files
from cairn.storage.files import SegmentReader, SegmentWriter, encode_parts, encode_segment
from cairn.storage.pack import write_pack, write_parts, write_segment, writer_term
from cairn.storage.store import open_store

SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("key", pa.int64()),
        ("value", pa.struct([("n", pa.int64()), ("s", pa.string())])),
        ("tags", pa.list_(pa.struct([("a", pa.int32())]))),
        ("seen", pa.map_(pa.string(), pa.float64())),
        ("live", pa.bool_()),
    ]
)
Row = tuple[Any, ...]
rows = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.one_of(st.none(), st.integers(0, 99)),
        st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"n": st.one_of(st.none(), st.integers(0, 9)), "s": st.text(max_size=3)}
            ),
        ),
        st.one_of(
            st.none(),
            st.lists(
                st.one_of(st.none(), st.fixed_dictionaries({"a": st.integers(0, 3)})), max_size=3
            ),
        ),
        st.one_of(
            st.none(),
            st.lists(
                st.tuples(st.text(max_size=2), st.one_of(st.none(), st.just(1.5))), max_size=2
            ),
        ),
        st.booleans(),
    ),
    max_size=40,
).map(lambda found: sorted(found, key=lambda row: row[0]))


def batch_of(found: list[Row]) -> pa.RecordBatch:
    columns: list[Any] = list(zip(*found, strict=True)) if found else [[] for _ in SCHEMA]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def reader_of(data: bytes | None, reads: list[tuple[int, int]] | None = None) -> SegmentReader:
    assert data is not None

    def read_range(offset: int, length: int) -> bytes:
        if reads is not None:
            reads.append((offset, length))
        return data[offset : offset + length]

    return SegmentReader(read_range, len(data), "state/x.delta")


def rows_of(batches: list[pa.RecordBatch]) -> list[Row]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def simple(groups: list[int]) -> pa.RecordBatch:
    values = np.arange(len(groups))
    return pa.record_batch({"group": np.array(groups, np.int32), "value": values})


@given(rows, st.integers(0, 13), st.integers(0, 13), st.integers(1, 9))
def test_rows_come_back_for_any_range_of_groups(
    found: list[Row], first: int, end: int, block_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_ROWS_MAX", block_rows)
        patch.setattr(files, "TAIL_BYTES", 64)
        patch.setattr(files, "GAP_BYTES_MAX", 0)
        batch = batch_of(found)
        segment = encode_segment("delta", "op", {"s": batch})
        reader = reader_of(segment.data)
        assert rows_of(reader.read("s")) == rows_of([batch])
        expected = [row for row in rows_of([batch]) if first <= row[0] < end]
        assert rows_of(reader.read("s", range(first, end))) == expected
    assert reader.id == segment.id
    assert segment.rows == len(found)
    assert reader.schema("s") == SCHEMA
    state = reader.index.states[0]
    counts = dict(zip(state.groups, state.group_rows, strict=True))
    assert counts == {g: [r[0] for r in found].count(g) for g in {r[0] for r in found}}


@given(rows, rows, rows, st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1))
def test_equal_rows_give_equal_bytes_however_they_were_cut(
    found: list[Row], before: list[Row], after: list[Row], block_rows: int, cuts: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_ROWS_MAX", block_rows)
        whole = encode_segment("base", "op", {"s": batch_of(found)})
        # A slice of something bigger has its neighbours' bits around it.
        bigger = batch_of([*before, *found, *after])
        sliced = bigger.slice(len(before), len(found))
        assert encode_segment("base", "op", {"s": sliced}).data == whole.data
        out = io.BytesIO()
        writer = SegmentWriter(out, "base", "op")
        writer.begin_state("s", SCHEMA)
        start, turn = 0, 0
        while start < len(found):
            writer.write(sliced.slice(start, cuts[turn % len(cuts)]))
            start += cuts[turn % len(cuts)]
            turn += 1
        written = writer.finish()
    assert out.getvalue() == whole.data
    assert (written.id, written.length) == (whole.id, len(whole.data))


def test_what_lies_under_a_null_does_not_change_the_id() -> None:
    ids = set()
    for garbage in (1, 2):
        n = pa.array(np.array([7, garbage]), mask=np.array([False, True]))
        inner = pa.array([5, garbage])
        struct = pa.StructArray.from_arrays([inner], ["x"], mask=pa.array([False, True]))
        nested = pa.StructArray.from_arrays([struct], ["y"], mask=pa.array([False, True]))
        group = pa.array([0, 0], pa.int32())
        batch = pa.record_batch({"group": group, "n": n, "s": struct, "d": nested})
        ids.add(encode_segment("delta", "op", {"s": batch}).id)
    assert len(ids) == 1


def test_ids_differ_by_rows_operator_kind_and_epochs() -> None:
    states = {"s": simple([1, 2])}
    ids = {
        encode_segment("delta", "op", states).id,
        encode_segment("base", "op", states).id,
        encode_segment("delta", "other", states).id,
        encode_segment("delta", "op", states, first_epoch=1, last_epoch=1).id,
        encode_segment("delta", "op", {"s": simple([1, 3])}).id,
        encode_segment("delta", "op", {"t": simple([1, 2])}).id,
    }
    assert len(ids) == 6


def test_schema_metadata_does_not_change_the_id() -> None:
    batch = simple([1, 2])
    marked = batch.replace_schema_metadata({"by": "pandas"})
    one = encode_segment("delta", "op", {"s": batch})
    assert encode_segment("delta", "op", {"s": marked}).id == one.id


def test_blocks_hold_whole_groups_and_a_big_group_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "BLOCK_ROWS_MAX", 10)
    groups = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 25 + [4] * 2 + [5] * 8
    segment = encode_segment("base", "op", {"s": simple(groups)})
    index = reader_of(segment.data).index
    blocks = [(b.first_group, b.last_group, b.rows) for b in index.states[0].blocks]
    assert blocks == [(0, 1, 8), (2, 2, 4), (3, 3, 10), (3, 3, 10), (3, 3, 5), (4, 5, 10)]


def test_only_needed_blocks_are_read_and_neighbours_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "BLOCK_ROWS_MAX", 1000)
    monkeypatch.setattr(files, "TAIL_BYTES", 4096)
    monkeypatch.setattr(files, "GAP_BYTES_MAX", 0)
    groups = np.repeat(np.arange(20), 1000).tolist()
    data = encode_segment("base", "op", {"s": simple(groups)}).data
    reads: list[tuple[int, int]] = []
    reader = reader_of(data, reads)
    assert len(reads) == 1
    assert len(reader.read("s", range(5, 8))) == 3
    assert reads[1][0] == 0 and len(reads) == 3
    assert sum(length for _, length in reads) < len(data) / 4


def test_a_small_segment_is_one_read() -> None:
    reads: list[tuple[int, int]] = []
    reader = reader_of(encode_segment("delta", "op", {"s": simple([1, 2])}).data, reads)
    assert len(rows_of(reader.read("s"))) == 2
    assert reader.read("unknown") == []
    assert len(reads) == 1


@pytest.mark.parametrize("tail_bytes", [64, 1 << 16])
def test_every_damaged_byte_is_noticed(tail_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TAIL_BYTES", tail_bytes)
    monkeypatch.setattr(files, "BLOCK_ROWS_MAX", 8)
    states = {"s": simple([1] * 5 + [2] * 6 + [9]), "t": simple([3, 4])}
    data = encode_segment("delta", "op", states).data
    assert data is not None
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptFileError, match=r"state/x\.delta"):
            reader_of(bytes(damaged)).verify()
    for length in range(0, len(data), 7):
        with pytest.raises(CorruptFileError):
            reader_of(data[:length]).verify()


def test_a_damaged_block_is_named_and_the_others_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "BLOCK_ROWS_MAX", 4)
    segment = encode_segment("delta", "op", {"s": simple([1] * 4 + [2] * 4)})
    assert segment.data is not None
    block = reader_of(segment.data).index.states[0].blocks[1]
    damaged = bytearray(segment.data)
    damaged[block.offset + block.length - 1] ^= 1
    reader = reader_of(bytes(damaged))
    assert len(reader.read("s", range(1, 2))) == 1
    with pytest.raises(CorruptFileError, match=f"state 's', block at {block.offset}"):
        reader.read("s", range(2, 3))


@pytest.mark.parametrize(
    "batch",
    [
        simple([2, 1]),
        pa.record_batch({"group": np.array([1]), "v": [1]}),
        pa.record_batch({"v": [1]}),
        pa.record_batch({"group": pa.array([1, None], pa.int32())}),
        pa.record_batch(
            {"group": pa.array([1], pa.int32()), "d": pa.array(["a"]).dictionary_encode()}
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(batch: pa.RecordBatch) -> None:
    with pytest.raises(ValueError):
        encode_segment("delta", "op", {"s": batch})


def test_segments_in_packs_and_alone_are_found_by_their_reference() -> None:
    store = open_store("memory:")
    segments = [encode_segment("delta", f"op{n}", {"s": simple([n, n + 1])}) for n in range(3)]
    placed = [
        *write_pack(store, segments, term=7),
        *(write_segment(store, s, term=7) for s in segments),
    ]
    assert len({s.path for s in placed}) == 4
    assert {writer_term(s.path) for s in placed} == {7}
    assert write_pack(store, segments, term=7) == placed[:3]
    assert write_pack(store, [], term=7) == []
    for file in placed:
        ref = file.list_for(range(128), first_epoch=0, last_epoch=0)
        assert len(rows_of(files.open_segment(store, ref).read("s"))) == 2
        with pytest.raises(CorruptFileError, match="expected 000"):
            files.open_segment(store, msgspec.structs.replace(ref, id="0" * 32))


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20])
def test_segment_written_in_parts_is_the_one_written_whole(
    tmp_path: Path, inline_bytes_max: int
) -> None:
    states = {"s": simple([1, 2, 2]), "t": simple([3])}
    whole = encode_segment("delta", "op", states)
    segment, parts = encode_parts("delta", "op", states)
    store = open_store(str(tmp_path))
    stored = write_parts(store, segment, parts, 7, inline_bytes_max=inline_bytes_max)
    assert (stored.id, stored.length, stored.rows) == (whole.id, whole.length, whole.rows)
    assert (stored.path is None) == bool(inline_bytes_max)
    data = stored.data if stored.path is None else store.get(stored.path)
    assert data == whole.data
