"""Decide how many subtasks a job needs, from the figures of its epochs.

    rate       rows per second of busy time: rows of an epoch over the busy time of its busiest
               subtask, summed over levels (they run one after the other)
    need       rows per second that arrive, and the backlog over CATCH_UP_S
    target     need / (rate of one subtask * UTILISATION)

Always true here:
- the same figures give the same decisions: no clock is read, nothing is written;
- up after EPOCHS_UP epochs in a row that want more, two that took UP_MS, or one that took twice
  that; down after DOWN_MS in which all wanted less;
- after a change nothing is decided for COOL_MS, and the first epochs after it do not count: they
  restore state;
- a target found for less load keeps utilisation below UTILISATION, so it does not want more again;
- more subtasks are not asked for where they do not help: alignment or a sink takes the time, an
  operator has a parallelism of its own, or one key group is heavier than a subtask's share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from cairn.protocol.spec import JobSpec
from cairn.report.epoch import EpochReport, Timings
from cairn.report.scaling import Decision

Autoscale = Literal["off", "observe", "on"]

LOW: Final = 0.4
HIGH: Final = 0.8
UTILISATION: Final = 0.6
"""The share of its time that the busiest subtask shall work."""
EPOCHS_UP: Final = 3
UP_MS: Final = 5_000
"""Epochs that take long are evidence enough when there are fewer of them."""
EPOCHS_SETTLING: Final = 1
"""Epochs after a change that do not count."""
DOWN_MS: Final = 180_000
COOL_MS: Final = 30_000
CATCH_UP_S: Final = 60.0
"""A backlog shall be gone after this time."""
LATE: Final = 1.1
"""Epochs that take this multiple of the trigger's interval keep rows waiting."""
LATE_STEP: Final = 1.5
"""Late epochs ask for this multiple of the rows that come, if the backlog is not known."""
DOMINANT: Final = 0.5


@dataclass(frozen=True)
class Figures:
    """Figures of one epoch, or of a time without one."""

    wall_ms: int
    parallelism: int
    rows: int = 0
    epoch_ms: float = 0.0
    busy_ms: float = 0.0
    alignment_ms: float = 0.0
    commit_ms: float = 0.0
    backlog_rows: int | None = None
    attempts: int = 1
    heaviest_share: float = 0.0
    """Share of the load in the heaviest key group."""
    bounded: str = ""
    """The operator that takes most of the busiest level, in fewer subtasks than the job has."""


class Autoscaler:
    """The state of the decision: the figures so far."""

    def __init__(self, smallest: int, largest: int, *, trigger_ms: int) -> None:
        self.smallest = smallest
        self.largest = largest
        self._trigger_ms = trigger_ms
        self._last_ms: int | None = None
        self._interval_ms = 0.0
        """The time that the last epoch took, with the wait before it; 0: it is not known."""
        self._rate: float | None = None
        """Rows per second of busy time and subtask, of the last epoch that had rows."""
        self._wanted_more: list[int] = []
        self._more_ms = 0.0
        """The time of the epochs in a row that wanted more."""
        self._less_since_ms: int | None = None
        self._less_max = 0
        self._changed_ms: int | None = None
        self._settling = 0

    def note_change(self, wall_ms: int) -> None:
        """Begin again after a change of the parallelism, by a decision or on request."""
        self._changed_ms = wall_ms
        self._settling = EPOCHS_SETTLING
        self._forget()

    def decide(self, found: Figures) -> Decision:
        """Return the decision after an epoch, or after a while without one."""
        interval_ms = 0.0  # The time before the first epoch is not known.
        before_ms, self._interval_ms = self._interval_ms, 0.0
        if self._last_ms is not None:
            passed_ms = float(found.wall_ms - self._last_ms)
            interval_ms = max(found.epoch_ms + found.commit_ms, passed_ms)
        self._last_ms, self._interval_ms = found.wall_ms, interval_ms
        used = None if interval_ms <= 0 else round(min(1.0, found.busy_ms / interval_ms), 3)
        kind, target, reason = self._judge(found, interval_ms, before_ms, used)
        return Decision(
            kind=kind,
            parallelism=found.parallelism,
            target=target,
            reason=reason,
            wall_ms=found.wall_ms,
            utilisation=used,
            backlog_rows=found.backlog_rows,
        )

    def _judge(
        self, found: Figures, interval_ms: float, before_ms: float, used: float | None
    ) -> tuple[Literal["up", "down", "hold"], int, str]:
        now = found.parallelism
        if self._settling:
            self._settling -= 1
            return "hold", now, "the epochs after a change restore state and do not count"
        if found.attempts > 1:
            return "hold", now, f"the epoch took {found.attempts} attempts"
        if not self.smallest <= now <= self.largest:
            target = min(max(now, self.smallest), self.largest)
            kind: Literal["up", "down"] = "up" if target > now else "down"
            return kind, target, f"the range is {self.smallest} to {self.largest}"
        if used is None:
            return "hold", now, "nothing was measured yet"
        if found.rows and found.busy_ms > 0:
            self._rate = found.rows / found.busy_ms * 1000 / now
        wanted, why = self._want(found, interval_ms, before_ms, used)
        if wanted > now:
            return self._grow(found, wanted, why, interval_ms)
        self._want_no_more()
        if wanted < now:
            return self._shrink(found, wanted, why)
        self._less_since_ms = None
        return "hold", now, why

    def _want(
        self, found: Figures, interval_ms: float, before_ms: float, used: float
    ) -> tuple[int, str]:
        """Return the number of subtasks that the figures of one epoch ask for."""
        now = found.parallelism
        if self._rate is None:
            return now, "no rows were processed yet"
        arriving = found.rows / interval_ms * 1000
        need = arriving
        about = f"the busiest subtask works {used:.0%} of the time"
        behind = found.backlog_rows or 0
        is_late = self._trigger_ms > 0 and interval_ms > LATE * self._trigger_ms
        if behind:
            need += behind / CATCH_UP_S
            about += f", {behind:,} rows wait"
        elif found.backlog_rows is None and is_late and found.rows:
            # After an epoch that was late, rows are those that came while it ran.
            if before_ms > 0 and self._wanted_more:
                need = max(need, found.rows / before_ms * 1000)
            need *= LATE_STEP
            about += f", epochs take {interval_ms / self._trigger_ms:.1f} times the trigger"
        wanted = math.ceil(need / (self._rate * UTILISATION) - 1e-9)
        wanted = min(max(wanted, self.smallest), self.largest)
        # A backlog of less than a second's rows is what came while the epoch ran.
        waits = behind > arriving
        if (wanted > now and used <= HIGH and not (is_late or waits)) or (
            # A late epoch of which subtasks work little would be as late with fewer of them.
            wanted < now and (used >= LOW or waits)
        ):
            return now, about
        return wanted, about

    def _grow(
        self, found: Figures, wanted: int, why: str, interval_ms: float
    ) -> tuple[Literal["up", "hold"], int, str]:
        now = found.parallelism
        self._less_since_ms = None
        whole_ms = found.epoch_ms + found.commit_ms
        if found.commit_ms > DOMINANT * whole_ms:
            self._want_no_more()
            return "hold", now, f"{why}; the sinks take most of the time: more would not help"
        if found.alignment_ms > DOMINANT * whole_ms:
            self._want_no_more()
            return "hold", now, f"{why}; subtasks wait for their input: more would not help"
        if found.bounded:
            self._want_no_more()
            about = f"operator {found.bounded} takes most of it, with a parallelism of its own"
            return "hold", now, f"{why}; {about}: more would not help"
        useful = math.ceil(1 / found.heaviest_share) if found.heaviest_share > 0 else wanted
        if useful <= now:
            self._want_no_more()
            share = f"one key group has {found.heaviest_share:.0%} of the load"
            return "hold", now, f"{why}; {share}: more would not help"
        wanted = min(wanted, useful)
        self._wanted_more.append(wanted)
        self._more_ms += interval_ms
        long_ms = UP_MS if len(self._wanted_more) > 1 else 2 * UP_MS
        if len(self._wanted_more) < EPOCHS_UP and self._more_ms < long_ms:
            return "hold", now, f"{why}; {wanted} subtasks would do, if this goes on"
        if self._is_cooling(found.wall_ms):
            return "hold", now, f"{why}; {wanted} subtasks would do, but a change was just made"
        last = sorted(self._wanted_more[-EPOCHS_UP:])
        return "up", last[len(last) // 2], why

    def _shrink(
        self, found: Figures, wanted: int, why: str
    ) -> tuple[Literal["down", "hold"], int, str]:
        now = found.parallelism
        if self._less_since_ms is None:
            self._less_since_ms, self._less_max = found.wall_ms, wanted
        self._less_max = max(self._less_max, wanted)
        is_long = found.wall_ms - self._less_since_ms >= DOWN_MS
        if not is_long or self._is_cooling(found.wall_ms):
            return "hold", now, f"{why}; {self._less_max} subtasks would do, if this goes on"
        return "down", self._less_max, why

    def _is_cooling(self, wall_ms: int) -> bool:
        return self._changed_ms is not None and wall_ms - self._changed_ms < COOL_MS

    def _want_no_more(self) -> None:
        self._wanted_more.clear()
        self._more_ms = 0.0

    def _forget(self) -> None:
        self._want_no_more()
        self._less_since_ms = None


def _slowest(timings: Timings) -> dict[int, float]:
    """Return the busy time of the busiest subtask of each level."""
    slowest: dict[int, float] = {}
    for each in timings.subtasks:
        busy = each.process_ms + each.snapshot_ms
        slowest[each.level] = max(busy, slowest.get(each.level, 0.0))
    return slowest


def busy_ms(timings: Timings) -> float:
    """Return the busy time of the busiest subtask, summed over levels."""
    slowest = _slowest(timings)
    # Times of subtasks are those of one batch and one round, the phases are those of all.
    one, whole = max(slowest.values(), default=0.0), timings.process_ms + timings.snapshot_ms
    return sum(slowest.values()) * (max(1.0, whole / one) if one else 1.0)


def find_bound(timings: Timings, spec: JobSpec, parallelism: int) -> str:
    """Return an operator with fewer subtasks than the job that takes most of the busy time.

    "" if there is none. Subtasks are timed with all operators of a level together: those beyond
    the bound of an operator do all of the work but its own.
    """
    slowest = _slowest(timings)
    busiest = max(slowest, key=lambda level: slowest[level], default=None)
    if busiest is None or slowest[busiest] < DOMINANT * sum(slowest.values()):
        return ""  # More subtasks help the other levels.
    busy = {
        each.subtask: each.process_ms + each.snapshot_ms
        for each in timings.subtasks
        if each.level == busiest
    }
    for op in (op for level in spec.levels if level.index == busiest for op in level.operators):
        if 0 < op.parallelism < parallelism:
            inside = [ms for subtask, ms in busy.items() if subtask < op.parallelism]
            outside = [ms for subtask, ms in busy.items() if subtask >= op.parallelism]
            without = sum(outside) / len(outside) if outside else 0.0
            if inside and without < DOMINANT * sum(inside) / len(inside):
                return op.uid
    return ""


def figures_of(
    report: EpochReport,
    *,
    backlog_rows: int | None,
    heaviest_share: float,
    spec: JobSpec | None = None,
) -> Figures:
    """Return the figures of a committed epoch, of the job with this spec."""
    return Figures(
        wall_ms=report.wall_ms,
        parallelism=report.parallelism,
        rows=report.rows_in,
        epoch_ms=report.epoch_ms,
        busy_ms=busy_ms(report.timings),
        alignment_ms=report.parts.alignment,
        commit_ms=report.commit_ms or 0.0,
        backlog_rows=backlog_rows,
        attempts=report.attempts,
        heaviest_share=heaviest_share,
        bounded="" if spec is None else find_bound(report.timings, spec, report.parallelism),
    )
