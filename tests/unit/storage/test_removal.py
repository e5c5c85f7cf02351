"""A checkpoint is removed whole, and half of one is never taken for a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cairn.backends.files import drop_external
from cairn.backends.redis.cleaning import write_note
from cairn.errors import CommitError, RestoreError
from cairn.snapshots.verify_redis import verify_redis
from cairn.storage.log import Log, create_or_open_job, read_job
from cairn.storage.manifest import Ancestor, encode_record
from cairn.storage.paths import EXTERNAL_SUFFIX, JOB_PATH, REMOVAL_PATH
from cairn.storage.removal import (
    delete_checkpoint,
    delete_savepoint,
    is_being_removed,
    is_savepoint,
)
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from cairn.testing.faulty_store import FaultyStore
from tests.unit.storage.leading import Driver, lay_spark_folder, new_store


def checkpoint(url: str) -> Store:
    store = new_store(url)
    Driver(store, folder=lay_spark_folder(store, 1)).epochs(25)
    return store


def test_nothing_is_left_of_a_removed_checkpoint(tmp_path: Path) -> None:
    store = checkpoint(str(tmp_path / "c"))
    objects = len(store.list())
    removed = delete_checkpoint(store)
    # The takeover that fences the running driver is one more.
    assert removed.objects == objects + 1 and removed.bytes > 0
    assert not (tmp_path / "c").exists()


def test_files_of_others_stay(tmp_path: Path) -> None:
    store = checkpoint(str(tmp_path / "c"))
    (tmp_path / "c" / "letter.txt").write_text("hello")
    delete_checkpoint(store)
    assert [found.path for found in store.list()] == ["letter.txt"]


def test_a_running_driver_cannot_commit_to_a_removed_checkpoint(tmp_path: Path) -> None:
    store = checkpoint(str(tmp_path / "c"))
    driver = Driver(store)
    driver.epoch()

    class Watching(FaultyStore):
        def delete(self, paths: Any) -> None:
            with pytest.raises(CommitError):
                driver.epoch()
            super().delete(paths)

    delete_checkpoint(Watching(store))
    with pytest.raises(CommitError):
        driver.epoch()


class DeadError(BaseException):
    """The process is gone."""


class DyingStore(FaultyStore):
    """Dies after so many writes."""

    def __init__(self, inner: Store, writes: int) -> None:
        super().__init__(inner)
        self.writes = writes

    def _run(self, operation: str, call: Any) -> Any:
        if operation in ("put", "put_if_absent", "delete"):
            self.writes -= 1
            if self.writes < 0:
                raise DeadError
        return super()._run(operation, call)


def test_a_removal_that_died_anywhere_starts_no_job_and_can_be_finished(tmp_path: Path) -> None:
    for writes in range(1, 100):
        store = checkpoint(str(tmp_path / str(writes)))
        try:
            delete_checkpoint(DyingStore(store, writes))
            break
        except DeadError:
            pass
        if store.list():
            assert is_being_removed(store)
            assert REMOVAL_PATH in {damage.path for damage in verify(store).damage}
            with pytest.raises(RestoreError, match="cairn rm"):
                create_or_open_job(store, "j", 8)
        delete_checkpoint(open_store(store.url))
        assert not Path(store.local_path("x") or "").parent.exists()
    assert writes > 10, "the mark, the fence, each record, job.json"


def test_a_checkpoint_with_branches_is_removed_by_force_only(tmp_path: Path) -> None:
    store = checkpoint(str(tmp_path / "c"))
    before = store.list()
    store.put("holds/branch-b1.json", b'{"paths": ["x"], "url": "file:///somewhere"}')
    with pytest.raises(RestoreError, match="file:///somewhere") as caught:
        delete_checkpoint(store)
    assert caught.value.branches == ["file:///somewhere"]
    assert [found for found in store.list() if not found.path.startswith("holds/")] == before
    delete_checkpoint(store, force=True)
    assert not (tmp_path / "c").exists()


def test_a_branch_whose_parent_cannot_be_reached_is_removed_and_says_so(tmp_path: Path) -> None:
    store = checkpoint(str(tmp_path / "c"))
    job = read_job(store)
    assert job is not None
    import msgspec

    ancestor = Ancestor(kind="branch", id="p", url="gopher://nowhere", epoch=1)
    store.put(JOB_PATH, encode_record(msgspec.structs.replace(job, ancestor=ancestor)))
    removed = delete_checkpoint(store)
    assert len(removed.unreleased) == 1 and "gopher://nowhere" in removed.unreleased[0]
    assert not (tmp_path / "c").exists()


def test_a_damaged_checkpoint_can_be_removed(tmp_path: Path) -> None:
    store = checkpoint(str(tmp_path / "c"))
    store.put(JOB_PATH, b"junk")
    for number in Log(store).numbers():
        store.put(f"epochs/{number:012d}.json", b"junk")
    delete_checkpoint(store)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_damaged_checkpoint_with_state_in_a_database_can_be_removed(
    kind: str, tmp_path: Path
) -> None:
    store = checkpoint(str(tmp_path / "c"))
    if kind == "redis":
        write_note(store, "redis://me:s3cret@127.0.0.1:1/3")
    else:
        store.put(f"state/1/digest{EXTERNAL_SUFFIX}", b"{}")
    store.put(JOB_PATH, b"junk")
    assert verify_redis(store).damage == []
    (unreached,) = delete_checkpoint(store, clean=drop_external).unreleased
    assert "job.json cannot be read" in unreached and "s3cret" not in unreached
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["savepoint.json", "unfinished.json"])
def test_a_savepoint_goes_with_everything_in_it(name: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    for path in (name, "state/op/count/00000.parquet", "sources/0/.hidden", "sources/0/1"):
        store.put(path, b"1")
    assert is_savepoint(store)
    delete_savepoint(store)
    assert not (tmp_path / "s").exists()


def test_a_savepoint_half_removed_is_none_any_more(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    for path in ("savepoint.json", "state/op/count/00000.parquet"):
        store.put(path, b"1")
    with pytest.raises(DeadError):
        delete_savepoint(DyingStore(store, 2))
    assert not store.exists("savepoint.json") and is_being_removed(store)


def test_what_waits_to_be_published_goes_with_the_checkpoint_and_is_no_damage(
    tmp_path: Path,
) -> None:
    store = checkpoint(str(tmp_path / "c"))
    store.put("wal/job/out/staged/000000000003-a.parquet", b"rows")
    store.put("pending/000000000026-000000000001-000001.json", b"an epoch")
    report = verify(store)
    assert report.ok and not report.orphans
    delete_checkpoint(store)
    assert not (tmp_path / "c").exists()
