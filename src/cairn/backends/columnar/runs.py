"""Rows of keys, found by key and range of times.

A run never changes but for two flags of each row: whether the row is there (`live`), and whether
it waits for a match (`waiting`). Both exist twice, as of the running epoch and as of the parent.
Rows are sorted by key, time and number when they are first searched: many are only ever read by
time, or not at all.

Always true here:
- rows of a run are in the order of their numbers;
- the place of a row, key number * span + tick, grows along `order`; ticks are in the order of time;
- flags that the epoch changed are listed in `_log`; all others are as of the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.pages import Pages, join_pages

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
    """The place of each row in `pages`. So rows are sorted, and dropped, without a copy."""
    pages: Pages

    def take(self, at: Ints) -> Rows:
        """Return these rows, in this order."""
        return Rows(
            self.keys[at],
            self.times[at],
            self.numbers[at],
            self.waiting[at],
            self.at[at],
            self.pages,
        )

    def read(self, at: Ints) -> pa.StructArray:
        """Return the content of these rows."""
        return self.pages.take(self.at[at])

    def compact(self) -> Rows:
        """Return the same without room for dropped rows, if that is much."""
        pages, at = self.pages.pack(self.at)
        return self._replace(at=at, pages=pages)


def concat_rows(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.pages) for part in parts[:-1])]).tolist()
    return Rows(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.waiting for part in parts]),
        np.concatenate([part.at + start for part, start in zip(parts, starts, strict=True)]),
        join_pages(part.pages for part in parts),
    )


class Index(NamedTuple):
    """The order of a run's rows by key, time and number."""

    base: int
    span: int
    key_max: int
    ticks: Ints | None
    """All times, if they are too far apart for the number of keys: then they are numbered."""
    at: Ints
    """Places, in ascending order."""
    order: Ints
    """The row at each of them."""

    def places(self, keys: Ints, times: Ints, side: str) -> Ints:
        """Return where rows of these keys and times begin ("left") or end ("right")."""
        if self.ticks is None:
            past = self.base + self.span
            ticks = np.clip(times, self.base - 1, past) - self.base
            if side == "right":
                ticks += 1
            ticks = np.clip(ticks, 0, self.span)
        else:
            ticks = np.searchsorted(self.ticks, times, side)  # type: ignore[call-overload]
        # Keys that came later are after all others.
        return np.minimum(keys, self.key_max + 1) * self.span + ticks


def make_index(keys: Ints, times: Ints) -> Index:
    """Return the index of rows that are in the order of their numbers."""
    base, last, key_max = int(times.min()), int(times.max()), int(keys.max())
    ticks: Ints | None = None
    span = last - base + 1
    if max(-base, last) >= _PLACES_MAX or (key_max + 2) * span >= _PLACES_MAX:
        ticks = np.unique(times)
        span = len(ticks)
    none = np.empty(0, np.int64)
    places = Index(base, span, key_max, ticks, none, none).places(keys, times, "left")
    at, order = sort_stably(places, (key_max + 2) * span)
    return Index(base, span, key_max, ticks, at, order)


def sort_stably(values: Ints, bound: int) -> tuple[Ints, Ints]:
    """Return values from 0 to `bound` in ascending order, and the index that each one had."""
    bits = len(values).bit_length()
    if bound.bit_length() + bits < 63:
        # Plain numbers are sorted several times faster than their indices.
        packed = np.sort(values << bits | np.arange(len(values)))
        return packed >> bits, packed & ((1 << bits) - 1)
    order = np.argsort(values, kind="stable")
    return values[order], order


class Run:
    """Rows that are searched together. `is_committed`: the parent epoch has them."""

    def __init__(self, rows: Rows, *, is_committed: bool) -> None:
        if (rows.numbers[1:] < rows.numbers[:-1]).any():
            rows = rows.take(np.argsort(rows.numbers, kind="stable"))
        self.all = rows
        self.is_fresh = not is_committed
        self._index: Index | None = None
        self.live = np.ones(len(rows.at), np.bool_)
        self.waiting = rows.waiting.copy()
        self.committed = np.full(len(rows.at), is_committed)
        self.waited = rows.waiting.copy()
        self.first: int | None = int(rows.times.min())
        """The earliest time of a live row."""
        self._number_max: int | None = None
        self._log: list[tuple[Ints, Change]] = []

    def __len__(self) -> int:
        return len(self.all.at)

    @property
    def index(self) -> Index:
        index = self._index
        if index is None:
            # Lookups on other threads may make the same one.
            index = self._index = make_index(self.all.keys, self.all.times)
        return index

    def bounds(self, keys: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return where the rows of each key from `low` to `high` begin and end in the order."""
        index = self.index
        starts = np.searchsorted(index.at, index.places(keys, low, "left"))
        stops = np.searchsorted(index.at, index.places(keys, high, "right"))
        return starts, np.maximum(starts, stops)

    def key_bounds(self, keys: Ints) -> tuple[Ints, Ints]:
        """Return the same for all times."""
        index = self.index
        first = np.minimum(keys, index.key_max + 1) * index.span
        return np.searchsorted(index.at, first), np.searchsorted(index.at, first + index.span)

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

    def drop(self, at: Ints) -> None:
        """Remove rows of the parent epoch, with no running epoch to undo it."""
        if len(at):
            self.live[at] = self.committed[at] = False
            self._number_max = None
            self._find_first()

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

    def field(self, name: str, type: pa.DataType) -> pa.Array:
        """Return one field of the rows."""
        if not self._parts:
            return pa.array([], type)
        picked = [run.all.pages.take_field(name, run.all.at[rows]) for run, rows, _ in self._parts]
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
            at, places = expand(starts[begin:end], lengths[begin:end])
            rows = run.index.order[places]
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
        has = stops > starts
        at, rows = asked[has], run.index.order[stops[has] - 1]
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
