"""Rows of keys in order: by key, then by time, then by number. Found by key and range of times.

A run never changes but for two flags of each row: whether the row is there (`live`), and whether
it waits for a match (`waiting`). Both exist twice, as of the running epoch and as of the parent.

Always true here:
- the place of a row, key number * span + tick, grows along the run; ticks are in the order of time;
- flags that the epoch changed are listed in `_log`; all others are as of the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints

Bools = npt.NDArray[np.bool_]
Change = Literal["remove", "match", "wait"]

PAIRS_MAX = 128 * 1024
"""Rows found that are worked on at once."""
_PLACES_MAX = 1 << 62


class Rows(NamedTuple):
    """Rows as columns, in any order."""

    keys: Ints
    """Numbers of the keys."""
    times: Ints
    numbers: Ints
    """Together with key and pane it names a row."""
    waiting: Bools
    at: Ints
    """The place of each row in `rows`. So rows are sorted, and dropped, without a copy."""
    rows: pa.StructArray

    def take(self, at: Ints) -> Rows:
        """Return these rows, in this order."""
        return Rows(
            self.keys[at],
            self.times[at],
            self.numbers[at],
            self.waiting[at],
            self.at[at],
            self.rows,
        )

    def read(self, at: Ints) -> pa.StructArray:
        """Return the content of these rows."""
        return self.rows.take(pa.array(self.at[at]))

    def compact(self) -> Rows:
        """Return the same without room for dropped rows, if that is much."""
        if 4 * len(self.at) > 3 * len(self.rows):
            return self
        every = np.arange(len(self.at))
        return self._replace(at=every, rows=self.read(every))


def concat_rows(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.rows) for part in parts[:-1])]).tolist()
    return Rows(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.waiting for part in parts]),
        np.concatenate([part.at + start for part, start in zip(parts, starts, strict=True)]),
        pa.concat_arrays([part.rows for part in parts]),
    )


class Run:
    """Sorted rows. `is_committed`: the parent epoch has them."""

    def __init__(self, rows: Rows, *, is_committed: bool) -> None:
        self._set_scale(rows)
        places = self._places(rows.keys, rows.times, "left")
        order = np.argsort(places)
        ordered = places[order]
        if (ordered[1:] == ordered[:-1]).any():
            order = np.lexsort((rows.numbers, places))
        rows, places = rows.take(order), places[order]
        self.all = rows
        self.is_fresh = not is_committed
        self._at = places
        self.live = np.ones(len(order), np.bool_)
        self.waiting = rows.waiting.copy()
        self.committed = np.full(len(order), is_committed)
        self.waited = rows.waiting.copy()
        self.first: int | None = int(rows.times.min())
        """The earliest time of a live row."""
        self._number_max: int | None = None
        self._log: list[tuple[Ints, Change]] = []

    def __len__(self) -> int:
        return len(self._at)

    def _set_scale(self, rows: Rows) -> None:
        self._base, last = int(rows.times.min()), int(rows.times.max())
        self._key_max = int(rows.keys.max())
        self._ticks: Ints | None = None
        self._span = last - self._base + 1
        is_far = max(-self._base, last) >= _PLACES_MAX
        if is_far or (self._key_max + 2) * self._span >= _PLACES_MAX:
            # Times too far apart for the number of keys: they are numbered.
            self._ticks = np.unique(rows.times)
            self._span = len(self._ticks)

    def _places(self, keys: Ints, times: Ints, side: str) -> Ints:
        """Return where rows of these keys and times begin ("left") or end ("right")."""
        if self._ticks is None:
            past = self._base + self._span
            ticks = np.clip(times, self._base - 1, past) - self._base
            if side == "right":
                ticks += 1
            ticks = np.clip(ticks, 0, self._span)
        else:
            ticks = np.searchsorted(self._ticks, times, side)  # type: ignore[call-overload]
        # Keys that came later are after all others.
        return np.minimum(keys, self._key_max + 1) * self._span + ticks

    def bounds(self, keys: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the first row, and the one after the last, of each key from `low` to `high`."""
        starts = np.searchsorted(self._at, self._places(keys, low, "left"))
        stops = np.searchsorted(self._at, self._places(keys, high, "right"))
        return starts, np.maximum(starts, stops)

    def key_bounds(self, keys: Ints) -> tuple[Ints, Ints]:
        """Return the same for all times."""
        first = np.minimum(keys, self._key_max + 1) * self._span
        return np.searchsorted(self._at, first), np.searchsorted(self._at, first + self._span)

    def before(self, time: int) -> Ints:
        """Return the live rows of before a time."""
        if self.first is None or self.first >= time:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.live & (self.all.times < time))

    # Flags

    def remove(self, at: Ints) -> None:
        """Mark live rows as gone."""
        if len(at):
            self._log.append((at, "remove"))
            self.live[at] = False
            self._find_first()

    def set_waiting(self, at: Ints, *, waits: bool) -> None:
        """Record that rows wait for a match, or have found one."""
        at = at[self.waiting[at] != waits]
        if len(at):
            self._log.append((at, "wait" if waits else "match"))
            self.waiting[at] = waits

    def _find_first(self) -> None:
        times = self.all.times[self.live]
        self.first = int(times.min()) if len(times) else None

    def mark(self) -> int:
        """Return the point that `back_to` can go back to."""
        return len(self._log)

    def back_to(self, mark: int) -> None:
        """Undo changes of flags."""
        if len(self._log) > mark:
            for at, change in reversed(self._log[mark:]):
                if change == "remove":
                    self.live[at] = True
                else:
                    self.waiting[at] = change == "match"
            del self._log[mark:]
            self._find_first()

    @property
    def is_changed(self) -> bool:
        return bool(self._log)

    def find_changes(self) -> Ints:
        """Return the rows that the epoch has added, removed or changed."""
        if self.is_fresh:
            return np.flatnonzero(self.live)
        if not self._log:
            return np.empty(0, np.int64)
        is_changed = np.zeros(len(self), np.bool_)
        for at, _ in self._log:
            is_changed[at] = True
        return np.flatnonzero(is_changed & self.committed)

    def promote(self) -> None:
        for at, _ in self._log:
            self.committed[at] = self.live[at]
            self.waited[at] = self.waiting[at]
            if self._number_max in self.all.numbers[at]:
                self._number_max = None
        self._log = []

    def number_max(self) -> int:
        """Return the largest number of a row that the parent epoch has, -1 without rows."""
        if self._number_max is None:
            numbers = self.all.numbers[self.committed]
            self._number_max = int(numbers.max()) if len(numbers) else -1
        return self._number_max

    def commit_all(self) -> None:
        """Make a run of the epoch a run of the parent's."""
        self.is_fresh = False
        self._number_max = None
        self.committed = self.live.copy()
        self.waited = self.waiting.copy()
        self._log = []

    def live_rows(self) -> Rows:
        """Return the live rows."""
        rows = self.all._replace(waiting=self.waiting)
        return rows if self.live.all() else rows.take(np.flatnonzero(self.live))


class Found:
    """Rows of runs: `at` has the question that each one answers."""

    def __init__(self, parts: Sequence[tuple[Run, Ints, Ints]], *, is_ordered: bool = True) -> None:
        """`parts`: a run, rows of it, and the question of each of these rows.

        Rows of several runs are put in the order of question, time and number, if `is_ordered`.
        """
        self._parts = [part for part in parts if len(part[1])]
        at = [at for _, _, at in self._parts]
        self.at: Ints = np.concatenate(at) if at else np.empty(0, np.int64)
        self._order: Ints | None = None
        if len(self._parts) > 1 and is_ordered:
            self._order = np.lexsort((self._pick("numbers"), self._pick("times"), self.at))
            self.at = self.at[self._order]

    def __len__(self) -> int:
        return len(self.at)

    def _pick(self, column: str) -> Ints:
        parts = [getattr(run.all, column)[rows] for run, rows, _ in self._parts]
        picked: Ints = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return picked if self._order is None else picked[self._order]

    @property
    def times(self) -> Ints:
        return self._pick("times")

    @property
    def numbers(self) -> Ints:
        return self._pick("numbers")

    @property
    def keys(self) -> Ints:
        return self._pick("keys")

    @property
    def waiting(self) -> Bools:
        """True where a row has found no match, as of now."""
        picked = [run.waiting[rows] for run, rows, _ in self._parts]
        flags = np.concatenate(picked) if picked else np.empty(0, np.bool_)
        return flags if self._order is None else flags[self._order]

    def rows(self, type: pa.DataType) -> pa.StructArray:
        """Return the rows themselves."""
        if not self._parts:
            return pa.array([], type)
        picked = [run.all.read(rows) for run, rows, _ in self._parts]
        whole = picked[0] if len(picked) == 1 else pa.concat_arrays(picked)
        return whole if self._order is None else whole.take(pa.array(self._order))

    def pick(self, at: Ints) -> Found:
        """Return some of the rows, in the order of `at`: the question is the index in it."""
        index = at if self._order is None else self._order[at]
        parts, start = [], 0
        for run, rows, _ in self._parts:
            mine = np.flatnonzero((index >= start) & (index < start + len(rows)))
            parts.append((run, rows[index[mine] - start], mine))
            start += len(rows)
        return Found(parts)

    def set_waiting(self, *, waits: bool) -> None:
        for run, rows, _ in self._parts:
            run.set_waiting(rows, waits=waits)

    def remove(self) -> None:
        for run, rows, _ in self._parts:
            run.remove(rows)

    def split(self) -> Iterable[tuple[Run, Ints, Ints]]:
        return self._parts


def search(runs: Sequence[Run], keys: Ints, low: Ints, high: Ints) -> Iterator[Found]:
    """Yield the live rows of each key from `low` to `high`, in pieces, by question.

    A key of -1 is not known. Rows of a question are in the order of time, then number.
    """
    asked = np.flatnonzero(keys >= 0)
    if not len(asked) or not runs:
        return
    # In the order of the runs, so that searching goes through memory once.
    asked = asked[np.argsort(keys[asked], kind="stable")]
    bounds = []
    counts = np.zeros(len(keys), np.int64)
    for run in runs:
        starts, lengths = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        first, stop = run.bounds(keys[asked], low[asked], high[asked])
        starts[asked], lengths[asked] = first, stop - first
        if lengths.any():
            bounds.append((run, starts, lengths))
            counts += lengths
    for begin, end in pieces(counts):
        parts = []
        for run, starts, lengths in bounds:
            at, rows = expand(starts[begin:end], lengths[begin:end])
            is_live = run.live[rows]
            if not is_live.all():
                at, rows = at[is_live], rows[is_live]
            parts.append((run, rows, at + begin))
        found = Found(parts)
        if len(found):
            yield found


def newest(runs: Sequence[Run], keys: Ints, times: Ints) -> Found:
    """Return the newest row of each key as of a time: at most one. A key of -1 is not known.

    Rows of a key that are gone must be older than those that are live.
    """
    asked = np.flatnonzero(keys >= 0)
    asked = asked[np.argsort(keys[asked], kind="stable")]
    best = np.full(len(keys), -1, np.int64)
    best_time, best_number = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    best_row = np.zeros(len(keys), np.int64)
    for index, run in enumerate(runs):
        least = np.full(len(asked), np.iinfo(np.int64).min)
        starts, stops = run.bounds(keys[asked], least, times[asked])
        rows = stops - 1
        has = rows >= starts
        at, rows = asked[has], rows[has]
        has = run.live[rows]
        at, rows = at[has], rows[has]
        time, number = run.all.times[rows], run.all.numbers[rows]
        is_newer = (best[at] < 0) | (time > best_time[at])
        is_newer |= (time == best_time[at]) & (number > best_number[at])
        at, rows = at[is_newer], rows[is_newer]
        best[at], best_row[at] = index, rows
        best_time[at], best_number[at] = time[is_newer], number[is_newer]
    found = []
    for index, run in enumerate(runs):
        at = np.flatnonzero(best == index)
        found.append((run, best_row[at], at))
    return Found(found)


def expand(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Return (range, element) of every element of ranges with these starts and lengths."""
    at = np.repeat(np.arange(len(starts)), lengths)
    ends = np.cumsum(lengths)
    within = np.arange(len(at)) - np.repeat(ends - lengths, lengths)
    return at, starts[at] + within


def pieces(counts: Ints) -> Iterator[tuple[int, int]]:
    """Yield ranges with about PAIRS_MAX in sum; none without any."""
    if not len(counts):
        return
    ends = np.cumsum(counts)
    total, start = int(ends[-1]), 0
    while total and start < len(counts):
        before = int(ends[start - 1]) if start else 0
        if before == total:
            return
        stop = max(start + 1, int(np.searchsorted(ends, before + PAIRS_MAX, "right")))
        yield start, stop
        start = stop
