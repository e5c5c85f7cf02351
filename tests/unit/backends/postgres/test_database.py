"""Rows with versions: histories, layers, fences, and the JSON that others read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg
import pytest

from cairn.backends.cached.described import StoredState
from cairn.backends.cached.numbers import PREFIX, state_number
from cairn.backends.postgres.database import (
    Epochs,
    History,
    Layer,
    PostgresDatabase,
    extend,
)
from cairn.backends.postgres.layout import schema_of
from cairn.backends.postgres.link import Link, address_of, parameters_of
from cairn.backends.postgres.writer import FencedError, Writer
from cairn.ids import new_id
from tests.backends import backend_name

STATE = StoredState(kind="value", type="bigint", entry_type=None, key_type="bigint", counts={})
NUMBERS = {"s": state_number("op", "s", STATE)}
pack = msgspec.msgpack.encode


class Table:
    """The rows of a job of its own."""

    def __init__(self) -> None:
        self.link = Link(address_of(parameters_of(backend_name("postgres"))), "test")
        self.schema = schema_of(new_id())

    def writer(self, term: int, epoch: int, groups: range = range(2)) -> Writer:
        writer = Writer(self.link, self.schema, "op", groups, term, epoch)
        writer.claim({"s": STATE})
        return writer

    def write(self, epoch: int, rows: dict[int, int | None], term: int = 1) -> None:
        prefix = PREFIX.pack(0, NUMBERS["s"])
        ops = [(prefix + pack(k), None if v is None else pack(v)) for k, v in rows.items()]
        writer = self.writer(term, epoch)
        writer.write(ops)
        writer.finish({})

    def read(self, history: History) -> dict[int, int]:
        database = PostgresDatabase(self.link, NUMBERS, history)
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


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.link.close()


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
    branch = Table()
    table.write(9, {1: 10, 2: 20, 3: 30})
    branch.write(4, {1: 11, 2: None, 4: 40})
    assert branch.read((*branch.of((4, 4)), *table.of((9, 9)))) == {1: 11, 3: 30, 4: 40}
    branch.link.close()


def test_a_history_grows_by_the_epochs_of_a_term_or_by_a_gap() -> None:
    one = extend((), "a", 1, 3)
    assert one == (Layer("a", (Epochs(3, 3, 1),)),)
    two = extend(one, "a", 1, 6)
    assert two[0].epochs == (Epochs(3, 6, 1),) and two[0].visible == "{[3,6]}"
    assert extend(two, "a", 8, 9)[0].epochs == (Epochs(3, 6, 1), Epochs(9, 9, 8))
    assert extend(two, "b", 8, 9) == (Layer("b", (Epochs(9, 9, 8),)), *two)


@pytest.mark.parametrize(("term", "epoch"), [(1, 9), (2, 4)])
def test_an_older_writer_writes_nothing(table: Table, term: int, epoch: int) -> None:
    late = table.writer(term, epoch)
    table.write(5, {1: 10}, term=2)
    prefix = PREFIX.pack(0, NUMBERS["s"])
    for refused in (
        lambda: late.write([(prefix + pack(1), pack(99))]),
        lambda: late.finish({}),
        lambda: table.writer(term, epoch),
    ):
        with pytest.raises(FencedError):
            refused()
    assert table.read(table.of((0, 100))) == {1: 10}


def test_writing_an_epoch_again_changes_nothing(table: Table) -> None:
    for _ in range(2):
        table.write(3, {1: 10, 2: None})
    assert table.read(table.of((3, 3))) == {1: 10}


def test_a_scan_reads_page_by_page(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.backends.postgres.database._PAGE_ROWS", 3)
    rows = {key: key * 2 for key in range(-5, 6)}
    table.write(3, rows)  # type: ignore[arg-type]
    table.write(4, {0: None, 2: None, 5: 99})
    database = PostgresDatabase(table.link, NUMBERS, table.of((3, 4)))
    prefix = database.prefix("s", 0)
    found = {msgspec.msgpack.decode(key[6:]) for key, _ in database.scan(prefix)}
    assert found == rows.keys() - {0, 2}


VALUES: list[Any] = [
    None, True, False, 0, 127, 128, 65_536, 1 << 40, -1, -32, -33, -129, -40_000, -(1 << 40),
    (1 << 63) - 1, -(1 << 63), 0.0, 1.5, -2.25, 1e300, 5e-324, "", "é", "x" * 40, "x" * 70_000,
    [], [1, [2, "a"], None], list(range(20)), [[1, "a"], [2, "b"]],
]  # fmt: skip


def test_unpack_makes_json_of_every_packed_value(table: Table) -> None:
    table.write(1, {1: 1})
    with psycopg.connect(backend_name("postgres")) as connection:
        for value in itertools.chain(VALUES):
            (found,) = connection.execute(
                f"select {table.schema}.unpack(%s)",
                [pack(value)],  # type: ignore[arg-type]
            ).fetchone() or (None,)
            assert (found == value and type(found) is type(value)) or found == pytest.approx(value)
        shown = f"select {table.schema}.unpack(%s)"
        for value, text in [(float("inf"), "Infinity"), (float("nan"), "NaN"), (b"\x01", "01")]:
            (found,) = connection.execute(shown, [pack(value)]).fetchone() or (None,)  # type: ignore[arg-type]
            assert found == text
