"""A start finds out what a store promises before it writes anything that stays."""

from __future__ import annotations

import pytest

from cairn.errors import CommitUnknownError, PlanError
from cairn.storage.probe import ATTEMPTS_MAX, put_probe
from cairn.storage.removal import delete_checkpoint
from cairn.storage.store import Store, open_store
from cairn.testing.faulty_store import Fault, FaultyStore, UnconditionalStore


@pytest.fixture
def store() -> Store:
    return open_store("memory:")


def probe(store: Store) -> None:
    with put_probe(store, "abc", sleep=lambda seconds: None) as path:
        assert store.get(path) == b"abc"


def test_a_probe_leaves_nothing_behind(store: Store) -> None:
    probe(store)
    probe(store)
    assert store.list() == []


def test_a_store_that_ignores_the_condition_is_refused_by_name_and_left_as_it_was(
    store: Store,
) -> None:
    with pytest.raises(PlanError, match="does not keep put-if-absent") as refused:
        probe(UnconditionalStore(store))
    assert f"store: {store.url}" in str(refused.value)
    assert store.list() == []


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_put_of_unknown_outcome_accuses_no_store(store: Store, kind: str, call: int) -> None:
    probe(FaultyStore(store, [Fault("put_if_absent", call, kind)]))  # type: ignore[arg-type]


def test_a_store_that_cannot_be_reached_is_not_taken_for_a_good_one(store: Store) -> None:
    faults = [Fault("put_if_absent", call + 1, "before") for call in range(ATTEMPTS_MAX)]
    with pytest.raises(CommitUnknownError):
        probe(FaultyStore(store, faults))


def test_a_probe_that_a_killed_start_has_left_is_removed_with_the_checkpoint(store: Store) -> None:
    store.put("probe-abc", b"abc")
    delete_checkpoint(store)
    assert store.list() == []
