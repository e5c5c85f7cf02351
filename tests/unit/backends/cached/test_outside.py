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


def test_unwritten_changes_of_the_same_keys_count_once(backend: Any) -> None:
    backend.open_state("s", "value", codec("long"), codec("string"), None)
    backend.open_state("m", "map", codec("long"), codec("string"), codec("long"))
    backend.open_state("l", "list", codec("long"), codec("string"), None)
    text, found = "x" * 1000, []
    for _ in range(30):
        backend.rows("s", 0).promote(dict.fromkeys(range(50), text))
        backend.rows("m", 0).promote({key: {1: text, 2: text} for key in range(50)})
        backend.rows("l", 0).promote({key: (0, [text, text]) for key in range(50)})
        found.append(backend.unwritten_bytes(with_frozen=False))
    assert backend.unwritten_bytes_max == MEMORY_BYTES * 3 // 8
    payload = 50 * 5 * 1000
    assert payload < found[-1] < payload * 3 // 2 < backend.unwritten_bytes_max


def test_frozen_changes_count_until_they_are_written(backend: Any) -> None:
    backend.open_state("s", "value", codec("long"), codec("long"), None)
    backend.rows("s", 0).promote(dict.fromkeys(range(10_000), 1))
    unwritten = backend.unwritten_bytes(with_frozen=False)
    assert unwritten > backend.unwritten_bytes_max
    base = backend.begin_base({}, range(1))
    assert backend.unwritten_bytes(with_frozen=False) == 0
    assert backend.unwritten_bytes(with_frozen=True) == unwritten
    base.close()
    assert backend.unwritten_bytes(with_frozen=True) == unwritten, "the writer gave up"
    write_base(backend, groups=range(1))
    assert backend.unwritten_bytes(with_frozen=True) == 0


def test_rows_in_arrays_count_as_far_as_they_should_leave(backend: Any) -> None:
    declaration = state.Value("bigint")
    declaration.name = "s"
    table: Any = make_batch_table(declaration, pa.int64(), backend, 1)
    table.assign(range(1))
    handle: Any = make_batch_handle(table)
    write_base(backend, groups=range(1))
    handle.put_many(pa.array(range(1000)), pa.array(range(1000)))
    table.promote()
    assert not table.is_too_large
    assert backend.unwritten_bytes(with_frozen=True) == 0, "there is room for them anyway"
    handle.put_many(pa.array(range(30_000)), pa.array(range(30_000)))
    table.promote()
    assert backend.unwritten_bytes(with_frozen=False) > backend.unwritten_bytes_max
    base = backend.begin_base({}, range(1))
    assert backend.unwritten_bytes(with_frozen=False) == 0
    assert backend.unwritten_bytes(with_frozen=True) > backend.unwritten_bytes_max
    base.close()
    assert backend.unwritten_bytes(with_frozen=False) > backend.unwritten_bytes_max
    write_base(backend, groups=range(1))
    assert backend.unwritten_bytes(with_frozen=True) == 0
