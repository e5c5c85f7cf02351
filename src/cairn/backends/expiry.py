"""Expired rows leave the slot: found through an index by time, a few at a time.

Each key of a table stands in a bucket: the time at which something of it may have expired, rounded
up. When the bucket is due the row itself is looked at: what has expired is removed, and a key
that lives on moves to a later bucket. So a key that is written all the time costs one
look per ttl, and nothing is ever searched through, but once after a restore, in slices.

Removal is this slot's own affair: it is in no delta and in no acknowledgement. Nobody sees
expired rows, bases leave them out, and handles write the same whether they are gone or not.

Always true here:
- only what had expired before the epoch's floor is removed; a list only as a whole;
- removal goes through `promote`, so a base that is being written is not disturbed;
- every key that is held is in the index, or its key group is waiting to be looked through. Some
  are in it twice, or are gone already: more than half of a group is never of that kind for long.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.base import ABSENT
from cairn.types.codec.stamped import join_stamps

if TYPE_CHECKING:
    from cairn.backends.overlay import Table
    from cairn.state import TTL

_BUCKETS_PER_TTL: Final = 64
_PIECE_KEYS: Final = 1024
_SCAN_KEYS: Final = 4096
_EXTRA_KEYS: Final = 256
_EMPTIED_KEYS_MIN: Final = 50_000
_QUIET_S: Final = 2.0
_TIDY_S_MAX: Final = 60.0
# Moving so many takes about a second.
_REPACK_KEYS_MAX: Final = 500_000
_KEPT: Final = object()

Keys = list[Any] | array  # type: ignore[type-arg]
Judge = Callable[[Any, int], tuple[Any, int | None]]


def _judge_value(held: Any, dead: int) -> tuple[Any, int | None]:
    """(the change that removes what is dead, when to look again)."""
    at = held[0]
    return (None, None) if at <= dead else (_KEPT, at)


def _judge_map(held: Mapping[Any, Any], dead: int) -> tuple[Any, int | None]:
    gone: dict[Any, Any] = {}
    first: int | None = None
    for entry, (at, _) in held.items():
        if at <= dead:
            gone[entry] = ABSENT
        elif first is None or at < first:
            first = at
    return gone or _KEPT, first


def _judge_list(held: Sequence[Any], dead: int) -> tuple[Any, int | None]:
    # Changes count on the items before them: a list goes when its last item does.
    last = max(at for at, _ in held)
    return ((0, []), None) if last <= dead else (_KEPT, last)


_JUDGES: Final[dict[str, Judge]] = {"map": _judge_map, "list": _judge_list}


class Expiry:
    """The index of one table, and the removal."""

    def __init__(self, table: Table, ttl: TTL) -> None:
        self._table = table
        self._ttl_ms = ttl.ms
        self.clock = ttl.clock
        self._width_ms = max(1, ttl.ms // _BUCKETS_PER_TTL)
        self._judge = _JUDGES.get(table.declaration.kind, _judge_value)
        self.floor_ms: int | None = None
        """What expired up to here may go. That of the epoch at hand, or of the last one."""
        self._is_number = pa.types.is_integer(table.keys.arrow)
        self._buckets: dict[int, dict[int, Keys]] = {}
        self._counts: dict[int, int] = {}
        self._unscanned: dict[int, Any] = {}
        """Key groups to be looked through, and how far that has come."""
        self.removed_keys = 0
        self._peak_keys = 0
        self._tidied_at = self._removed_before = 0
        self._tidied_s = self._removed_s = time.monotonic()

    def begin(self, floor_ms: int | None) -> None:
        """An epoch begins; None: its floor is not known."""
        if floor_ms is not None:
            self.floor_ms = floor_ms
        self._peak_keys = max(self._peak_keys, self._held_keys())

    def _held_keys(self) -> int:
        rows = self._table.rows
        return sum(len(rows[group]) for group in self._table.groups)

    def assign(self, group: int) -> None:
        """A key group came, or was loaded anew: it is to be looked through."""
        self.release(group)
        self._unscanned[group] = None

    def release(self, group: int) -> None:
        """A key group went."""
        self._unscanned.pop(group, None)
        if self._counts.pop(group, 0):
            for by_group in self._buckets.values():
                by_group.pop(group, None)

    def promoting(self, group: int, changes: Mapping[Any, Any]) -> None:
        """These changes are about to come down: keys that are new get a place."""
        if self._unscanned.get(group, self) is None:
            return  # Not begun: they will be found there.
        new = self._table.rows[group].new_keys(changes)
        if new:
            # What the epoch wrote is not older than its floor. Exactly how old: later.
            self._add(group, new, self._first_ms())
            if self._counts[group] > 2 * len(self._table.rows[group]) + _EXTRA_KEYS + len(new):
                self._tidy(group)

    def _first_ms(self) -> int:
        return self.floor_ms if self.floor_ms is not None else 0

    def _add(self, group: int, keys: list[Any], at: int) -> None:
        bucket = -(-(at + self._ttl_ms) // self._width_ms)
        by_group = self._buckets.setdefault(bucket, {})
        packed = self._packed(keys)
        known = by_group.get(group)
        if known is None:
            by_group[group] = packed
        elif type(known) is type(packed):
            known.extend(packed)
        else:
            by_group[group] = [*known, *keys]
        self._counts[group] = self._counts.get(group, 0) + len(keys)

    def _packed(self, keys: list[Any]) -> Keys:
        """Numbers as such: a key that lies on the disk should not be an object here."""
        if self._is_number:
            try:
                return array("q", keys)
            except TypeError:
                pass  # A key may be None.
        return keys

    def _tidy(self, group: int) -> None:
        """Leave out what is there twice: keys that were deleted and came again, for one."""
        seen: set[Any] = set()
        count = 0
        for bucket in sorted(self._buckets):
            keys = self._buckets[bucket].pop(group, None)
            if keys is not None:
                fresh = [key for key in dict.fromkeys(keys) if key not in seen]
                seen.update(fresh)
                count += len(fresh)
                if fresh:
                    self._buckets[bucket][group] = self._packed(fresh)
        self._counts[group] = count

    # Removal

    def is_emptied(self) -> bool:
        """Whether much was removed since `tidied`: time to give something back."""
        now_s = time.monotonic()
        if self.removed_keys != self._removed_before:
            self._removed_before, self._removed_s = self.removed_keys, now_s
        removed = self.removed_keys - self._tidied_at
        if removed < max(_EMPTIED_KEYS_MIN, self._held_keys()):
            return False
        # Not in the middle of a wave: the rest of it would leave holes again.
        return now_s - self._removed_s >= _QUIET_S or now_s - self._tidied_s >= _TIDY_S_MAX

    def is_sparse(self) -> bool:
        """Whether what is left is little, of what there was and to move."""
        return self._held_keys() <= min(self._peak_keys // 4, _REPACK_KEYS_MAX)

    def tidied(self, *, is_packed: bool) -> None:
        self._tidied_at, self._tidied_s = self.removed_keys, time.monotonic()
        if is_packed:
            self._peak_keys = self._held_keys()

    def reclaim(self, seconds: float) -> bool:
        """Work for about so long; True when there is more to do."""
        until = time.perf_counter() + seconds
        while self._step():
            if time.perf_counter() >= until:
                return True
        return False

    def _step(self) -> bool:
        """A piece of about a millisecond; False when nothing is due."""
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
        part = list(keys[-_PIECE_KEYS:])
        if len(keys) > len(part):
            del keys[-_PIECE_KEYS:]
            by_group[group] = keys
        self._counts[group] -= len(part)
        rows = self._table.rows[group]
        self._settle(group, list(zip(part, rows.held_many(part), strict=True)))
        return True

    def _scan(self, group: int) -> None:
        rows = self._table.rows[group]
        pairs, then = rows.scan(self._unscanned[group], _SCAN_KEYS)
        if then is None:
            del self._unscanned[group]
        else:
            self._unscanned[group] = then
        self._settle(group, pairs)

    def _settle(self, group: int, pairs: list[tuple[Any, Any]]) -> None:
        """Remove what has expired of these keys; the others get a new place."""
        assert self.floor_ms is not None
        dead = self.floor_ms - self._ttl_ms
        judge = self._judge
        gone: dict[Any, Any] = {}
        later: dict[int, list[Any]] = {}
        removed = 0
        for key, held in pairs:
            if held is None:
                continue
            if held is ABSENT:
                # Into a bucket that is due, to be asked for.
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
    """Stored rows without those written up to `dead_ms`. With `keep_rows` they become deletions.

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


def trim_memory() -> None:
    """Give freed memory back to the system, where allocators have to be told."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
