"""Collection removes what is retired, and never what anybody can still come back to."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import CorruptFileError
from cairn.storage.files import StatePart, encode_segment
from cairn.storage.log import Log, create_or_open_job, new_nonce, record_path
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Epoch,
    FileRef,
    OperatorEntry,
    RangeState,
    Restore,
    SparkPosition,
)
from cairn.storage.pack import state_path, write_segment
from cairn.storage.retention import (
    Collector,
    collect,
    read_holds,
    referenced_paths,
    retained,
)
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from cairn.testing.faulty_store import Fault, FaultyStore

LATER_S = 10_000.0


class Driver:
    """A leader reduced to storage: each epoch adds a delta, now and then a base."""

    def __init__(self, store: Store, keep: int = 2) -> None:
        self.store = store
        self.log = Log(store, sleep=lambda seconds: None)
        self.term = self.log.take_over(host="h", pid=1, wall_ms=1).term
        self.collector = Collector(store, self.log, keep, self.term)
        self.counter = itertools.count()

    def write(self, kind: Any) -> FileRef:
        n = next(self.counter)
        batch = pa.record_batch({"group": np.array([0], np.int32), "v": [n]})
        epoch = (self.log.last or 0) + 1
        segment = encode_segment(
            kind, "op", [StatePart("s", batch)], first_epoch=epoch, last_epoch=epoch
        )
        place = write_segment(self.store, segment, self.term)
        return FileRef(
            id=segment.id,
            path=place.path,
            offset=0,
            length=place.length,
            kind=kind,
            tier=0,
            rows=1,
            first_epoch=epoch,
            last_epoch=epoch,
            first_group=0,
            group_count=128,
        )

    def epoch(self, *, base: bool = False) -> Epoch:
        parent = self.log.newest_epoch()
        files = parent.operators["op"].ranges[0].files if parent else []
        files = [self.write("base")] if base or len(files) > 6 else [*files, self.write("delta")]
        state = RangeState(
            first_group=0,
            group_count=8,
            version=EMPTY_VERSION,
            files=files,
            state_keys=0,
            state_bytes=0,
        )
        entry = OperatorEntry(
            uid="op", function_version="1", key_types={}, states={}, parallelism=1, ranges=[state]
        )
        oldest = self.collector.oldest_to_keep()
        return self.log.append(
            lambda number: Epoch(
                number=number,
                parent=parent.number if parent else None,
                term=self.term,
                nonce=new_nonce(),
                wall_ms=1,
                now_ms=1,
                watermarks={},
                operators={"op": entry},
                spark=SparkPosition(folder="", batch_id=0, offsets=""),
                oldest_kept=oldest,
            )
        )

    def restore(self, epoch: int) -> None:
        self.log.append(
            lambda number: Restore(
                number=number, term=self.term, nonce=new_nonce(), wall_ms=1, epoch=epoch
            )
        )


def new_store() -> Store:
    store = open_store("memory:")
    create_or_open_job(store, "j", 8)
    return store


@pytest.fixture
def store() -> Store:
    return new_store()


def state_paths(store: Store) -> set[str]:
    return {found.path for found in store.list("state")}


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
    assert state_paths(store) == referenced_paths(epochs)
    assert retained(Log(store), 2) == set(numbers)
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
    assert referenced_paths([first]) <= state_paths(store)
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
    assert driver.collector.lost_paths(first) == referenced_paths([first])
    assert driver.collector.lost_paths(driver.epoch()) == set()


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
    assert Log(store).numbers()[0] == later.log.retired_below()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("epochs"), st.integers(1, 25)),
        st.tuples(st.just("collect"), st.integers(0, 1)),
        st.tuples(st.just("restore"), st.integers(0, 60)),
        st.tuples(st.just("restart"), st.integers(1, 5)),
        st.tuples(st.just("orphan"), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 60)),
        st.tuples(st.just("release"), st.just(0)),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(actions)
def test_everything_a_kept_manifest_references_exists(script: list[tuple[str, int]]) -> None:
    store = new_store()
    driver = Driver(store)
    zombie = driver
    driver.epoch()
    for action, n in script:
        kept = [
            r.number
            for r in Log(store).records(start=driver.log.retired_below())
            if isinstance(r, Epoch)
        ]
        if action == "epochs":
            for index in range(n):
                driver.epoch(base=index % 7 == 6)
                if n % 2:
                    driver.collector.after_epoch()
        elif action == "collect":
            if n:
                collect(store, driver.log, 2, driver.term, time.time() + LATER_S)
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
        else:
            store.delete(["holds/h"])
        report = verify(store)
        assert report.damage == []
        for number in read_holds(store).epochs:
            assert referenced_paths([Log(store).epoch(number)]) <= state_paths(store)
    newest = Log(store).newest_epoch()
    assert newest is not None and newest.number in Log(store).numbers()
