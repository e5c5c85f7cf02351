"""A server that is out of reach for a moment, or for long: nothing is lost and nothing repeated."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cairn.errors import CommitError, EpochError
from cairn.sinks import Postgres
from cairn.sinks.base import refuse_if_away
from cairn.storage import postgres_session
from tests.places.base import prepared
from tests.places.postgres import PostgresPlace
from tests.servers import postgres
from tests.unit.sinks.postgres.proxy import Proxy

# Statements that publish: everything at once, or piece by piece and then the mark.
DECISIVE = {
    "append": [b"do $cairn"],
    "upsert": [b"do $cairn"],
    "prepared": [b"commit prepared", b"insert into"],
}


def test_a_commit_whose_answer_was_lost_is_not_repeated(place: PostgresPlace) -> None:
    expected = []
    with tempfile.TemporaryDirectory() as folder:
        proxy = Proxy(Path(folder), place.uri)
        slot = place.opened(in_slot=True)
        driver: Any = place.make()
        driver._dsn = proxy.dsn
        driver.open(place.context(in_slot=False))
        for epoch, words in enumerate(DECISIVE[place.mode], 2):
            rows = [(10 * epoch + s, "x") for s in range(2)]
            pieces = [prepared(slot, epoch, row, subtask=s) for s, row in enumerate(rows)]
            proxy.armed = words
            with pytest.raises(CommitError, match=f"could not publish epoch {epoch}"):
                driver.commit(epoch, pieces)
            driver.commit(epoch, pieces)
            expected += rows
            assert place.seen(driver) == expected
        assert proxy.lost == len(DECISIVE[place.mode])
        for opened in (proxy, slot, driver):
            opened.close()
    assert place.leftovers() == [] and place.connections() == []


@pytest.mark.parametrize("words", [b"insert into", b"from stdin"])
def test_a_slot_that_loses_its_line_is_followed_by_one_that_stages_once(
    place: PostgresPlace, words: bytes
) -> None:
    """Also when all was durable, and only the answer to that was lost."""
    with tempfile.TemporaryDirectory() as folder:
        proxy = Proxy(Path(folder), place.uri)
        driver, other = place.both()
        slot: Any = place.make()
        slot._dsn = proxy.dsn
        slot.open(place.context(in_slot=True))
        proxy.armed = words
        with pytest.raises(EpochError, match="could not be written"):
            prepared(slot, 2, (1, "a"))
        driver.commit(2, [prepared(other, 2, (1, "a"))])
        assert proxy.lost == 1
        driver.commit(3, [prepared(slot, 3, (2, "b"))])
        assert place.seen(driver) == [(1, "a"), (2, "b")]
        for opened in (proxy, slot, other, driver):
            opened.close()
    assert place.leftovers() == []


def test_a_server_that_goes_away_and_returns_is_reached_again(place: PostgresPlace) -> None:
    driver, slot = place.both()
    driver.commit(2, [prepared(slot, 2, (1, "a"))])
    pieces = [prepared(slot, 3, (s, "b"), subtask=s) for s in (2, 3)]
    postgres().stop()
    try:
        for _ in range(2):
            with pytest.raises(CommitError, match="could not publish epoch 3") as away:
                driver.commit(3, pieces)
            assert driver.is_away(away.value)
        with pytest.raises(EpochError, match="could not be written") as unwritten:
            prepared(slot, 4, (4, "c"))
        assert slot.is_away(unwritten.value)
        with pytest.raises(CommitError, match=r"cannot be reached[\s\S]*next: repair") as unopened:
            place.opened()
        assert driver.is_away(unopened.value)
        with (
            pytest.raises(CommitError, match="cannot be reached") as unrecovered,
            refuse_if_away("out", driver),
        ):
            driver.recover(4)
        assert driver.is_away(unrecovered.value)
    finally:
        postgres().start()
    driver.commit(3, pieces)
    driver.commit(4, [prepared(slot, 4, (4, "c"))])
    assert place.seen(driver) == [(1, "a"), (2, "b"), (3, "b"), (4, "c")]
    assert place.leftovers() == []
    slot.close()
    driver.close()


def test_an_idle_connection_the_server_has_ended_is_replaced(place: PostgresPlace) -> None:
    driver, slot = place.both()
    driver.commit(2, [prepared(slot, 2, (1, "a"))])
    place._query(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where datname = current_database() and application_name like 'cairn:%'"
    )
    driver.commit(3, [prepared(slot, 3, (2, "b"))])
    assert place.seen(driver) == [(1, "a"), (2, "b")]
    slot.close()
    driver.close()


@pytest.mark.parametrize(
    ("cause", "is_away"),
    [
        (psycopg.OperationalError("connection refused"), True),
        (psycopg.InterfaceError("the connection is closed"), True),
        (psycopg.errors.ConnectionTimeout("timeout"), True),
        (psycopg.errors.AdminShutdown("terminating connection"), True),
        (psycopg.errors.CannotConnectNow("starting up"), True),
        (psycopg.errors.TooManyConnections("too many clients"), True),
        (ConnectionRefusedError("refused"), True),
        (TimeoutError("too late"), True),
        (psycopg.errors.LockNotAvailable("lock timeout"), False),
        (psycopg.errors.OutOfMemory("out of shared memory"), False),
        (psycopg.errors.UniqueViolation("duplicate key"), False),
        (psycopg.errors.UndefinedTable("no such relation"), False),
        (psycopg.errors.NotNullViolation("null"), False),
        (ValueError("another"), False),
    ],
)
def test_a_server_out_of_reach_is_told_from_one_that_refuses(
    cause: Exception, is_away: bool
) -> None:
    sink = Postgres(table="rows")
    assert sink.is_away(cause) == is_away
    for kind in (CommitError, EpochError):
        wrapped = kind("sink 'out' could not be written")
        assert not sink.is_away(wrapped)
        wrapped.__cause__ = cause
        assert sink.is_away(wrapped) == is_away


def test_a_lock_that_somebody_holds_fails_the_commit_until_it_is_free(
    append: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(postgres_session._SERVER, "lock_timeout", "50ms")
    driver, slot = append.both()
    piece = prepared(slot, 2, (1, "a"))
    with psycopg.connect(append.uri) as other:
        other.execute(f"lock table {append.schema}.rows in share mode")
        with pytest.raises(CommitError, match="lock timeout"):
            driver.commit(2, [piece])
    driver.commit(2, [piece])
    assert append.seen(driver) == [(1, "a")]
    slot.close()
    driver.close()
