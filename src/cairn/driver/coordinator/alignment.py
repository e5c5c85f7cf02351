"""Alignment: the time that an operator's input was only partly there.

An operator waits at Spark's stage boundary until every subtask that feeds it has finished. Its
alignment time is the time between the first and the last of them to finish. Rows that bypass a
level count as rows of that level: they cross the same boundary.

Always true here:
- upstream of level 0 are the Spark tasks that read the sources and map their rows;
- a chained operator does not wait;
- in a batch of several rounds, the longest one counts.

Finish times are taken from the clock of each machine. Where clocks differ by more than the batch
took, the alignment is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cairn.protocol.messages import Report
from cairn.protocol.spec import LevelSpec, OperatorSpec


def level_alignment_ms(
    levels: Sequence[LevelSpec],
    reports: Sequence[Report],
    sources_ms: int | None,
    ran_ms: float = math.inf,
) -> dict[int, int | None]:
    """Return the alignment time of each level; None if it is not known.

    `sources_ms` is the time between the first and the last Spark task before level 0, and `ran_ms`
    the time that the batch took.
    """
    # Each round is a Spark action of its own, with its own stages.
    finished: dict[tuple[int, int | None], dict[int, int]] = {}
    for report in reports:
        subtasks = finished.setdefault((report.level, report.stage), {})
        # A subtask that ran again counts when it finished last.
        if report.finished_ms > subtasks.get(report.subtask, 0):
            subtasks[report.subtask] = report.finished_ms
    spreads: dict[int, int] = {}
    for (level, _), subtasks in finished.items():
        spread = max(subtasks.values()) - min(subtasks.values())
        spreads[level] = max(spread, spreads.get(level, 0))
    known = {level: spread for level, spread in spreads.items() if spread <= ran_ms}
    return {
        level.index: sources_ms if level.index == 0 else known.get(level.index - 1)
        for level in levels
    }


def alignment_ms(
    levels: Sequence[LevelSpec],
    reports: Sequence[Report],
    sources_ms: int | None,
    ran_ms: float = math.inf,
) -> dict[str, int | None]:
    """Return the alignment time of each operator."""
    waited = level_alignment_ms(levels, reports, sources_ms, ran_ms)
    return {
        operator.uid: 0 if is_chained(operator) else waited[level.index]
        for level in levels
        for operator in level.operators
    }


def is_chained(operator: OperatorSpec) -> bool:
    """True if all rows come from operators of the same level."""
    return all(inlet.is_chained for inlet in operator.inlets)
