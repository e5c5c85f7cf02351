"""Rows of keys with times: what an attempt that fails leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cairn.backends import make_backend
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.backends.handles.rows import RowsHandle
from cairn.backends.timed_rows import TimedRows
from cairn.errors import FunctionError
from cairn.key_groups import key_groups

GROUP_COUNT = 16


def test_keys_that_came_with_a_foreign_one_get_their_key_groups_in_the_next_attempt() -> None:
    declaration = TimedRows(pa.schema([("key", pa.int64())]), step_us=1000)
    declaration.name = "s"
    table = make_batch_table(declaration, pa.int64(), make_backend("heap", ""), GROUP_COUNT)
    table.assign(range(8))
    handle = make_batch_handle(table)
    assert isinstance(handle, RowsHandle)

    def append(keys: pa.Array) -> None:
        rows = pa.StructArray.from_arrays([keys], ["key"])
        handle.append(keys, np.zeros(len(keys), np.int64), rows, np.zeros(len(keys), np.bool_))

    keys = pa.array(range(100))
    groups = key_groups(keys, pa.int64(), GROUP_COUNT)
    for _ in range(2):
        with pytest.raises(FunctionError, match="belongs to another subtask"):
            append(keys)
        table.rollback()
    owned = keys.filter(pa.array(groups < 8))
    append(pa.concat_arrays([owned, owned]))
    delta = table.delta()
    assert delta is not None and delta.num_rows == 2 * len(owned)
    assert delta["group"].to_pylist() == key_groups(delta["key"], pa.int64(), GROUP_COUNT).tolist()


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_deltas_that_are_applied_one_by_one_give_the_rows_of_the_table_that_wrote_them(
    backend: str, tmp_path: Path
) -> None:
    chance = np.random.default_rng(7)
    (written, rows), (following, _) = (_timed(backend, tmp_path / name) for name in "ab")
    for epoch in range(12):
        keys = pa.array(chance.integers(0, 5, 40))
        times = chance.integers(0, 20_000, 40)
        content = pa.StructArray.from_arrays([keys], ["key"])
        rows.append(keys, times, content, chance.random(40) < 0.5)
        if epoch % 2:
            rows.remove(rows.before(int(chance.integers(0, 20_000))))
        delta = written.delta()
        written.promote()
        if delta is not None:
            following.apply(delta)
            following.end_applying()
        assert _stored(following) == _stored(written)
    assert _stored(following)


def _timed(backend: str, folder: Path) -> tuple[Any, RowsHandle]:
    declaration = TimedRows(pa.schema([("key", pa.int64())]), step_us=1000)
    declaration.name = "s"
    made = make_backend(backend, str(folder), 64 << 20)
    table = make_batch_table(declaration, pa.int64(), made, GROUP_COUNT)
    table.assign(range(GROUP_COUNT))
    handle = make_batch_handle(table)
    assert isinstance(handle, RowsHandle)
    return table, handle


def _stored(table: Any) -> list[str]:
    return sorted(str(row) for batch in table.dump() for row in batch.to_pylist())
