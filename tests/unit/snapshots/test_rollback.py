"""A rollback says what it undoes, then makes an earlier epoch the newest one."""

from __future__ import annotations

import pytest

from cairn.errors import CommitConflictError, RestoreError
from cairn.snapshots.rollback import plan_rollback, rollback
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, Restore
from cairn.storage.store import Store
from cairn.storage.verify import verify
from cairn.testing.clock import ManualClock
from cairn.testing.faulty_store import Fault, FaultyStore
from tests.unit.storage.leading import Driver, new_store


@pytest.fixture
def store() -> Store:
    return new_store()


def newest(store: Store) -> Epoch:
    epoch = Log(store).newest_epoch()
    assert epoch is not None
    return epoch


def test_the_plan_names_what_is_undone_what_stays_and_where_input_is_read_again(
    store: Store,
) -> None:
    clock = ManualClock(1000)
    driver = Driver(store, clock=clock)
    for _ in range(6):
        driver.epoch()
        clock.advance_ms(50)
    plan = plan_rollback(store, 4)
    assert (plan.epoch, plan.newest) == (4, 7)
    assert [undone.epoch for undone in plan.undone] == [7, 6, 5]
    assert plan.rows == 30
    assert plan.span_ms == (1150, 1250)
    # Odd epochs have given the sink something.
    assert plan.output == {"out": {7: 1, 5: 1}}
    assert plan.offsets == ['{"topic":{"0":7}}'] and plan.sources == ["topic"]
    assert plan.regained == []
    assert Log(store).newest_number() == 7, "planning changes nothing"


def test_the_restored_epoch_is_newest_and_numbers_go_on(store: Store) -> None:
    driver = Driver(store)
    epochs = driver.epochs(6)
    restore = rollback(store, 4, clock_ms=lambda: 17)
    assert (restore.number, restore.term, restore.epoch, restore.wall_ms) == (8, 8, 4, 17)
    assert newest(store) == epochs[2]
    assert Log(store).epoch(7) == epochs[-1], "what is undone stays readable"
    later = Driver(store)
    assert later.epoch().number == 10
    assert [e.number for e in Log(store).lineage()] == [10, 4, 3, 2]


def test_a_driver_of_the_old_lineage_loses_its_next_put(store: Store) -> None:
    driver = Driver(store)
    driver.epochs(4)
    rollback(store, 3)
    with pytest.raises(CommitConflictError):
        driver.epoch()
    later = Driver(store)
    later.epoch()
    with pytest.raises(CommitConflictError):
        driver.epoch()
    assert [e.number for e in Log(store).lineage()] == [8, 3, 2]


def test_what_a_driver_commits_meanwhile_is_undone_too(store: Store) -> None:
    driver = Driver(store)
    driver.epochs(4)

    class Racing(FaultyStore):
        races = 3

        def put_if_absent(self, path: str, data: bytes) -> bool:
            if self.races:
                self.races -= 1
                driver.epoch()
            return super().put_if_absent(path, data)

    restore = rollback(Racing(store), 3)
    assert restore.number == 9
    assert newest(store).number == 3
    with pytest.raises(CommitConflictError):
        driver.epoch()


def test_an_epoch_retired_meanwhile_is_refused(store: Store) -> None:
    driver = Driver(store)
    driver.epochs(19)

    class Racing(FaultyStore):
        def put_if_absent(self, path: str, data: bytes) -> bool:
            if driver.log.last == 20:
                driver.epochs(5)
            return super().put_if_absent(path, data)

    with pytest.raises(RestoreError, match="retired"):
        rollback(Racing(store), 5)
    assert newest(store).number == 25


@pytest.mark.parametrize(
    ("number", "said"),
    [(63, "takeover"), (99, "no record 99"), (0, "no record 0"), (62, "nothing to undo")],
)
def test_what_is_no_older_epoch_is_refused_and_nothing_changes(
    store: Store, number: int, said: str
) -> None:
    driver = Driver(store, keep=100)
    driver.epochs(61)
    Driver(store)
    for attempt in (plan_rollback, rollback):
        with pytest.raises(RestoreError, match=said):
            attempt(store, number)
    assert Log(store).newest_number() == 63


def test_a_retired_epoch_is_refused_with_the_oldest_one_that_is_kept(store: Store) -> None:
    Driver(store).epochs(61)
    for attempt in (plan_rollback, rollback):
        with pytest.raises(RestoreError, match="epoch 5 is retired"):
            attempt(store, 5)


def test_a_checkpoint_without_epochs_has_none_to_go_back_to(store: Store) -> None:
    with pytest.raises(RestoreError):
        plan_rollback(store, 1)


def test_going_back_to_an_abandoned_epoch_regains_its_lineage(store: Store) -> None:
    driver = Driver(store, keep=50)
    driver.epochs(5)
    rollback(store, 3)
    driver = Driver(store, keep=50)
    driver.epochs(2)
    plan = plan_rollback(store, 6)
    assert [undone.epoch for undone in plan.undone] == [10, 9]
    assert plan.regained == [6, 5, 4]
    rollback(store, 6)
    assert [e.number for e in Log(store).lineage()] == [6, 5, 4, 3, 2]


def test_a_rollback_can_itself_be_rolled_back(store: Store) -> None:
    driver = Driver(store)
    driver.epochs(5)
    rollback(store, 3)
    rollback(store, 6)
    assert newest(store).number == 6
    kinds = [type(record).__name__ for record in Log(store).records()][-2:]
    assert kinds == ["Restore", "Restore"]


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_put_of_unknown_outcome_is_settled(store: Store, kind: str) -> None:
    Driver(store).epochs(5)
    faulty = FaultyStore(store, [Fault("put_if_absent", 1, kind)])  # type: ignore[arg-type]
    assert rollback(faulty, 3).number == 7
    assert [r.number for r in Log(store).records() if isinstance(r, Restore)] == [7]


def test_after_a_rollback_nothing_the_new_lineage_needs_is_collected(store: Store) -> None:
    driver = Driver(store, keep=3)
    driver.epochs(45)
    oldest = driver.log.oldest_kept()
    while not isinstance(Log(store).read(oldest), Epoch):
        oldest += 1
    rollback(store, oldest)
    later = Driver(store, keep=3)
    later.collector.sweep(0)
    for _ in range(45):
        later.epoch(collect=True)
        assert verify(store).ok
        assert later.log.oldest_kept() >= oldest
    assert Log(store).numbers()[0] > 45
