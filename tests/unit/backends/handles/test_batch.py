"""What state by the batch tells of the epoch at hand, and of the entry that comes next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends import make_backend, overlay
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.errors import FunctionError
from cairn.key_groups import key_groups


@pytest.fixture(params=["heap", "rocksdb"])
def make(request: Any, tmp_path: Path) -> Any:
    """make(declaration) -> (table, handle)"""

    def make(declaration: Any) -> tuple[Any, Any]:
        backend = make_backend(request.param, str(tmp_path / "state"), 64 << 20)
        table = make_batch_table(declaration, pa.int64(), backend, 4)
        table.assign(range(4))
        return table, make_batch_handle(table)

    return make


def longs(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int64())


def set_now(handle: Any) -> dict[int, int]:
    keys, values = handle.set_in_epoch()
    return dict(zip(keys.to_pylist(), values.to_pylist(), strict=True))


def test_what_an_epoch_has_set_is_told_until_it_ends(make: Any) -> None:
    table, handle = make(state.Value("bigint"))
    assert set_now(handle) == {}
    handle.put_many(longs(1, 2, 3), longs(10, 20, 30))
    handle.put_many(longs(2, 3), longs(21, None))
    assert set_now(handle) == {1: 10, 2: 21}
    table.delta()
    table.promote()
    assert set_now(handle) == {}
    handle.put_many(longs(1), longs(11))
    assert set_now(handle) == {1: 11}
    table.rollback()
    assert set_now(handle) == {}


def test_the_next_entry_is_the_least_above(make: Any) -> None:
    table, handle = make(state.Map("bigint", "bigint"))
    assert handle.entry_above(None) is None
    handle.put_many(longs(1, 1, 2), longs(30, 10, 20), longs(0, 0, 0))
    assert [handle.entry_above(low) for low in (None, 5, 10, 20, 30)] == [10, 10, 20, 30, None]
    handle.put_many(longs(1), longs(10), longs(None))
    assert handle.entry_above(None) == 20
    table.rollback()
    assert handle.entry_above(None) is None


def test_keys_of_other_subtasks_are_refused(make: Any) -> None:
    table, handle = make(state.Value("bigint"))
    keys = longs(*range(8))
    groups = key_groups(keys, pa.int64(), 4)
    handle.put_many(keys, keys)
    table.delta()
    table.promote()
    table.assign(range(2))
    foreign = [key for key in range(8) if groups[key] >= 2]
    for _ in range(2):
        with pytest.raises(FunctionError, match="key_by") as caught:
            handle.put_many(longs(*range(8)), keys)
        assert caught.value.key == foreign[0]
        assert table.delta() is None
    own = longs(*(key for key in range(8) if groups[key] < 2))
    assert handle.get_many(own).equals(own)
    handle.put_many(own, own)
    assert table.keys_changed() == len(own)


def test_deltas_too_large_for_one_batch_are_not_merged(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow leaves strings of more than 2 GiB in pieces, of which only the first was read."""
    table, handle = make(state.Value("bigint"))
    handle.put_many(longs(1, 2), longs(10, 20))
    delta = table.delta()
    assert table.merge([delta, delta]).num_rows == 2

    class InPieces:
        def from_batches(self, batches: Any) -> Any:
            whole = pa.Table.from_batches(batches)
            return SimpleNamespace(combine_chunks=lambda: whole)

    monkeypatch.setattr(overlay, "pa", SimpleNamespace(Table=InPieces(), array=pa.array))
    with pytest.raises(OverflowError, match="2 GiB"):
        table.merge([delta, delta])


def test_entries_of_structs_may_have_null_fields(make: Any) -> None:
    table, handle = make(state.Map("struct<a: int, b: int>", "bigint"))
    kept = [{"a": 0, "b": None}, {"a": 1, "b": None}, {"a": 1, "b": 2}, {"a": None, "b": 1}]
    entries = pa.array(kept, pa.struct([("a", pa.int32()), ("b", pa.int32())]))
    handle.put_many(longs(1, 2, 3, 4), entries, longs(1, 2, 3, 4))
    for _ in range(2):
        keys, found, values = handle.between(None, None)
        assert keys.to_pylist() == values.to_pylist() == [4, 1, 2, 3]
        assert found.to_pylist() == [kept[key - 1] for key in (4, 1, 2, 3)]
        table.promote()


@pytest.mark.parametrize("type_", ["struct<a: int>", "array<int>"])
def test_a_range_of_nested_entries_is_refused(make: Any, type_: str) -> None:
    _, handle = make(state.Map(type_, "bigint"))
    for low, high in ((None, (1,)), ((1,), None)):
        with pytest.raises(TypeError, match=r"between\(None, None\)"):
            handle.between(low, high)


@pytest.mark.parametrize(("type_", "bits"), [("tinyint", 8), ("int", 32), ("bigint", 64)])
def test_bounds_may_lie_beyond_what_entries_can_be(make: Any, type_: str, bits: int) -> None:
    table, handle = make(state.Map(type_, "bigint"))
    most = 2 ** (bits - 1) - 1
    entries = [-most - 1, 0, most]
    handle.put_many(longs(1, 2, 3), pa.array(entries, getattr(pa, f"int{bits}")()), longs(0, 0, 0))
    beyond = 2**80
    for _ in range(2):
        for low in (None, -beyond, -most - 2, -most - 1, 0, most, most + 1, beyond):
            for high in (None, -beyond, -most - 2, -most - 1, 0, most, most + 1, beyond):
                expected = [
                    entry
                    for entry in entries
                    if (low is None or entry > low) and (high is None or entry <= high)
                ]
                assert handle.between(low, high)[1].to_pylist() == expected, (low, high)
            above = [entry for entry in entries if low is None or entry > low]
            assert handle.entry_above(low) == min(above, default=None)
        table.promote()
