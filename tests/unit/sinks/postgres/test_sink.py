"""Epochs are published once and whole: by another mode, by an older driver, by several at once."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import CommitError
from cairn.sinks import Postgres, SinkContext
from cairn.sinks.postgres import sink as postgres_sink
from cairn.sinks.postgres import writer as postgres_writer
from cairn.types import parse_schema
from tests.at_once import at_once
from tests.places import PLACES
from tests.places.base import prepared
from tests.places.postgres import PostgresPlace
from tests.servers import postgres

MODES = [name for name in PLACES if name.startswith("postgres")]


# Settings that change


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize("then", MODES)
def test_an_epoch_is_published_as_it_was_prepared_when_the_mode_has_changed(
    tmp_path: Path, then: str, is_published: bool
) -> None:
    for before in MODES:
        place: Any = PLACES[before](tmp_path)
        mode = PLACES[then].mode  # type: ignore[attr-defined]
        old, slot = place.both()
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


@pytest.mark.parametrize("ddl", ["k long", "k long, s string, t string"])
def test_columns_of_the_program_before_keep_their_values(place: PostgresPlace, ddl: str) -> None:
    driver, slot = place.both()
    place.add_column("t")
    piece = prepared(slot, 2, (1, "a"))
    later = place.opened(schema=parse_schema(ddl))
    later.commit(2, [piece])
    assert place._query(f"select k, s, t from {place.schema}.rows") == [(1, "a", None)]
    for sink in (driver, slot, later):
        sink.close()


def test_an_epoch_is_upserted_by_the_key_it_was_prepared_with(tmp_path: Path) -> None:
    place: Any = PLACES["postgres, upsert"](tmp_path)
    driver, slot = place.both()
    driver.commit(2, [prepared(slot, 2, (1, "a"))])
    piece = prepared(slot, 3, (1, "b"))
    place.outside.execute(f"create unique index on {place.schema}.rows (s)")
    later = Postgres(place.uri, f"{place.schema}.rows", mode="upsert", key="s")
    later.open(place.context(in_slot=False))
    later.commit(3, [piece])
    assert place.seen(later) == [(1, "b")]
    for opened in (driver, slot, later, place):
        opened.close()


def test_an_epoch_is_published_into_the_table_it_was_prepared_for(place: PostgresPlace) -> None:
    driver, slot = place.both()
    piece = prepared(slot, 2, (1, "a"))
    place.outside.execute(f"create table {place.schema}.other (k bigint primary key, s text)")
    key = "k" if place.mode == "upsert" else ()
    later = Postgres(place.uri, f"{place.schema}.other", mode=place.mode, key=key)
    later.open(place.context(in_slot=False))
    later.commit(2, [piece])
    assert place.seen(later) == [(1, "a")]
    assert place._query(f"select * from {place.schema}.other") == []
    for sink in (driver, slot, later):
        sink.close()


def test_an_epoch_of_a_version_that_noted_its_key_only_is_published(tmp_path: Path) -> None:
    place: Any = PLACES["postgres, upsert"](tmp_path)
    driver, slot = place.both()
    piece = prepared(slot, 2, (1, "a"))
    del piece["columns"], piece["table"]
    driver.commit(2, [piece])
    assert place.seen(driver) == [(1, "a")]
    for opened in (driver, slot, place):
        opened.close()


def test_an_epoch_staged_in_another_schema_is_refused_with_where_it_was_looked_for(
    place: PostgresPlace,
) -> None:
    driver, slot = place.both()
    piece = prepared(slot, 2, (1, "a"))
    place.outside.execute("drop schema if exists elsewhere cascade; create schema elsewhere")
    moved = Postgres(place.uri, f"{place.schema}.rows", schema="elsewhere")
    moved.open(place.context(in_slot=False))
    if place.mode == "prepared":
        place.outside.execute(f"rollback prepared '{piece['gid']}'")
    with pytest.raises(CommitError, match=r"in schema 'elsewhere'[\s\S]*schema= .* changed"):
        moved.commit(2, [piece])
    for sink in (driver, slot, moved):
        sink.close()


def test_a_target_that_was_renamed_is_not_called_given_up(append: PostgresPlace) -> None:
    driver, slot = append.both()
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
    (older, slot), newer = place.both(), place.opened()
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


def test_what_the_newer_driver_gives_up_the_older_one_publishes_whole_or_is_refused(
    place: PostgresPlace,
) -> None:
    """Both at once, on real transactions."""
    (older, slot), newer = place.both(), place.opened()
    seen = 0
    for epoch in range(2, 12):
        rows = [(10 * epoch + s, "x") for s in range(4)]
        pieces = [prepared(slot, epoch, row, subtask=s) for s, row in enumerate(rows)]
        failed = at_once(
            partial(older.commit, epoch, pieces),
            partial(newer.recover, epoch + 1),
        )
        assert all(isinstance(error, CommitError) for error in failed), failed
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
    (older, slot), newer = place.both(), place.opened()
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
            raise AssertionError("the newer driver never got through")

        failed = at_once(partial(older.commit, epoch, pieces), take_over)
        assert all(isinstance(error, CommitError) for error in failed), failed
        older.commit(epoch, pieces)
        expected += rows
        assert place.seen(newer) == expected
        assert place.leftovers() == []
    for sink in (older, newer, slot):
        sink.close()


def test_what_the_newer_driver_gave_up_is_refused_with_what_to_do(place: PostgresPlace) -> None:
    older, slot = place.both()
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

    def open_sink(number: int) -> None:
        sink = Postgres(uri, "fresh", create=True)
        try:
            sink.open(SinkContext(f"job {number % 3}", "j", "out", parse_schema("k long")))
        finally:
            sink.close()

    assert at_once(*(partial(open_sink, n) for n in range(6))) == []
