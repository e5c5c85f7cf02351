"""A mark of an epoch that the log does not have ends a start, before anybody is fenced."""

from __future__ import annotations

import msgspec
import pytest

from cairn.driver.coordinator.marks import check_marks
from cairn.errors import CommitError, RestoreError
from cairn.report.epoch import Measured
from cairn.sinks import Collect
from cairn.storage.log import Log, new_nonce, record_path
from cairn.storage.manifest import Restore
from cairn.storage.store import Store, open_store
from tests.unit.driver.coordinator.manifests import epoch


class Marked(Collect):
    """A sink with marks up to an epoch."""

    def __init__(self, newest: int | None) -> None:
        super().__init__()
        self.newest = newest

    def newest_mark(self) -> int | None:
        return self.newest


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def write(store: Store, records: str, guarantee: str = "exactly-once") -> None:
    """T: takeover, E: epoch, W and w: those of a job that publishes first, R: restore of 2."""
    log = Log(store)
    for kind in records:
        if kind in "TW":
            given = guarantee if kind == "T" else "at-least-once"
            log.take_over(host="h", pid=1, wall_ms=1, guarantee=given)
        elif kind == "R":
            log.append(lambda n: Restore(number=n, term=n, nonce=new_nonce(), wall_ms=1, epoch=2))
        else:
            metrics = Measured(published={} if kind == "w" else None)
            log.append(
                lambda n, metrics=metrics: msgspec.structs.replace(epoch(n), metrics=metrics)  # type: ignore[misc]
            )


def is_refused(store: Store, mark: int | None) -> bool:
    try:
        check_marks({"a": Marked(None), "out": Marked(mark)}, store)
    except RestoreError as error:
        assert f"sink 'out' has published epoch {mark}" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("records", "allowed"),
    [
        ("TEEE", {2, 3, 4}),
        ("TE", {2}),
        ("TET", {2}),
        ("TETT", {2}),
        # A rollback: what was published after the epoch stays.
        ("TEER", {2, 3}),
        ("TEERT", {2, 3}),
        ("TEERTE", {2, 3, 4, 5, 6}),
        # A driver that publishes first, and died before its record.
        ("W", {2}),
        ("WT", {2}),
        ("TEW", {2, 4}),
        ("Ww", {2, 3}),
        ("WwT", {2, 3}),
        ("WwTT", {2, 3}),
        ("WwR", {2, 3}),
        ("WwRT", {2, 3}),
        ("WwTE", {2, 3, 4}),
        ("TETW", {2, 5}),
        # It has loaded a savepoint before.
        ("WE", {2, 3}),
        ("WET", {2, 3}),
    ],
)
def test_only_marks_that_a_driver_of_this_log_may_have_written_pass(
    store: Store, records: str, allowed: set[int]
) -> None:
    write(store, records)
    assert not is_refused(store, None)
    found = {mark for mark in range(2, len(records) + 5) if not is_refused(store, mark)}
    assert found == allowed


def test_the_newest_epoch_deleted_by_hand_is_missed_by_every_later_start(store: Store) -> None:
    write(store, "TEE")
    assert not is_refused(store, 3)
    store.delete([record_path(3)])
    for _ in range(3):
        assert is_refused(store, 3)
        Log(store).take_over(host="h", pid=1, wall_ms=1, guarantee="exactly-once")


def test_a_mark_in_a_checkpoint_without_records_is_refused(store: Store) -> None:
    assert is_refused(store, 1) and is_refused(store, 7)


def test_a_driver_whose_guarantee_is_not_known_may_have_published_first(store: Store) -> None:
    """Takeovers of before do not name one."""
    write(store, "T", guarantee="")
    assert not is_refused(store, 2)
    assert is_refused(store, 3)


def test_a_target_that_may_not_be_read_is_named(store: Store) -> None:
    class Closed(Collect):
        def newest_mark(self) -> int | None:
            raise PermissionError("not yours")

    with pytest.raises(
        CommitError,
        match=r"sink 'out' cannot read its marks of published epochs: not yours\n  next: ",
    ):
        check_marks({"out": Closed()}, store)
