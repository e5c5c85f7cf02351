"""The watermark of a job, computed from the event times of its sources.

An origin is a place where event time and a watermark are declared: a source, or a stream
after a transform. Each follows the latest time it has seen, less its allowed delay. The
job's watermark is the earliest of them, leaving out those that have been idle for long.

Always true here:
- the job's watermark never goes back, even if origins wake up, are added or removed;
- there is none until every origin that is not idle has had a row;
- it depends only on the parent epoch's clocks, the times in this epoch, and its `now`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cairn.plan.graph import Watermark
from cairn.storage.manifest import Epoch
from cairn.types.durations import MAX_MS, MIN_MS


@dataclass(frozen=True)
class Clocks:
    """The event-time clocks after an epoch."""

    watermark_ms: int | None = None
    origins: dict[str, int | None] = field(default_factory=dict)
    """The watermark of each origin alone."""
    seen_ms: dict[str, int] = field(default_factory=dict)
    """Per origin, the end of the last epoch in which it had a row, or first appeared."""

    def after(
        self,
        latest_us: Mapping[str, int],
        origins: Mapping[str, Watermark],
        now_ms: int,
        *,
        ended_ms: int = 0,
        awake_ms: int = 0,
    ) -> Clocks:
        """Return the clocks after an epoch with these latest event times per origin.

        The epoch ran from `now_ms` to `ended_ms`. Sources are not read while an epoch runs, nor
        before `awake_ms`, when the run began: that time does not count as idle.
        """
        own: dict[str, int | None] = {}
        seen: dict[str, int] = {}
        active: list[int | None] = []
        for name, origin in origins.items():
            own[name] = self.origins.get(name)
            seen[name] = self.seen_ms.get(name, now_ms)
            if name in latest_us:
                reached = _clamp(latest_us[name] // 1000 - origin.delay_ms)
                own[name] = _later(own[name], reached)
                seen[name] = max(now_ms, ended_ms)
            silent_ms = now_ms - max(seen[name], awake_ms)
            if name in latest_us or origin.idle_ms is None or silent_ms < origin.idle_ms:
                active.append(own[name])
        return Clocks(_later(self.watermark_ms, _lowest(active, own)), own, seen)


def clocks_of(epoch: Epoch | None) -> Clocks:
    if epoch is None:
        return Clocks()
    return Clocks(epoch.watermark_ms, epoch.watermarks, epoch.seen_ms)


def _lowest(active: list[int | None], own: Mapping[str, int | None]) -> int | None:
    if active:
        known = [mark for mark in active if mark is not None]
        return min(known) if len(known) == len(active) else None
    # All are idle: the furthest one counts, so the order in which they became idle does not.
    return max((mark for mark in own.values() if mark is not None), default=None)


def _later(left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return right if left is None else left
    return max(left, right)


def _clamp(ms: int) -> int:
    # The very last millisecond is for draining: no row may end event time.
    return min(max(ms, MIN_MS), MAX_MS - 1)
