"""What PostgreSQL's sink does beyond the contract: locks, fences, broken lines, keys, rules."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from cairn.errors import CommitError, EpochError, PlanError
from cairn.sinks import Postgres, SinkContext
from cairn.sinks.base import Sink, attempt_of
from cairn.sinks.postgres import ledger as postgres_ledger
from cairn.sinks.postgres import session as postgres_session
from cairn.sinks.postgres import sink as postgres_sink
from cairn.sinks.postgres import writer as postgres_writer
from cairn.types import parse_schema
from tests.places import PLACES, batch
from tests.places.base import prepared
from tests.places.postgres import PostgresPlace
from tests.servers import postgres
from tests.unit.sinks.postgres.proxy import Proxy

MODES = ["postgres", "postgres, upsert", "postgres, prepared"]


@pytest.fixture(params=MODES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = PLACES[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def append(tmp_path: Path) -> Iterator[PostgresPlace]:
    made = PostgresPlace(tmp_path)
    yield made
    made.close()


def _sinks(place: PostgresPlace) -> tuple[Sink, Sink]:
    return place.opened(), place.opened(in_slot=True)


# Sessions that were given up


def test_recovery_ends_a_session_that_is_still_inside_a_closed_epoch(place: PostgresPlace) -> None:
    """As of a slot whose machine is gone while the server does not know yet."""
    driver, slot = _sinks(place)
    zombie = slot.writer(2, 0, 0)
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
    driver, slot = _sinks(place)
    other_driver = place.opened("job", "other")
    other = place.opened("job", "other", in_slot=True)
    writers = [(slot, driver, slot.writer(7, 0, 0)), (other, other_driver, other.writer(2, 0, 0))]
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
    driver, slot = _sinks(place)
    driver.recover(5)
    writer = slot.writer(4, 0, 0)
    writer.write(batch((1, "a")))
    with pytest.raises(EpochError, match="epoch 4 is closed"):
        writer.prepare()
    assert place.leftovers() == []
    driver.commit(5, [prepared(slot, 5, (1, "a"))])
    assert place.seen(driver) == [(1, "a")]
    slot.close()
    driver.close()


def test_publishing_does_not_wait_for_a_session_that_still_writes(place: PostgresPlace) -> None:
    driver, slot = _sinks(place)
    zombie = place.opened(in_slot=True).writer(2, 0, 0)
    zombie.write(batch((1, "zombie")))
    driver.commit(2, [prepared(slot, 2, (2, "a"), attempt=1)])
    assert place.seen(driver) == [(2, "a")]
    zombie.abort()
    assert place.leftovers() == []


def test_a_slot_keeps_one_connection_over_epochs(place: PostgresPlace) -> None:
    driver, slot = _sinks(place)
    for epoch in range(2, 8):
        driver.commit(epoch, [prepared(slot, epoch, (epoch, "x"), subtask=s) for s in range(3)])
    found = place._asked(
        "select count(*) from pg_stat_activity where datname = current_database()"
        f" and application_name like 'cairn:{postgres_ledger.key_of(driver.context)}:-:j/out%'"
    )
    assert found == [(2,)]
    slot.close()
    driver.close()
    assert place.connections() == []


# What a commit removes


def test_what_failed_attempts_left_goes_with_the_next_commit(place: PostgresPlace) -> None:
    """Of N slots one dies after the others have prepared, epoch after epoch; the driver lives."""
    driver, slot = _sinks(place)
    for epoch in range(2, 6):
        for s in range(3):
            prepared(slot, epoch, (s, "given up"), subtask=s)
        named = [
            prepared(slot, epoch, (s, f"{epoch}"), subtask=s, attempt=attempt_of(1, 0))
            for s in range(4)
        ]
        driver.commit(epoch, named)
        assert len(place.leftovers()) in (3, 6), "more than one epoch's"
    driver.commit(6, [prepared(slot, 6, (9, "last"))])
    assert place.leftovers() == []
    assert len(place.rows(driver)) == (5 if place.is_keyed else 17)
    slot.close()
    driver.close()


def test_a_slot_given_up_for_dead_is_told_so_after_the_next_commit(place: PostgresPlace) -> None:
    driver, slot = _sinks(place)
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
    driver, slot = _sinks(place)
    for part in range(3):
        piece = prepared(slot, 2, (part, "x"), attempt=attempt_of(0, part << 20))
        driver.commit(2, [piece], part=part)
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
    driver, slot = _sinks(place)
    prepared(slot, 2, (1, "given up"))
    ((piece,),) = place._asked(f"select place from {place.schema}.cairn_staged")
    with psycopg.connect(place.uri) as other:
        other.execute(f"select from {piece}".encode())
        driver.recover(3)
        driver.commit(3, [prepared(slot, 3, (2, "b"))])
        assert place.seen(driver) == [(2, "b")] and place.leftovers() != []
    driver.commit(4, [prepared(slot, 4, (3, "c"))])
    assert place.leftovers() == []
    for opened in (slot, driver, place):
        opened.close()


# Settings that change


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize("then", MODES)
def test_an_epoch_is_published_as_it_was_prepared_when_the_mode_has_changed(
    tmp_path: Path, then: str, is_published: bool
) -> None:
    for before in MODES:
        place: Any = PLACES[before](tmp_path)
        mode = PLACES[then].mode  # type: ignore[attr-defined]
        old, slot = _sinks(place)
        if mode == "upsert" and not place.is_keyed:
            place.outside.execute(f"alter table {place.schema}.rows add primary key (k)")
        keys = (1, 1) if place.is_keyed else (1, 2)
        pieces = [prepared(slot, 2, (keys[0], "a"), (keys[1], "b"))]
        if is_published:
            old.commit(2, pieces)
        new = Postgres(
            place.uri, f"{place.schema}.rows", mode=mode, key="k" if mode == "upsert" else ()
        )
        new.open(place.context(in_slot=False))
        new.commit(2, pieces)
        new.recover(3)
        assert place.seen(new) == ([(1, "b")] if place.is_keyed else [(1, "a"), (2, "b")])
        assert place.leftovers() == []
        for opened in (slot, old, new, place):
            opened.close()


def test_an_epoch_staged_in_another_schema_is_refused_with_where_it_was_looked_for(
    place: PostgresPlace,
) -> None:
    driver, slot = _sinks(place)
    piece = prepared(slot, 2, (1, "a"))
    place.outside.execute("drop schema if exists elsewhere cascade; create schema elsewhere")
    moved = Postgres(place.uri, f"{place.schema}.rows", schema="elsewhere")
    moved.open(place.context(in_slot=False))
    if place.mode == "prepared":
        place.outside.execute(f"rollback prepared '{piece['gid']}'")
    with pytest.raises(CommitError, match=r"in schema 'elsewhere'[\s\S]*schema= .* before"):
        moved.commit(2, [piece])
    for sink in (driver, slot, moved):
        sink.close()


def test_a_target_that_was_renamed_is_not_called_given_up(append: PostgresPlace) -> None:
    driver, slot = _sinks(append)
    piece = prepared(slot, 2, (1, "a"))
    append.outside.execute(f"alter table {append.schema}.rows rename to other")
    with pytest.raises(CommitError, match=r"could not publish epoch 2[\s\S]*rows\" does not exist"):
        driver.commit(2, [piece])
    append.outside.execute(f"alter table {append.schema}.other rename to rows")
    driver.commit(2, [piece])
    assert append.seen(driver) == [(1, "a")]
    slot.close()
    driver.close()


# Two drivers


def test_an_older_driver_that_goes_on_within_a_commit_adds_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a task that runs twice has prepared its transaction again, and died."""
    place: Any = PLACES["postgres, prepared"](tmp_path)
    (older, slot), newer = _sinks(place), place.opened()
    zombie = place.opened(in_slot=True)
    pieces = [prepared(slot, 2, (s, "x"), subtask=s) for s in range(2)]
    passed = []

    def stalled(point: str) -> None:
        if point == "driver.sink.piece" and not passed:
            passed.append(point)
            newer.commit(2, pieces)
            newer.recover(3)
            with monkeypatch.context() as dying:
                # Dead before it could look whether its epoch is closed.
                dying.setattr(postgres_writer, "_last", lambda cursor: 0)
                prepared(zombie, 2, (1, "x"), subtask=1)

    monkeypatch.setattr(postgres_sink, "crash_point", stalled)
    older.commit(2, pieces)
    assert passed
    assert place.seen(older) == [(0, "x"), (1, "x")]
    newer.commit(3, [prepared(slot, 3, (2, "y"))])
    assert place.leftovers() == []
    for opened in (slot, zombie, older, newer, place):
        opened.close()


def _at_once(*calls: Callable[[], None]) -> list[CommitError]:
    start, failed = threading.Barrier(len(calls)), []

    def act(call: Callable[[], None]) -> None:
        start.wait()
        try:
            call()
        except CommitError as error:
            failed.append(error)

    threads = [threading.Thread(target=act, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_what_the_newer_driver_gives_up_the_older_one_publishes_whole_or_is_refused(
    place: PostgresPlace,
) -> None:
    """Both at once, on real transactions."""
    (older, slot), newer = _sinks(place), place.opened()
    seen = 0
    for epoch in range(2, 12):
        rows = [(10 * epoch + s, "x") for s in range(4)]
        pieces = [prepared(slot, epoch, row, subtask=s) for s, row in enumerate(rows)]
        _at_once(
            partial(older.commit, epoch, pieces),
            partial(newer.recover, epoch + 1),
        )
        newer.recover(epoch + 1)
        added, seen = len(place.rows(older)) - seen, len(place.rows(older))
        assert added in ((0, 4) if older.shows == "epochs" else range(5))
        with pytest.raises(CommitError) if added < 4 else nullcontext():
            older.commit(epoch, pieces)
        assert len(place.rows(older)) == seen
        assert place.leftovers() == []
    for sink in (older, newer, slot):
        sink.close()


def test_a_fenced_driver_that_commits_while_the_newer_one_does_adds_nothing(
    place: PostgresPlace,
) -> None:
    (older, slot), newer = _sinks(place), place.opened()
    expected = []
    for epoch in range(2, 8):
        rows = [(10 * epoch + s, "x") for s in range(3)]
        pieces = [prepared(slot, epoch, row, subtask=s) for s, row in enumerate(rows)]

        def take_over(epoch: int = epoch, pieces: Any = pieces) -> None:
            # Called again until it succeeds: the other may be in the middle of a piece.
            for _ in range(100):
                with suppress(CommitError):
                    newer.commit(epoch, pieces)
                    newer.recover(epoch + 1)
                    return

        _at_once(partial(older.commit, epoch, pieces), take_over)
        older.commit(epoch, pieces)
        expected += rows
        assert place.seen(newer) == expected
        assert place.leftovers() == []
    for sink in (older, newer, slot):
        sink.close()


def test_what_the_newer_driver_gave_up_is_refused_with_what_to_do(place: PostgresPlace) -> None:
    older, slot = _sinks(place)
    newer = place.opened()
    piece = prepared(slot, 2, (1, "a"))
    newer.recover(3)
    for _ in range(2):
        with pytest.raises(CommitError, match=r"cannot publish epoch 2: .* gone[\s\S]*next:"):
            older.commit(2, [piece])
    newer.commit(3, [prepared(slot, 3, (2, "b"))])
    assert place.seen(newer) == [(2, "b")]
    for sink in (older, newer, slot):
        sink.close()


def test_drivers_that_start_at_once_make_the_tables_once(tmp_path: Path) -> None:
    uri = postgres().new_database()
    start, failed = threading.Barrier(6), []

    def open_sink(number: int) -> None:
        sink = Postgres(uri, "fresh", create=True)
        start.wait()
        try:
            sink.open(SinkContext(f"job {number % 3}", "j", "out", parse_schema("k long")))
        except Exception as error:
            failed.append(error)
        sink.close()

    threads = [threading.Thread(target=open_sink, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# Lines that break


# What is sent when the server publishes: everything at once, or piece by piece and then the mark.
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
        driver, other = _sinks(place)
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
    driver, slot = _sinks(place)
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
        with pytest.raises(PlanError, match="cannot use PostgreSQL") as unopened:
            place.opened()
        assert driver.is_away(unopened.value)
    finally:
        postgres().start()
    driver.commit(3, pieces)
    driver.commit(4, [prepared(slot, 4, (4, "c"))])
    assert place.seen(driver) == [(1, "a"), (2, "b"), (3, "b"), (4, "c")]
    assert place.leftovers() == []
    slot.close()
    driver.close()


def test_an_idle_connection_the_server_has_ended_is_replaced(place: PostgresPlace) -> None:
    driver, slot = _sinks(place)
    driver.commit(2, [prepared(slot, 2, (1, "a"))])
    place._asked(
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
    driver, slot = _sinks(append)
    piece = prepared(slot, 2, (1, "a"))
    with psycopg.connect(append.uri) as other:
        other.execute(f"lock table {append.schema}.rows in share mode")
        with pytest.raises(CommitError, match="lock timeout"):
            driver.commit(2, [piece])
    driver.commit(2, [piece])
    assert append.seen(driver) == [(1, "a")]
    slot.close()
    driver.close()


# Marks


def test_marks_are_bounded_and_what_they_proved_stays_proven(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_ledger, "MARKS_KEPT", 3)
    monkeypatch.setattr(postgres_sink, "_TRIM_EVERY", 2)
    driver, slot = _sinks(place)
    pieces = {epoch: [prepared(slot, epoch, (epoch, "x"))] for epoch in range(10, 30, 2)}
    for epoch, committables in pieces.items():
        driver.commit(epoch, committables)
    kept = place._asked(f"select count(*) from {place.schema}.cairn_marks")
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
    driver, slot = _sinks(append)
    driver.commit(2, [prepared(slot, 2, (1, "a"))], part=1)
    marks = append._asked(
        f"select job, sink, epoch, part, published_at <= now() from {append.schema}.cairn_marks"
    )
    assert marks == [("job", "out", 2, 1, True)]
    slot.close()
    driver.close()


# What is staged


def test_an_epoch_may_have_very_many_batches(place: PostgresPlace) -> None:
    driver, slot = _sinks(place)
    driver.commit(2, [prepared(slot, 2, (1, "a"), attempt=attempt_of(0, 5000 << 20))])
    assert place.seen(driver) == [(1, "a")]
    assert place.leftovers() == []
    slot.close()
    driver.close()


def test_a_trigger_may_leave_rows_out(append: PostgresPlace) -> None:
    driver, slot = _sinks(append)
    append.outside.execute(
        f"create function {append.schema}.odd() returns trigger language plpgsql as"
        " 'begin if new.k % 2 = 0 then return null; end if; return new; end';"
        f" create trigger odd before insert on {append.schema}.rows"
        f" for each row execute function {append.schema}.odd()"
    )
    driver.commit(2, [prepared(slot, 2, (1, "a"), (2, "b"))])
    assert append.seen(driver) == [(1, "a")]
    slot.close()
    driver.close()


def test_a_writer_that_has_failed_takes_no_more_rows(place: PostgresPlace) -> None:
    driver, slot = _sinks(place)
    writer = slot.writer(2, 0, 0)
    writer.write(batch((1, "a")))
    with pytest.raises(EpochError):
        writer.write(batch((2, "no \x00")))
    for act in (lambda: writer.write(batch((3, "c"))), writer.prepare):
        with pytest.raises(EpochError, match="sink 'out': this attempt at epoch 2 has failed"):
            act()
    writer.abort()
    assert place.leftovers() == []
    driver.commit(2, [prepared(slot, 2, (4, "d"), attempt=1)])
    assert place.seen(driver) == [(4, "d")]
    slot.close()
    driver.close()


def test_a_staged_row_that_is_missing_fails_the_whole_epoch(tmp_path: Path) -> None:
    for name in ("postgres", "postgres, upsert"):
        place: Any = PLACES[name](tmp_path)
        driver, slot = _sinks(place)
        pieces = [prepared(slot, 2, (s, "a"), (s + 10, "b"), subtask=s) for s in range(2)]
        ((piece,),) = place._asked(f"select place from {place.schema}.cairn_staged where subtask=1")
        place.outside.execute(f"delete from {piece} where k = 11")
        with pytest.raises(CommitError, match="subtask 1 staged 2 rows in pass 0, of which 1"):
            driver.commit(2, pieces)
        assert place.rows(driver) == []
        assert place._asked(f"select * from {place.schema}.cairn_marks") == []
        driver.recover(3)
        assert place.leftovers() == []
        for opened in (slot, driver, place):
            opened.close()


def test_many_pieces_are_published_and_dropped_a_few_at_a_time(
    append: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that drops a table holds several locks, of which a server has few."""
    for module in (postgres_ledger, postgres_sink):
        monkeypatch.setattr(module, "DROPS_MAX", 2)
    driver, slot = _sinks(append)
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
    found = append._asked("select c.relname from pg_class c where relname like 'cairn_piece%'")
    assert append._asked("select place from aside.cairn_staged") == [
        (f'"aside"."{name}"',) for (name,) in found if not name.endswith("_pkey")
    ]
    sink.commit(2, [piece])
    assert append.seen(sink) == [(1, "a")]
    made = "select tablename from pg_tables where schemaname = %s"
    assert append._asked(made, append.schema) == [("rows",)]
    sink.close()


def test_rules_for_single_rows_fail_the_epoch_not_the_publication(append: PostgresPlace) -> None:
    driver, slot = _sinks(append)
    append.outside.execute(
        f"alter table {append.schema}.rows alter s set not null, add check (k > 0),"
        " add extra int not null default 7, add constraint e check (extra < length(s) + 10)"
    )
    driver.close()
    driver.open(driver.context)
    slot = append.opened(in_slot=True)
    for row, said in [((1, None), "not-null"), ((-1, "a"), "check constraint")]:
        with pytest.raises(EpochError, match=said):
            prepared(slot, 2, row)
    driver.commit(2, [prepared(slot, 2, (1, "a"))])
    assert append._asked(f"select * from {append.schema}.rows") == [(1, "a", 7)]
    slot.close()
    driver.close()


def test_rows_a_unique_index_refuses_can_be_published_once_it_is_gone(
    append: PostgresPlace,
) -> None:
    driver, slot = _sinks(append)
    append.outside.execute(f"create unique index once on {append.schema}.rows (k)")
    piece = prepared(slot, 2, (1, "a"), (1, "b"))
    with pytest.raises(CommitError, match=r"epoch 2[\s\S]*unique constraint"):
        driver.commit(2, [piece])
    assert append.rows(driver) == []
    append.outside.execute(f"drop index {append.schema}.once")
    driver.commit(2, [piece])
    assert append.seen(driver) == [(1, "a"), (1, "b")]
    slot.close()
    driver.close()


# Keys


def test_of_each_key_the_last_row_of_the_epoch_is_kept(tmp_path: Path) -> None:
    place = PLACES["postgres, upsert"](tmp_path)
    driver, slot = place.opened(), place.opened(in_slot=True)
    driver.commit(2, [prepared(slot, 2, (1, "old"), (2, "old"))])
    writer = slot.writer(3, 0, 0)
    writer.write(batch((1, "a"), (3, "x"), (1, "b")))
    writer.write(batch((3, "y"), (1, "c"), (4, "z")))
    first = writer.prepare()
    later = prepared(slot, 3, (4, "pass 1"), attempt=attempt_of(0, 1))
    assert first is not None
    driver.commit(3, [later, first])
    assert place.seen(driver) == [(1, "c"), (2, "old"), (3, "y"), (4, "pass 1")]
    for opened in (slot, driver, place):
        opened.close()


def test_a_null_key_is_refused_by_name(tmp_path: Path) -> None:
    place = PLACES["postgres, upsert"](tmp_path)
    driver, slot = place.opened(), place.opened(in_slot=True)
    with pytest.raises(EpochError, match="sink 'out': column 'k' is a key and holds null"):
        prepared(slot, 2, (1, "a"), (None, "b"))
    assert place.leftovers() == []
    for opened in (slot, driver, place):
        opened.close()


def test_an_upsert_leaves_other_columns_alone_and_needs_none(append: PostgresPlace) -> None:
    append.outside.execute(
        f"create table {append.schema}.facts (a int, b text, note text, primary key (b, a))"
    )
    schema = parse_schema("a int, b string")
    sink = Postgres(append.uri, f"{append.schema}.facts", mode="upsert", key=["a", "b"])
    sink.open(SinkContext("job", "j", "facts", schema))
    for epoch in (2, 3):
        writer = sink.writer(epoch, 0, 0)
        writer.write(pa.RecordBatch.from_pydict({"a": [1, 1], "b": ["x", "x"]}, schema))
        committable = writer.prepare()
        assert committable is not None
        sink.commit(epoch, [committable])
        append.outside.execute(f"update {append.schema}.facts set note = 'kept'")
    assert append._asked(f"select * from {append.schema}.facts") == [(1, "x", "kept")]
    sink.close()


# Prepared transactions


def test_a_given_up_try_is_not_in_the_way_of_the_next_where_keys_are_unique(
    tmp_path: Path,
) -> None:
    place: Any = PLACES["postgres, prepared"](tmp_path)
    driver = place.opened()
    place.outside.execute(f"create unique index on {place.schema}.rows (k)")
    slots = [place.opened(in_slot=True) for _ in range(2)]
    prepared(slots[0], 2, (1, "a"))
    prepared(slots[0], 2, (2, "b"), subtask=1)
    # Another pass keeps its own.
    other = prepared(slots[0], 2, (3, "c"), attempt=attempt_of(0, 1))
    # The rows of both come to one subtask this time.
    named = prepared(slots[1], 2, (1, "a"), (2, "b"), attempt=attempt_of(1, 0))
    driver.commit(2, [named, other])
    assert place.seen(driver) == [(1, "a"), (2, "b"), (3, "c")]
    assert place.leftovers() == []
    for opened in (*slots, driver, place):
        opened.close()


def test_tries_do_not_pile_up_while_one_slot_cannot_reach_the_server(tmp_path: Path) -> None:
    place: Any = PLACES["postgres, prepared"](tmp_path)
    driver, slot = _sinks(place)
    for attempt in range(6):
        named = [prepared(slot, 2, (s, "x"), subtask=s, attempt=attempt) for s in range(2)]
        assert len(place.leftovers()) <= 4
    driver.commit(2, named)
    driver.commit(3, [prepared(slot, 3, (2, "y"))])
    assert place.seen(driver) == [(0, "x"), (1, "x"), (2, "y")]
    assert place.leftovers() == []
    for opened in (slot, driver, place):
        opened.close()


def test_names_of_transactions_fit_and_tell_the_epoch(tmp_path: Path) -> None:
    place: Any = PLACES["postgres, prepared"](tmp_path)
    driver = place.opened("j" * 200, "ü" * 200)
    slot = place.opened("j" * 200, "ü" * 200, in_slot=True)
    committable = prepared(slot, 10**12, (1, "a"), subtask=99999, attempt=attempt_of(999, 10**6))
    assert len(committable["gid"]) < 200 and ":1000000000000:99999:" in committable["gid"]
    driver.commit(10**12, [committable])
    assert place.seen(driver) == [(1, "a")]
    for opened in (slot, driver, place):
        opened.close()
