"""Log the events of a job: takeovers, epochs and failed attempts.

Always true here:
- all values in a message are also fields of the record, for programs.
"""

from __future__ import annotations

import logging

from cairn.errors import CairnError, FunctionError
from cairn.logs import logger
from cairn.report.epoch import total_keys
from cairn.storage.manifest import Epoch, Takeover

ERROR_CHARS_MAX = 1000


def log_takeover(job: str, record: Takeover, newest: Epoch | None) -> None:
    at = "it has no epoch yet" if newest is None else f"its newest epoch is {newest.number}"
    facts = {"job": job, "term": record.term, "previous": record.previous}
    logger.info("leading with term %d; %s", record.term, at, extra=facts)


def log_failed_attempt(epoch: int, attempt: int, error: CairnError) -> None:
    """Log that a batch runs again after this many attempts."""
    # The first line only. An error of a user's function is not a warning: if it happens again,
    # the run ends with it.
    why = error.message.partition("\n")[0][:ERROR_CHARS_MAX]
    level = logging.INFO if isinstance(error, FunctionError) else logging.WARNING
    facts: dict[str, object] = {"attempt": attempt}
    facts |= {name: error.facts[name] for name in ("operator", "subtask") if name in error.facts}
    message = "epoch %d runs again, attempt %d failed: %s"
    logger.log(level, message, epoch, attempt, why, extra=facts)


def log_epoch(epoch: Epoch, commit_ms: float) -> None:
    found, timings = epoch.metrics.operators.values(), epoch.timings
    restored, sink_rows = epoch.metrics.restored, sum(epoch.metrics.sink_rows.values())
    figures = {
        "rows_in": sum(each.rows_in for each in found) + sink_rows,
        "rows_out": sum(each.rows_out for each in found) + sink_rows,
        "entries_changed": sum(each.entries_changed for each in found),
        "state_keys": total_keys(found) or 0,
        "state_entries": sum(each.state_entries for each in found),
        "delta_bytes": sum(each.delta_bytes for each in found),
    }
    extra = {
        **figures,
        "run_ms": timings.run_ms,
        "commit_ms": round(commit_ms, 1),
        "attempts": timings.attempts,
        "restored": restored,
        "watermark_ms": epoch.watermark_ms,
    }
    if restored:
        logger.info(
            "epoch %d: %d subtasks restored their state",
            epoch.number,
            restored,
            extra={"restored": restored},
        )
    logger.info(
        "epoch %d committed: %d rows in %.0f ms, %d entries changed, %d held of %d keys, "
        "%d bytes written",
        epoch.number,
        figures["rows_in"],
        timings.run_ms,
        figures["entries_changed"],
        figures["state_entries"],
        figures["state_keys"],
        figures["delta_bytes"],
        extra=extra,
    )
