"""Timers of an operator: map state from key to times, and an index of it ordered by time.

What is set and deleted goes to the state's overlay, like any other change of state, so
snapshots, rescaling, savepoints and readers need to know nothing of timers. The index
answers what is due next. On the heap it has all timers; over a database, those that are due
soon (`stored_timers`).

Always true here:
- once built, the index holds exactly the timers of the state, the running epoch's included;
- an overlay entry is True for a timer that is not committed, ABSENT for one that is: so
  nothing is read from the state to set or delete a timer, and what is set and deleted in
  one epoch leaves no trace;
- what is due next is a function of the state: by time, then by key, never by who came first.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, NoReturn

import pyarrow as pa

from cairn.backends.contract import ABSENT
from cairn.backends.journal import Journal
from cairn.backends.layout import live_column
from cairn.backends.overlay import MapTable, Table, in_order
from cairn.errors import FunctionError, PlanError
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.slot.context import SlotContext
from cairn.types.durations import MAX_MS, Duration, duration_ms

STALE_TIMES_MAX = 1024
Remembered = tuple[bool, bool, Any, bool | None]
"""A timer before a change: is it set, is it set for later, its change, was it changed blindly."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MILLISECOND = dt.timedelta(milliseconds=1)


class TimerIndex:
    """The timers of one kind, of every key of the subtask."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.times: list[int] = []
        """A heap of the times at hand; of those that are gone too, until they come up."""
        self.is_waiting = False
        """True while timers that are set are not due before the next epoch."""
        self._changes = table.changes
        self._at: dict[int, dict[Any, int]] = {}
        """Per time the keys, each with its key group."""
        self._later: dict[tuple[int, Any], int] = {}
        """Timers set while waiting."""
        self._is_built = False

    # From the state

    def build(self) -> None:
        """Make the index from the state, unless it is there."""
        if self._is_built:
            return
        self._at.clear()
        self._later.clear()
        self.is_waiting = False
        at = self._at
        for group in self.table.groups:
            assert not self._changes[group], "the index is built before the first change"
            for key, entries in self.table.rows[group].items():
                for time in entries:
                    at.setdefault(time, {})[key] = group
        self._order()
        self._is_built = True

    def forget(self) -> None:
        """The state becomes another one."""
        self._is_built = False
        self._at.clear()
        self._later.clear()
        self.times.clear()

    def apply(self, batch: pa.RecordBatch) -> None:
        """Follow stored rows that are applied to the state."""
        if not self._is_built:
            return
        table = self.table
        assert isinstance(table, MapTable), "timers are entries of a map"
        for group, key, time, is_live in zip(
            batch["group"].to_numpy().tolist(),
            table.keys.decode_keys(batch["key"]),
            table.entries.decode_keys(batch["entry"]),
            live_column(batch),
            strict=True,
        ):
            if is_live:
                self._add(group, key, time)
            else:
                self._remove(key, time)

    def commit(self) -> None:
        """The epoch is committed. To be called while its changes are still there."""

    def undo(self) -> None:
        """The epoch never happened. To be called while its changes are still there."""
        self.release()
        if not self._is_built:
            return
        for group in self.table.groups:
            for key, changed in self._changes[group].items():
                for time, value in changed.items():
                    if value is ABSENT:
                        self._add(group, key, time)
                    else:
                        self._remove(key, time)

    # One timer

    def set(self, group: int, key: Any, time: int) -> None:
        held = self._at.get(time)
        if held is not None and key in held:
            return
        if self._later and (time, key) in self._later:
            return
        if self.is_waiting:
            self._later[time, key] = group
        elif held is None:
            self._at[time] = {key: group}
            heappush(self.times, time)
            if len(self.times) > 2 * len(self._at) + STALE_TIMES_MAX:
                self._order()
        else:
            held[key] = group
        changes = self._changes[group]
        changed = changes.get(key)
        if changed is None:
            changes[key] = {time: True}
        elif time in changed:
            self._unchange(changes, key, time)
        else:
            changed[time] = True

    def delete(self, group: int, key: Any, time: int) -> None:
        if self._later.pop((time, key), None) is None and not self._remove(key, time):
            return
        self._change_gone(group, key, time)

    def remember(self, group: int, key: Any, time: int) -> Remembered:
        """Return what `put_back` needs to undo later calls of `set` and `delete`."""
        changed = self._changes[group].get(key, {})
        is_now, is_later = key in self._at.get(time, ()), (time, key) in self._later
        return is_now, is_later, changed.get(time), None

    def put_back(self, group: int, key: Any, time: int, before: Remembered) -> None:
        is_now, is_later, change, _ = before
        self._later.pop((time, key), None)
        self._remove(key, time)
        if is_now:
            self._add(group, key, time)
        if is_later:
            self._later[time, key] = group
        changes = self._changes[group]
        if change is not None:
            changes.setdefault(key, {})[time] = change
        elif time in changes.get(key, ()):
            self._unchange(changes, key, time)

    def of_key(self, key: Any) -> list[int]:
        """Every time at which a timer of the key is set."""
        self.build()
        return sorted(time for time, keys in self._at.items() if key in keys)

    # Due timers

    def first(self) -> int | None:
        """The earliest time."""
        times = self.times
        while times and times[0] not in self._at:
            heappop(times)
        return times[0] if times else None

    def take(self, until: int) -> tuple[int, list[tuple[int, Any]]] | None:
        """The timers of the earliest time that is due, as (group, key) in order; none are left."""
        time = self.first()
        if time is None or time > until:
            return None
        heappop(self.times)
        keys = self._at.pop(time)
        due = [(keys[key], key) for key in in_order(keys)]
        for group, key in due:
            self._change_gone(group, key, time)
        return time, due

    def upcoming(self, until: int, count_max: int) -> tuple[list[int], list[Any]]:
        """Return groups and keys of the next timers of `take`, about `count_max` of them."""
        groups: list[int] = []
        keys: list[Any] = []
        seen: list[int] = []
        try:
            while len(keys) < count_max:
                time = self.first()
                if time is None or time > until:
                    break
                seen.append(heappop(self.times))
                # A time may be in the heap twice.
                if len(seen) < 2 or seen[-2] != time:
                    keys += self._at[time].keys()
                    groups += self._at[time].values()
        finally:
            for time in seen:
                heappush(self.times, time)
        return groups, keys

    def release(self) -> None:
        """Make timers that were set while waiting count from now on."""
        self.is_waiting = False
        for (time, key), group in self._later.items():
            self._add(group, key, time)
        self._later.clear()

    # Helpers

    def _add(self, group: int, key: Any, time: int) -> None:
        held = self._at.get(time)
        if held is None:
            self._at[time] = {key: group}
            heappush(self.times, time)
        else:
            held[key] = group

    def _remove(self, key: Any, time: int) -> bool:
        held = self._at.get(time)
        if held is None or held.pop(key, None) is None:
            return False
        if not held:
            del self._at[time]
        return True

    def _change_gone(self, group: int, key: Any, time: int) -> None:
        changes = self._changes[group]
        changed = changes.get(key)
        if changed is None:
            changes[key] = {time: ABSENT}
        elif time in changed:
            self._unchange(changes, key, time)
        else:
            changed[time] = ABSENT

    def _unchange(self, changes: dict[Any, Any], key: Any, time: int) -> None:
        """The second change of a timer takes back the first."""
        changed = changes[key]
        del changed[time]
        if not changed:
            del changes[key]

    def _order(self) -> None:
        # In place: who runs rows holds on to the list.
        self.times[:] = self._at
        heapify(self.times)


class Timers:
    """Both kinds of an operator."""

    def __init__(self, tables: dict[str, Table], make: Callable[[Table], TimerIndex]) -> None:
        self.event = make(tables[EVENT_TIMERS])
        self.processing = make(tables[PROCESSING_TIMERS])
        self._both = (self.event, self.processing)

    def are_of(self, tables: dict[str, Table]) -> bool:
        return self.event.table is tables.get(EVENT_TIMERS)

    def build(self) -> None:
        for index in self._both:
            index.build()

    def forget(self) -> None:
        for index in self._both:
            index.forget()

    def apply(self, name: str, batch: pa.RecordBatch) -> None:
        """Follow stored rows that are applied to a state of the operator."""
        for index in self._both:
            if index.table.name == name:
                index.apply(batch)

    def commit(self) -> None:
        for index in self._both:
            index.commit()

    def undo(self) -> None:
        for index in self._both:
            index.undo()

    def release(self) -> None:
        for index in self._both:
            index.release()


class JournaledIndex:
    """Timers that are set and deleted in a way that can be undone."""

    __slots__ = ("_index", "_journal")

    def __init__(self, index: TimerIndex, journal: Journal) -> None:
        self._index = index
        self._journal = journal

    def set(self, group: int, key: Any, time: int) -> None:
        index = self._index
        self._journal.call(index.put_back, group, key, time, index.remember(group, key, time))
        index.set(group, key, time)

    def delete(self, group: int, key: Any, time: int) -> None:
        index = self._index
        self._journal.call(index.put_back, group, key, time, index.remember(group, key, time))
        index.delete(group, key, time)


class KeyTimers:
    """`ctx.timers`: the timers of the key at hand."""

    __slots__ = ("_context", "_event", "_processing")

    def __init__(
        self, context: SlotContext, timers: Timers, journal: Journal | None = None
    ) -> None:
        self._context = context
        self._event: TimerIndex | JournaledIndex = timers.event
        self._processing: TimerIndex | JournaledIndex = timers.processing
        if journal is not None:
            self._event = JournaledIndex(timers.event, journal)
            self._processing = JournaledIndex(timers.processing, journal)

    def event(
        self, at: int | dt.datetime | None = None, *, after: Duration | int | None = None
    ) -> None:
        context = self._context
        if after is not None or type(at) is not int or not -MAX_MS <= at <= MAX_MS:
            at = _time_ms(at, after, context.event_time_ms)
        self._event.set(context.group, context.key, at)

    def processing(
        self, at: int | dt.datetime | None = None, *, after: Duration | int | None = None
    ) -> None:
        context = self._context
        if after is not None or type(at) is not int or not -MAX_MS <= at <= MAX_MS:
            at = _time_ms(at, after, context.now_ms)
        self._processing.set(context.group, context.key, at)

    def delete_event(self, at: int | dt.datetime) -> None:
        context = self._context
        self._event.delete(context.group, context.key, as_ms(at))

    def delete_processing(self, at: int | dt.datetime) -> None:
        context = self._context
        self._processing.delete(context.group, context.key, as_ms(at))


class UntimedKeyTimers(KeyTimers):
    """Timers of an operator whose rows have no event time."""

    __slots__ = ()

    def event(
        self, at: int | dt.datetime | None = None, *, after: Duration | int | None = None
    ) -> None:
        _refuse_untimed()

    def delete_event(self, at: int | dt.datetime) -> None:
        _refuse_untimed()


class NoTimers:
    """`ctx.timers` where there are none: says why."""

    __slots__ = ("_message",)

    def __init__(self, message: str) -> None:
        self._message = message

    def event(
        self, at: int | dt.datetime | None = None, *, after: Duration | int | None = None
    ) -> None:
        self._refuse()

    def processing(
        self, at: int | dt.datetime | None = None, *, after: Duration | int | None = None
    ) -> None:
        self._refuse()

    def delete_event(self, at: int | dt.datetime) -> None:
        self._refuse()

    def delete_processing(self, at: int | dt.datetime) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FunctionError(self._message)


def timer_text(kind: str, time_ms: int) -> str:
    """For people: "event at 2026-01-01T00:00:00+00:00"."""
    try:
        return f"{kind} at {(_EPOCH + time_ms * _MILLISECOND).isoformat()}"
    except OverflowError:
        return f"{kind} at {time_ms} ms"


def _refuse_untimed() -> NoReturn:
    raise FunctionError(
        "an event timer is used, but the rows of this operator have no event time\n"
        "  next: declare it, with job.source(..., event_time=...) or stream.event_time(...), or "
        "use ctx.timers.processing(...)"
    )


@lru_cache(maxsize=256)
def _span_ms(span: Duration) -> int:
    try:
        return duration_ms(span, "after")
    except PlanError as error:
        raise FunctionError(error.message) from None


def _time_ms(at: Any, after: Any, from_ms: int | None) -> int:
    """The time that is meant, in milliseconds."""
    if (at is None) == (after is None):
        raise TypeError("a timer needs exactly one of `at` and `after`")
    if after is None:
        return as_ms(at)
    if from_ms is None:
        raise FunctionError(
            "an event timer is set with `after`, but without an event time to count from: "
            "a processing timer has none\n  next: give the time itself, `at`"
        )
    # A time beyond the last year does not fail: its timer is due when all are.
    if isinstance(after, Duration):
        return min(from_ms + _span_ms(after), MAX_MS)
    if type(after) is int:
        return as_ms(min(from_ms + after, MAX_MS))
    raise TypeError(
        "`after` must be a duration such as '1 minute', a timedelta, or milliseconds; "
        f"found {after!r}"
    )


def as_ms(at: Any) -> int:
    """A time in milliseconds since 1970, given so or as a datetime; a naive one is UTC."""
    if isinstance(at, dt.datetime):
        aware = at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)
        at = (aware - _EPOCH) // _MILLISECOND
    if not isinstance(at, int) or isinstance(at, bool):
        raise TypeError(f"a time is milliseconds since 1970 or a datetime; found {at!r}")
    if not -MAX_MS <= at <= MAX_MS:
        raise ValueError(
            f"the time {at} ms is out of range\n"
            f"  expected: up to {MAX_MS}, the end of the year 9999, in milliseconds since 1970"
        )
    return at
