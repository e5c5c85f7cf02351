"""Sessions found and merged for many keys at once.

Always true here:
- rows of a key no further apart than the gap are in one session, touching ones too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.operators.aggregates.grouping import first_rows, number_values
from cairn.operators.aggregates.parts import Ints


class Spans(NamedTuple):
    """Stretches of time, each of a numbered key."""

    keys: Ints
    starts: Ints
    ends: Ints


class ParentSessions:
    """The sessions of keys as of the parent epoch, whatever calls have made of them since."""

    def __init__(self) -> None:
        self._calls: list[tuple[pa.Array, Spans]] = []

    def add(self, keys: pa.Array, known: Spans) -> None:
        """Add a call: its distinct keys, and their sessions in state before it."""
        self._calls.append((keys, known))

    def find(self) -> tuple[Ints, Spans]:
        """Return a number for each key of the last call, and the sessions of all numbers."""
        if len(self._calls) == 1:
            keys, known = self._calls[0]
            return np.arange(len(keys)), known
        numbers, count = number_values(pa.concat_arrays([keys for keys, _ in self._calls]))
        starts = np.cumsum([0, *(len(keys) for keys, _ in self._calls)])
        first_call = np.searchsorted(starts, first_rows(numbers, count), "right") - 1
        parts = []
        for call, (_, known) in enumerate(self._calls):
            owners = numbers[starts[call] + known.keys]
            is_first = first_call[owners] == call
            parts.append((owners[is_first], known.starts[is_first], known.ends[is_first]))
        spans = Spans(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        return numbers[starts[-2] :], spans


def unite(spans: Spans) -> tuple[Ints, Spans]:
    """Unite spans of a key that overlap or touch: the number of each span's union, the unions."""
    keys, starts, ends = spans
    count = len(keys)
    if not count:
        return np.zeros(0, np.int64), spans
    order = np.lexsort((starts, keys))
    keys, starts, ends = keys[order], starts[order], ends[order]
    # The latest end so far, per key: as ranks, which leave room for the key in the upper digits.
    ranked, ranks = np.unique(ends, return_inverse=True)
    reach = ranked[np.maximum.accumulate(ranks + keys * len(ranked)) % len(ranked)]
    is_first = np.ones(count, np.bool_)
    is_first[1:] = (keys[1:] != keys[:-1]) | (starts[1:] > reach[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], count) - 1
    numbers = np.empty(count, np.int64)
    numbers[order] = np.cumsum(is_first) - 1
    return numbers, Spans(keys[firsts], starts[firsts], reach[lasts])


def mark_touching(spans: Spans, others: Spans) -> npt.NDArray[np.bool_]:
    """Mark the spans that overlap or touch one of the others, which are apart from each other."""
    if not len(others.keys):
        return np.zeros(len(spans.keys), np.bool_)
    order = np.lexsort((others.starts, others.keys))
    others = Spans(*(column[order] for column in others))
    # Keys and times as one number: times as ranks, which leave room for the key above them.
    ranked, ranks = np.unique(np.concatenate([others.starts, spans.ends]), return_inverse=True)
    starts, ends = ranks[: len(order)], ranks[len(order) :]
    # The last one that starts no later than the span ends. Those before it end before it starts.
    last = np.searchsorted(
        others.keys * len(ranked) + starts, spans.keys * len(ranked) + ends, side="right"
    )
    last = np.maximum(last - 1, 0)
    found: npt.NDArray[np.bool_] = (
        (others.keys[last] == spans.keys)
        & (others.starts[last] <= spans.ends)
        & (others.ends[last] >= spans.starts)
    )
    return found
