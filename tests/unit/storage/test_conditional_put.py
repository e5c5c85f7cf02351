"""A store that does not keep put-if-absent is found out, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.errors import CommitConflictError, CommitError, CommitUnknownError
from cairn.storage.conditional_put import check_conditional_put
from cairn.storage.log import SETTLE_ATTEMPTS_MAX, Log, record_path
from cairn.storage.store import Store, open_store
from cairn.testing.faulty_store import Fault, FaultyStore, UnconditionalStore


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def check(store: Store, *faults: Fault) -> None:
    faulty = FaultyStore(store)
    log = Log(faulty, sleep=lambda seconds: None)
    takeover = log.take_over(host="h", pid=1, wall_ms=1)
    done = faulty.calls["put_if_absent"]
    faulty.plan(*(fault._replace(call=done + fault.call) for fault in faults))
    check_conditional_put(log, takeover, sleep=lambda seconds: None)


def fault(call: int, kind: Any = "after") -> Fault:
    return Fault("put_if_absent", call, kind)


def test_a_store_that_keeps_the_condition_passes(store: Store) -> None:
    check(store)
    check(store)


def test_a_store_that_ignores_the_condition_is_refused_by_name(store: Store) -> None:
    with pytest.raises(CommitError, match="does not keep put-if-absent") as refused:
        check(UnconditionalStore(store))
    assert f"store: {store.url}" in str(refused.value)
    assert not isinstance(refused.value, CommitConflictError | CommitUnknownError)


@pytest.mark.parametrize("kind", ["before", "after", "enospc"])
def test_a_put_of_unknown_outcome_is_tried_again(store: Store, kind: str) -> None:
    check(store, fault(1, kind), fault(2, kind))


def test_a_store_that_cannot_be_reached_is_not_taken_for_a_good_one(store: Store) -> None:
    with pytest.raises(CommitUnknownError, match="could not find out"):
        check(store, *(fault(call + 1, "before") for call in range(SETTLE_ATTEMPTS_MAX)))


def test_a_takeover_retired_meanwhile_is_a_conflict_and_not_the_fault_of_the_store(
    store: Store,
) -> None:
    old = Log(store)
    takeover = old.take_over(host="h", pid=1, wall_ms=1)
    new = Log(store)
    new.take_over(host="h", pid=2, wall_ms=1)
    store.delete([record_path(takeover.number)])
    with pytest.raises(CommitConflictError, match="another driver has taken over"):
        check_conditional_put(old, takeover)


# Leadership


def test_a_log_leads_until_somebody_appends_behind_it(store: Store) -> None:
    old, new = Log(store), Log(store)
    old.take_over(host="h", pid=1, wall_ms=1)
    assert old.is_leading()
    new.take_over(host="h", pid=2, wall_ms=1)
    assert new.is_leading() and not old.is_leading()


def test_a_log_does_not_lead_when_its_records_are_retired(store: Store) -> None:
    old = Log(store)
    old.take_over(host="h", pid=1, wall_ms=1)
    for _ in range(3):
        Log(store).take_over(host="h", pid=2, wall_ms=1)
    store.delete([record_path(1)])
    store.delete([record_path(2)])
    assert not old.is_leading()
