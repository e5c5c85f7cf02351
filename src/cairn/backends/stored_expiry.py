"""The expiry index of a state over a database: a time index beside the state's rows.

An entry says: this key had something that was written at this time, rounded up. It is due when the
ttl has passed since. Then the key itself is looked at, as on the heap: it is removed, or gets an
entry for the time that it has now. So a ttl may change without a change of the index.

Memory has no entries but those that the database lacks, and per key group the place of the first
one. After a restore the entries that are due next are the first rows of the index.

Always true here:
- every key that the state holds has an entry, unless its key group is not complete: then it is
  scanned, once, and until the scan has ended no base says that the index is complete;
- no entry of a key group is before `_from`;
- entries change with the rows, between epochs: a base has both or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa

from cairn.backends.cached.backend import CachedBackend
from cairn.backends.cached.ordered import IndexRows, Page, Timer, read_next
from cairn.backends.cached.rows import CachedRows
from cairn.backends.cached.timer_names import INDEX_KIND, index_name, pack_time
from cairn.backends.contract import ABSENT, Change
from cairn.backends.expiry import PIECE_KEYS, Expiry
from cairn.types.codec import Key, codec

if TYPE_CHECKING:
    from cairn.backends.overlay import Table
    from cairn.state import TTL

_GROUPS_AT_ONCE: Final = 16
"""Key groups whose due entries are read in one round trip."""
_BEGIN: Final = b""
_END: Final = b"\xff"
"""Before and after all names."""


def _stamp_of_value(change: Change) -> int | None:
    return None if change is None else change[0]


def _stamp_of_map(change: Change) -> int | None:
    return min((pair[0] for pair in change.values() if pair is not ABSENT), default=None)


def _stamp_of_list(change: Change) -> int | None:
    return max((at for at, _ in change[1]), default=None)


_STAMPS: Final[dict[str, Callable[[Change], int | None]]] = {
    "map": _stamp_of_map,
    "list": _stamp_of_list,
}


class StoredExpiry(Expiry):
    """Expiry of a state whose database has the index."""

    def __init__(self, table: Table, ttl: TTL) -> None:
        super().__init__(table, ttl)
        assert isinstance(table.backend, CachedBackend), "the index is in its databases"
        self._backend: CachedBackend = table.backend
        self._name = index_name(table.name)
        self._stamp_of = _STAMPS.get(table.declaration.kind, _stamp_of_value)
        self._backend.open_state(
            self._name, INDEX_KIND, table.keys, codec(pa.bool_()), codec(pa.int64())
        )
        self._from: dict[int, bytes] = {}

    def _index(self, group: int) -> IndexRows:
        return cast(IndexRows, self._backend.rows(self._name, group))

    def begin(self, floor_ms: int | None) -> None:
        super().begin(floor_ms)
        for group in self._from:
            if not self._index(group).is_complete:
                self._unscanned.setdefault(group, None)

    def assign(self, group: int) -> None:
        self._from[group] = _BEGIN

    def release(self, group: int) -> None:
        if self._from.pop(group, None) is not None:
            self._unscanned.pop(group, None)
            self._backend.drop(self._name, group)

    # Entries

    def note_new_keys(self, group: int, changes: Mapping[Key, Change]) -> None:
        # Also keys that only the database could tell: the entry of a known key does no harm.
        stamp_of = self._stamp_of
        times = {key: at for key, change in changes.items() if (at := stamp_of(change)) is not None}
        new = self._table.rows[group].new_keys(times)
        self._put(group, {(self._round_up(times[key]), key): True for key in new})

    def _add(self, group: int, keys: list[Key], at: int) -> None:
        self._put(group, dict.fromkeys([(self._round_up(at), key) for key in keys], True))

    def _put(self, group: int, entries: dict[Timer, Change]) -> None:
        if entries:
            first = pack_time(min([time for time, _ in entries]))
            self._from[group] = min(self._from[group], first)
            self._index(group).change(entries)

    def _round_up(self, at: int) -> int:
        return -(-at // self._width_ms) * self._width_ms

    # Removal

    def _scan(self, group: int) -> None:
        super()._scan(group)
        if group not in self._unscanned:
            self._index(group).is_complete = True

    def _step(self) -> bool:
        if self.floor_ms is None:
            return False
        if self._unscanned:
            self._scan(next(iter(self._unscanned)))
            return True
        dead = self.floor_ms - self._ttl_ms
        end = pack_time(dead + 1)
        groups = [group for group, name in self._from.items() if name < end][:_GROUPS_AT_ONCE]
        if groups:
            self._look_at_due(groups, dead)
        return bool(groups)

    def _look_at_due(self, groups: list[int], dead: int) -> None:
        """Look at the keys of some entries that are due."""
        count = max(1, PIECE_KEYS // len(groups))
        indexes = [self._index(group) for group in groups]
        changed = [index.merge_unwritten() for index in indexes]
        wanted = [(index, self._from[g]) for index, g in zip(indexes, groups, strict=True)]
        pages = read_next(self._backend, wanted, count)
        found = [
            _find_due(index, page, unwritten, dead, count)
            for index, page, unwritten in zip(indexes, pages, changed, strict=True)
        ]
        rows = [cast(CachedRows, self._table.rows[group]) for group in groups]
        keys = [list(dict.fromkeys([key for _, key in due])) for due, _ in found]
        self._backend.load_keys(list(zip(rows, keys, strict=True)))
        for group, (due, following), some in zip(groups, found, keys, strict=True):
            before, self._from[group] = self._from[group], following
            try:
                held = self._table.rows[group].get_many(some)
                self._settle(group, list(zip(some, held, strict=True)))
                self._index(group).change(dict.fromkeys(due, ABSENT))
            except BaseException:
                self._from[group] = before
                raise


def _find_due(
    index: IndexRows, page: Page, unwritten: Mapping[Timer, Change], dead: int, count: int
) -> tuple[list[Timer], bytes]:
    """Return entries that are due, and the place of the next ones."""
    names, last = page
    end = pack_time(dead + 1)
    following = _END if last is None else last + b"\0"
    due: list[Timer] = []
    for name in names:
        if name >= end:
            following = name
            break
        timer = index.timer_of(name)
        if timer not in unwritten:
            due.append(timer)
    for timer, change in unwritten.items():
        if change is True:
            if timer[0] <= dead and len(due) < 2 * count:
                due.append(timer)
            else:
                following = min(following, pack_time(timer[0]))
    return due, following
