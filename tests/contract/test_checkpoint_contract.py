"""A checkpoint's whole life on every kind of store: epochs, rollback, branch, removal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cairn.errors import CommitConflictError
from cairn.snapshots.branch import branch
from cairn.snapshots.rollback import rollback
from cairn.storage.holds import find_holds
from cairn.storage.log import Log
from cairn.storage.removal import delete_checkpoint
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from tests.hdfs import hdfs
from tests.marks import for_soak
from tests.s3 import s3_server
from tests.unit.storage.leading import LATER_S, Driver, lay_spark_folder, new_store, state_paths


@pytest.mark.parametrize("kind", ["local", "memory", "s3", for_soak("hdfs"), for_soak("hadoop")])
def test_a_checkpoint_lives_branches_and_goes(kind: str, tmp_path: Path) -> None:
    if kind == "s3":
        with s3_server() as s3, s3.in_environment():
            live(f"{s3.url}/jobs/parent", f"{s3.url}/jobs/branch")
    elif kind == "hdfs":
        live(hdfs().url("jobs/parent"), hdfs().url("jobs/branch"))
    elif kind == "hadoop":
        live(f"hadoop+{hdfs().url('by/parent')}", f"hadoop+{hdfs().url('by/branch')}")
    elif kind == "memory":
        live("memory:parent", "memory:branch")
    else:
        live(str(tmp_path / "parent"), str(tmp_path / "branch"))


def live(parent_url: str, branch_url: str) -> None:
    store = new_store(parent_url)
    first = Driver(store, folder=lay_spark_folder(store, 1))
    first.epochs(24)
    rollback(store, 22)
    with pytest.raises(CommitConflictError):
        first.epoch()
    info = branch(store, 23, branch_url)
    child = open_store(branch_url)
    second = Driver(store)
    second.collector.sweep(time.time() + LATER_S)
    second.epochs(40, base=True)
    assert verify(store).ok and verify(child).ok
    assert set(find_holds(store).all.paths) <= state_paths(store)
    assert len(find_holds(store).all.paths) == info.objects
    branched = Driver(child)
    branched.epochs(3)
    assert [epoch.number for epoch in Log(child).lineage()] == [5, 4, 3, 1]
    delete_checkpoint(child)
    second.epochs(1)
    assert child.list() == []
    report = verify(store)
    assert report.ok and not report.stale_holds
    assert [o.path for o in report.orphans] == [], "what only the branch held is still there"
    delete_checkpoint(store)
    assert store.list() == []
