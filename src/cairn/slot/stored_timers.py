"""The timers of one kind over a database: memory has those that are due soon.

Per key group, all timers up to some time are in memory. When a later one is asked for, the next
page of each key group is read. Timers set for later than that are in memory until they are
committed; from then on the rows have them (`backends/timer_table`).

Always true here:
- up to `_until` of its key group, memory has all timers, the running epoch's included;
- later timers are in memory only if the running epoch has set them;
- nothing that is read is skipped: the heap of times has an entry where memory ends (`_gap`).
"""

from __future__ import annotations

from heapq import heappush
from typing import Any, Final

import pyarrow as pa

from cairn.backends.contract import ABSENT
from cairn.backends.timer_table import NO_END, TimerTable
from cairn.slot.timers import STALE_TIMES_MAX, Remembered, TimerIndex
from cairn.types.durations import MAX_MS

FIRST_MS: Final = -MAX_MS
"""The earliest time of a timer: before the year 1."""
MEMORY_TIMERS_MAX: Final = 65_536
"""More committed timers than this are not kept: half of it is, the earliest."""


class StoredTimerIndex(TimerIndex):
    """Timers of which memory has a part."""

    table: TimerTable

    def __init__(self, table: TimerTable) -> None:
        super().__init__(table)
        self._until: dict[int, int] = {}
        self._gap = NO_END
        """The earliest time of which memory may lack timers."""

    # From the state

    def build(self) -> None:
        if self._is_built:
            return
        self.forget()
        self.is_waiting = False
        self._until = dict.fromkeys(self.table.groups, FIRST_MS - 1)
        self._note_gap()
        self._is_built = True

    def forget(self) -> None:
        super().forget()
        self._later.clear()
        self._until.clear()
        self._gap = NO_END

    def undo(self) -> None:
        self.release()
        if not self._is_built:
            return
        for group in self.table.groups:
            until = self._until[group]
            for key, changed in self._changes[group].items():
                for time, value in changed.items():
                    if value is not ABSENT:
                        self._remove(key, time)
                    elif time <= until and (key, time) not in self.table.blind.get(group, ()):
                        self._add(group, key, time)

    def commit(self) -> None:
        """The changes of the epoch are about to be promoted: keep what is due soon."""
        if not self._is_built:
            return
        self.table.settle()
        for group in self.table.groups:
            until = self._until[group]
            for key, changed in self._changes[group].items():
                for time, value in changed.items():
                    if value is True and time > until:
                        if self._later.pop((time, key), None) is None:
                            self._remove(key, time)
        if sum(map(len, self._at.values())) > MEMORY_TIMERS_MAX:
            self._drop_latest()
        self._order_if_stale()

    def _drop_latest(self) -> None:
        """Keep half of what memory may hold, and all timers of the earliest time."""
        kept: list[int] = []
        count = 0
        for time in sorted(self._at):
            if kept and count + len(self._at[time]) > MEMORY_TIMERS_MAX // 2:
                break
            kept.append(time)
            count += len(self._at[time])
        for time in self._at.keys() - set(kept):
            del self._at[time]
        self._until = {group: min(until, kept[-1]) for group, until in self._until.items()}
        # Timers for later that were set while waiting are committed too.
        for time, key in [timer for timer in self._later if timer[0] > kept[-1]]:
            del self._later[time, key]
        self._note_gap()
        self._order()

    def apply(self, batch: pa.RecordBatch) -> None:
        if self._is_built:
            # Rows of any time may have been applied: read them again.
            self._is_built = False
            self.build()

    # One timer

    def set(self, group: int, key: Any, time: int) -> None:
        if time <= self._until[group]:
            super().set(group, key, time)
            return
        held = self._at.get(time)
        if (held is not None and key in held) or (time, key) in self._later:
            return
        if self.is_waiting:
            self._later[time, key] = group
        else:
            self._add(group, key, time)
            self._order_if_stale()
        self._change_blindly(group, key, time, True)

    def delete(self, group: int, key: Any, time: int) -> None:
        if time <= self._until[group]:
            super().delete(group, key, time)
            return
        if self._later.pop((time, key), None) is None:
            self._remove(key, time)
        self._change_blindly(group, key, time, ABSENT)

    def _change_blindly(self, group: int, key: Any, time: int, change: Any) -> None:
        self._changes[group].setdefault(key, {})[time] = change
        blind = self.table.blind.setdefault(group, {})
        blind[key, time] = change is ABSENT or blind.get((key, time), False)

    def remember(self, group: int, key: Any, time: int) -> Remembered:
        blind = self.table.blind.get(group, {}).get((key, time))
        return (*super().remember(group, key, time)[:3], blind)

    def put_back(self, group: int, key: Any, time: int, before: Remembered) -> None:
        super().put_back(group, key, time, before)
        blind = self.table.blind.setdefault(group, {})
        if before[3] is None:
            blind.pop((key, time), None)
        else:
            blind[key, time] = before[3]

    def of_key(self, key: Any) -> list[int]:
        self.build()
        found: set[int] = set()
        for group in self.table.groups:
            found |= set(self.table.rows[group].peek(key) or ())
            blind = self.table.blind.get(group, {})
            for time, change in self._changes[group].get(key, {}).items():
                if change is not ABSENT and (time, key) not in self._later:
                    found.add(time)
                elif change is ABSENT or blind.get((key, time), True):
                    found.discard(time)
                # Else it is there if it was set all along: then it need not wait.
        return sorted(found)

    # Due timers

    def first(self) -> int | None:
        while True:
            time = super().first()
            if self._gap == NO_END or (time is not None and time < self._gap):
                return time
            self._load()

    def take(self, until: int) -> tuple[int, list[tuple[int, Any]]] | None:
        if until < self._gap:
            time = super().first()
            if self._gap < NO_END and (not self.times or self.times[0] > self._gap):
                heappush(self.times, self._gap)
            if time is None or time > until:
                return None
        return super().take(until)

    def _load(self) -> None:
        """Read the next timers of the key groups that end first."""
        # If they cannot be read now, the heap still says where memory ends.
        heappush(self.times, self._gap)
        least = min(self._until.values())
        groups = [group for group, until in self._until.items() if until == least]
        for group, (timers, until) in self.table.read_due(groups, least + 1).items():
            self._take_in(group, timers, until)
        self._note_gap()

    def _take_in(self, group: int, timers: list[tuple[int, Any]], until: int) -> None:
        """Add committed timers, all up to a time, and settle blind changes of that time."""
        changes, blind = self._changes[group], self.table.blind.get(group, {})
        for time, key in timers:
            change = changes[key].get(time) if key in changes else None
            if change is None:
                self._add(group, key, time)
            elif change is True and not blind.get((key, time), True):
                # It was set all along: it need not wait.
                if self._later.pop((time, key), None) is not None:
                    self._add(group, key, time)
        known = [(key, time) for key, time in blind if time <= until]
        if known:
            committed = set(timers)
            for key, time in known:
                del blind[key, time]
                self.table.resolve(group, key, time, is_set=(time, key) in committed)
        self._until[group] = until

    def _note_gap(self) -> None:
        until = min(self._until.values(), default=NO_END)
        self._gap = NO_END if until >= NO_END else until + 1
        if self._gap < NO_END:
            heappush(self.times, self._gap)

    def _order_if_stale(self) -> None:
        if len(self.times) > 2 * len(self._at) + STALE_TIMES_MAX:
            self._order()

    def _order(self) -> None:
        super()._order()
        if self._gap < NO_END:
            heappush(self.times, self._gap)


def make_index(table: Any) -> TimerIndex:
    """Return the index of a table of timers."""
    return StoredTimerIndex(table) if isinstance(table, TimerTable) else TimerIndex(table)
