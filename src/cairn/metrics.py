"""Metrics of user functions: counters, gauges and histograms, counted with the epoch.

    def open(self, ctx):
        self.hits = ctx.metrics.counter("hits")

    def process(self, row, ctx):
        self.hits.inc()

A slot counts anew in every attempt at an epoch; what an attempt comes to is added to the totals
of the epoch when that is committed. So an attempt that failed has counted nothing, and the totals
go on from one run of a job to the next.

Always true here:
- a total is of committed epochs only; rolled back with the state, it is as of that epoch;
- what is collected are plain finite numbers, which any format can take: what would be larger
  than the largest one stays there;
- with a journal, what a row has counted is taken back with everything else it did.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite
from numbers import Integral
from typing import Any, Final, Protocol, TypeVar

from cairn.errors import FunctionError

Collected = dict[str, dict[str, Any]]
"""{"counters": {name: n}, "gauges": {name: x}, "histograms": {name: {"count", "sum", "buckets"}}};
a bucket is [upper bound, how many were not above it]."""

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
    """What is told how to take a change back."""

    def call(self, function: Any, *args: Any) -> None: ...


class Counter:
    """How often something happened. It only goes up."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = 0

    def inc(self, n: float = 1) -> None:
        if not 0 <= n < inf:
            raise FunctionError(f"a counter goes up by a number from 0 on, found {n!r}")
        # A number of numpy's would stay of its few bits, and a sum would overflow.
        self.value += n if type(n) is int or type(n) is float else _plain(n)

    def reset(self) -> None:
        self.value = 0


class Gauge:
    """The last value of something. Of several subtasks the largest is shown."""

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
    """How values are spread: how many were not above each of some bounds."""

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
    """In an operator with dead letters: a row may be undone."""

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
    """The metrics of one operator, by their names. Asked for twice, it is the same one."""

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
        """`buckets` are upper bounds, from the lowest to the highest."""
        found = self._found.get(name)
        bounds = tuple(buckets) if buckets is not DEFAULT_BUCKETS else DEFAULT_BUCKETS
        if isinstance(found, Histogram) and bounds == found.bounds:
            return found
        if isinstance(found, Histogram):
            raise FunctionError(
                f"the histogram {name!r} has other buckets already\n"
                f"  found: {bounds}\n  expected: {found.bounds}"
            )
        _check_bounds(name, bounds)
        bounds = tuple(float(bound) for bound in bounds)
        undo = self._undo
        return self._add(
            name, found, Histogram(bounds) if undo is None else _UndoneHistogram(bounds, undo)
        )

    def reset(self) -> None:
        """An attempt at an epoch begins: nothing is counted yet."""
        for metric in self._found.values():
            metric.reset()

    def collected(self) -> Collected:
        """What the attempt came to. A gauge that was not set in it is not there."""
        if not self._found:
            return {}
        made: Collected = {"counters": {}, "gauges": {}, "histograms": {}}
        for name, metric in self._found.items():
            if isinstance(metric, Counter):
                made["counters"][name] = _plain(metric.value)
            elif isinstance(metric, Histogram):
                made["histograms"][name] = _collected(metric)
            elif metric.value is not None:
                made["gauges"][name] = _plain(metric.value)
        return made

    def _add(self, name: str, found: Any, metric: _M) -> _M:
        if found is not None:
            kind = type(found).__name__.removeprefix("_Undone").lower()
            raise FunctionError(
                f"the metric {name!r} is a {kind} already\n  next: give this one another name"
            )
        _check_name(name)
        if len(self._found) >= NAMES_MAX:
            raise FunctionError(
                f"a function has at most {NAMES_MAX} metrics, and {name!r} would be one more\n"
                "  next: do not make names of data, such as keys"
            )
        self._found[name] = metric
        return metric


_M = TypeVar("_M", Counter, Gauge, Histogram)


def united(parts: Iterable[Collected]) -> Collected:
    """Of the subtasks of an operator: counted together, of a gauge the largest value."""
    made: Collected = {}
    for part in parts:
        gauges = made.get("gauges", {})
        largest = {
            name: max(value, gauges.get(name, value))
            for name, value in part.get("gauges", {}).items()
        }
        made = followed(made, {**part, "gauges": largest}) if part else made
    return made


def followed(before: Mapping[str, Any], last: Collected) -> Collected:
    """Totals, with what came after them. A gauge that was not set again keeps its value."""
    if not last:
        return dict(before)
    counters = dict(before.get("counters", {}))
    for name, value in last["counters"].items():
        counters[name] = _plus(counters.get(name), value)
    histograms = dict(before.get("histograms", {}))
    for name, histogram in last["histograms"].items():
        histograms[name] = _added(histograms.get(name), histogram)
    gauges = {**before.get("gauges", {}), **last["gauges"]}
    return {"counters": counters, "gauges": gauges, "histograms": histograms}


def _added(before: dict[str, Any] | None, last: dict[str, Any]) -> dict[str, Any]:
    bounds = [bound for bound, _ in last["buckets"]]
    if before is None or [bound for bound, _ in before["buckets"]] != bounds:
        return last  # Another version of the function has other buckets: counted anew.
    counts = zip(bounds, before["buckets"], last["buckets"], strict=True)
    return {
        "count": before["count"] + last["count"],
        "sum": _plus(before["sum"], last["sum"]),
        "buckets": [[bound, first + second] for bound, (_, first), (_, second) in counts],
    }


def _collected(histogram: Histogram) -> dict[str, Any]:
    buckets, below = [], 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        buckets.append([bound, below])
    count = below + histogram.counts[-1]
    return {"count": count, "sum": _plain(histogram.sum), "buckets": buckets}


def _plain(value: Any) -> int | float:
    """Without numpy's types, which no format knows, and within what every format can hold."""
    if isinstance(value, Integral):
        return min(max(int(value), -INT_MAX), INT_MAX)
    return min(max(float(value), -FLOAT_MAX), FLOAT_MAX)


def _plus(before: float | None, last: float) -> int | float:
    """A total. None is what JSON has made of one that was not finite: counted anew."""
    return _plain((before or 0) + last)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FunctionError(
            f"{name!r} is no name of a metric\n"
            "  expected: letters, digits and _, at most 100, and no digit first"
        )
    ending = next((end for end in _RESERVED if name.endswith(end)), None)
    if ending is not None:
        raise FunctionError(
            f"the name of a metric may not end in {ending!r}, found {name!r}\n"
            "  next: leave the ending out; Prometheus adds it where it belongs"
        )


def _check_bounds(name: str, bounds: Sequence[float]) -> None:
    ordered = all(low < high for low, high in pairwise(bounds))
    if not 0 < len(bounds) <= BUCKETS_MAX or not all(map(isfinite, bounds)) or not ordered:
        raise FunctionError(
            f"the histogram {name!r} has buckets {bounds}\n"
            f"  expected: 1 to {BUCKETS_MAX} finite numbers, each above the one before"
        )
