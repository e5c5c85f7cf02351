"""The moments at which windows and running aggregates emit, as `emit=` names them.

Always true here:
- a result covers all rows so far, so a later one replaces those before it;
- a window emits when it is complete, whatever else `emit` asks for.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cairn.errors import PlanError
from cairn.types.durations import duration_ms

_ROWS = re.compile(r"(\d+)\s+rows?", re.ASCII)


class Trigger(NamedTuple):
    """A cause of results, beside the end of a window; none if both are None."""

    rows: int | None = None
    """After this number of rows since the last result."""
    ms: int | None = None
    """This long, by the clock, after the first row since the last result."""


FINAL = Trigger()
ON_CHANGE = Trigger(rows=1)


def parse_emit(emit: str, where: str) -> Trigger:
    """Parse `emit=`; `where` is the thing it is given to."""
    text = emit.strip().lower() if isinstance(emit, str) else ""
    if text == "final":
        return FINAL
    if text == "change":
        return ON_CHANGE
    every = re.match(r"every\s+(.*\S)$", text)
    if every is None:
        raise PlanError(
            f"{where}: emit={emit!r}\n"
            '  expected: "final", "change", "every 10 seconds", "every 100 rows" or '
            '"every 100 rows or 10 seconds"'
        )
    rows: list[int] = []
    intervals: list[int] = []
    for part in re.split(r"\s+or\s+", every[1]):
        count = _ROWS.fullmatch(part)
        if count is None:
            intervals.append(duration_ms(part, f"{where}: emit={emit!r}", positive=True))
        else:
            rows.append(int(count[1]))
    if len(rows) > 1 or len(intervals) > 1 or 0 in rows:
        raise PlanError(
            f"{where}: emit={emit!r}\n  expected: a positive number of rows, a duration, or both"
        )
    return Trigger(rows[0] if rows else None, intervals[0] if intervals else None)


def running_interval_ms(emit: str, where: str) -> int | None:
    """Return the time between two results of a running aggregate; None: one per epoch."""
    trigger = parse_emit(emit, where)
    if trigger == FINAL:
        raise PlanError(
            f'{where}: emit="final", but a running aggregate has no end\n'
            '  next: use emit="change" or emit="every ...", or windows'
        )
    if trigger == ON_CHANGE:
        return None
    if trigger.rows is not None:
        raise PlanError(
            f"{where}: emit={emit!r}: a running aggregate does not count rows\n"
            '  next: use emit="every 10 seconds", or windows.global_() with this emit='
        )
    return trigger.ms
