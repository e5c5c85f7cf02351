"""The ledger beside the rows: sessions that end, pieces that are dropped, marks that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from cairn.errors import EpochError
from cairn.sinks import Postgres
from cairn.sinks.base import Execution
from cairn.sinks.postgres import ledger as postgres_ledger
from cairn.sinks.postgres import sink as postgres_sink
from tests.places import PLACES, batch
from tests.places.base import prepared
from tests.places.postgres import PostgresPlace

# Sessions that were given up


def test_recovery_ends_a_session_that_is_still_inside_a_closed_epoch(place: PostgresPlace) -> None:
    """As of a slot whose machine is gone while the server does not know yet."""
    driver, slot = place.both()
    zombie = slot.writer(2, 0, Execution())
    zombie.write(batch((1, "a")))
    assert place.leftovers() != []
    driver.recover(3)
    assert place.leftovers() == []
    with pytest.raises(EpochError, match="sink 'out' could not be written"):
        zombie.write(batch((2, "b")))
        zombie.prepare()
    zombie.abort()
    # The slot goes on: it connects again.
    driver.commit(4, [prepared(slot, 4, (4, "d"))])
    assert place.seen(driver) == [(4, "d")]
    slot.close()
    driver.close()


def test_recovery_leaves_sessions_of_later_epochs_and_of_others_alone(place: PostgresPlace) -> None:
    driver, slot = place.both()
    other_driver = place.opened("job", "other")
    other = place.opened("job", "other", in_slot=True)
    writers = [
        (slot, driver, slot.writer(7, 0, Execution())),
        (other, other_driver, other.writer(2, 0, Execution())),
    ]
    for k, (_, _, writer) in enumerate(writers):
        writer.write(batch((k, "a")))
    driver.recover(7)
    for k, (_, sink, writer) in enumerate(writers):
        writer.write(batch((k + 10, "b")))
        committable = writer.prepare()
        assert committable is not None
        sink.commit(7 if k == 0 else 2, [committable])
    assert len(place.rows(driver)) == 4
    for sink in (driver, slot, other, other_driver):
        sink.close()


def test_a_slot_that_prepares_in_a_closed_epoch_is_told_so_and_leaves_nothing(
    place: PostgresPlace,
) -> None:
    driver, slot = place.both()
    driver.recover(5)
    writer = slot.writer(4, 0, Execution())
    writer.write(batch((1, "a")))
    with pytest.raises(EpochError, match="epoch 4 is closed"):
        writer.prepare()
    assert place.leftovers() == []
    driver.commit(5, [prepared(slot, 5, (1, "a"))])
    assert place.seen(driver) == [(1, "a")]
    slot.close()
    driver.close()


def test_publishing_does_not_wait_for_a_session_that_still_writes(place: PostgresPlace) -> None:
    driver, slot = place.both()
    zombie = place.opened(in_slot=True).writer(2, 0, Execution())
    zombie.write(batch((1, "zombie")))
    driver.commit(2, [prepared(slot, 2, (2, "a"), attempt=1)])
    assert place.seen(driver) == [(2, "a")]
    zombie.abort()
    assert place.leftovers() == []


def test_a_slot_keeps_one_connection_over_epochs(place: PostgresPlace) -> None:
    driver, slot = place.both()
    for epoch in range(2, 8):
        driver.commit(epoch, [prepared(slot, epoch, (epoch, "x"), subtask=s) for s in range(3)])
    found = place._query(
        "select count(*) from pg_stat_activity where datname = current_database()"
        f" and application_name like 'cairn:{postgres_ledger.key_of(driver.context)}:-:j/out%'"
    )
    assert found == [(2,)]
    slot.close()
    driver.close()
    assert place.connections() == []


# Leftovers that a commit removes


def test_what_failed_attempts_left_goes_with_the_next_commit(place: PostgresPlace) -> None:
    """In each epoch one slot dies after the others have prepared; the driver lives."""
    driver, slot = place.both()
    for epoch in range(2, 6):
        for s in range(3):
            prepared(slot, epoch, (s, "given up"), subtask=s)
        named = [prepared(slot, epoch, (s, f"{epoch}"), subtask=s, attempt=1) for s in range(4)]
        driver.commit(epoch, named)
        assert len(place.leftovers()) in (3, 6), "more than one epoch's"
    driver.commit(6, [prepared(slot, 6, (9, "last"))])
    assert place.leftovers() == []
    assert len(place.rows(driver)) == (5 if place.is_keyed else 17)
    slot.close()
    driver.close()


def test_a_slot_given_up_for_dead_is_told_so_after_the_next_commit(place: PostgresPlace) -> None:
    driver, slot = place.both()
    driver.commit(2, [prepared(slot, 2, (1, "a"))])
    driver.commit(3, [prepared(slot, 3, (2, "b"))])
    with pytest.raises(EpochError, match="epoch 2 is closed"):
        prepared(slot, 2, (3, "late"), subtask=1)
    assert place.leftovers() == []
    slot.close()
    driver.close()


def test_later_parts_of_an_epoch_are_taken_after_the_first_is_published(
    place: PostgresPlace,
) -> None:
    driver, slot = place.both()
    for part in range(3):
        piece = prepared(slot, 2, (part, "x"), round=part << 20)
        driver.commit(2, [piece], batch=part)
    assert len(place.rows(driver)) == 3
    assert place.leftovers() == []
    slot.close()
    driver.close()


@pytest.mark.parametrize("name", ["postgres", "postgres, upsert"])
def test_a_piece_that_somebody_holds_is_dropped_when_it_is_free(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a driver that was given up in the middle of a long publication."""
    monkeypatch.setattr(postgres_ledger, "DROP_WAIT", "50ms")
    place: Any = PLACES[name](tmp_path)
    driver, slot = place.both()
    prepared(slot, 2, (1, "given up"))
    ((piece,),) = place._query(f"select place from {place.schema}.cairn_staged")
    with psycopg.connect(place.uri) as other:
        other.execute(f"select from {piece}".encode())
        driver.recover(3)
        driver.commit(3, [prepared(slot, 3, (2, "b"))])
        assert place.seen(driver) == [(2, "b")] and place.leftovers() != []
    driver.commit(4, [prepared(slot, 4, (3, "c"))])
    assert place.leftovers() == []
    for opened in (slot, driver, place):
        opened.close()


# Marks


def test_marks_are_bounded_and_what_they_proved_stays_proven(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_ledger, "MARKS_KEPT", 3)
    monkeypatch.setattr(postgres_sink, "_TRIM_EVERY", 2)
    driver, slot = place.both()
    pieces = {epoch: [prepared(slot, epoch, (epoch, "x"))] for epoch in range(10, 30, 2)}
    for epoch, committables in pieces.items():
        driver.commit(epoch, committables)
    kept = place._query(f"select count(*) from {place.schema}.cairn_marks")
    assert kept[0][0] in (3, 4)
    rows = place.seen(driver)
    assert len(rows) == len(pieces)
    newest = place.opened()
    for sink in (driver, newest):
        for epoch, committables in pieces.items():
            sink.commit(epoch, committables)
    newest.recover(30)
    assert place.seen(driver) == rows
    assert place.leftovers() == []
    for sink in (driver, newest, slot):
        sink.close()


def test_the_time_of_publication_can_be_read_beside_the_rows(append: PostgresPlace) -> None:
    driver, slot = append.both()
    driver.commit(2, [prepared(slot, 2, (1, "a"))], batch=1)
    marks = append._query(
        f"select job, sink, epoch, part, published_at <= now() from {append.schema}.cairn_marks"
    )
    assert marks == [("job", "out", 2, 1, True)]
    slot.close()
    driver.close()


def test_many_pieces_are_published_and_dropped_a_few_at_a_time(
    append: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that drops a table holds several locks, of which a server has few."""
    for module in (postgres_ledger, postgres_sink):
        monkeypatch.setattr(module, "DROPS_MAX", 2)
    driver, slot = append.both()
    pieces = [prepared(slot, 2, (s, "a"), subtask=s) for s in range(5)]
    with monkeypatch.context() as dying:
        dying.setattr(postgres_ledger.Ledger, "drop", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.commit(2, pieces)
    assert len(append.rows(driver)) == 5 and len(append.leftovers()) == 10
    driver.commit(2, pieces)
    assert len(append.rows(driver)) == 5 and append.leftovers() == []
    for epoch in (3, 4):
        for s in range(3):
            prepared(slot, epoch, (s, "given up"), subtask=s)
    driver.recover(5)
    assert append.leftovers() == []
    slot.close()
    driver.close()


def test_marks_and_staged_rows_may_be_in_a_schema_of_their_own(append: PostgresPlace) -> None:
    append.outside.execute("drop schema if exists aside cascade; create schema aside")
    sink = Postgres(append.uri, f"{append.schema}.rows", create=True, schema="aside")
    sink.open(append.context(in_slot=False))
    piece = prepared(sink, 2, (1, "a"))
    found = append._query("select c.relname from pg_class c where relname like 'cairn_piece%'")
    assert append._query("select place from aside.cairn_staged") == [
        (f'"aside"."{name}"',) for (name,) in found if not name.endswith("_pkey")
    ]
    sink.commit(2, [piece])
    assert append.seen(sink) == [(1, "a")]
    made = "select tablename from pg_tables where schemaname = %s"
    assert append._query(made, append.schema) == [("rows",)]
    sink.close()
