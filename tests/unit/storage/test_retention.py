"""Collection removes what is retired, and never what anybody can still come back to."""

from __future__ import annotations

import json
import logging
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import CorruptFileError
from cairn.storage.holds import read_holds
from cairn.storage.lineage import Window
from cairn.storage.log import FIRST_NUMBER, Log, record_path
from cairn.storage.manifest import Epoch, is_full
from cairn.storage.pack import state_path
from cairn.storage.retention import Collector, object_paths
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from cairn.testing.clock import ManualClock
from cairn.testing.faulty_store import Fault, FaultyStore
from tests.unit.storage.leading import LATER_S, Driver, lay_spark_folder, new_store, state_paths


@pytest.fixture
def store() -> Store:
    return new_store()


def test_old_epochs_go_and_the_last_ones_stay_with_their_files(store: Store) -> None:
    driver = Driver(store)
    removed = 0
    for _ in range(70):
        driver.epoch()
        removed += driver.collector.after_epoch().epochs_removed
    numbers = driver.log.numbers()
    assert numbers == list(range(60, 72)), "from the full manifest on, without gaps"
    assert removed == 58
    epochs = [r for r in Log(store).records() if isinstance(r, Epoch)]
    assert state_paths(store) == object_paths(epochs)
    assert Window(Log(store), 2).oldest() == numbers[0]
    assert verify(store).ok


def test_an_epoch_that_retires_nothing_costs_no_request(store: Store) -> None:
    faulty = FaultyStore(store)
    driver = Driver(faulty)
    for _ in range(5):
        driver.epoch()
        driver.collector.after_epoch()
    driver.epoch()
    before = dict(faulty.calls)
    driver.collector.after_epoch()
    assert dict(faulty.calls) == before


def test_keeping_many_epochs_reads_none_of_them_again(store: Store) -> None:
    faulty = FaultyStore(store)
    driver = Driver(faulty, keep=100)
    for _ in range(130):
        driver.epoch()
        driver.collector.after_epoch()
    before = faulty.calls["get"]
    driver.epoch()
    driver.collector.after_epoch()
    assert faulty.calls["get"] == before


def test_held_epochs_and_paths_stay_until_released(store: Store) -> None:
    driver = Driver(store)
    first = driver.epoch()
    orphan = state_path(driver.term, "f" * 32 + ".base")
    store.put(orphan, b"x")
    store.put("holds/savepoint", json.dumps({"epochs": [first.number], "paths": []}).encode())
    store.put("holds/branch", json.dumps({"paths": [orphan]}).encode())
    assert read_holds(store) == (frozenset({first.number}), frozenset({orphan}))
    for _ in range(50):
        driver.epoch()
        driver.collector.after_epoch()
    assert Log(store).epoch(first.number) == first
    assert object_paths([first]) <= state_paths(store)
    store.delete(["holds/savepoint"])
    driver.epoch()
    driver.collector.after_epoch()
    later = Driver(store)
    later.collector.sweep(time.time() + LATER_S)
    assert not store.exists(record_path(first.number))
    assert orphan in state_paths(store)
    store.delete(["holds/branch"])
    later.collector.sweep(time.time() + LATER_S)
    assert orphan not in state_paths(store)


def test_a_hold_written_after_the_floor_was_published_is_still_honoured(store: Store) -> None:
    driver = Driver(store)
    for _ in range(45):
        driver.epoch()
    store.put("holds/x", json.dumps({"epochs": [3]}).encode())
    driver.collector.after_epoch()
    assert Log(store).epoch(3).number == 3


def test_an_unreadable_hold_stops_all_removal(store: Store) -> None:
    driver = Driver(store)
    for _ in range(45):
        driver.epoch()
    before = {o.path for o in store.list()}
    store.put("holds/x", b"{")
    with pytest.raises(CorruptFileError, match="holds/x"):
        driver.collector.sweep(time.time() + LATER_S)
    assert {o.path for o in store.list()} == before | {"holds/x"}


def test_orphans_go_only_when_old_and_of_an_older_term(store: Store) -> None:
    old = Driver(store)
    old.epoch()
    orphan = old.write("delta").path
    nameless = "state/who-knows"
    store.put(nameless, b"x")
    assert old.collector.sweep(time.time() + LATER_S).objects_removed == 0, "our own term"
    new = Driver(store)
    mine = new.write("base").path
    assert new.collector.sweep(time.time()).objects_removed == 0, "within the grace period"
    collected = new.collector.sweep(time.time() + LATER_S)
    assert collected.objects_removed == 1 and collected.bytes_removed > 0
    assert orphan not in state_paths(store)
    assert {mine, nameless} <= state_paths(store)
    assert verify(store).ok


def test_a_collected_file_that_comes_back_is_reported_before_publishing(store: Store) -> None:
    driver = Driver(store)
    first = driver.epoch()
    for _ in range(45):
        driver.epoch(base=True)
        driver.collector.after_epoch()
    assert driver.collector.find_lost_paths(first) == object_paths([first])
    assert driver.collector.find_lost_paths(driver.epoch()) == set()


def test_rollback_keeps_what_the_restored_lineage_needs(store: Store) -> None:
    driver = Driver(store)
    for _ in range(50):
        driver.epoch()
        driver.collector.after_epoch()
    target = driver.log.numbers()[0]
    driver.restore(target)
    for _ in range(3):
        driver.epoch()
        driver.collector.after_epoch()
        assert verify(store).ok
    assert target in driver.log.numbers()


def test_after_a_rollback_the_abandoned_epochs_go_in_time_and_retirement_stands(
    store: Store,
) -> None:
    driver = Driver(store, keep=3)
    abandoned = driver.epochs(50)[-10:]
    driver.restore(abandoned[0].number)
    oldest_kept = driver.log.oldest_kept()
    for _ in range(60):
        driver.epoch(base=True, collect=True)
        assert driver.log.oldest_kept() >= oldest_kept
        oldest_kept = driver.log.oldest_kept()
        assert verify(store).ok
    assert not {epoch.number for epoch in abandoned} & set(driver.log.numbers())
    assert not object_paths(abandoned) & state_paths(store)


def test_an_epoch_is_kept_while_it_is_among_the_last_or_young_enough(store: Store) -> None:
    clock = ManualClock(1_000_000)
    driver = Driver(store, keep=2, keep_s=60.0, clock=clock)
    for _ in range(50):
        driver.epoch(collect=True)
        clock.advance_ms(1000)
    assert driver.log.oldest_kept() <= 2, "all epochs are younger than a minute"
    for _ in range(100):
        driver.epoch(collect=True)
        clock.advance_ms(1000)
    newest = driver.log.newest_epoch()
    assert newest is not None
    kept = [epoch for epoch in driver.log.lineage() if epoch.number >= driver.log.oldest_kept()]
    assert newest.wall_ms - kept[-1].wall_ms >= 58_000, "one young enough is retired"
    assert len(kept) <= 60 + 2 * 20, "old ones are kept by the run of a full manifest only"
    clock.advance_ms(3_600_000)
    for _ in range(21):
        driver.epoch(collect=True)
    assert driver.log.numbers()[0] > newest.number - 20, "by age nothing before is kept"
    assert verify(store).ok


def walked_back(log: Log, keep: int, keep_ms: float, now_ms: int) -> int:
    """What Window promises, said by a walk: whole runs, as long as anything in them counts."""
    runs: list[list[Epoch]] = [[]]
    for epoch in log.lineage():
        runs[-1].append(epoch)
        if is_full(epoch.number, epoch.parent):
            runs.append([])
    runs = [run for run in runs if run]
    oldest, position = FIRST_NUMBER, 0
    for run in runs:
        is_young = any(now_ms - epoch.wall_ms < keep_ms for epoch in run)
        if position >= keep and not is_young:
            break
        position += len(run)
        oldest = run[-1].number
    return oldest


@given(
    st.integers(1, 30),
    st.sampled_from([0.0, 5.0, 40.0]),
    st.lists(
        st.tuples(st.sampled_from(["epochs", "restore", "restart", "wait"]), st.integers(1, 40)),
        max_size=8,
    ),
)
def test_the_window_is_what_a_walk_back_finds(
    keep: int, keep_s: float, script: list[tuple[str, int]]
) -> None:
    store, clock = new_store(), ManualClock(1_000_000)
    driver = Driver(store, keep, keep_s=keep_s, clock=clock)
    window = Window(driver.log, keep, keep_s, clock)
    for action, n in script:
        if action == "restore" and driver.log.newest_epoch() is not None:
            epochs = list(driver.log.lineage())
            driver.restore(epochs[n % len(epochs)].number)
        elif action == "restart":
            driver = Driver(store, keep, keep_s=keep_s, clock=clock)
            window = Window(driver.log, keep, keep_s, clock)
        elif action == "wait":
            clock.advance_ms(n * 1000)
        elif action == "epochs":
            for _ in range(n):
                driver.epoch(collect=True)
                clock.advance_ms(500)
                assert window.oldest() == walked_back(driver.log, keep, keep_s * 1000, clock())
        assert verify(store).ok


def test_thousands_of_epochs_kept_by_age_cost_an_epoch_no_more_reads(store: Store) -> None:
    faulty = FaultyStore(store)
    clock = ManualClock(1_000_000)
    driver = Driver(faulty, keep=1, keep_s=1e6, clock=clock)
    driver.epochs(30)
    costs = []
    for _ in range(300):
        before = dict(faulty.calls)
        driver.epoch(collect=True)
        costs.append({name: n - before.get(name, 0) for name, n in faulty.calls.items()})
    assert all(cost == costs[0] for cost in costs)
    assert not costs[0].get("get") and not costs[0]["list"]


def hold_objects(store: Store, epoch: Epoch, name: str = "branch-x") -> str:
    path = f"holds/{name}.json"
    store.put(path, json.dumps({"paths": sorted(object_paths([epoch]))}).encode())
    return path


def test_objects_kept_by_a_hold_alone_go_without_a_restart_once_it_is_gone(store: Store) -> None:
    driver = Driver(store)
    first = driver.epoch(base=True)
    hold = hold_objects(store, first)
    driver.epochs(50, base=True)
    assert not store.exists(record_path(first.number))
    assert object_paths([first]) <= state_paths(store)
    store.delete([hold])
    collected = driver.collector.after_epoch()
    assert (collected.objects_removed, collected.epochs_removed) == (1, 0)
    assert not object_paths([first]) & state_paths(store)
    assert verify(store).ok


def test_a_leader_that_finds_objects_kept_by_a_hold_alone_frees_them_too(store: Store) -> None:
    driver = Driver(store)
    first = driver.epoch(base=True)
    hold = hold_objects(store, first)
    driver.epochs(50, base=True)
    later = Driver(store)
    later.collector.sweep(time.time())
    later.epochs(2)
    assert object_paths([first]) <= state_paths(store)
    store.delete([hold])
    later.epochs(1)
    assert not object_paths([first]) & state_paths(store)


def test_a_hold_that_shrinks_frees_what_it_no_longer_names(store: Store) -> None:
    driver = Driver(store)
    first, second = driver.epoch(base=True), driver.epoch(base=True)
    hold_objects(store, first, "branch-x")
    hold_objects(store, second, "branch-y")
    driver.epochs(50, base=True)
    store.put("holds/branch-x.json", b'{"paths": []}')
    driver.collector.after_epoch()
    assert not object_paths([first]) & state_paths(store)
    assert object_paths([second]) <= state_paths(store)


@pytest.mark.parametrize("operation", ["delete", "list", "get"])
def test_a_failure_to_collect_is_told_and_made_up_for_later(
    store: Store, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStore(store)
    driver = Driver(faulty)
    driver.epochs(20, base=True)
    store.put("holds/other.json", b"{}")
    with caplog.at_level(logging.WARNING, "cairn"):
        for _ in range(60):
            epoch = driver.epoch(base=True)
            for nth in range(1, 30):
                faulty.plan(Fault(operation, faulty.calls[operation] + nth, "before"))
            driver.collector.after_epoch()
            faulty._plan.clear()
            assert Log(store).epoch(epoch.number) == epoch
            assert verify(store).ok
    assert "could not remove" in caplog.text
    driver.epochs(1, base=True)
    report = verify(store)
    assert report.ok and not report.orphans
    assert Log(store).numbers()[0] == driver.log.oldest_kept()


def test_an_unreadable_hold_retires_nothing_and_fails_no_epoch(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(store)
    store.put("holds/x", b"{")
    driver.epochs(60)
    assert driver.log.oldest_kept() == 0
    assert "holds cannot be read" in caplog.text
    store.delete(["holds/x"])
    driver.epochs(20)
    assert driver.log.numbers()[0] == driver.log.oldest_kept() > 40


def test_spark_folders_go_when_no_epoch_names_them_and_nobody_writes_there(store: Store) -> None:
    first = Driver(store, folder=lay_spark_folder(store, 1))
    first.epochs(5)
    second = Driver(store, folder=lay_spark_folder(store, first.log.last + 1))  # type: ignore[operator]
    second.epochs(1)
    third = Driver(store, folder=lay_spark_folder(store, 99))
    third.collector.sweep(time.time() + LATER_S)
    folders = {first.folder, second.folder, third.folder}
    there = {o.path.rsplit("/", 2)[0] for o in store.list("spark") if "/offsets/" in o.path}
    assert there == folders, "the log still names them, or a later term made them"
    third.epochs(60)
    fourth = Driver(store)
    mine = lay_spark_folder(store, fourth.term)
    fourth.collector.sweep(time.time())
    assert store.list(first.folder), "somebody may still write there"
    fourth.collector.sweep(time.time() + LATER_S)
    assert not store.list(first.folder) and not store.list(second.folder)
    assert store.list(third.folder) and store.list(mine)
    local = store.local_path(first.folder)
    assert local is not None
    assert not os.path.exists(local), "hidden files are left"


def test_spark_folders_are_removed_where_they_lie(store: Store) -> None:
    spark = open_store("memory:")
    old, kept = lay_spark_folder(spark, 1), lay_spark_folder(spark, 2)
    driver = Driver(store)
    driver.epoch()
    driver = Driver(store)
    log = Log(store)
    Collector(store, log, 2, 2, spark_store=spark).sweep(time.time() + LATER_S)
    assert not spark.list(old) and spark.list(kept)


@pytest.mark.parametrize("call", range(1, 40))
def test_a_driver_that_dies_while_collecting_leaves_a_whole_checkpoint(
    store: Store, call: int
) -> None:
    driver = Driver(store)
    for _ in range(45):
        driver.epoch(base=True)
    faulty = FaultyStore(store, [Fault("delete", call, "before")])
    log = Log(faulty, sleep=lambda seconds: None)
    try:
        Collector(faulty, log, 2, driver.term).after_epoch()
    except OSError:
        assert faulty.faults_seen
    assert verify(store).ok
    later = Driver(store)
    later.epoch()
    later.collector.sweep(time.time() + LATER_S)
    report = verify(store)
    assert report.ok and not report.orphans
    assert Log(store).numbers()[0] == later.log.oldest_kept()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("epochs"), st.integers(1, 25)),
        st.tuples(st.just("collect"), st.integers(0, 1)),
        st.tuples(st.just("restore"), st.integers(0, 60)),
        st.tuples(st.just("restart"), st.integers(1, 5)),
        st.tuples(st.just("orphan"), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 60)),
        st.tuples(st.just("branch"), st.integers(0, 60)),
        st.tuples(st.just("release"), st.just(0)),
    ),
    max_size=14,
)


@given(actions)
def test_everything_a_kept_manifest_references_exists(script: list[tuple[str, int]]) -> None:
    store = new_store()
    driver = Driver(store)
    zombie = driver
    driver.epoch()
    for action, n in script:
        kept = [
            r.number
            for r in Log(store).records(start=driver.log.oldest_kept())
            if isinstance(r, Epoch)
        ]
        if action == "epochs":
            for index in range(n):
                driver.epoch(base=index % 7 == 6)
                if n % 2:
                    driver.collector.after_epoch()
        elif action == "collect":
            if n:
                fresh = Collector(store, driver.log, 2, driver.term)
                fresh.sweep(time.time() + LATER_S)
            else:
                driver.collector.sweep(time.time() + LATER_S)
                # A leader that has lost may still be at it, with what it knew.
                zombie.collector.sweep(time.time() + LATER_S)
        elif action == "restore":
            driver.restore(kept[n % len(kept)])
        elif action == "restart":
            zombie, driver = driver, Driver(store, keep=n)
        elif action == "orphan":
            driver.write("base")
        elif action == "hold":
            held = {"epochs": [kept[n % len(kept)]]}
            store.put("holds/h", json.dumps(held).encode())
        elif action == "branch":
            hold_objects(store, Log(store).epoch(kept[n % len(kept)]))
        else:
            store.delete(["holds/branch-x.json"])
            store.delete(["holds/h"])
        report = verify(store)
        assert report.damage == []
        for number in read_holds(store).epochs:
            assert object_paths([Log(store).epoch(number)]) <= state_paths(store)
        assert read_holds(store).paths <= state_paths(store)
    newest = Log(store).newest_epoch()
    assert newest is not None and newest.number in Log(store).numbers()
