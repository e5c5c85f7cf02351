"""Rows of keys with times: what an attempt that fails leaves behind."""

from __future__ import annotations

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
