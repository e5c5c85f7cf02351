"""The state of timers over a database, read by time.

The overlay is that of any map, and so is the delta. The rows below are in the order of their times
(`cached/ordered`): they tell which timers are due next, but not cheaply whether one timer is set.
So timers may be set and deleted *blindly*, without a look at the rows. `settle` looks for all of
them at once and takes back the changes that change nothing.

Always true here:
- after `settle` an overlay entry is True for a timer that is not committed, ABSENT for one that
  is: the delta does not depend on what was in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final, cast

import pyarrow as pa

from cairn.backends.cached.backend import CachedBackend
from cairn.backends.cached.database import Database
from cairn.backends.cached.ordered import OrderedRows, Timer, read_next
from cairn.backends.cached.timer_names import KIND, pack_time, unpack_time
from cairn.backends.contract import ABSENT, Backend, Change
from cairn.backends.layout import live_column
from cairn.backends.overlay import MapTable
from cairn.state import Declaration
from cairn.storage.manifest import Held
from cairn.types.codec import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_END: Final = 1 << 62
"""Later than all timers."""
PAGE_TIMERS: Final = 256
"""Timers read at a time, per key group."""
_GROWTH: Final = 8


class TimerTable(MapTable):
    """Timers of one kind, by key group."""

    stored_kind: ClassVar[str | None] = KIND
    backend: CachedBackend

    def __init__(
        self, declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
    ) -> None:
        super().__init__(declaration, key_type, backend, group_count)
        self.blind: dict[int, dict[tuple[Key, int], bool]] = {}
        """Per key group the timers that were changed without a look at the rows. True: they were
        deleted in this epoch."""

    def timer_rows(self, group: int) -> OrderedRows:
        return cast(OrderedRows, self.rows[group])

    # Reading by time

    def read_due(self, groups: Sequence[int], start_ms: int) -> dict[int, tuple[list[Timer], int]]:
        """Return committed timers from a time on, the next ones of each key group.

        With them comes the time up to which they are complete, `NO_END` at the end of a group.
        """
        due: dict[int, tuple[list[Timer], int]] = {}
        wanted, count = list(groups), PAGE_TIMERS
        while wanted:
            changed = {group: self.timer_rows(group).merge_unwritten() for group in wanted}
            starts = [(self.timer_rows(group), pack_time(start_ms)) for group in wanted]
            missing = []
            for group, page in zip(wanted, read_next(self.backend, starts, count), strict=True):
                names, last = page
                until = NO_END if last is None else unpack_time(last) - 1
                if until < start_ms:
                    missing.append(group)  # More timers of one time than a page has.
                    continue
                due[group] = self._merge(group, names, changed[group], start_ms, until)
            wanted, count = missing, count * _GROWTH
        return due

    def _merge(
        self,
        group: int,
        names: list[bytes],
        changed: Mapping[Timer, Change],
        start_ms: int,
        until: int,
    ) -> tuple[list[Timer], int]:
        """Return the timers of names up to a time, after changes that the database lacks."""
        timer_of = self.timer_rows(group).timer_of
        found = [t for name in names if (t := timer_of(name))[0] <= until and t not in changed]
        found += [
            timer
            for timer, change in changed.items()
            if change is True and start_ms <= timer[0] <= until
        ]
        if len(found) > PAGE_TIMERS:
            cut = sorted([time for time, _ in found])[PAGE_TIMERS - 1]
            if cut < until:
                found, until = [timer for timer in found if timer[0] <= cut], cut
        return found, until

    def are_set(self, names: Sequence[tuple[int, Timer]]) -> list[bool]:
        """Return for each timer, with its key group, whether it is committed."""
        found = self._find_unwritten(names)
        by_database: dict[Database, list[int]] = {}
        for at, (group, _) in enumerate(names):
            database = self.timer_rows(group).database
            if found[at] is None and database is not None:
                by_database.setdefault(database, []).append(at)
        for database, places in by_database.items():
            rows = [self.timer_rows(names[at][0]) for at in places]
            keys = [r.prefix + r.name_of(names[at][1]) for r, at in zip(rows, places, strict=True)]
            for at, raw in zip(places, database.get_many(keys), strict=True):
                found[at] = None if raw is None else True
        return [each is True for each in found]

    def _find_unwritten(self, names: Sequence[tuple[int, Timer]]) -> list[Change]:
        """Return the change of each timer that the database lacks; None if there is none."""
        changed = {
            group: self.timer_rows(group).merge_unwritten() for group in {g for g, _ in names}
        }
        return [changed[group].get(timer) for group, timer in names]

    # The overlay

    def settle(self) -> None:
        """Take back blind changes that change nothing."""
        blind, self.blind = self.blind, {}
        names = [(group, (time, key)) for group, each in blind.items() for key, time in each]
        for (group, (time, key)), is_set in zip(names, self.are_set(names), strict=True):
            self.resolve(group, key, time, is_set=is_set)

    def resolve(self, group: int, key: Key, time: int, *, is_set: bool) -> None:
        """Take back a change if it changes nothing."""
        changes = self.changes[group]
        if (changes[key][time] is True) == is_set:
            del changes[key][time]
            if not changes[key]:
                del changes[key]

    def rollback(self) -> None:
        self.blind = {}
        super().rollback()

    def promote(self) -> None:
        self.settle()
        super().promote()

    def assign(self, groups: range) -> None:
        self.blind = {}
        super().assign(groups)

    def delta(self) -> pa.RecordBatch | None:
        self.settle()
        self._order_changes()
        return super().delta()

    def _order_changes(self) -> None:
        """Sort the epoch's changes: the order in which they came is that of blind ones too."""
        for group in self.groups:
            changes = self.changes[group]
            if changes:
                in_order = sorted(changes, key=self.timer_rows(group).packing.key)
                self.changes[group] = {key: dict(sorted(changes[key].items())) for key in in_order}

    def keys_changed(self) -> int:
        self.settle()
        return super().keys_changed()

    def count_held(self) -> Held:
        """Count timers. How many keys have them is not counted: each counts as a key."""
        self.settle()
        held = sum(self.rows[group].entry_count() for group in self.groups)
        for group in self.groups:
            for changed in self.changes[group].values():
                held += sum(-1 if change is ABSENT else 1 for change in changed.values())
        return Held(held, held)

    def apply(self, batch: pa.RecordBatch) -> None:
        groups = batch["group"].to_numpy().tolist()
        keys = self.keys.decode_keys(batch["key"])
        times = self.entries.decode_keys(batch["entry"])
        after = dict(zip(zip(groups, zip(times, keys, strict=True), strict=True),
                         live_column(batch), strict=True))  # fmt: skip
        changes: dict[int, dict[Key, dict[Key, Change]]] = {}
        if all(self.timer_rows(group).settles_later for group in set(groups)):
            # A delta has timers that it changes, so the others need not be looked up.
            changed_before = self._find_unwritten(list(after))
            before = [None if each is None else each is True for each in changed_before]
        else:
            before = list(self.are_set(list(after)))
        for (name, is_live), is_set in zip(after.items(), before, strict=True):
            if is_live != is_set:
                group, (time, key) = name
                changed = changes.setdefault(group, {}).setdefault(key, {})
                changed[time] = True if is_live else ABSENT
        for group, changed_keys in changes.items():
            self._restore(group, changed_keys)
