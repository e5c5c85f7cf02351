"""Sessions found and merged for many keys at once.

Always true here:
- rows of a key no further apart than the gap are in one session, touching ones too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cairn.operators.aggregates.parts import Ints


class Spans(NamedTuple):
    """Stretches of time, each of a numbered key."""

    keys: Ints
    starts: Ints
    ends: Ints


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
