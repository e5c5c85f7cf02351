"""State in dicts: small bases travel inline, and dicts shrink when most of their keys are gone."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

from cairn.backends.heap.backend import HeapRows
from cairn.storage.files import SegmentReader
from tests.unit.backends.bases import Slot, no_pace, read_batches


def test_a_small_heap_base_travels_inline(tmp_path: Path) -> None:
    slot = Slot("heap", str(tmp_path))
    slot.fill(5)
    base = slot.backend.begin_base(slot.tables, slot.groups)
    found = base.write(slot.target(inline_bytes_max=1 << 20), no_pace)
    base.close()
    assert found.path is None and found.data is not None
    data = found.data
    reader = SegmentReader(lambda at, n: data[at : at + n], len(data), "inline", found.id)
    batches: dict[str, list[pa.RecordBatch]] = {n: list(reader.read(n)) for n in reader.states}
    assert read_batches(batches) == slot.content()


def test_a_dict_that_has_become_mostly_empty_shrinks() -> None:
    rows = HeapRows()
    rows.promote({key: (0, key) for key in range(10_000)})
    full = sys.getsizeof(rows)
    rows.promote(dict.fromkeys(range(100, 10_000)))
    assert sys.getsizeof(rows) == full
    rows.compact()
    assert sys.getsizeof(rows) < full / 10
    assert rows == {key: (0, key) for key in range(100)}


def test_a_dict_that_is_mostly_full_is_left_alone() -> None:
    for count in range(0, 3_000, 7):
        rows = HeapRows()
        for key in range(count):
            rows.promote({key: (0, key)})
        size = sys.getsizeof(rows)
        rows.compact()
        assert sys.getsizeof(rows) == size
