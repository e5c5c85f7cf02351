"""Windows for whole columns of times, in microseconds.

A pane is the longest stretch of time without a beginning or end of a window inside: rows of a
key and pane are in the same windows, so they are merged before they are added to windows.

Always true here:
- the result for a column is what `assign` of the windows returns for each time.
"""

from __future__ import annotations

import math

import numpy as np

from cairn.operators.aggregates.parts import Ints
from cairn.windows import FOREVER, Global, Sliding, Tumbling

_HOUR_US = 3_600_000_000


def pane_us(spec: Tumbling | Sliding) -> int | None:
    """Return the length of a pane; None if panes differ in length."""
    if isinstance(spec, Sliding):
        return math.gcd(spec.size_ms, spec.slide_ms) * 1000
    return spec.size_ms * 1000 if spec.timezone is None else None


def panes(spec: Tumbling | Sliding | Global, times: Ints) -> Ints:
    """Return the start of each time's pane."""
    if isinstance(spec, Global):
        return np.full(len(times), FOREVER[0])
    length = pane_us(spec)
    if length is None:
        return _days(spec, times)[0]
    return times - (times - spec.offset_ms * 1000) % length


def last_ends(spec: Tumbling | Sliding | Global, starts: Ints) -> Ints:
    """Return the end of the last window of each pane."""
    if isinstance(spec, Global):
        return np.full(len(starts), FOREVER[1])
    if isinstance(spec, Sliding):
        return _last_starts(spec, starts) + spec.size_ms * 1000
    if spec.timezone is not None:
        return _days(spec, starts)[1]
    return starts + spec.size_ms * 1000


def windows(spec: Tumbling | Sliding | Global, starts: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (pane, start, end) of every window of each pane."""
    rows = np.arange(len(starts))
    if not isinstance(spec, Sliding):
        return rows, starts, last_ends(spec, starts)
    size_us, slide_us = spec.size_ms * 1000, spec.slide_ms * 1000
    count = -(-size_us // slide_us)
    steps = np.arange(count) * slide_us
    found = (_last_starts(spec, starts)[:, None] - steps).ravel()
    rows = np.repeat(rows, count)
    is_in = found + size_us > starts[rows]
    rows, found = rows[is_in], found[is_in]
    return rows, found, found + size_us


def _last_starts(spec: Sliding, starts: Ints) -> Ints:
    return starts - (starts - spec.offset_ms * 1000) % (spec.slide_ms * 1000)


def _days(spec: Tumbling | Sliding, times: Ints) -> tuple[Ints, Ints]:
    """Return the calendar days of times. No two begin within an hour, so an hour has one or two."""
    assert isinstance(spec, Tumbling)
    hours, at = np.unique(times // _HOUR_US, return_inverse=True)
    first = np.empty((len(hours), 2), np.int64)
    second = np.empty((len(hours), 2), np.int64)
    for row, hour in enumerate(hours.tolist()):
        first[row] = spec.assign(hour * _HOUR_US)[0]
        second[row] = spec.assign((hour + 1) * _HOUR_US - 1)[0]
    bounds = np.where((times < first[at, 1])[:, None], first[at], second[at])
    return bounds[:, 0], bounds[:, 1]
