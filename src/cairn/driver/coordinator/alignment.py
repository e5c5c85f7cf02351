"""Alignment: how long an operator's input was half there.

An operator sees all of an epoch from every subtask that feeds it, or nothing: Spark's stage
boundary is where it waits. Its alignment time is from the first upstream subtask to finish until
the last one has. Rows that pass a level by count as that level's own: they cross
the same boundary.

Always true here:
- upstream of level 0 are the Spark tasks that read the sources and map their rows;
- an operator that is fed inside the slot waits for nobody;
- in an epoch of several rounds it is the longest of them.

Finish times are those of each machine's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.protocol.messages import Report
from cairn.protocol.spec import LevelSpec, OperatorSpec


def level_alignment_ms(
    levels: Sequence[LevelSpec], reports: Sequence[Report], sources_ms: int | None
) -> dict[int, int | None]:
    """What each level waited for; None where that is not known.

    `sources_ms` is from the first to the last Spark task before level 0.
    """
    # A round of a loop is an action of its own, so its stages are too.
    finished: dict[tuple[int, int | None], dict[int, int]] = {}
    for report in reports:
        subtasks = finished.setdefault((report.level, report.stage), {})
        # One that ran again is done when it was done for the last time.
        subtasks[report.subtask] = max(report.finished_ms, subtasks.get(report.subtask, 0))
    spreads: dict[int, int] = {}
    for (level, _), subtasks in finished.items():
        spread = max(subtasks.values()) - min(subtasks.values())
        spreads[level] = max(spread, spreads.get(level, 0))
    return {
        level.index: sources_ms if level.index == 0 else spreads.get(level.index - 1)
        for level in levels
    }


def alignment_ms(
    levels: Sequence[LevelSpec], reports: Sequence[Report], sources_ms: int | None
) -> dict[str, int | None]:
    """The same by operator."""
    waited = level_alignment_ms(levels, reports, sources_ms)
    return {
        operator.uid: 0 if is_chained(operator) else waited[level.index]
        for level in levels
        for operator in level.operators
    }


def is_chained(operator: OperatorSpec) -> bool:
    """Whether all its rows come from operators of its own level."""
    return all(inlet.lane is None for inlet in operator.inlets)
