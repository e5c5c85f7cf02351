"""Timers and time indexes in a database, in the order of their times.

A row's name is `time | key`, its value is True. So the timers of a key group that are due next are
the first rows of the state, and nothing else has to be read to find them.

Always true here:
- nothing is kept in memory but changes that the database lacks;
- a change is a new timer (True) or the end of a timer that was set (ABSENT): so the count is exact;
- names in ascending order are times in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from cairn.backends.cached.database import Database, Op
from cairn.backends.cached.rows import DIRTY_ENTRY_BYTES, CachedRows, Memory, pieces
from cairn.backends.cached.timer_names import TIME_BYTES, pack_time, unpack_time
from cairn.backends.contract import ABSENT, Change, Content, Cursor
from cairn.backends.packing import Packing
from cairn.types.codec import Key

if TYPE_CHECKING:
    from cairn.backends.cached.backend import CachedBackend

Timer = tuple[int, Key]
"""A time and a key."""
_TIMER_BYTES: Final = DIRTY_ENTRY_BYTES + 96


class OrderedRows(CachedRows):
    """Rows of timers: to the table above, a map of times per key."""

    __slots__ = ()

    # A timer is found by its time, not by its key: nothing is read ahead or kept.

    def recall(self, key: Key) -> bool:
        return True

    def get(self, key: Key, default: Content = None) -> Content:
        held = self.peek(key)
        return default if held is None else held

    def __contains__(self, key: object) -> bool:
        return self.peek(key) is not None

    def peek(self, key: Key) -> Content:
        """Return the timers of a key. Reads all of the key group."""
        return {time: True for time, other in self.timers() if other == key} or None

    def get_many(self, keys: Sequence[Key]) -> list[Content]:
        held = dict(self.items())
        return [held.get(key) for key in keys]

    def items(self) -> Iterator[tuple[Key, Content]]:  # type: ignore[override]
        held: dict[Key, dict[int, bool]] = {}
        for time, key in self.timers():
            held.setdefault(key, {})[time] = True
        yield from held.items()

    def scan(
        self, cursor: Cursor | None, count: int
    ) -> tuple[list[tuple[Key, Content]], Cursor | None]:
        return list(self.items()), None

    def timers(self) -> Iterator[Timer]:
        """Return all timers, in no particular order."""
        changed = self.merge_unwritten()
        if self.database is not None:
            cut = len(self.prefix)
            for row, _ in self.database.scan(self.prefix):
                timer = self.timer_of(row[cut:])
                if timer not in changed:
                    yield timer
        yield from [timer for timer, change in changed.items() if change is True]

    # By time

    def name_of(self, timer: Timer) -> bytes:
        return pack_time(timer[0]) + self.packing.key(timer[1])

    def timer_of(self, name: bytes) -> Timer:
        return unpack_time(name), self.packing.key_of(name[TIME_BYTES:])

    def merge_unwritten(self) -> dict[Timer, Change]:
        """Return the changes that the database lacks. To be called before it is read."""
        merged: dict[Timer, Change] = {}
        for layer in reversed(self.unwritten()):
            merged.update(layer)  # type: ignore[arg-type]
        return merged

    # Changing

    def set_counts(self, keys: int, entries: int) -> None:
        self.held = entries

    def promote(self, changes: Mapping[Key, Change]) -> None:
        dirty: dict[Any, Change] = self.dirty
        before = len(dirty)
        more = 0
        for key, changed in changes.items():
            for time, change in changed.items():
                is_set = change is not ABSENT
                dirty[time, key] = True if is_set else ABSENT
                more += 1 if is_set else -1
        self.held += more
        self.memory.add_dirty((len(dirty) - before) * _TIMER_BYTES)

    def restore(self, changes: Mapping[Key, Change]) -> None:
        if self.settles_later:
            for key, changed in changes.items():
                for time, change in changed.items():
                    if (time, key) not in self.dirty:
                        # Counted as a change that changes something, as it is in most deltas.
                        self.unsettled[time, key] = change is not ABSENT
        self.promote(changes)

    def select_unsettled(self) -> list[Key]:
        return list(self.unsettled)

    def names_to_settle(self, keys: Sequence[Key]) -> list[bytes]:
        timers = cast("Sequence[Timer]", keys)
        return [self.prefix + self.name_of(timer) for timer in timers]

    def settle(self, keys: Sequence[Key], raws: Sequence[bytes | None]) -> None:
        for timer, raw in zip(keys, raws, strict=True):
            is_set = self.unsettled.pop(timer)
            if is_set == (raw is not None):
                self.held += -1 if is_set else 1

    def layer_bytes(self, layer: Mapping[Key, Change]) -> int:
        return len(layer) * _TIMER_BYTES

    def ops(self, prefix: bytes) -> Iterator[list[Op]]:
        name_of, is_set = self.name_of, self.packing.value(True)
        for piece in pieces(self.frozen):
            yield [
                (prefix + name_of(timer), None if change is ABSENT else is_set)  # type: ignore[arg-type]
                for timer, change in piece
            ]


class IndexRows(OrderedRows):
    """Rows of a time index: each says that a key of another state is due at a time, or was.

    An entry too many does no harm: the key itself is looked at when the entry is due.
    """

    __slots__ = ("is_complete",)

    def __init__(self, name: str, packing: Packing, memory: Memory, group: int) -> None:
        super().__init__(name, packing, memory, group)
        self.is_complete = True
        """Every key that the other state holds is listed. A base says so by a count of 1."""

    def __len__(self) -> int:
        return int(self.is_complete)

    def entry_count(self) -> int:
        return 0

    def set_counts(self, keys: int, entries: int) -> None:
        self.is_complete = keys > 0

    def change(self, changes: Mapping[Timer, Change]) -> None:
        """Add entries (True) and remove others (ABSENT)."""
        dirty: dict[Any, Change] = self.dirty
        before = len(dirty)
        dirty.update(changes)
        self.memory.add_dirty((len(dirty) - before) * _TIMER_BYTES)


Page = tuple[list[bytes], bytes | None]
"""Names of rows in order, and the last name that was looked at; None at the end."""


def read_pages(database: Database, starts: Sequence[tuple[bytes, bytes]], count: int) -> list[Page]:
    """Return the next `count` names of several prefixes, each from a place on."""
    found: list[Page] = []
    for prefix, start in starts:
        names: list[bytes] = []
        for row, _ in database.scan(prefix, prefix + start):
            names.append(row[len(prefix) :])
            if len(names) == count:
                break
        found.append((names, names[-1] if len(names) == count else None))
    return found


def read_next(
    backend: CachedBackend, wanted: Sequence[tuple[OrderedRows, bytes]], count: int
) -> list[Page]:
    """Return the next `count` names of rows, each from a place on, as the databases have them."""
    pages: list[Page] = [([], None)] * len(wanted)
    by_database: dict[Database, list[int]] = {}
    for at, (rows, _) in enumerate(wanted):
        if rows.database is not None:
            by_database.setdefault(rows.database, []).append(at)
    for database, places in by_database.items():
        starts = [(wanted[at][0].prefix, wanted[at][1]) for at in places]
        for at, page in zip(places, backend.read_pages(database, starts, count), strict=True):
            pages[at] = page
    return pages
