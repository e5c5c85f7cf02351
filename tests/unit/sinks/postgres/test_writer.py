"""Slots stage every row once, the last of each key, and none that the table refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn.errors import CommitError, EpochError
from cairn.sinks import Postgres, SinkContext
from cairn.sinks.base import Execution
from cairn.types import parse_schema
from tests.places import PLACES, batch
from tests.places.base import prepared
from tests.places.postgres import PostgresPlace

# Staged rows


def test_an_epoch_may_have_very_many_batches(place: PostgresPlace) -> None:
    driver, slot = place.both()
    driver.commit(2, [prepared(slot, 2, (1, "a"), round=5000 << 20)])
    assert place.seen(driver) == [(1, "a")]
    assert place.leftovers() == []
    slot.close()
    driver.close()


def test_a_trigger_may_leave_rows_out(append: PostgresPlace) -> None:
    driver, slot = append.both()
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
    driver, slot = place.both()
    writer = slot.writer(2, 0, Execution())
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
        driver, slot = place.both()
        pieces = [prepared(slot, 2, (s, "a"), (s + 10, "b"), subtask=s) for s in range(2)]
        ((piece,),) = place._query(f"select place from {place.schema}.cairn_staged where subtask=1")
        place.outside.execute(f"delete from {piece} where k = 11")
        with pytest.raises(CommitError, match="subtask 1 staged 2 rows, of which 1"):
            driver.commit(2, pieces)
        assert place.rows(driver) == []
        assert place._query(f"select * from {place.schema}.cairn_marks") == []
        driver.recover(3)
        assert place.leftovers() == []
        for opened in (slot, driver, place):
            opened.close()


def test_rules_for_single_rows_fail_the_epoch_not_the_publication(append: PostgresPlace) -> None:
    driver, slot = append.both()
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
    assert append._query(f"select * from {append.schema}.rows") == [(1, "a", 7)]
    slot.close()
    driver.close()


def test_rows_a_unique_index_refuses_can_be_published_once_it_is_gone(
    append: PostgresPlace,
) -> None:
    driver, slot = append.both()
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
    writer = slot.writer(3, 0, Execution())
    writer.write(batch((1, "a"), (3, "x"), (1, "b")))
    writer.write(batch((3, "y"), (1, "c"), (4, "z")))
    first = writer.prepare()
    later = prepared(slot, 3, (4, "round 1"), round=1)
    assert first is not None
    driver.commit(3, [later, first])
    assert place.seen(driver) == [(1, "c"), (2, "old"), (3, "y"), (4, "round 1")]
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
        writer = sink.writer(epoch, 0, Execution())
        writer.write(pa.RecordBatch.from_pydict({"a": [1, 1], "b": ["x", "x"]}, schema))
        committable = writer.prepare()
        assert committable is not None
        sink.commit(epoch, [committable])
        append.outside.execute(f"update {append.schema}.facts set note = 'kept'")
    assert append._query(f"select * from {append.schema}.facts") == [(1, "x", "kept")]
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
    other = prepared(slots[0], 2, (3, "c"), round=1)
    # The rows of both come to one subtask this time.
    named = prepared(slots[1], 2, (1, "a"), (2, "b"), attempt=1)
    driver.commit(2, [named, other])
    assert place.seen(driver) == [(1, "a"), (2, "b"), (3, "c")]
    assert place.leftovers() == []
    for opened in (*slots, driver, place):
        opened.close()


def test_tries_do_not_pile_up_while_one_slot_cannot_reach_the_server(tmp_path: Path) -> None:
    place: Any = PLACES["postgres, prepared"](tmp_path)
    driver, slot = place.both()
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
    committable = prepared(slot, 10**12, (1, "a"), subtask=99999, attempt=999, round=10**6)
    assert len(committable["gid"]) < 200 and ":1000000000000:99999:" in committable["gid"]
    driver.commit(10**12, [committable])
    assert place.seen(driver) == [(1, "a")]
    for opened in (slot, driver, place):
        opened.close()
