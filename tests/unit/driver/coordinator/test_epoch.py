"""The coordinator: what is written in which order, what is retried and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.driver.coordinator import epoch as epoch_module
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.publisher import TRIES_BEFORE_PAUSE
from cairn.driver.coordinator.reports import report_of
from cairn.driver.coordinator.rounds import Outcome
from cairn.errors import (
    CommitConflictError,
    CommitError,
    CorruptFileError,
    EpochError,
    FunctionError,
    PlanError,
)
from cairn.plan.graph import Watermark
from cairn.protocol.messages import Begin
from cairn.testing import Fault
from cairn.types.durations import MAX_MS
from tests.unit.driver.coordinator.leads import POSITION, Lead

# An epoch


def test_an_epoch_is_in_the_log_before_its_sinks_publish(lead: Lead) -> None:
    epoch = lead.run_batch((1, 5))
    assert lead.sink.calls == [("recover", 2), ("commit", epoch.number)]
    assert lead.coordinator.newest == epoch == lead.coordinator.log.epoch(epoch.number)
    assert lead.sink.rows == [(1, 1, 5)]


def test_epochs_name_their_parents_and_continue_the_log(lead: Lead) -> None:
    first, second = lead.run_batch((1, 1)), lead.run_batch((1, 1))
    assert (first.number, first.parent, first.term) == (2, None, 1)
    assert (second.number, second.parent, second.term) == (3, 2, 1)
    assert lead.sink.rows[-1].n == 2


def test_an_epoch_without_rows_is_an_epoch_like_any_other(lead: Lead) -> None:
    first = lead.run_batch((1, 1))
    second = lead.run_batch()
    assert second.operators["count"].ranges[0].version == first.operators["count"].ranges[0].version
    assert second.committables == {"out": []}
    assert lead.sink.calls[-1] == ("commit", second.number)


def test_the_manifest_says_what_the_job_is(lead: Lead) -> None:
    entry = lead.run_batch((1, 1)).operators["count"]
    assert entry.key_types == {"k": "bigint"}
    assert {name: decl.kind for name, decl in entry.states.items()} == {
        "n": "value",
        "values": "list",
        "last": "map",
    }
    assert entry.function_version == lead.spec.levels[0].operators[0].function_version


def test_now_is_the_clock_and_never_goes_back(lead: Lead, tmp_path: Path) -> None:
    assert lead.run_batch().now_ms == 1000
    lead.clock.advance_ms(500)
    assert lead.run_batch().now_ms == 1500
    behind = Lead(tmp_path, lead.store).start()
    assert behind.clock() < 1500
    assert behind.run_batch().now_ms == 1500


def test_now_is_the_same_in_every_attempt(lead: Lead) -> None:
    def execute(begin: Begin) -> Outcome:
        outcome = lead.execute(begin)
        if begin.execution.attempt < 2:
            lead.clock.advance_ms(60_000)
            raise EpochError("once more")
        return outcome

    epoch = lead.coordinator.run_batch(POSITION, execute)
    assert {begin.now_ms for begin in lead.begins} == {epoch.now_ms} == {1000}
    assert [begin.execution.attempt for begin in lead.begins] == [0, 1, 2]
    assert {begin.epoch for begin in lead.begins} == {epoch.number}
    assert epoch.timings.attempts == 3


# What goes wrong while it runs


def test_the_first_cause_is_raised_when_every_attempt_failed(lead: Lead) -> None:
    def execute(begin: Begin) -> Outcome:
        raise FunctionError(f"cause {begin.execution.attempt}", operator="count")

    with pytest.raises(FunctionError, match="cause 0") as caught:
        lead.coordinator.run_batch(POSITION, execute)
    assert caught.value.attempts == 4
    assert lead.coordinator.newest is None
    assert lead.sink.calls == [("recover", 2)]


def test_failure_that_a_slot_has_seen_before_ends_the_run_at_once(lead: Lead) -> None:
    """If two subtasks fail, Spark may report either of them."""

    def execute(begin: Begin) -> Outcome:
        repeated = {"is_repeated": True} if begin.execution.attempt else {}
        raise FunctionError(f"row {begin.execution.attempt}", operator="count", **repeated)

    with pytest.raises(FunctionError, match="row 1") as caught:
        lead.coordinator.run_batch(POSITION, execute)
    assert caught.value.attempts == 2


def test_damage_conflicts_and_wrong_jobs_are_not_tried_again(lead: Lead) -> None:
    for error in (CorruptFileError("damaged"), CommitConflictError("fenced"), PlanError("wrong")):
        attempts = []

        def execute(begin: Begin, error: Any = error, attempts: Any = attempts) -> Outcome:
            attempts.append(begin.execution.attempt)
            raise error

        with pytest.raises(type(error)):
            lead.coordinator.run_batch(POSITION, execute)
        assert attempts == [0]


def test_a_storage_error_is_tried_again(lead: Lead) -> None:
    lead.store.plan(Fault("put", lead.store.calls["put"] + 1, "before"))
    epoch = lead.run_batch((1, 1))
    assert epoch.timings.attempts == 2
    assert lead.sink.rows == [(1, 1, 1)]


def test_an_acknowledgement_said_twice_counts_once(lead: Lead) -> None:
    def execute(begin: Begin) -> Outcome:
        outcome = lead.execute(begin, [(1, 5)])
        return Outcome([*outcome.acks, *outcome.acks], [])

    epoch = lead.coordinator.run_batch(POSITION, execute)
    assert len(epoch.committables["out"]) == 1
    assert lead.sink.rows == [(1, 1, 5)]
    assert epoch.metrics.operators["count"].rows_in == 1


def test_two_different_acknowledgements_of_a_subtask_make_the_epoch_run_again(
    lead: Lead,
) -> None:
    def execute(begin: Begin) -> Outcome:
        outcome = lead.execute(begin, [(1, 5)])
        if begin.execution.attempt == 0:
            other = msgspec.structs.replace(outcome.acks[0], committables={})
            return Outcome([*outcome.acks, other], [])
        return outcome

    epoch = lead.coordinator.run_batch(POSITION, execute)
    assert epoch.timings.attempts == 2
    assert lead.sink.rows == [(1, 1, 5)]


def test_a_missing_acknowledgement_is_named(tmp_path: Path) -> None:
    lead = Lead(tmp_path, parallelism=2).start()

    def execute(begin: Begin) -> Outcome:
        return Outcome(lead.execute(begin).acks[:1], [])

    with pytest.raises(EpochError, match=r"no acknowledgement of \(level, subtask\) \[\(0, 1\)\]"):
        lead.coordinator.run_batch(POSITION, execute)


def test_an_epoch_that_failed_never_happened(lead: Lead, tmp_path: Path) -> None:
    lead.run_batch((1, 1))

    def execute(begin: Begin) -> Outcome:
        lead.execute(begin, [(1, 666)])
        raise EpochError("no")

    with pytest.raises(EpochError):
        lead.coordinator.run_batch(POSITION, execute)
    after = Lead(tmp_path, lead.store).start()
    after.run_batch((1, 2))
    assert after.sink.rows[-1] == (1, 2, 3)


# Sinks


def test_a_sink_that_fails_is_tried_until_it_has_published(lead: Lead) -> None:
    lead.sink.failures = 2 * TRIES_BEFORE_PAUSE
    lead.run_batch((1, 5))
    assert lead.sink.rows == [(1, 1, 5)]


def test_a_sink_that_keeps_failing_ends_the_run_and_is_published_by_the_next(
    tmp_path: Path,
) -> None:
    lead = Lead(tmp_path, commit_timeout_s=60).start()
    lead.sink.failures = 1000
    with pytest.raises(CommitError, match="sink 'out' did not take epoch 2: sink is away"):
        lead.run_batch((1, 5))
    assert lead.clock() >= 61_000
    after = Lead(tmp_path, lead.store).start()
    assert after.sink.calls == [("commit", 2), ("recover", 4)]
    assert after.sink.rows == [(1, 1, 5)]


def test_recovery_publishes_before_it_clears_and_clears_only_what_is_older(
    lead: Lead, tmp_path: Path
) -> None:
    lead.run_batch((1, 5))
    after = Lead(tmp_path, lead.store)
    after.coordinator.take_over()
    assert after.sink.calls == [], "nothing is touched before the takeover is in the log"
    after.coordinator.recover()
    assert after.sink.calls == [("commit", 2), ("recover", after.coordinator.term + 1)]


def test_a_sink_that_left_the_job_is_not_committed(lead: Lead, tmp_path: Path) -> None:
    lead.run_batch((1, 5))
    before = list(lead.sink.calls)
    coordinator = Coordinator(
        lead.spec, lead.store, {}, parallelism=1, retained_epochs=3, clock=lead.clock
    )
    coordinator.take_over()
    coordinator.recover()
    assert lead.sink.calls == before


# Storage of deltas


def test_small_deltas_of_an_epoch_share_one_object(tmp_path: Path) -> None:
    lead = Lead(tmp_path, parallelism=3).start()
    epoch = lead.run_batch(*((k, k) for k in range(30)))
    paths = {ref.path for part in epoch.operators["count"].ranges for ref in part.files}
    assert len(paths) == 1 and paths.pop().endswith(".pack")


def test_a_large_delta_has_an_object_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_module, "INLINE_BYTES_MAX", 10)
    lead = Lead(tmp_path).start()
    (part,) = lead.run_batch((1, 1)).operators["count"].ranges
    assert part.files[0].path.endswith(".delta")


def test_ten_epochs_later_deltas_are_merged_and_the_state_is_the_same(
    lead: Lead, tmp_path: Path
) -> None:
    for n in range(25):
        epoch = lead.run_batch((n % 4, n))
    (part,) = epoch.operators["count"].ranges
    assert [ref.tier for ref in part.files] == [1, 1, 0, 0, 0, 0, 0]
    after = Lead(tmp_path, lead.store).start()
    after.run_batch((0, 100))
    assert after.sink.rows[-1] == (0, 8, sum(range(0, 25, 4)) + 100)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_change_of_parallelism_when_a_merge_is_due_is_no_failure(
    tmp_path: Path, parallelism: int
) -> None:
    lead = Lead(tmp_path, parallelism=2).start()
    for n in range(10):
        lead.run_batch(*((k, n) for k in range(12)))
    after = Lead(tmp_path, lead.store, parallelism=parallelism).start()
    after.run_batch(*((k, 10) for k in range(12)))
    after.run_batch(*((k, 11) for k in range(12)))
    assert {row.n for row in after.sink.rows[-12:]} == {12}


def test_parallelism_changes_between_two_epochs_and_nothing_is_rewritten(lead: Lead) -> None:
    before = lead.run_batch(*((k, 1) for k in range(12)))
    known = {ref.path for part in before.operators["count"].ranges for ref in part.files}
    lead.coordinator.subtasks.rescale(3)
    after = lead.run_batch(*((k, 2) for k in range(12)))
    assert len(after.operators["count"].ranges) == 3
    deltas = [
        ref
        for part in after.operators["count"].ranges
        for ref in part.files
        if ref.path not in known
    ]
    assert {ref.first_epoch for ref in deltas} == {after.number}
    assert {row[1] for row in lead.sink.rows[-12:]} == {2}


def test_a_migration_that_a_subtask_did_not_write_is_no_epoch(lead: Lead) -> None:
    lead.run_batch((1, 1))
    lead.coordinator.deploy(lead.spec, rewrite=["count"])

    def silent(begin: Begin) -> Outcome:
        outcome = lead.execute(begin, [(1, 2)])
        return Outcome(outcome.acks, [])

    with pytest.raises(EpochError, match="did not write their state in its new form"):
        lead.coordinator.run_batch(POSITION, silent)
    epoch = lead.run_batch((1, 3))
    (part,) = epoch.operators["count"].ranges
    assert [ref.kind for ref in part.files] == ["base", "delta"]
    again = lead.run_batch((1, 4))
    assert [ref.kind for ref in again.operators["count"].ranges[0].files][:1] == ["base"]
    assert again.metrics.bases == 0, "once is enough"


# Time


def run_at(lead: Lead, latest_ms: int | None = None, **more: Any) -> Any:
    """An epoch in which the only origin has come to a time."""

    def execute(begin: Begin) -> Outcome:
        times = {} if latest_ms is None else {"rows": latest_ms * 1000}
        return lead.execute(begin)._replace(event_times=times)

    return lead.coordinator.run_batch(POSITION, execute, **more)


def test_an_epoch_runs_with_the_watermark_of_its_parent(tmp_path: Path) -> None:
    lead = Lead(tmp_path, origins={"rows": Watermark(10)}).start()
    found = [run_at(lead, at) for at in (100, None, 300)]
    assert [e.watermark_ms for e in found] == [90, 90, 290]
    assert [b.watermark_ms for b in lead.begins] == [None, 90, 90]
    assert [e.passed_ms for e in found] == [None, 90, 90]
    assert [b.passed_ms for b in lead.begins] == [None, None, 90]
    assert found[-1].watermarks == {"rows": 290}


def test_the_watermark_is_the_same_in_every_attempt_and_a_failed_one_leaves_no_trace(
    tmp_path: Path,
) -> None:
    lead = Lead(tmp_path, origins={"rows": Watermark(10)}).start()
    run_at(lead, 100)
    tries = []

    def execute(begin: Begin) -> Outcome:
        tries.append(begin.watermark_ms)
        if len(tries) == 1:
            raise EpochError("no")
        return lead.execute(begin)._replace(event_times={"rows": 150_000})

    assert lead.coordinator.run_batch(POSITION, execute).watermark_ms == 140
    assert tries == [90, 90]


def test_a_new_leader_goes_on_with_the_watermark_that_is_in_the_log(tmp_path: Path) -> None:
    origins = {"rows": Watermark(10, 1_000)}
    lead = Lead(tmp_path, origins=origins).start()
    run_at(lead, 100)
    after = Lead(tmp_path, lead.store, origins=origins).start()
    assert after.coordinator.watermark_ms == 90
    assert run_at(after, 50).watermark_ms == 90
    assert after.begins[0].watermark_ms == 90


def test_a_drain_is_at_the_end_of_time_and_the_log_keeps_the_real_watermark(
    tmp_path: Path,
) -> None:
    lead = Lead(tmp_path, origins={"rows": Watermark(10)}).start()
    run_at(lead, 100)
    run_at(lead, 200)
    drained = run_at(lead, is_draining=True)
    begin = lead.begins[-1]
    assert begin.is_draining and (begin.watermark_ms, begin.passed_ms) == (MAX_MS, 90)
    assert (drained.watermark_ms, drained.passed_ms) == (190, 90)
    run_at(lead, 300)
    assert not lead.begins[-1].is_draining and lead.begins[-1].watermark_ms == 190


def test_late_rows_and_timers_of_all_subtasks_are_in_the_manifest(tmp_path: Path) -> None:
    lead = Lead(tmp_path, parallelism=2).start()

    def execute(begin: Begin) -> Outcome:
        outcome = lead.execute(begin)
        acks = [
            msgspec.structs.replace(
                ack,
                operators=[
                    msgspec.structs.replace(
                        op,
                        late_rows=2,
                        untimed_rows=1,
                        error_rows=3,
                        event_timer_ms=50 + ack.subtask,
                    )
                    for op in ack.operators
                ],
            )
            for ack in outcome.acks
        ]
        return outcome._replace(acks=acks)

    epoch = lead.coordinator.run_batch(POSITION, execute)
    (operator,) = epoch.metrics.operators.values()
    assert (operator.late_rows, operator.untimed_rows) == (4, 2)
    assert operator.error_rows == report_of(epoch).error_rows == 6
    assert list((epoch.timers or {}).values()) == [(50, None)]
