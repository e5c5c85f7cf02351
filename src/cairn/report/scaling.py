"""A decision about the parallelism of a job, as manifests, metrics and pages have it."""

from __future__ import annotations

from typing import Literal

import msgspec


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of subtasks that a job should have, and why."""

    kind: Literal["up", "down", "hold"]
    parallelism: int
    """Subtasks when it was decided."""
    target: int
    reason: str
    wall_ms: int
    by: Literal["autoscale", "request"] = "autoscale"
    is_applied: bool = True
    """False: the job only observes what it would do."""
    utilisation: float | None = None
    """Share of the time in which the busiest subtask worked; None: not known."""
    backlog_rows: int | None = None
    """Rows that the sources have and the job has not read; None: Spark does not report it."""

    def text(self) -> str:
        """Return the decision in a line."""
        if self.kind == "hold":
            return f"stays at {self.parallelism} subtasks: {self.reason}"
        verb = "scales" if self.is_applied else "would scale"
        return f"{verb} {self.kind} from {self.parallelism} to {self.target}: {self.reason}"


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Autoscaling of a run: the last decision, and the changes so far."""

    mode: str
    """off, observe or on."""
    decision: Decision | None = None
    """The last decision; None: nothing yet, or autoscaling is off."""
    changes: list[Decision] = []
    """Changes of the parallelism in this run, oldest first; those only observed too."""
    backlog: dict[str, int | None] = {}
    """Per source, the rows not yet read; None: Spark does not report it."""
