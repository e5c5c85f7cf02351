"""Keys are read from a database while the rows before them are processed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import state
from cairn.backends.overlay import make_table
from cairn.backends.rocksdb.backend import RocksBackend
from cairn.backends.rocksdb.database import RocksDatabase
from cairn.errors import EpochError
from cairn.types.codec import codec

KEYS = [f"k{number}" for number in range(100)]
GROUPS = [number % 4 for number in range(100)]


class Reads:
    """Every read of several keys: the thread that made it, and how many keys it had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        get_many = RocksDatabase.get_many

        def noted(database: RocksDatabase, keys: Sequence[bytes]) -> list[bytes | None]:
            thread = threading.current_thread()
            self.made.append(("main" if thread is threading.main_thread() else "ahead", len(keys)))
            assert thread is threading.main_thread() or self.may_go_on.wait(10)
            if self.error is not None:
                raise self.error
            return get_many(database, keys)

        monkeypatch.setattr(RocksDatabase, "get_many", noted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[RocksBackend]:
    """A backend whose rows are in the database only."""
    backend = RocksBackend(str(tmp_path / "state"), 64 << 20)
    backend.open_state("s", "value", codec("string"), codec("bigint"), None)
    backend.open_state("m", "map", codec("string"), codec("bigint"), codec("string"))
    for number, key in enumerate(KEYS):
        backend.rows("s", GROUPS[number]).promote({key: number})
        backend.rows("m", GROUPS[number]).promote({key: {"a": number}})
    backend.flush()
    forget(backend)
    yield backend
    backend.close()


def forget(backend: RocksBackend) -> None:
    for rows in backend.all_rows():
        rows.rotate()
        rows.rotate()


def held(backend: RocksBackend, name: str) -> list[Any]:
    return [backend.rows(name, group).get(key) for group, key in zip(GROUPS, KEYS, strict=True)]


def test_keys_read_ahead_are_in_memory_without_another_read(
    backend: RocksBackend, reads: Reads
) -> None:
    backend.read_ahead(GROUPS, KEYS)
    backend.prefetch(GROUPS, KEYS)
    assert reads.made == [("ahead", 200)]
    assert held(backend, "s") == list(range(100))
    assert len(reads.made) == 1


def test_the_caller_goes_on_while_keys_are_read(backend: RocksBackend, reads: Reads) -> None:
    backend.prefetch(GROUPS[:10], KEYS[:10])
    reads.may_go_on.clear()
    backend.read_ahead(GROUPS[10:], KEYS[10:])
    assert backend.rows("s", 1).get("k1") == 1
    reads.may_go_on.set()
    backend.prefetch(GROUPS[10:], KEYS[10:])
    assert held(backend, "s") == list(range(100))


def test_keys_that_left_memory_meanwhile_are_read_again(
    backend: RocksBackend, reads: Reads
) -> None:
    backend.prefetch(GROUPS[:50], KEYS[:50])
    backend.read_ahead(GROUPS, KEYS)
    forget(backend)
    backend.prefetch(GROUPS, KEYS)
    assert [made for made, _ in reads.made] == ["main", "ahead", "main"]
    assert held(backend, "s") == list(range(100))


def test_changes_written_between_read_and_use_are_not_lost(
    backend: RocksBackend, reads: Reads
) -> None:
    backend.rows("m", 1).promote({"k1": {"b": 7}})
    forget(backend)
    parts = backend.freeze()
    reads.may_go_on.clear()
    backend.read_ahead(GROUPS, KEYS)
    reads.may_go_on.set()
    for _ in backend.write_frozen(parts):
        pass
    backend.prefetch(GROUPS, KEYS)
    assert dict(backend.rows("m", 1).get("k1")) == {"a": 1, "b": 7}


def test_an_error_of_the_other_thread_is_raised_where_keys_are_needed(
    backend: RocksBackend, reads: Reads
) -> None:
    reads.error = EpochError("away", is_away=True)
    backend.read_ahead(GROUPS, KEYS)
    with pytest.raises(EpochError) as caught:
        backend.prefetch(GROUPS, KEYS)
    assert caught.value.facts["is_away"]
    reads.error = None
    backend.prefetch(GROUPS, KEYS)
    assert held(backend, "s") == list(range(100))


def test_a_read_that_nobody_needs_ends_and_is_forgotten(
    backend: RocksBackend, reads: Reads
) -> None:
    reads.error = EpochError("away", is_away=True)
    backend.read_ahead(GROUPS, KEYS)
    backend.drop_ahead()
    reads.error = None
    backend.rows("s", 1).promote({"k1": -1})
    backend.prefetch(GROUPS, KEYS)
    assert backend.rows("s", 1).get("k1") == -1


def test_an_epoch_that_left_memory_is_promoted_with_one_read_per_state(
    backend: RocksBackend, reads: Reads
) -> None:
    changes = {group: dict.fromkeys(KEYS[group::4], 7) for group in range(4)}
    entries = {group: {key: {"b": 7} for key in KEYS[group::4]} for group in range(4)}
    backend.prepare_promote("s", changes)
    backend.prepare_promote("m", entries)
    assert reads.made == [("main", 100), ("main", 100)]
    for group in range(4):
        backend.rows("s", group).promote({**changes[group], f"new{group}": 8})
        backend.rows("m", group).promote(entries[group])
    assert [count for _, count in reads.made[2:] if count > 1] == [], "each in its key group"
    assert len(backend.rows("s", 0)) == 26 and backend.rows("m", 0).entry_count() == 50
    assert held(backend, "s") == [7] * 100


def test_a_delta_is_applied_with_one_read_not_one_per_key_group(
    backend: RocksBackend, reads: Reads
) -> None:
    declaration = state.Map("string", "bigint")
    declaration.name = "m"
    table = make_table(declaration, pa.string(), backend, 4)
    table.assign(range(4))
    changes = {group: {key: {"b": 7} for key in KEYS[group::4]} for group in range(4)}
    table.apply(table.layout.batch(list(changes), list(changes.values())))
    assert [count for _, count in reads.made if count > 1] == [100]
    assert backend.rows("m", 3).get(KEYS[3]).copy() == {"a": 3, "b": 7}


def test_rows_whose_key_groups_alternate_are_all_applied(backend: RocksBackend) -> None:
    declaration = state.Value("bigint")
    declaration.name = "v"
    table = make_table(declaration, pa.string(), backend, 4)
    table.assign(range(4))
    pieces = [(0, {"a": 1, "b": 2}), (1, {"c": 3}), (0, {"d": 4, "a": 5})]
    table.apply(table.layout.batch([g for g, _ in pieces], [held for _, held in pieces]))
    rows = backend.rows("v", 0)
    assert [rows.get(key) for key in "abd"] == [5, 2, 4]
    assert backend.rows("v", 1).get("c") == 3
