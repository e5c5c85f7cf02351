"""Rows with versions: histories, layers, fences, and the JSON that others read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cairn.backends.cached.described import StoredState
from cairn.backends.cached.numbers import PREFIX, state_number
from cairn.backends.postgres.versions import _visible
from cairn.backends.versioned.contract import (
    Epochs,
    FencedError,
    Layer,
    Range,
    VersionStore,
    Writing,
    place_of,
)
from cairn.backends.versioned.database import History, VersionedDatabase, extend
from cairn.backends.versioned.kinds import kind_of_url
from cairn.ids import new_id
from tests import sqlite_versions
from tests.backends import VERSIONED, backend_name

STATE = StoredState(kind="value", type="bigint", entry_type=None, key_type="bigint", counts={})
NUMBERS = {"s": state_number("op", "s", STATE)}
pack = msgspec.msgpack.encode


class Table:
    """The rows of a job of its own."""

    def __init__(self, backend: str) -> None:
        self.schema = place_of(new_id())
        self.backend = backend
        self.versions = self.reopen(self.schema)

    def reopen(self, place: str) -> VersionStore:
        url = backend_name(self.backend)
        kind = kind_of_url(url)
        assert kind is not None
        return kind.open(kind.address_of(url), place, "test")

    def close(self) -> None:
        self.versions.close()

    def claim(self, term: int, epoch: int, groups: range = range(2)) -> Writing:
        writing = Writing("op", tuple(groups), term, epoch)
        self.versions.claim(writing, {"s": STATE})
        return writing

    def write(self, epoch: int, rows: dict[int, int | None], term: int = 1) -> None:
        prefix = PREFIX.pack(0, NUMBERS["s"])
        ops = [(prefix + pack(k), None if v is None else pack(v)) for k, v in rows.items()]
        writing = self.claim(term, epoch)
        self.versions.write(writing, ops)
        self.versions.finish(writing, {})

    def read(self, history: History) -> dict[int, int]:
        database = VersionedDatabase(self.versions, NUMBERS, history)
        prefix = database.prefix("s", 0)
        scanned = {
            msgspec.msgpack.decode(key[len(prefix) :]): msgspec.msgpack.decode(raw)
            for key, raw in database.scan(prefix)
        }
        got = database.get_many([prefix + pack(key) for key in range(6)])
        found = {k: msgspec.msgpack.decode(raw) for k, raw in enumerate(got) if raw is not None}
        assert found == scanned, "a scan and a look-up agree"
        return scanned

    def of(self, *epochs: tuple[int, int]) -> History:
        return (Layer(self.schema, tuple(Epochs(first, last, 1) for first, last in epochs)),)


@pytest.fixture(params=VERSIONED)
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    made = Table(request.param)
    yield made
    made.close()


def test_the_newest_version_that_counts_wins(table: Table) -> None:
    table.write(3, {1: 10, 2: 20})
    table.write(5, {1: 11, 3: 30})
    table.write(8, {2: None, 3: 31})
    assert table.read(()) == {}
    assert table.read(table.of((3, 3))) == {1: 10, 2: 20}
    assert table.read(table.of((3, 7))) == {1: 11, 2: 20, 3: 30}
    assert table.read(table.of((3, 8))) == {1: 11, 3: 31}
    assert table.read(table.of((3, 3), (8, 8))) == {1: 10, 3: 31}, "epoch 5 was rolled back"


def test_a_layer_decides_before_those_below_it_even_by_a_deletion(table: Table) -> None:
    branch = Table(table.backend)
    table.write(9, {1: 10, 2: 20, 3: 30})
    branch.write(4, {1: 11, 2: None, 4: 40})
    assert branch.read((*branch.of((4, 4)), *table.of((9, 9)))) == {1: 11, 3: 30, 4: 40}
    branch.close()


def test_a_history_grows_by_the_epochs_of_a_term_or_by_a_gap() -> None:
    one = extend((), "a", 1, 3)
    assert one == (Layer("a", (Epochs(3, 3, 1),)),)
    two = extend(one, "a", 1, 6)
    assert two[0].epochs == (Epochs(3, 6, 1),) and _visible(two[0]) == "{[3,6]}"
    assert extend(two, "a", 8, 9)[0].epochs == (Epochs(3, 6, 1), Epochs(9, 9, 8))
    assert extend(two, "a", 1, 9, claimed=6)[0].epochs == (Epochs(3, 9, 1),)
    assert extend(two, "a", 1, 9, claimed=8)[0].epochs == (Epochs(3, 6, 1), Epochs(9, 9, 1))
    assert extend(two, "b", 8, 9) == (Layer("b", (Epochs(9, 9, 8),)), *two)


@pytest.mark.parametrize(("term", "epoch"), [(1, 9), (2, 4)])
def test_an_older_writer_writes_nothing(table: Table, term: int, epoch: int) -> None:
    late = table.claim(term, epoch)
    table.write(5, {1: 10}, term=2)
    prefix = PREFIX.pack(0, NUMBERS["s"])
    for refused in (
        lambda: table.versions.write(late, [(prefix + pack(1), pack(99))]),
        lambda: table.versions.finish(late, {}),
        lambda: table.claim(term, epoch),
    ):
        with pytest.raises(FencedError):
            refused()
    assert table.read(table.of((0, 100))) == {1: 10}


def test_a_claim_keeps_earlier_epochs_out_and_returns_what_was_claimed_before(table: Table) -> None:
    early = table.claim(1, 5, range(1))
    later = Writing("op", (0, 1), 1, 8)
    assert dict(table.versions.claim(later, {"s": STATE})).get(0) == 5
    ops = [(PREFIX.pack(0, NUMBERS["s"]) + pack(1), pack(10))]
    with pytest.raises(FencedError):
        table.versions.write(early, ops)
    table.versions.write(later, ops)
    assert table.read(table.of((5, 8))) == {1: 10}
    assert set(table.versions.claim(later._replace(epoch=9), {"s": STATE}).values()) == {8}
    # A later term may go back to an epoch before those that were undone.
    after = later._replace(term=10, epoch=6)
    assert set(table.versions.claim(after, {"s": STATE}).values()) == {9}
    table.versions.write(after, ops)


def test_writing_an_epoch_again_changes_nothing(table: Table) -> None:
    for _ in range(2):
        table.write(3, {1: 10, 2: None})
    assert table.read(table.of((3, 3))) == {1: 10}


def test_a_scan_reads_page_by_page(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.backends.versioned.database.PAGE_ROWS", 3)
    rows = {key: key * 2 for key in range(-5, 6)}
    table.write(3, rows)  # type: ignore[arg-type]
    table.write(4, {0: None, 2: None, 5: 99})
    database = VersionedDatabase(table.versions, NUMBERS, table.of((3, 4)))
    prefix = database.prefix("s", 0)
    found = {msgspec.msgpack.decode(key[6:]) for key, _ in database.scan(prefix)}
    assert found == rows.keys() - {0, 2}


def versions_left(table: Table) -> dict[int, dict[int, int]]:
    """Return what each epoch alone shows."""
    return {epoch: table.read(table.of((epoch, epoch))) for epoch in (3, 5, 8)}


def test_older_versions_are_removed_and_noted_and_then_everything(table: Table) -> None:
    table.write(3, {1: 10, 2: 20, 3: 30})
    table.write(5, {1: 11})
    table.write(8, {2: None, 4: 40})
    part = Range("op", (NUMBERS["s"],), (0, 1))
    versions = table.versions
    assert versions.list_epochs(part, 8) == [3, 5, 8] and versions.list_epochs(part, 5) == [3, 5]
    assert versions.remove_older(part, 5, with_deletions=False) == 1
    assert versions.remove_older(part, 8, with_deletions=False) == 1
    assert versions_left(table) == {3: {3: 30}, 5: {1: 11}, 8: {4: 40}}
    assert versions.remove_older(part, 8, with_deletions=True) == 1, "the deletion"
    versions.note_collected(part, 5)
    assert versions.list_epochs(part, 8) == [8]
    assert versions.remove_epoch(part, 5) == 1
    assert versions.remove_epoch(part._replace(groups=(1,)), 8) == 0
    assert table.read(table.of((0, 9))) == {3: 30, 4: 40}
    assert versions.find_missing(table.schema, "op", (0, 1)) == ""
    assert versions.find_missing(table.schema, "op", (0, 2)) and versions.find_missing(
        table.schema, "other", (0,)
    )
    versions.drop()
    versions.drop()
    with contextlib.closing(table.reopen(table.schema)) as table.versions:
        table.write(3, {5: 50})
        assert table.read(table.of((0, 9))) == {5: 50}


def test_rows_of_another_place_are_not_touched(table: Table) -> None:
    table.write(3, {1: 10})
    other = Table(table.backend)
    other.write(3, {1: 99})
    other.versions.drop()
    other.versions.close()
    assert table.read(table.of((3, 3))) == {1: 10}


def test_a_further_database_needs_at_most_300_lines() -> None:
    assert len(Path(sqlite_versions.__file__).read_text().splitlines()) <= 300
