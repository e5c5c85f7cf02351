"""Parallelism and functions change between two epochs of a running query; state moves along."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from cairn import (
    CommitConflictError,
    EpochError,
    FunctionError,
    KeyedProcess,
    PlanError,
    StateSchemaError,
    state,
)
from cairn.driver.coordinator import autoscale, load
from tests.marks import for_soak
from tests.spark.live import FILES, Live
from tests.spark.programs.ledger import SCHEMA, Ledger, Ledger2, build, payments
from tests.spark.support import (
    Input,
    by_id,
    epochs,
    eventually,
    finish,
    published,
    slot_pids,
    stored_state,
)


@pytest.fixture(scope="module")
def undisturbed(spark, tmp_path_factory):
    """(rows of each sink, state) of the job that nobody touches."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = Input(folder / "in", SCHEMA).add_all(payments(FILES))
    job = build(spark, source.folder, folder)
    finish(job, folder / "checkpoint")
    return by_id(published(folder / "booked")), stored_state(job, folder / "checkpoint")


@pytest.mark.parametrize("backend", [for_soak("heap"), "rocksdb"])
def test_rescaling_a_running_query_moves_state_and_rewrites_nothing(
    spark, undisturbed, tmp_path, backend
):
    rows, expected = undisturbed
    with Live(spark, tmp_path, backend=backend) as live:
        parent = live.feed(2)
        query = live.run._engine.query.runId
        for parallelism in (4, 2, 3, 1):
            live.run.rescale(parallelism)
            assert live.run.parallelism != parallelism, "not before the next epoch"
            epoch = live.feed()
            entry = epoch.operators["ledger"]
            assert live.run.parallelism == entry.parallelism == len(entry.ranges) == parallelism
            known = {ref.path for part in parent.operators["ledger"].ranges for ref in part.files}
            new = {ref.id: ref for part in entry.ranges for ref in part.files}
            written = [ref for ref in new.values() if ref.path not in known]
            assert {(ref.kind, ref.first_epoch) for ref in written} <= {("delta", epoch.number)}
            parent = epoch
        assert live.run._engine.query.runId == query, "the query was never restarted"
    assert by_id(published(tmp_path / "booked")) == rows
    assert stored_state(live.job, tmp_path / "checkpoint") == expected


@pytest.mark.parametrize("backend", [for_soak("heap"), "rocksdb"])
def test_ranges_by_load_move_key_groups_and_rewrite_nothing(
    spark, undisturbed, tmp_path, backend, monkeypatch
):
    rows, expected = undisturbed
    # The few rows of a test: any gain counts.
    monkeypatch.setattr(load, "ROWS_PER_SUBTASK_MIN", 1)
    monkeypatch.setattr(load, "GAIN_MIN", 0.001)
    with Live(spark, tmp_path, backend=backend, parallelism=3) as live:
        parent = live.feed(3)
        balance = live.run.rebalance()
        assert balance.groups_moved and balance.busiest_after < balance.busiest_before
        epoch = live.feed(2)
        ranges = epoch.operators["ledger"].ranges
        assert [each.groups for each in ranges] != [
            each.groups for each in parent.operators["ledger"].ranges
        ]
        assert [group for each in ranges for group in each.groups] == list(
            range(live.job.max_parallelism)
        )
        live.run.rescale(2)
        live.feed()
    assert by_id(published(tmp_path / "booked")) == rows
    assert stored_state(live.job, tmp_path / "checkpoint") == expected


def test_a_job_that_is_busy_scales_up_by_itself_and_notes_why(
    spark, undisturbed, tmp_path, monkeypatch
):
    rows, expected = undisturbed
    # Any work is too much for one subtask, and two epochs prove it.
    rules = {"UTILISATION": 1e-9, "HIGH": -1.0, "EPOCHS_UP": 2, "DOMINANT": 2.0, "COOL_MS": 0}
    for name, value in rules.items():
        monkeypatch.setattr(autoscale, name, value)
    with Live(spark, tmp_path, parallelism="1..2", autoscale="on") as live:
        assert live.run.parallelism == 1, "the lower end of the range"
        for _ in range(6):
            live.feed()
        scaling = live.run.scaling
        assert live.run.parallelism == 2 and scaling.mode == "on"
        (made,) = [each for each in scaling.changes if each.by == "autoscale"]
        assert (made.kind, made.parallelism, made.target) == ("up", 1, 2)
        noted = [each.decision for each in live.run.epochs() if each.decision is not None]
        assert made in noted
        assert scaling.backlog == dict.fromkeys(live.job.graph().source_names), "files report none"
    assert by_id(published(tmp_path / "booked")) == rows
    assert stored_state(live.job, tmp_path / "checkpoint") == expected


def test_slots_that_are_not_needed_any_more_end_after_scaling_down(spark, tmp_path):
    with Live(spark, tmp_path, parallelism=3) as live:
        live.feed()
        run_id = live.run._engine.coordinator.run_id
        assert slot_pids(run_id).keys() == {0, 1, 2}
        live.run.rescale(1)
        live.feed()
        assert eventually(lambda: slot_pids(run_id).keys() == {0})


class SlowToClose(Ledger):
    """Closing it takes until a file is there."""

    def __init__(self, until):
        self.until = until

    def close(self):
        while not os.path.exists(self.until):
            time.sleep(0.02)


# tests/unit/slot/test_process.py has slots that are closing without Spark.
@pytest.mark.soak
def test_rescaling_down_and_up_while_slots_are_closing_changes_nothing(
    spark, undisturbed, tmp_path
):
    rows, expected = undisturbed
    function = SlowToClose(str(tmp_path / "closed"))
    with Live(spark, tmp_path, function=function) as live:
        run_id = live.run._engine.coordinator.run_id
        live.feed()
        closing = slot_pids(run_id)[1]
        live.run.rescale(1)
        live.feed()
        assert eventually(lambda: slot_pids(run_id).keys() == {0})
        live.run.rescale(2)
        live.feed(2)
        again = slot_pids(run_id)
        assert again.keys() == {0, 1} and again[1] != closing
        (tmp_path / "closed").touch()
        assert eventually(lambda: not psutil.pid_exists(closing))
        live.feed(2)
        assert slot_pids(run_id) == again, "the one that closed took nothing with it"
    assert by_id(published(tmp_path / "booked")) == rows
    assert stored_state(live.job, tmp_path / "checkpoint") == expected


# tests/simulation/test_sleepers.py has it without Spark.
@pytest.mark.soak
def test_stale_slots_that_wake_up_after_two_rescales_change_nothing(spark, undisturbed, tmp_path):
    """2, 4, 2, 4: the slots of subtasks 2 and 3 sleep through the time they are not needed."""
    rows, expected = undisturbed
    with Live(spark, tmp_path) as live:
        live.feed()
        live.run.rescale(4)
        live.feed()
        stale = {s: p for s, p in slot_pids(live.run._engine.coordinator.run_id).items() if s >= 2}
        assert stale.keys() == {2, 3}
        for pid in stale.values():
            os.kill(pid, signal.SIGSTOP)
        try:
            live.run.rescale(2)
            live.feed(2)
            live.run.rescale(4)
        finally:
            for pid in stale.values():
                os.kill(pid, signal.SIGCONT)
        live.feed(2)
    assert by_id(published(tmp_path / "booked")) == rows
    assert stored_state(live.job, tmp_path / "checkpoint") == expected


def test_a_parallelism_out_of_bounds_is_refused_at_once(spark, tmp_path):
    with Live(spark, tmp_path) as live:
        for parallelism in (0, 17):
            with pytest.raises(PlanError, match="between 1 and max_parallelism"):
                live.run.rescale(parallelism)
    with pytest.raises(EpochError, match="has ended"):
        live.run.rescale(2)


class Doubled(Ledger):
    """Counts twice as fast, and has a state that the function before it had not."""

    since = state.Value("bigint")

    def process(self, row, ctx):
        if self.since.get() is None:
            self.since.set(ctx.epoch)
        for row_id, account, n, total, size in super().process(row, ctx):
            yield row_id, account, n, total * 2, size


@pytest.mark.parametrize("backend", ["heap", for_soak("rocksdb")])
def test_upgrading_a_running_query_keeps_state_and_restores_nothing(
    spark, undisturbed, tmp_path, backend
):
    rows, expected = undisturbed
    with Live(spark, tmp_path, backend=backend) as live:
        before = live.feed(3)
        pids = slot_pids(live.run._engine.coordinator.run_id)
        live.run.upgrade("ledger", Doubled())
        after = live.feed(3)
        assert slot_pids(live.run._engine.coordinator.run_id) == pids
        assert live.run.epochs()[2].restored == 0, "the slots have it all"
        versions = [epoch.operators["ledger"].function_version for epoch in (before, after)]
        assert versions[0] != versions[1]
        assert before.operators["spread"].function_version == (
            after.operators["spread"].function_version
        )
    found = by_id(published(tmp_path / "booked"))
    half = 3 * 30
    assert found[:half] == rows[:half]
    assert found[half:] == [{**row, "total": row["total"] * 2} for row in rows[half:]]
    kept = stored_state(
        build(spark, live.source.folder, tmp_path, Doubled()), live.folder / "checkpoint"
    )
    since = kept["ledger"].pop("since")
    assert set(since.values()) <= {before.number + 1, before.number + 2, before.number + 3}
    assert kept == expected


class Wider(KeyedProcess):
    """State of another form: a field more, a wider number, and a count that is text now."""

    count = state.Value("string", migrate=lambda count: f"{count} payments")
    total = state.Value("double", migrate=float)
    last = state.List("bigint")
    by_size = state.Map("bigint", "bigint")

    def process(self, row, ctx):
        count = int(self.count.get("0 payments").split()[0]) + 1
        self.count.set(f"{count} payments")
        self.total.set(self.total.get(0.0) + row.amount)
        yield row.id, row.account, count, int(self.total.get()), row.amount // 250


@pytest.mark.parametrize("backend", [for_soak("heap"), "rocksdb"])
def test_an_upgrade_that_changes_the_form_of_state_migrates_it_once(
    spark, undisturbed, tmp_path, monkeypatch, backend
):
    rows, _ = undisturbed
    with Live(spark, tmp_path, backend=backend) as live:
        live.feed(3)
        live.run.upgrade("ledger", Wider())
        first = live.feed()
        held = [part for part in first.operators["ledger"].ranges if part.files]
        assert [[ref.kind for ref in part.files] for part in held] == [["base", "delta"]] * len(
            held
        )
        assert first.operators["ledger"].states["count"].type == "string"
        live.run.rescale(3)
        live.feed(2)
    # The rows are the same; restored without migrate=, nothing of the old form is left.
    assert by_id(published(tmp_path / "booked")) == rows

    for declaration in (Wider.count, Wider.total):
        monkeypatch.setattr(declaration, "migrate", None)
    kept = stored_state(
        build(spark, live.source.folder, tmp_path, Wider()), tmp_path / "checkpoint"
    )
    assert {text.split()[1] for text in kept["ledger"]["count"].values()} == {"payments"}


def test_an_upgrade_that_does_not_fit_is_refused_and_the_query_goes_on(
    spark, undisturbed, tmp_path
):
    class Other(Ledger2):
        pass

    class Text(KeyedProcess):
        count = state.Value("string")
        total = state.Value("bigint")
        last = state.List("bigint")
        by_size = state.Map("bigint", "bigint")

        def process(self, row, ctx): ...

    class Less(KeyedProcess):
        count = state.Value("bigint")

        def process(self, row, ctx): ...

    with Live(spark, tmp_path) as live:
        live.feed()
        with pytest.raises(StateSchemaError, match="migrate="):
            live.run.upgrade("ledger", Text())
        with pytest.raises(StateSchemaError, match="allow_dropped_state"):
            live.run.upgrade("ledger", Less())
        with pytest.raises(PlanError, match="no operator 'nobody'"):
            live.run.upgrade("nobody", Other())
        with pytest.raises(PlanError, match="not the class"):
            live.run.upgrade("ledger", Other)
        live.feed(FILES - 1)
    assert by_id(published(tmp_path / "booked")) == undisturbed[0]


def test_a_new_function_that_fails_ends_the_run_and_the_old_program_goes_on(
    spark, undisturbed, tmp_path
):
    class Broken(Ledger):
        def process(self, row, ctx):
            raise ValueError("broken")

    with Live(spark, tmp_path) as live:
        live.feed(2)
        live.run.upgrade("ledger", Broken())
        with pytest.raises(FunctionError, match="broken"):
            live.feed()
    live.source.add_all(payments(FILES)[live.source.count :])
    finish(live.job, tmp_path / "checkpoint")
    assert by_id(published(tmp_path / "booked")) == undisturbed[0]
    assert stored_state(live.job, tmp_path / "checkpoint") == undisturbed[1]


class Told(Ledger):
    """Keeps a diary of the epochs it was told of, a file per subtask."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_epoch_committed(self, epoch):
        with open(f"{self.folder}/told-{os.getpid()}", "a") as diary:
            diary.write(f"{epoch} ")


def test_functions_are_told_of_committed_epochs_in_order(spark, tmp_path):
    source = Input(tmp_path / "in", SCHEMA).add_all(payments(4))
    job = build(spark, source.folder, tmp_path, Told(tmp_path))
    finish(job, tmp_path / "checkpoint")
    numbers = [str(epoch.number) for epoch in epochs(tmp_path / "checkpoint")]
    diaries = [path.read_text().split() for path in tmp_path.glob("told-*")]
    assert diaries == [numbers[:-1]] * 2, "the last one would be told with the next epoch"


@pytest.mark.soak
def test_a_checkpoint_goes_on_with_another_backend(spark, undisturbed, tmp_path, monkeypatch):
    """Bases of either kind are read by both."""
    monkeypatch.setattr("cairn.driver.coordinator.compaction.BASE_BYTES_MIN", 0)
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0.001")
    source = Input(tmp_path / "in", SCHEMA)
    job = build(spark, source.folder, tmp_path)
    kinds = []
    # A base is asked for in the second epoch, and told of in that one or the next.
    for backend, files in (("heap", 3), ("rocksdb", 2), ("heap", 1)):
        source.add_all(payments(FILES)[source.count :][:files])
        finish(job, tmp_path / "checkpoint", backend=backend)
        newest = epochs(tmp_path / "checkpoint")[-1]
        stored = [f for op in newest.operators.values() for part in op.ranges for f in part.files]
        kinds.append({file.format for file in stored if file.kind == "base"})
    assert {"segment"} in kinds[:1] and "rocksdb" in kinds[1] | kinds[2]
    assert by_id(published(tmp_path / "booked")) == undisturbed[0]
    assert stored_state(job, tmp_path / "checkpoint") == undisturbed[1]


def test_the_older_of_two_runs_in_one_session_ends_with_a_conflict(spark, tmp_path):
    with Live(spark, tmp_path) as older:
        older.feed()
        checkpoint = str(older.checkpoint)
        with older.job.start(checkpoint=checkpoint, trigger="50 milliseconds") as newer:
            with pytest.raises(CommitConflictError, match="another driver"):
                older.run.wait(60)
            assert isinstance(older.run.error, CommitConflictError)
            assert older.run.status == "superseded"
            older.run = newer
            older.feed()
            assert newer.is_active and newer.error is None
    assert {row["id"] for row in older.booked()} == {
        row[0] for file in older.files[:2] for row in file
    }
