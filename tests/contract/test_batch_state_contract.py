"""State by the batch, the same over every backend: what a BatchProcess may rely on."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends import Backend
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.backends.overlay import Table
from tests.backends import ALL, make

GROUP_COUNT = 8


@pytest.fixture(params=ALL)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = make(request.param, str(tmp_path / "state"), 64 << 20)
    yield backend
    backend.close()


def made(backend: Backend, declaration: state.Declaration, key: Any = None) -> tuple[Table, Any]:
    declaration.name = "s"
    table = make_batch_table(declaration, key or pa.int64(), backend, GROUP_COUNT)
    table.assign(range(GROUP_COUNT))
    return table, make_batch_handle(table)


def longs(*values: Any) -> pa.Array:
    return pa.array(values, pa.int64())


def plain(found: tuple[pa.Array, ...]) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in found), strict=True))


def test_what_is_not_there_is_null_or_the_default(backend: Backend) -> None:
    _, held = made(backend, state.Value("long"))
    assert held.get_many(longs(1, None)).to_pylist() == [None, None]
    assert held.get_many(longs()).type == pa.int64()


def test_a_default_stands_in_until_there_is_a_value(backend: Backend) -> None:
    _, held = made(backend, state.Value("struct<a: long, b: string>", default=(1, None)))
    held.put_many(longs(2), pa.array([{"a": None, "b": "x"}]))
    assert held.get_many(longs(1, 2)).to_pylist() == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
    ]


def test_null_clears_and_the_last_word_on_a_key_counts(backend: Backend) -> None:
    table, held = made(backend, state.Value("long"))
    held.put_many(longs(7, 8, 7, 8), longs(1, 2, 3, None))
    assert held.get_many(longs(8, 7)).to_pylist() == [None, 3]
    table.promote()
    held.put_many(longs(7, 8, 7), longs(None, 1, None))
    assert held.get_many(longs(7, 8)).to_pylist() == [None, 1]
    assert table.keys_changed() == 2 and table.count_held().entries == 1
    table.rollback()
    assert held.get_many(longs(7, 8)).to_pylist() == [3, None]


def test_arrays_of_other_types_are_cast_or_refused_before_anything_changes(
    backend: Backend,
) -> None:
    table, held = made(backend, state.Value("long"))
    held.put_many(pa.chunked_array([pa.array([1], pa.int8())]), pa.array([2.0]))
    assert held.get_many([1]).to_pylist() == [2]
    for keys, values in (
        (longs(1), pa.array([2.5])),
        (longs(1), longs(1, 2)),
        (pa.array(["x"]), longs(1)),
    ):
        with pytest.raises((TypeError, ValueError), match="state 's'"):
            held.put_many(keys, values)
    assert held.get_many(longs(1)).to_pylist() == [2] and table.keys_changed() == 1


def test_entries_of_keys_come_by_key_as_asked_then_by_entry(backend: Backend) -> None:
    table, held = made(backend, state.Map("string", "long"), pa.string())
    keys, entries = pa.array(["b", "a", "b", None]), pa.array(["y", "x", "x", "z"])
    held.put_many(keys, entries, longs(1, 2, 3, 4))
    table.promote()
    held.put_many(pa.array(["b", "b"]), pa.array(["y", "w"]), longs(None, 5))
    asked = pa.array(["b", "none", None, "a", "b"])
    assert plain(held.of_keys(asked)) == [
        (0, "w", 5), (0, "x", 3), (2, "z", 4), (3, "x", 2), (4, "w", 5), (4, "x", 3),
    ]  # fmt: skip
    assert held.get_many(asked, pa.array(["x"] * 5)).to_pylist() == [3, None, None, 2, 3]


def test_a_range_of_entries_is_open_below_and_closed_above(backend: Backend) -> None:
    table, held = made(backend, state.Map("long", "long"))
    held.put_many(longs(1, 2, 1, 3), longs(10, 20, 20, 30), longs(1, 2, 3, 4))
    table.promote()
    assert plain(held.between(10, 20)) == [(1, 20, 3), (2, 20, 2)]
    held.put_many(longs(1, 9), longs(20, 15), longs(None, 5))
    assert plain(held.between(10, 20)) == [(9, 15, 5), (2, 20, 2)]
    assert held.entry_above(10) == 15 and held.entry_above(30) is None
    table.rollback()
    assert plain(held.between(10, 20)) == [(1, 20, 3), (2, 20, 2)]
    assert plain(held.between(None, 10)) == [(1, 10, 1)] and held.entry_above(10) == 20
    assert plain(held.between(20, None)) == [(3, 30, 4)]
    assert plain(held.between(5, 5)) == []
    # Groups that go take their entries with them, also out of what was remembered of them.
    table.assign(range(0))
    assert plain(held.between(None, None)) == [] and held.entry_above(None) is None


def test_bounds_may_be_times_or_what_is_stored_of_them(backend: Backend) -> None:
    _, held = made(backend, state.Map("timestamp", "long"))
    times = pa.array([0, 1_000_000], pa.timestamp("us", "UTC"))
    held.put_many(longs(1, 1), times, longs(1, 2))
    at = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
    for bound in (at, 1_000_000):
        assert held.between(None, bound)[2].to_pylist() == [1, 2]
        assert held.between(bound, None)[2].to_pylist() == []


def test_keys_of_several_columns_are_struct_arrays(backend: Backend) -> None:
    key = pa.struct([("a", pa.int64()), ("b", pa.string())])
    _, held = made(backend, state.Value("double"), key)
    keys = pa.array([{"a": 1, "b": None}, {"a": None, "b": "x"}, {"a": 1, "b": ""}], key)
    held.put_many(keys, pa.array([1.0, 2.0, 3.0]))
    turned = keys.take(pa.array([2, 0, 1]))
    assert held.get_many(turned).to_pylist() == [3.0, 1.0, 2.0]
