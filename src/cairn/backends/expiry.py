"""Removes expired rows from the slot, a few at a time, found through an index by time.

Each key of a table is in a bucket: the time at which part of its content may have expired, rounded
up. When the bucket is due, the content itself is checked: expired values are removed, and a key
that lives on moves to a later bucket. So a key that is written all the time costs one check per
ttl, and rows are never searched, except once after a restore, in slices. Over a database the index
is stored there (`stored_expiry`).

Removal is local to the slot: it is in no delta and in no acknowledgement. No reader sees
expired rows, bases leave them out, and handles write the same with or without them.

Always true here:
- only values that expired before the epoch's floor are removed; a list only as a whole;
- removal goes through `promote`, so a base that is being written is not disturbed;
- every held key is in the index, or its key group waits for a scan. Some keys are in the index
  twice, or are gone already: never more than half of a group for long.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.contract import ABSENT, Change, Content, Cursor
from cairn.types.codec import Datum, Key
from cairn.types.codec.stamped import join_stamps

if TYPE_CHECKING:
    from cairn.backends.overlay import Table
    from cairn.state import TTL

_BUCKETS_PER_TTL: Final = 64
PIECE_KEYS: Final = 1024
_SCAN_KEYS: Final = 4096
_EXTRA_KEYS: Final = 256
_EMPTIED_KEYS_MIN: Final = 50_000
_QUIET_S: Final = 2.0
_TIDY_S_MAX: Final = 60.0
# Moving this number of keys takes about a second.
_REPACK_KEYS_MAX: Final = 500_000
_KEPT: Final = object()

Keys: TypeAlias = "list[Key] | array[int]"
Judge = Callable[[Content, int], tuple[Change, int | None]]
"""From a key's content and the latest expired time: the change that removes expired values
(or _KEPT), and the earliest time left (or None)."""


def _judge_value(held: Content, dead: int) -> tuple[Change, int | None]:
    at = held[0]
    return (None, None) if at <= dead else (_KEPT, at)


def _judge_map(held: Content, dead: int) -> tuple[Change, int | None]:
    gone: dict[Key, Datum] = {}
    first: int | None = None
    for entry, (at, _) in held.items():
        if at <= dead:
            gone[entry] = ABSENT
        elif first is None or at < first:
            first = at
    return gone or _KEPT, first


def _judge_list(held: Content, dead: int) -> tuple[Change, int | None]:
    # Changes count the items before them, so a list is removed with its last item.
    last = max(at for at, _ in held)
    return ((0, []), None) if last <= dead else (_KEPT, last)


_JUDGES: Final[dict[str, Judge]] = {"map": _judge_map, "list": _judge_list}


class Expiry:
    """The expiry index of one table, and the removal of its expired rows."""

    def __init__(self, table: Table, ttl: TTL) -> None:
        self._table = table
        self._ttl_ms = ttl.ms
        self.clock = ttl.clock
        self._width_ms = max(1, ttl.ms // _BUCKETS_PER_TTL)
        self._judge = _JUDGES.get(table.declaration.kind, _judge_value)
        self.floor_ms: int | None = None
        """Values that expired up to here may be removed: the floor of the current or last epoch."""
        self._is_number = pa.types.is_integer(table.keys.arrow)
        self._buckets: dict[int, dict[int, Keys]] = {}
        self._counts: dict[int, int] = {}
        self._unscanned: dict[int, Cursor | None] = {}
        """Key groups that wait for a scan, and where it goes on; None: not begun."""
        self.removed_keys = 0
        self._peak_keys = 0
        self._tidied_at = self._removed_before = 0
        self._tidied_s = self._removed_s = time.monotonic()

    def begin(self, floor_ms: int | None) -> None:
        """Begin an epoch; None if its floor is unknown."""
        if floor_ms is not None:
            self.floor_ms = floor_ms
        self._peak_keys = max(self._peak_keys, self._count_keys())

    def _count_keys(self) -> int:
        rows = self._table.rows
        return sum(len(rows[group]) for group in self._table.groups)

    def assign(self, group: int) -> None:
        """Scan a key group that was added, or loaded again."""
        self.release(group)
        self._unscanned[group] = None

    def release(self, group: int) -> None:
        """Forget a key group."""
        self._unscanned.pop(group, None)
        if self._counts.pop(group, 0):
            for by_group in self._buckets.values():
                by_group.pop(group, None)

    def note_new_keys(self, group: int, changes: Mapping[Key, Change]) -> None:
        """Index the new keys of changes that are about to be promoted."""
        if self._unscanned.get(group, b"") is None:
            return  # The scan, not begun yet, will find them.
        new = self._table.rows[group].new_keys(changes)
        if new:
            # Writes of the epoch are not older than its floor; how old exactly is read later.
            self._add(group, new, self.floor_ms or 0)
            if self._counts[group] > 2 * len(self._table.rows[group]) + _EXTRA_KEYS + len(new):
                self._tidy(group)

    def _add(self, group: int, keys: list[Key], at: int) -> None:
        bucket = -(-(at + self._ttl_ms) // self._width_ms)
        by_group = self._buckets.setdefault(bucket, {})
        packed = self._pack(keys)
        known = by_group.get(group)
        if known is None:
            by_group[group] = packed
        elif isinstance(known, list):
            known.extend(keys)
        elif isinstance(packed, array):
            known.extend(packed)
        else:
            by_group[group] = [*known, *keys]
        self._counts[group] = self._counts.get(group, 0) + len(keys)

    def _pack(self, keys: list[Key]) -> Keys:
        """Return integer keys as an array: the index of keys on disk holds no objects."""
        if self._is_number:
            try:
                return array("q", keys)  # type: ignore[arg-type]
            except TypeError:
                pass  # A key is None.
        return keys

    def _tidy(self, group: int) -> None:
        """Remove duplicates, such as keys that were deleted and written again."""
        seen: set[Key] = set()
        count = 0
        for bucket in sorted(self._buckets):
            keys = self._buckets[bucket].pop(group, None)
            if keys is not None:
                fresh = [key for key in dict.fromkeys(keys) if key not in seen]
                seen.update(fresh)
                count += len(fresh)
                if fresh:
                    self._buckets[bucket][group] = self._pack(fresh)
        self._counts[group] = count

    # Removal

    def is_emptied(self) -> bool:
        """True if enough was removed since `note_tidied` to release memory or disk space."""
        now_s = time.monotonic()
        if self.removed_keys != self._removed_before:
            self._removed_before, self._removed_s = self.removed_keys, now_s
        removed = self.removed_keys - self._tidied_at
        if removed < max(_EMPTIED_KEYS_MIN, self._count_keys()):
            return False
        # Not while more is being removed: that would leave holes again.
        return now_s - self._removed_s >= _QUIET_S or now_s - self._tidied_s >= _TIDY_S_MAX

    def is_sparse(self) -> bool:
        """True if few keys are left: few of the former number, and few enough to move."""
        return self._count_keys() <= min(self._peak_keys // 4, _REPACK_KEYS_MAX)

    def note_tidied(self, *, is_packed: bool) -> None:
        self._tidied_at, self._tidied_s = self.removed_keys, time.monotonic()
        if is_packed:
            self._peak_keys = self._count_keys()

    def reclaim(self, seconds: float) -> bool:
        """Remove expired rows for about this long; True if there is more to do."""
        until = time.perf_counter() + seconds
        while self._step():
            if time.perf_counter() >= until:
                return True
        return False

    def _step(self) -> bool:
        """Do about a millisecond of work; False if nothing is due."""
        if self.floor_ms is None:
            return False
        if self._unscanned:
            self._scan(next(iter(self._unscanned)))
            return True
        due = self.floor_ms // self._width_ms
        bucket = min(self._buckets, default=due + 1)
        if bucket > due:
            return False
        by_group = self._buckets[bucket]
        if not by_group:
            del self._buckets[bucket]
            return True
        group, keys = by_group.popitem()
        part = list(keys[-PIECE_KEYS:])
        if len(keys) > len(part):
            del keys[-PIECE_KEYS:]
            by_group[group] = keys
        self._counts[group] -= len(part)
        rows = self._table.rows[group]
        self._settle(group, list(zip(part, rows.get_many(part), strict=True)))
        return True

    def _scan(self, group: int) -> None:
        rows = self._table.rows[group]
        pairs, then = rows.scan(self._unscanned[group], _SCAN_KEYS)
        if then is None:
            del self._unscanned[group]
        else:
            self._unscanned[group] = then
        self._settle(group, pairs)

    def _settle(self, group: int, pairs: list[tuple[Key, Content]]) -> None:
        """Remove the expired values of these keys; the other keys get a new bucket."""
        assert self.floor_ms is not None
        dead = self.floor_ms - self._ttl_ms
        judge = self._judge
        gone: dict[Key, Change] = {}
        later: dict[int, list[Key]] = {}
        removed = 0
        for key, held in pairs:
            if held is None:
                continue
            if held is ABSENT:
                # Into a bucket that is due, so that its content is read.
                later.setdefault(dead - self._width_ms, []).append(key)
                continue
            change, at = judge(held, dead)
            if change is not _KEPT:
                gone[key] = change
            if at is None:
                removed += 1
            else:
                later.setdefault(at, []).append(key)
        if gone:
            rows = self._table.rows[group]
            rows.promote(gone)
            rows.compact()
            self.removed_keys += removed
        for at, keys in later.items():
            self._add(group, keys, at)


def leave_out_expired(
    batch: pa.RecordBatch, kind: str, dead_ms: int, *, keep_rows: bool
) -> pa.RecordBatch:
    """Leave out rows written up to `dead_ms`; with `keep_rows` they become deletions.

    Lists stay as they are.
    """
    if kind == "list":
        return batch
    at, values = batch["value"].flatten()
    expired = pc.fill_null(pc.less_equal(at, dead_ms), False)
    if not expired.true_count:
        return batch
    kept = pc.invert(expired)
    if not keep_rows:
        return batch.filter(kept)
    live = pc.and_(batch["live"], kept)
    columns = {name: batch[name] for name in batch.schema.names}
    columns |= {"value": join_stamps(at, values, live), "live": live}
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)
