"""The log: one winner per number, doubt settled by reading back, the right epoch is newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.errors import (
    CommitConflictError,
    CommitUnknownError,
    CorruptFileError,
    KeyGroupCountError,
    RestoreError,
)
from cairn.storage.log import Log, create_or_open_job, new_nonce, record_path
from cairn.storage.manifest import Epoch, Restore, SparkPosition, Takeover
from cairn.storage.store import Store, open_store
from cairn.testing.faulty_store import Fault, FaultyStore


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def quiet(store: Store, **options: Any) -> Log:
    return Log(store, sleep=lambda seconds: None, **options)


def take_over(log: Log) -> int:
    return log.take_over(host="h", pid=1, wall_ms=1).term


def add_epoch(log: Log, parent: int | None, term: int = 1, **fields: Any) -> Epoch:
    return log.append(
        lambda number: Epoch(
            number=number,
            parent=parent,
            term=term,
            nonce=new_nonce(),
            wall_ms=1,
            now_ms=1,
            watermarks={},
            spark=SparkPosition(folder="spark/0", batch_id=0, offsets=""),
            operators={},
            **fields,
        )
    )


def add_restore(log: Log, epoch: int) -> Restore:
    return log.append(
        lambda number: Restore(number=number, term=1, nonce=new_nonce(), wall_ms=1, epoch=epoch)
    )


def test_numbers_start_at_one_and_go_up_by_one(store: Store) -> None:
    log = quiet(store)
    assert (log.newest_number(), log.newest_epoch()) == (None, None)
    assert take_over(log) == 1
    assert [add_epoch(log, None).number, add_epoch(log, 2).number] == [2, 3]
    assert [r.number for r in Log(store).records()] == [1, 2, 3]
    assert [r.number for r in Log(store).records(start=2)] == [2, 3]
    assert store.exists("epochs/000000000003.json")


def test_the_leader_appends_without_listing(store: Store) -> None:
    faulty = FaultyStore(store)
    log = quiet(faulty)
    take_over(log)
    before = faulty.calls["list"]
    for parent in (None, 2, 3, 4):
        add_epoch(log, parent)
    assert faulty.calls["list"] == before


def test_the_older_of_two_leaders_is_fenced_for_good(store: Store) -> None:
    old, new = quiet(store), quiet(store)
    take_over(old)
    add_epoch(old, None)
    take_over(new)
    for _ in range(2):
        with pytest.raises(CommitConflictError):
            add_epoch(old, 2)
    assert add_epoch(new, 2, term=3).number == 4
    assert [type(r).__name__ for r in Log(store).records()] == [
        "Takeover", "Epoch", "Takeover", "Epoch",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["before", "after"])
def test_unknown_outcome_is_settled_and_published_once(store: Store, kind: Any) -> None:
    log = quiet(FaultyStore(store, [Fault("put_if_absent", 2, kind)]))
    take_over(log)
    first = add_epoch(log, None)
    assert add_epoch(log, first.number).number == 3
    assert [r.number for r in Log(store).records()] == [1, 2, 3]


def test_unknown_outcome_that_another_leader_used_is_a_conflict(store: Store) -> None:
    faulty = FaultyStore(store, [Fault("put_if_absent", 2, "before")])
    old = quiet(faulty)
    take_over(old)
    other = quiet(store)

    real = faulty.inner.get

    def get(path: str) -> bytes:
        if other.last is None:
            take_over(other)
        return real(path)

    faulty.get = get  # type: ignore[method-assign]
    with pytest.raises(CommitConflictError):
        add_epoch(old, None)


def test_when_reading_back_fails_too_the_outcome_stays_unknown(store: Store) -> None:
    plan = [Fault("put_if_absent", 2, "after")]
    plan += [Fault("get", n, "before") for n in range(1, 20)]
    log = quiet(FaultyStore(store, plan))
    take_over(log)
    with pytest.raises(CommitUnknownError):
        add_epoch(log, None)
    with pytest.raises(CommitUnknownError):
        add_epoch(log, None)
    assert Log(store).newest_number() == 2


def test_a_torn_read_back_is_read_again(store: Store) -> None:
    plan = [Fault("put_if_absent", 2, "after"), Fault("get", 1, "torn")]
    log = quiet(FaultyStore(store, plan))
    take_over(log)
    assert add_epoch(log, None).number == 2


def test_a_full_disk_publishes_nothing_and_may_be_tried_again(store: Store) -> None:
    log = quiet(FaultyStore(store, [Fault("put_if_absent", 2, "enospc")]))
    take_over(log)
    with pytest.raises(OSError, match="injected"):
        add_epoch(log, None)
    assert Log(store).newest_number() == 1
    assert add_epoch(log, None).number == 2


def test_a_leader_that_slept_past_the_retirement_of_its_number_learns_of_it(store: Store) -> None:
    old = quiet(store)
    take_over(old)
    add_epoch(old, None)
    new = quiet(store)
    take_over(new)
    parent = 2
    for _ in range(20):
        parent = add_epoch(new, parent, term=3).number
    for number in range(1, 20):
        store.delete([record_path(number)])
    with pytest.raises(CommitUnknownError, match="moved on"):
        add_epoch(old, 2)
    newest = Log(store).newest_epoch()
    assert newest is not None and newest.number == parent


def test_restored_epoch_is_newest_until_another_is_appended(store: Store) -> None:
    log = quiet(store)
    take_over(log)
    for parent in (None, 2, 3):
        add_epoch(log, parent)
    add_restore(log, 2)
    take_over(log)
    for reader in (log, Log(store)):
        newest = reader.newest_epoch()
        assert newest is not None and newest.number == 2
    assert add_epoch(log, 2).number == 7
    assert [e.number for e in Log(store).lineage()] == [7, 2]
    add_restore(log, 4)
    assert [e.number for e in Log(store).lineage()] == [4, 3, 2]


def test_only_an_epoch_that_is_kept_can_be_restored(store: Store) -> None:
    log = quiet(store)
    take_over(log)
    add_epoch(log, None)
    add_epoch(log, 2)
    add_epoch(log, 3, oldest_kept=3)
    for wrong in (1, 2, 99):
        with pytest.raises(RestoreError):
            add_restore(log, wrong)
    add_restore(log, 3)
    # What was retired stays retired on the new lineage, said or not.
    assert add_epoch(log, 3).oldest_kept == 3


def test_incremental_manifests_read_whole_without_the_cache(store: Store) -> None:
    log = quiet(store)
    take_over(log)
    written = [add_epoch(log, None)]
    for _ in range(50):
        written.append(add_epoch(log, written[-1].number))
    for epoch in reversed(written):
        assert Log(store, cache_records_max=1).epoch(epoch.number) == epoch


def test_a_damaged_or_misplaced_record_is_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = quiet(store)
    take_over(log)
    add_epoch(log, None)
    data = store.get(record_path(2))
    store.put(record_path(5), data)
    store.put(record_path(2), data[:-5])
    for number in (2, 5):
        with pytest.raises(CorruptFileError, match=f"{number:012d}"):
            Log(store).read(number)
    with pytest.raises(RestoreError):
        Log(store).read(3)
    with pytest.raises(RestoreError, match="takeover"):
        Log(store).epoch(1)


def test_job_is_created_once_and_recognised(store: Store) -> None:
    job = create_or_open_job(store, "fraud", 128)
    assert create_or_open_job(store, "fraud", 128) == job
    with pytest.raises(KeyGroupCountError, match="max_parallelism=128"):
        create_or_open_job(store, "fraud", 64)
    with pytest.raises(RestoreError, match="another job"):
        create_or_open_job(store, "other", 128)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_job_creation_in_doubt_is_raised_or_found(store: Store, kind: Any) -> None:
    faulty = FaultyStore(store, [Fault("put_if_absent", 1, kind)])
    if kind == "before":
        with pytest.raises(CommitUnknownError):
            create_or_open_job(faulty, "fraud", 8)
    job = create_or_open_job(faulty, "fraud", 8)
    assert create_or_open_job(store, "fraud", 8) == job


@pytest.mark.parametrize("seed", range(60))
def test_with_any_faults_what_append_returned_is_in_the_log(store: Store, seed: int) -> None:
    published: list[int] = []
    for turn in range(4):
        faulty = FaultyStore(store, seed=seed * 10 + turn, fault_rate=0.3)
        log = quiet(faulty)
        refused: str | None = None
        try:
            take_over(log)
            for _ in range(5):
                newest = Log(store).newest_epoch()
                refused = new_nonce()
                record = log.append(
                    lambda number, nonce=refused, newest=newest: Epoch(  # type: ignore[misc]
                        number=number,
                        parent=newest.number if newest else None,
                        term=1,
                        nonce=nonce,
                        wall_ms=1,
                        now_ms=1,
                        watermarks={},
                        operators={},
                        spark=SparkPosition(folder="", batch_id=0, offsets=""),
                    )
                )
                published.append(record.number)
                refused = None
        except CommitUnknownError:
            pass
        except (CommitConflictError, OSError, CorruptFileError):
            found = [r.nonce for r in Log(store).records()]
            assert refused is None or refused not in found, f"seed {seed}"
    numbers = [r.number for r in Log(store).records()]
    assert numbers == list(range(1, len(numbers) + 1)), f"seed {seed}"
    assert set(published) <= set(numbers) and len(set(published)) == len(published)


def test_a_conditional_takeover_follows_exactly_the_record_that_was_seen(store: Store) -> None:
    assert Log(store).take_over(host="h", pid=1, wall_ms=1, only_if_last=0).term == 1
    for stale in (0, 2):
        log = Log(store)
        with pytest.raises(CommitConflictError):
            log.take_over(host="h", pid=2, wall_ms=1, only_if_last=stale)
        with pytest.raises(CommitConflictError):
            log.append(lambda number: Takeover(
                number=number, term=1, nonce="n", wall_ms=1, host="h", pid=2, previous=1,
            ))  # fmt: skip
    assert Log(store).numbers() == [1]
    assert Log(store).take_over(host="h", pid=2, wall_ms=1, only_if_last=1).term == 2


def test_of_two_conditional_takeovers_at_once_one_wins_and_the_other_does_not_try_again(
    store: Store,
) -> None:
    take_over(Log(store))
    loser = Log(store)
    listed = loser.newest_number

    def overtaken() -> int | None:
        newest = listed()
        Log(store).take_over(host="h", pid=2, wall_ms=1, only_if_last=1)
        return newest

    loser.newest_number = overtaken
    with pytest.raises(CommitConflictError):
        loser.take_over(host="h", pid=3, wall_ms=1, only_if_last=1)
    assert Log(store).numbers() == [1, 2]


def test_a_takeover_stops_when_its_lease_is_lost(store: Store) -> None:
    take_over(Log(store))
    with pytest.raises(CommitConflictError, match="lease"):
        Log(store).take_over(host="h", pid=2, wall_ms=1, is_held=lambda: False)
    assert Log(store).numbers() == [1]


def test_a_takeover_that_was_paused_after_its_look_at_the_lease_fences_nobody(
    store: Store,
) -> None:
    take_over(Log(store))
    looks = iter([True, False])

    def pause() -> bool:
        """The lease is held; then the driver is paused, and another one takes over."""
        is_held = next(looks)
        if is_held:
            take_over(Log(store))
        return is_held

    with pytest.raises(CommitConflictError, match="lease"):
        Log(store).take_over(host="h", pid=2, wall_ms=1, is_held=pause)
    assert Log(store).numbers() == [1, 2]
