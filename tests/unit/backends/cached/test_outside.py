"""Changes that wait in memory for a writer to a database outside of the slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.ids import new_id
from cairn.types.codec import codec
from tests.backends import OUTSIDE, make, write_base

MEMORY_BYTES = 1 << 20


@pytest.fixture(params=OUTSIDE)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = make(request.param, str(tmp_path / "b"), MEMORY_BYTES, job_id=new_id(), operator="op")
    yield made
    made.close()


def test_memory_is_short_until_many_changes_of_keys_are_written(backend: Any) -> None:
    backend.open_state("s", "value", codec("long"), codec("long"), None)
    assert not backend.is_short_of_memory()
    backend.rows("s", 0).promote(dict.fromkeys(range(10_000), 1))
    assert backend.is_short_of_memory()
    base = backend.begin_base({}, range(1))
    assert backend.is_short_of_memory(), "they are still in memory"
    base.close()
    write_base(backend, groups=range(1))
    assert not backend.is_short_of_memory()


def test_memory_is_short_until_rows_can_leave_the_arrays(backend: Any) -> None:
    declaration = state.Value("bigint")
    declaration.name = "s"
    table: Any = make_batch_table(declaration, pa.int64(), backend, 1)
    table.assign(range(1))
    handle: Any = make_batch_handle(table)
    handle.put_many(pa.array(range(50_000)), pa.array(range(50_000)))
    table.promote()
    assert backend.is_short_of_memory()
    write_base(backend, groups=range(1))
    table.promote()
    assert not backend.is_short_of_memory() and not table.is_whole
