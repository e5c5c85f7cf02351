"""What an epoch measured, and what all of them together did."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver.coordinator.measured import latest
from cairn.driver.coordinator.reports import report_of
from cairn.driver.coordinator.rounds import Outcome
from cairn.errors import EpochError
from cairn.metrics import UserMetrics
from cairn.protocol.messages import Begin
from cairn.report.epoch import HotKey
from cairn.sinks.base import Execution
from cairn.storage.manifest import decode_record, encode_epoch, resolve
from tests.unit.driver.coordinator.leads import POSITION, Count, Lead, run_counting


def counts(seen: int, level: float | None = None) -> dict[str, UserMetrics]:
    """The metrics of a function in a subtask, as a report has them."""
    return {"count": UserMetrics({"seen": seen}, {} if level is None else {"level": level})}


def test_an_epoch_says_where_its_rows_fell(tmp_path: Path) -> None:
    lead = Lead(tmp_path, parallelism=2).start()
    epoch = lead.run_batch(*[(n, n) for n in range(40)], *[(7, 7)] * 60)
    measured = epoch.metrics.operators["count"]
    assert sum(measured.subtask_rows) == sum(measured.group_rows) == 100
    assert len(measured.subtask_rows) == 2 and len(measured.group_rows) == 6
    assert measured.hot_keys[0] == HotKey("7", 61)
    assert report_of(epoch).operators["count"].hot_keys == measured.hot_keys
    (kept,) = report_of(epoch).brief().operators.values()
    assert kept.rows_in == 100 and not (kept.hot_keys or kept.group_rows or kept.user)


def test_totals_go_on_over_epochs_and_drivers(lead: Lead, tmp_path: Path) -> None:
    lead.run_batch((1, 1), (2, 2))
    lead.run_batch((1, 1))
    again = Lead(tmp_path, lead.store).start()
    epoch = again.run_batch((3, 3))
    totals = epoch.metrics.operators["count"].totals
    assert totals.rows_in == 4 and epoch.metrics.operators["count"].rows_in == 1
    assert epoch.metrics.totals.epochs == 3 and epoch.metrics.totals.restored == 1
    assert report_of(epoch).totals == epoch.metrics.totals


def test_an_attempt_that_failed_counts_as_an_attempt_and_as_nothing_else(lead: Lead) -> None:
    lead.run_batch((1, 1))

    def execute(begin: Begin) -> Outcome:
        outcome = lead.execute(begin, [(1, 1)])
        if begin.execution.attempt == 0:
            raise EpochError("once more")
        return outcome

    epoch = lead.coordinator.run_batch(POSITION, execute)
    assert epoch.metrics.operators["count"].totals.rows_in == 2
    assert (epoch.metrics.totals.epochs, epoch.metrics.totals.attempts) == (2, 3)


def test_batches_of_one_epoch_add_up_once(tmp_path: Path) -> None:
    lead = Lead(tmp_path, checkpoint_every=2).start()
    users = [counts(1), counts(10), counts(100), counts(1000, 4.0)]
    for user in users:
        run_counting(lead, user)
    first, second = sorted(lead.coordinator.log.lineage(), key=lambda epoch: epoch.number)
    assert first.metrics.operators["count"].user.counters == {"seen": 11}
    assert second.metrics.operators["count"].user.counters == {"seen": 1111}
    assert second.metrics.operators["count"].rows_in == 2
    assert second.metrics.operators["count"].subtask_rows == [2]
    assert sum(second.metrics.operators["count"].group_rows) == 2
    assert second.metrics.operators["count"].totals.rows_in == 4
    assert second.metrics.totals.epochs == 2 and second.metrics.totals.attempts == 4


def test_what_functions_count_adds_up_over_subtasks_and_epochs(tmp_path: Path) -> None:
    lead = Lead(tmp_path, parallelism=2).start()
    run_counting(lead, counts(1, 3.0), counts(2, 7.0))
    epoch = run_counting(lead, counts(10), counts(20))
    assert epoch.metrics.operators["count"].user == UserMetrics({"seen": 33}, {"level": 7.0})


class Counting(Count):
    def open(self, ctx: Any) -> None:
        self.seen = ctx.metrics.counter("seen")

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.inc()
        return super().process(row, ctx)


def test_slots_count_each_row_of_a_committed_epoch_once_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.driver.coordinator.leads.Count", Counting)
    lead = Lead(tmp_path, parallelism=2).start()
    rows = [(n, n) for n in range(20)]

    def execute(begin: Begin) -> Outcome:
        outcome = lead.execute(begin, rows)
        if begin.execution.attempt == 0:
            lead.slots.pop(0)
            raise EpochError("a slot is gone after it has counted")
        if begin.execution.attempt == 1:
            raise EpochError("and this was in vain too")
        return outcome

    for expected in (20, 40, 60):
        epoch = lead.coordinator.run_batch(POSITION, execute)
        found = epoch.metrics.operators["count"]
        assert found.user.counters == {"seen": expected}
        assert found.totals.rows_in == expected


def test_a_stage_that_ran_twice_counts_once(lead: Lead) -> None:
    reports = lead.execute(_begun(lead), [(1, 1)]).reports
    later = msgspec.structs.replace(reports[0], finished_ms=reports[0].finished_ms + 1)
    assert latest([later, *reports]) == [later]


def _begun(lead: Lead) -> Begin:
    lead.run_batch()
    return msgspec.structs.replace(lead.begins[-1], execution=Execution(attempt=1))


def test_an_epoch_says_how_long_the_commit_before_it_took(lead: Lead) -> None:
    first = lead.run_batch((1, 1))
    took_ms = lead.coordinator.last_commit_ms
    second = lead.run_batch((1, 1))
    assert first.timings.last_commit_ms == 0.0
    assert second.timings.last_commit_ms == round(took_ms, 1)
    assert first.metrics.totals.commits == 0 and second.metrics.totals.commits == 1


def test_metrics_survive_the_manifest(lead: Lead) -> None:
    epoch = run_counting(lead, counts(2, 0.5))
    stored = decode_record(encode_epoch(epoch, None, whole=True), "epoch")
    assert resolve(stored, None).metrics == epoch.metrics  # type: ignore[arg-type]


# What is said in the log


def test_the_log_says_what_became_of_an_epoch(lead: Lead, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cairn")

    def execute(begin: Begin) -> Outcome:
        if begin.execution.attempt == 0:
            raise EpochError("the slot is gone", operator="count")
        return lead.execute(begin, [(1, 1), (2, 2)])

    epoch = lead.coordinator.run_batch(POSITION, execute)
    again, committed = (vars(record) for record in caplog.records)
    job = lead.spec.job_name
    assert (again["job"], again["epoch"], again["operator"]) == (job, epoch.number, "count")
    assert again["levelname"] == "WARNING" and "the slot is gone" in again["msg"] % again["args"]
    assert (committed["job"], committed["epoch"]) == (job, epoch.number)
    assert (committed["rows_in"], committed["attempts"]) == (2, 2)


def test_the_log_says_who_leads(
    lead: Lead, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = lead.run_batch((1, 1))
    caplog.set_level(logging.INFO, "cairn")
    Lead(tmp_path, lead.store).start()
    (record,) = caplog.records
    assert f"its newest epoch is {epoch.number}" in record.getMessage()
    assert vars(record)["term"] == epoch.number + 1 and vars(record)["job"] == lead.spec.job_name
