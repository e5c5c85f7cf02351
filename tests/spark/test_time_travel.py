"""Back to an earlier epoch, and on a second way from it: nothing is lost, doubled or disturbed.

A job that is rolled back gives the output of the undone epochs once more; everything else
is compared with a run that nobody touched.
"""

from __future__ import annotations

import collections
import json
import os
import signal

import pytest

from cairn import CommitConflictError
from cairn.cli import main
from cairn.driver.coordinator import epoch
from cairn.snapshots import diff_epochs
from cairn.snapshots.branch import branch
from cairn.snapshots.rollback import rollback
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.retention import object_paths
from cairn.storage.spark_log import COMPACT_SETTING
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from cairn.testing.crash import SimulatedCrash, simulated_crash
from tests.marks import for_soak
from tests.spark.live import Live, Undisturbed
from tests.spark.programs.ledger import SCHEMA, build, payments
from tests.spark.support import (
    Input,
    Program,
    epochs,
    eventually,
    finish,
    published,
    stored_state,
)


def cairn(*arguments):
    """A command as it is typed."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0, arguments


def published_once(folder):
    """The rows of a Files sink, counted, once it is certain that no epoch has two lists."""
    lists = {}
    for path in folder.glob("_cairn/*/*/epochs/*.json"):
        assert int(path.stem) not in lists, "two jobs or sinks have written here"
        lists[int(path.stem)] = [file["name"] for file in json.loads(path.read_bytes())["files"]]
    for number, names in lists.items():
        assert all(name.startswith(f"part-{number:012d}-") for name in names)
    named = sorted(name for names in lists.values() for name in names)
    assert named == sorted(path.name for path in folder.glob("*.parquet"))
    return counted(published(folder))


def counted(rows):
    return collections.Counter(tuple(row.items()) for row in rows)


def check_whole(checkpoint):
    report = verify(open_store(str(checkpoint)))
    assert report.ok and not report.stale_holds, report


# Rollback


def test_a_job_that_is_rolled_back_replays_input_under_new_numbers(spark, ledger, tmp_path):
    source = Input(tmp_path / "in", SCHEMA).add_all(ledger.files[:5])
    job = build(spark, source.folder, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    finish(job, checkpoint)
    expected = counted(ledger.booked(0, 5))
    used = {epoch.number for epoch in epochs(checkpoint)}
    # Each time to the epochs after so many files: once, and then twice in a row.
    for back_to in ([3], [4, 2]):
        for files in back_to:
            cairn("rollback", checkpoint, epochs(checkpoint)[files - 1].number, "--yes")
            assert stored_state(job, checkpoint) == ledger.state(files)
        assert published_once(tmp_path / "booked") == expected, "output stays"
        finish(job, checkpoint)
        expected += counted(ledger.booked(back_to[-1], 5))
        assert published_once(tmp_path / "booked") == expected
        published_once(tmp_path / "large")
        assert stored_state(job, checkpoint) == ledger.state(5)
        new = {epoch.number for epoch in epochs(checkpoint)[back_to[-1] :]}
        assert len(new) == 5 - back_to[-1] and min(new) > max(used)
        used |= new
    check_whole(checkpoint)


@pytest.mark.soak
def test_a_job_whose_lists_of_files_were_compacted_at_another_interval_is_taken_back_and_saved(
    spark, ledger, tmp_path
):
    source = Input(tmp_path / "in", SCHEMA).add_all(ledger.files[:7])
    job = build(spark, source.folder, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    spark.conf.set(COMPACT_SETTING, 2)
    try:
        finish(job, checkpoint)
    finally:
        spark.conf.unset(COMPACT_SETTING)
    saved, back = epochs(checkpoint)[2].number, epochs(checkpoint)[5].number
    assert list(checkpoint.glob("spark/*/sources/0/5.compact")), "Spark has used the setting"
    cairn("savepoint", f"{checkpoint}@{saved}", tmp_path / "saved")
    cairn("rollback", checkpoint, back, "--yes")
    finish(job, checkpoint)
    expected = counted(ledger.booked(0, 7)) + counted(ledger.booked(6, 7))
    assert published_once(tmp_path / "booked") == expected
    assert stored_state(job, checkpoint) == ledger.state(7)
    other = build(spark, source.folder, tmp_path / "other")
    finish(other, tmp_path / "other" / "checkpoint", savepoint=str(tmp_path / "saved"))
    assert published_once(tmp_path / "other" / "booked") == counted(ledger.booked(3, 7))
    assert stored_state(other, tmp_path / "other" / "checkpoint") == ledger.state(7)


@pytest.mark.parametrize("point", [for_soak("driver.takeover.written"), "driver.rewind.laid"])
def test_a_start_that_dies_after_a_rollback_changes_nothing_for_the_next(
    spark, ledger, tmp_path, point
):
    with Live(spark, tmp_path, ledger.files) as live:
        live.feed(2)
    rollback(open_store(str(live.checkpoint)), epochs(live.checkpoint)[0].number)
    with simulated_crash(point), pytest.raises(SimulatedCrash):
        finish(live.job, live.checkpoint)
    assert live.state() == ledger.state(1)
    finish(live.job, live.checkpoint)
    again = counted(ledger.booked(0, 2)) + counted(ledger.booked(1, 2))
    assert published_once(tmp_path / "booked") == again
    assert live.state() == ledger.state(2)


@pytest.mark.soak
def test_a_driver_killed_before_the_first_epoch_after_a_rollback_publishes_nothing(
    spark, ledger, tmp_path
):
    source = Input(tmp_path / "in", SCHEMA).add_all(ledger.files[:3])
    job = build(spark, source.folder, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    finish(job, checkpoint)
    rollback(open_store(str(checkpoint)), epochs(checkpoint)[0].number)
    # Its output is staged by then.
    crash = {"CAIRN_CRASH_AT": "driver.pack.written"}
    with Program("ledger", source.folder, tmp_path, on=spark, **crash) as dies:
        dies.end()
    assert dies.killed, dies.errors[-2000:]
    assert published_once(tmp_path / "booked") == counted(ledger.booked(0, 3))
    finish(job, checkpoint)
    again = counted(ledger.booked(0, 3)) + counted(ledger.booked(1, 3))
    assert published_once(tmp_path / "booked") == again
    assert stored_state(job, checkpoint) == ledger.state(3)
    check_whole(checkpoint)


def test_a_rollback_fences_the_driver_that_runs(spark, ledger, tmp_path):
    with Live(spark, tmp_path, ledger.files) as live:
        live.feed(3)
        rollback(open_store(str(live.checkpoint)), epochs(live.checkpoint)[0].number)
        with pytest.raises(CommitConflictError):
            live.feed()
        assert live.run.status == "superseded"
    assert published_once(tmp_path / "booked") == counted(ledger.booked(0, 3))
    assert live.state() == ledger.state(1)
    finish(live.job, live.checkpoint)
    again = counted(ledger.booked(0, 4)) + counted(ledger.booked(1, 3))
    assert published_once(tmp_path / "booked") == again
    assert live.state() == ledger.state(4)


# tests/simulation/test_zombies.py has it without Spark.
@pytest.mark.soak
def test_a_driver_of_the_old_lineage_that_wakes_up_commits_nothing(spark, ledger, tmp_path):
    """It sleeps in the middle of an epoch while the job is rolled back and goes on without it."""
    source = Input(tmp_path / "in", SCHEMA).add_all(ledger.files[:2])
    trap = f"sleep {ledger.files[2][0][0]} 8"
    arguments = (source.folder, tmp_path, "--trigger", "50 milliseconds")
    job = build(spark, source.folder, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    with Program("ledger", *arguments, TRAP=trap) as zombie:
        zombie.await_report(epoch=3)
        source.add(*ledger.files[2])
        begun = checkpoint / epochs(checkpoint)[-1].spark.folder / "offsets" / "2"
        assert eventually(begun.exists)
        os.kill(zombie.process.pid, signal.SIGSTOP)
        assert len(epochs(checkpoint)) == 2, "it sleeps before the third epoch is committed"
        cairn("rollback", checkpoint, 2, "--yes")
        finish(job, checkpoint)
        os.kill(zombie.process.pid, signal.SIGCONT)
        last = zombie.end()[-1]
    assert (last["end"], last["error"]) == ("superseded", "CommitConflictError"), last
    again = counted(ledger.booked(0, 3)) + counted(ledger.booked(1, 2))
    assert published_once(tmp_path / "booked") == again
    assert stored_state(job, checkpoint) == ledger.state(3)
    check_whole(checkpoint)


# Branch


def near_full_manifest(checkpoint):
    """An empty checkpoint whose third epoch has a full manifest, so that those before it can go."""
    store = open_store(str(checkpoint))
    create_or_open_job(store, "ledger", 16)
    for _ in range(16):
        Log(store).take_over(host="nobody", pid=0, wall_ms=0)
    return store


def are_bases_written(store):
    """True if a slot has written a base that no epoch names yet, or the newest epoch has all."""
    kept = list(Log(store).lineage())
    ranges = [part for operator in kept[0].operators.values() for part in operator.ranges]
    unreported = {found.path for found in store.list("state/")} - object_paths(kept)
    return unreported or all(part.files[0].kind == "base" for part in ranges if part.files)


@pytest.mark.soak
def test_a_branch_of_a_running_job_and_its_parent_do_not_notice_each_other(
    spark, ledger, tmp_path, monkeypatch
):
    other_way = payments(12, 100, 127)[10:]
    alone = Undisturbed(spark, tmp_path / "alone", [*ledger.files[:2], *other_way])
    store = near_full_manifest(tmp_path / "parent" / "checkpoint")
    branch_folder = tmp_path / "branch"
    # Bases are due in every epoch, and files of their own.
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0.1")
    monkeypatch.setattr(epoch, "INLINE_BYTES_MAX", 0)
    with Live(spark, tmp_path / "parent", ledger.files, retained_epochs=1) as parent:
        start = parent.feed(2)
        info = branch(store, None, str(branch_folder / "checkpoint"))
        assert info.parent_epoch == start.number
        # The parent goes on until the epoch is retired, and has bases instead of its files.
        for _ in range(4):
            assert eventually(lambda: are_bases_written(store))
            parent.feed()
        assert Log(store).oldest_kept() > start.number
        held = object_paths([start]) - object_paths(epochs(parent.checkpoint))
        assert held, "the parent itself needs them no more"
        check_whole(branch_folder / "checkpoint")
        check_whole(parent.checkpoint)

        # The branch keeps the parent's files, as long as it writes no bases.
        monkeypatch.undo()
        with Live(spark, branch_folder, other_way) as second:
            second.feed()
            parent.feed()
            second.feed()
            assert parent.run.is_active and second.run.is_active
        assert second.state() == alone.state()
        assert second.booked() == alone.booked(2)
        check_whole(second.checkpoint)
        check_whole(parent.checkpoint)
        assert all(store.exists(path) for path in held)

        cairn("rm", second.checkpoint, "--yes")
        parent.feed()
        left = [path for path in held if store.exists(path)]
        assert left == [], "freed without a restart"
        check_whole(parent.checkpoint)
    assert parent.state() == ledger.state()
    assert parent.booked() == ledger.booked()


@pytest.mark.parametrize(("backend", "parallelism"), [("rocksdb", 3), for_soak("heap", 1)])
def test_a_branch_of_an_older_epoch_runs_in_any_backend_at_any_parallelism(
    spark, ledger, tmp_path, backend, parallelism
):
    before = epochs(ledger.checkpoint)
    cairn("branch", f"{ledger.checkpoint}@{ledger.epochs[5]}", tmp_path / "checkpoint")
    job = build(spark, ledger.source.folder, tmp_path)
    finish(job, tmp_path / "checkpoint", parallelism, backend=backend)
    assert stored_state(job, tmp_path / "checkpoint") == ledger.state()
    assert published_once(tmp_path / "booked") == counted(ledger.booked(6))
    assert epochs(tmp_path / "checkpoint")[-1].operators["ledger"].parallelism == parallelism
    assert epochs(ledger.checkpoint) == before
    check_whole(tmp_path / "checkpoint")
    cairn("rm", tmp_path / "checkpoint", "--yes")
    check_whole(ledger.checkpoint)


# Difference


@pytest.mark.parametrize(("a", "b"), [(3, 5), (5, 3)])
def test_diff_names_exactly_the_keys_that_functions_changed(ledger, a, b):
    before, after = ledger.state(a), ledger.state(b)
    numbers = (ledger.epochs[a - 1], ledger.epochs[b - 1])
    found = diff_epochs(open_store(str(ledger.checkpoint)), *numbers, limit=10_000)
    assert {(each.operator, each.state) for each in found} == {
        (uid, name) for uid, states in after.items() for name in states
    }
    for each in found:
        old = entries(each, before[each.operator][each.state])
        new = entries(each, after[each.operator][each.state])
        assert named(each.added_examples) == new.keys() - old.keys()
        assert named(each.removed_examples) == old.keys() - new.keys()
        assert named(each.changed_examples) == {k for k in old.keys() & new if old[k] != new[k]}
    assert any(each.added for each in found) == (a < b)
    assert any(each.removed for each in found) == (a > b)
    assert all(each.changed for each in found)


def entries(diff, held):
    """{(key, entry): value}; only map state has entries."""
    if diff.kind != "map":
        return {(key, None): value for key, value in held.items()}
    return {(key, entry): n for key, inner in held.items() for entry, n in inner.items()}


def named(examples):
    names = [(example.key, example.entry) for example in examples]
    assert len(set(names)) == len(names)
    return set(names)
