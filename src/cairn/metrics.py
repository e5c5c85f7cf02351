"""Metrics of user functions: counters, gauges and histograms, counted with the epoch.

    def open(self, ctx):
        self.hits = ctx.metrics.counter("hits")

    def process(self, row, ctx):
        self.hits.inc()

A slot starts from zero in every attempt at an epoch. When the epoch is committed, the figures of
its attempt are added to the totals. So a failed attempt counts nothing, and totals continue from
one run of a job to the next.

Always true here:
- totals are of committed epochs only; a rollback takes them back with the state;
- collected figures are plain finite numbers, which any format can hold: larger ones are clamped;
- with a journal, the counts of a row are undone with everything else that the row did.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf, isfinite
from numbers import Integral
from typing import Final, Protocol, SupportsFloat, TypeVar

import msgspec

from cairn.errors import FunctionError

Number = int | float


class HistogramCounts(msgspec.Struct, frozen=True):
    """Values that a histogram observed."""

    count: int
    sum: Number | None
    """None: JSON has no form for a sum that was not finite, in epochs of older versions."""
    buckets: list[tuple[float, int]]
    """Each with its upper bound, and how many values were not above it."""


class UserMetrics(msgspec.Struct, frozen=True):
    """Metrics of a function by name, in an attempt or over all epochs so far."""

    counters: dict[str, Number | None] = {}
    gauges: dict[str, Number | None] = {}
    histograms: dict[str, HistogramCounts] = {}


NAMES_MAX: Final = 100
BUCKETS_MAX: Final = 50
INT_MAX: Final = 2**63 - 1
FLOAT_MAX: Final = sys.float_info.max
DEFAULT_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")
_RESERVED: Final = (
    "_total", "_count", "_sum", "_bucket", "_created", "_info", "_gauge", "_histogram"
)  # fmt: skip


class Undo(Protocol):
    """Undo log of the current row."""

    def call(self, function: Callable[..., None], *args: object) -> None: ...


class Counter:
    """A number that only goes up."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Number = 0

    def inc(self, n: float = 1) -> None:
        if not 0 <= n < inf:
            raise FunctionError(f"a counter goes up by a number from 0 on, found {n!r}")
        # The sum of numpy's integers would overflow.
        self.value += n if type(n) is int or type(n) is float else _plain(n)

    def reset(self) -> None:
        self.value = 0


class Gauge:
    """The last value that was set. The largest one of all subtasks is shown."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def set(self, value: float) -> None:
        if not isfinite(value):
            raise FunctionError(f"a gauge is set to a finite number, found {value!r}")
        self.value = value

    def reset(self) -> None:
        self.value = None


class Histogram:
    """The spread of values: for each bound, how many were not above it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.reset()

    def observe(self, value: float) -> None:
        if not isfinite(value):
            raise FunctionError(f"a histogram observes finite numbers, found {value!r}")
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += float(value)

    def reset(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum: float = 0.0


class _UndoneCounter(Counter):
    """A counter of an operator with dead letters, where a row may be undone."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Undo) -> None:
        super().__init__()
        self._undo = undo

    def inc(self, n: float = 1) -> None:
        self._undo.call(setattr, self, "value", self.value)
        super().inc(n)


class _UndoneGauge(Gauge):
    __slots__ = ("_undo",)

    def __init__(self, undo: Undo) -> None:
        super().__init__()
        self._undo = undo

    def set(self, value: float) -> None:
        self._undo.call(setattr, self, "value", self.value)
        super().set(value)


class _UndoneHistogram(Histogram):
    __slots__ = ("_undo",)

    def __init__(self, bounds: Sequence[float], undo: Undo) -> None:
        super().__init__(bounds)
        self._undo = undo

    def observe(self, value: float) -> None:
        before = self.sum
        super().observe(value)
        self._undo.call(self._take_back, bisect_left(self.bounds, value), before)

    def _take_back(self, at: int, before: float) -> None:
        self.counts[at] -= 1
        self.sum = before


class Metrics:
    """The metrics of one operator by name. The same name gives the same metric."""

    def __init__(self, undo: Undo | None = None) -> None:
        self._undo = undo
        self._found: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str) -> Counter:
        found = self._found.get(name)
        if type(found) in (Counter, _UndoneCounter):
            return found  # type: ignore[return-value]
        return self._add(
            name, found, Counter() if self._undo is None else _UndoneCounter(self._undo)
        )

    def gauge(self, name: str) -> Gauge:
        found = self._found.get(name)
        if type(found) in (Gauge, _UndoneGauge):
            return found  # type: ignore[return-value]
        return self._add(name, found, Gauge() if self._undo is None else _UndoneGauge(self._undo))

    def histogram(self, name: str, buckets: Iterable[float] = DEFAULT_BUCKETS) -> Histogram:
        """Return a histogram; `buckets` are its upper bounds, lowest first."""
        found = self._found.get(name)
        bounds = tuple(buckets) if buckets is not DEFAULT_BUCKETS else DEFAULT_BUCKETS
        if isinstance(found, Histogram) and bounds == found.bounds:
            return found
        if isinstance(found, Histogram):
            raise FunctionError(
                f"the histogram {name!r} already has other buckets\n"
                f"  expected: {found.bounds}\n  found: {bounds}"
            )
        _check_bounds(name, bounds)
        bounds = tuple(float(bound) for bound in bounds)
        undo = self._undo
        return self._add(
            name, found, Histogram(bounds) if undo is None else _UndoneHistogram(bounds, undo)
        )

    def reset(self) -> None:
        """Start an attempt at an epoch: nothing is counted yet."""
        for metric in self._found.values():
            metric.reset()

    def collect(self) -> UserMetrics | None:
        """Return the figures of this attempt; None for a function without metrics.

        A gauge that the attempt has not set is left out.
        """
        if not self._found:
            return None
        made = UserMetrics({}, {}, {})
        for name, metric in self._found.items():
            if isinstance(metric, Counter):
                made.counters[name] = _plain(metric.value)
            elif isinstance(metric, Histogram):
                made.histograms[name] = _collect(metric)
            elif metric.value is not None:
                made.gauges[name] = _plain(metric.value)
        return made

    def _add(self, name: str, found: object, metric: _M) -> _M:
        if found is not None:
            kind = type(found).__name__.removeprefix("_Undone").lower()
            raise FunctionError(
                f"the metric {name!r} is already a {kind}\n  next: give this one another name"
            )
        _check_name(name)
        if len(self._found) >= NAMES_MAX:
            raise FunctionError(
                f"a function has at most {NAMES_MAX} metrics, and {name!r} would be one more\n"
                "  next: do not put data, such as keys, into names"
            )
        self._found[name] = metric
        return metric


_M = TypeVar("_M", Counter, Gauge, Histogram)


def merge_subtasks(parts: Iterable[UserMetrics]) -> UserMetrics:
    """Return the metrics of an operator's subtasks together: of a gauge the largest value."""
    made = UserMetrics()
    for part in parts:
        gauges = {
            name: _larger(value, made.gauges.get(name)) for name, value in part.gauges.items()
        }
        made = add_metrics(made, msgspec.structs.replace(part, gauges=gauges))
    return made


def add_metrics(before: UserMetrics, last: UserMetrics | None) -> UserMetrics:
    """Return totals with later figures added. A gauge that was not set again keeps its value."""
    if last is None:
        return before
    counters, histograms = before.counters.copy(), before.histograms.copy()
    for name, n in last.counters.items():
        counters[name] = _plus(counters.get(name), n)
    for name, each in last.histograms.items():
        histograms[name] = _add_histogram(histograms.get(name), each)
    return UserMetrics(counters, before.gauges | last.gauges, histograms)


def _larger(one: Number | None, other: Number | None) -> Number | None:
    return one if other is None or (one is not None and one > other) else other


def _add_histogram(before: HistogramCounts | None, last: HistogramCounts) -> HistogramCounts:
    bounds = [bound for bound, _ in last.buckets]
    if before is None or [bound for bound, _ in before.buckets] != bounds:
        return last  # Another version of the function has other buckets: it starts from zero.
    counts = zip(bounds, before.buckets, last.buckets, strict=True)
    return HistogramCounts(
        before.count + last.count,
        _plus(before.sum, last.sum),
        [(bound, first + second) for bound, (_, first), (_, second) in counts],
    )


def _collect(histogram: Histogram) -> HistogramCounts:
    buckets, below = [], 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        buckets.append((bound, below))
    return HistogramCounts(below + histogram.counts[-1], _plain(histogram.sum), buckets)


def _plain(value: SupportsFloat) -> Number:
    """Return a number without numpy's type, within the range that every format can hold."""
    if isinstance(value, Integral):
        return min(max(int(value), -INT_MAX), INT_MAX)
    return min(max(float(value), -FLOAT_MAX), FLOAT_MAX)


def _plus(before: Number | None, last: Number | None) -> Number:
    """Return a total. None, which JSON makes of a number that is not finite, counts as zero."""
    return _plain((before or 0) + (last or 0))


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FunctionError(
            f"{name!r} is not a name for a metric\n"
            "  expected: at most 100 letters, digits and _, not starting with a digit"
        )
    ending = next((end for end in _RESERVED if name.endswith(end)), None)
    if ending is not None:
        raise FunctionError(
            f"the name of a metric must not end in {ending!r}, found {name!r}\n"
            "  next: leave the ending out; Prometheus adds it where it belongs"
        )


def _check_bounds(name: str, bounds: Sequence[float]) -> None:
    ordered = all(low < high for low, high in pairwise(bounds))
    if not 0 < len(bounds) <= BUCKETS_MAX or not all(map(isfinite, bounds)) or not ordered:
        raise FunctionError(
            f"the histogram {name!r} has buckets {bounds}\n"
            f"  expected: 1 to {BUCKETS_MAX} finite numbers, each above the one before"
        )
