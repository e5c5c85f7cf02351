"""Where the time of an epoch went.

Always true here:
- the parts add up to the time the epoch ran and that of its commit: what overlaps counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PARTS: Final = ("begin", "process", "alignment", "snapshot", "commit", "other")


def parts_ms(facts: Mapping[str, Any], commit_ms: float) -> dict[str, float]:
    """Of an epoch in figures. Parts of subtasks are those of the slowest one.

    `alignment` is what levels waited for their input while nothing else took the time, `other`
    is planning, scheduling and shuffling.
    """
    timings = facts.get("timings", {})
    parts = dict.fromkeys(PARTS, 0.0)
    for name in ("begin", "process", "snapshot"):
        parts[name] = float(timings.get(f"{name}_ms") or 0.0)
    # Rather than `epoch_ms`: where a run tells of itself, that has the commit in it.
    ran_ms = float(timings.get("run_ms", facts.get("epoch_ms", 0.0)))
    rest = max(0.0, ran_ms - sum(parts.values()))
    waited = timings.get("alignment_ms") or {}
    parts["alignment"] = min(rest, float(sum(ms for ms in waited.values() if ms is not None)))
    parts["other"] = rest - parts["alignment"]
    parts["commit"] = float(commit_ms)
    return parts
