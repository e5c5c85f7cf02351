"""The faulty store does what its plan says."""

from __future__ import annotations

import errno

import pytest

from cairn.errors import CommitUnknownError
from cairn.storage.store import open_store
from cairn.testing.faulty_store import Fault, FaultyStore


def test_faults_strike_the_call_they_are_planned_for() -> None:
    plan = [
        Fault("put", 1, "before"),
        Fault("put", 2, "after"),
        Fault("put", 3, "enospc"),
        Fault("get", 1, "torn"),
        Fault("put_if_absent", 1, "after"),
    ]
    store = FaultyStore(open_store("memory:"), plan)
    with pytest.raises(OSError):
        store.put("a", b"1234")
    assert not store.exists("a")
    with pytest.raises(OSError):
        store.put("a", b"1234")
    assert store.exists("a")
    with pytest.raises(OSError) as caught:
        store.put("b", b"1")
    assert caught.value.errno == errno.ENOSPC and not store.exists("b")
    assert (store.get("a"), store.get("a")) == (b"12", b"1234")
    with pytest.raises(CommitUnknownError):
        store.put_if_absent("c", b"1")
    assert store.exists("c")
    assert [fault.kind for fault in store.faults_seen] == [
        "before", "after", "enospc", "torn", "after",
    ]  # fmt: skip


def test_the_same_seed_gives_the_same_faults() -> None:
    def run(seed: int) -> list[Fault]:
        store = FaultyStore(open_store("memory:"), seed=seed, fault_rate=0.3)
        for n in range(50):
            try:
                store.put(f"p{n}", b"12")
                store.get(f"p{n}")
            except OSError:
                continue
        return store.faults_seen

    assert run(1) == run(1) != run(2)
