"""Slots that a subtask has moved away from are told to end, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.driver import roster
from cairn.driver.roster import Roster, SlotInfo
from cairn.protocol.lookups import DoorSpec, LookupReply, this_host
from cairn.protocol.messages import End, Report, Token
from cairn.sinks.base import Execution
from cairn.slot.door import Door, open_door

KEY = b"k" * 32


def token(epoch: int, attempt: int = 0) -> Token:
    return Token(1, epoch, Execution(attempt=attempt))


class Slot:
    """The door of a slot, and what it has begun."""

    def __init__(self, folder: Path, slot_id: str, *, host: str = "") -> None:
        (folder / slot_id).mkdir()
        spec = DoorSpec(KEY, host or this_host(), "127.0.0.1")
        self.slot_id = slot_id
        self.begun = token(1)
        self.orders: list[End] = []
        self.door: Door = open_door(
            spec, str(folder / slot_id), lambda ask: LookupReply(None), self.end
        )

    def end(self, order: End) -> bool:
        self.orders.append(order)
        return order.as_of is None or self.begun <= order.as_of

    def report(self, subtask: int, *, level: int = 0, door: str | None = None) -> Report:
        return Report(
            level=level,
            subtask=subtask,
            executor="host:1",
            log=f"/logs/{self.slot_id}",
            started_ms=0,
            finished_ms=0,
            begin_ms=0,
            restored=False,
            process_ms=0,
            snapshot_ms=0,
            door=self.door.address if door is None else door,
            slot_id=self.slot_id,
        )


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Any]:
    made: list[Slot] = []

    def make(slot_id: str, **options: Any) -> Slot:
        made.append(Slot(tmp_path, slot_id, **options))
        return made[-1]

    yield make
    for slot in made:
        slot.door.close()


class Scan:
    """Records the orders for slots that have no door."""

    def __init__(self) -> None:
        self.calls: list[tuple[frozenset[str], Any]] = []

    def __call__(self, keep: frozenset[str], as_of: Any) -> None:
        self.calls.append((keep, as_of))


@pytest.mark.parametrize("host", ["", "another machine"])
def test_slot_that_a_subtask_has_moved_away_from_is_told_to_end_once(slots: Any, host: str) -> None:
    known, scan = Roster(KEY), Scan()
    stays, before, after = slots("a"), slots("b", host=host), slots("c")
    known.update([stays.report(0), before.report(1)], (), token(2))
    known.end_left_behind(scan)
    assert not known.has_left_behind
    known.update([stays.report(0), after.report(1)], (), token(3))
    known.end_left_behind(scan)
    known.end_left_behind(scan)
    assert before.orders == [End(token(3))]
    assert stays.orders == after.orders == [] and not scan.calls
    assert known.slots == [SlotInfo(0, "host:1", "/logs/a"), SlotInfo(1, "host:1", "/logs/c")]


def test_slots_of_other_levels_of_the_same_subtask_are_in_use(slots: Any) -> None:
    known, scan = Roster(KEY), Scan()
    first, second = slots("a"), slots("b")
    known.update([first.report(0), second.report(0, level=1)], (), token(2))
    known.end_left_behind(scan)
    assert first.orders == second.orders == []


def test_slot_of_an_attempt_that_failed_elsewhere_is_left_behind(slots: Any) -> None:
    known, scan = Roster(KEY), Scan()
    failed, used = slots("a"), slots("b")
    known.update([used.report(0)], [failed.report(0), used.report(0)], token(2, 1))
    known.end_left_behind(scan)
    assert failed.orders == [End(token(2, 1))] and used.orders == []


def test_slot_that_has_begun_something_since_stays_and_is_asked_nothing_more(slots: Any) -> None:
    known, scan = Roster(KEY), Scan()
    moved, other = slots("a"), slots("b")
    known.update([moved.report(0)], (), token(2))
    known.update([other.report(0)], (), token(3))
    moved.begun = token(4)
    known.end_left_behind(scan)
    known.update([moved.report(0)], (), token(4))
    known.end_left_behind(scan)
    assert moved.orders == [End(token(3))]
    assert other.orders == [End(token(4))]


def test_slot_that_is_gone_is_forgotten(slots: Any, tmp_path: Path) -> None:
    known, scan = Roster(KEY), Scan()
    gone, other = slots("a"), slots("b")
    gone.door.close()
    known.update([gone.report(0)], (), token(2))
    known.update([other.report(0)], (), token(3))
    known.end_left_behind(scan)
    assert not known.has_left_behind and not scan.calls


def test_slot_without_a_door_is_looked_for_a_few_times_and_left_to_its_lease(slots: Any) -> None:
    known, scan = Roster(KEY), Scan()
    silent, other = slots("a"), slots("b")
    known.update([silent.report(0, door="")], (), token(2))
    for number in range(3, 3 + 2 * roster.TRIES_MAX):
        known.update([other.report(0)], (), token(number))
        known.end_left_behind(scan)
    tries = [(frozenset({"b"}), token(3 + at)) for at in range(roster.TRIES_MAX)]
    assert scan.calls == tries and not known.has_left_behind


def test_a_search_that_fails_is_repeated_a_few_times_only(slots: Any) -> None:
    def scan(keep: frozenset[str], as_of: Any) -> None:
        calls.append(as_of)
        raise ConnectionError("Spark is gone")

    calls: list[Any] = []
    known = Roster(KEY)
    silent, other = slots("a"), slots("b")
    known.update([silent.report(0, door="")], (), token(2))
    for number in range(3, 3 + 2 * roster.TRIES_MAX):
        known.update([other.report(0)], (), token(number))
        if known.has_left_behind:
            with pytest.raises(ConnectionError):
                known.end_left_behind(scan)
    assert len(calls) == roster.TRIES_MAX and not known.has_left_behind


def test_at_the_end_every_slot_is_told(slots: Any) -> None:
    known = Roster(KEY)
    first, second = slots("a"), slots("b")
    known.update([first.report(0)], (), token(2))
    known.update([second.report(0)], (), token(3))
    second.begun = token(9)
    known.end_all()
    assert first.orders == second.orders == [End()]


def test_slots_that_read_ahead_and_were_not_used_are_looked_for_after_some_attempts(
    slots: Any,
) -> None:
    known, scan = Roster(KEY), Scan()
    used = slots("a")
    known.update([used.report(0)], (), token(2))
    known.expect_strays()
    for number in range(3, 2 + roster.STRAYS_AFTER):
        known.update([used.report(0)], (), token(number))
        assert not known.has_left_behind
    last = token(2 + roster.STRAYS_AFTER)
    known.update([used.report(0)], (), last)
    assert known.has_left_behind
    known.end_left_behind(scan)
    assert scan.calls == [(frozenset(["a"]), last)] and not used.orders
    assert not known.has_left_behind
