"""A branch shares its parent's files, and neither disturbs the other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import CommitUnknownError, RestoreError
from cairn.snapshots.branch import branch
from cairn.snapshots.rollback import rollback
from cairn.storage.files import open_segment
from cairn.storage.holds import branch_hold_path, find_holds
from cairn.storage.log import Log, create_or_open_job, read_job
from cairn.storage.manifest import Ancestor, Epoch, FileRef
from cairn.storage.references import files_of
from cairn.storage.removal import delete_checkpoint
from cairn.storage.retention import object_paths
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from cairn.testing.faulty_store import Fault, FaultyStore
from tests.unit.storage.leading import (
    LATER_S,
    OFFSETS,
    Driver,
    lay_spark_folder,
    new_store,
    state_paths,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(str(tmp_path / "parent"))


@pytest.fixture
def dest(tmp_path: Path) -> str:
    return str(tmp_path / "branch")


def running(store: Store, epochs: int = 5, keep: int = 2) -> Driver:
    driver = Driver(store, keep=keep, folder=lay_spark_folder(store, 1))
    driver.epochs(epochs)
    return driver


def newest(store: Store) -> Epoch:
    epoch = Log(store).newest_epoch()
    assert epoch is not None
    return epoch


def rows(store: Store, epoch: Epoch) -> list[int]:
    return [
        value
        for file in files_of(epoch)
        for batch in open_segment(store, file).read("s")
        for value in batch.column("v").to_pylist()
    ]


def foreign(epoch: Epoch) -> set[str]:
    return {file.path for file in files_of(epoch) if file.store}


def held(store: Store) -> set[str]:
    return set(find_holds(store).all.paths)


def test_a_branch_begins_with_the_epoch_and_copies_no_state(store: Store, dest: str) -> None:
    parent = running(store).log.epoch(4)
    before = {found.path for found in store.list()}
    info = branch(store, 4, dest)
    child = open_store(dest)
    first = newest(child)
    assert (info.epoch, first.number, first.parent) == (1, 1, None)
    assert rows(child, first) == rows(store, parent)
    assert state_paths(child) == set()
    for name in ("now_ms", "watermarks", "watermark_ms", "passed_ms", "seen_ms", "timers"):
        assert getattr(first, name) == getattr(parent, name), name
    assert not first.committables
    assert {found.path for found in store.list()} - before == {branch_hold_path(info.job_id)}
    assert held(store) == object_paths([parent])
    assert verify(child).ok and verify(store).ok
    assert not verify(store).stale_holds


def test_a_branch_is_a_job_of_its_own_that_says_where_it_came_from(store: Store, dest: str) -> None:
    running(store)
    parent = read_job(store)
    info = branch(store, None, dest)
    child = read_job(open_store(dest))
    assert parent is not None and child is not None
    assert child.job_id == info.job_id != parent.job_id
    assert (child.name, child.max_parallelism) == (parent.name, parent.max_parallelism)
    assert child.ancestor == Ancestor(kind="branch", id=parent.job_id, url=store.url, epoch=6)
    assert create_or_open_job(open_store(dest), "j", 8) == child


def test_sparks_folder_is_laid_out_in_the_branch_so_that_a_start_goes_on(
    store: Store, dest: str
) -> None:
    running(store)
    branch(store, 4, dest)
    child = open_store(dest)
    spark = newest(child).spark
    assert spark.folder == "spark/000000000001"
    assert child.get(f"{spark.folder}/offsets/{spark.batch_id}").decode() == OFFSETS
    assert child.exists(f"{spark.folder}/commits/{spark.batch_id}")
    # Another query to Spark: of two with one id, it stops the older.
    assert child.get(f"{spark.folder}/metadata") != b'{"id":"x"}'
    assert child.exists(f"{spark.folder}/sources/0/0")
    assert Driver(child).term == 2, "no leader's folder is taken for the branch's"


def test_sparks_folders_may_lie_elsewhere_for_both_but_not_in_one_place(
    store: Store, dest: str, tmp_path: Path
) -> None:
    spark, new = open_store(str(tmp_path / "spark")), open_store(str(tmp_path / "new"))
    Driver(store, folder=lay_spark_folder(spark, 1)).epochs(5)
    with pytest.raises(RestoreError, match="empty folder"):
        branch(store, None, dest, spark_store=spark, spark_dest=spark)
    assert find_holds(store).holds == {}
    branch(store, None, dest, spark_store=spark, spark_dest=new)
    at = newest(open_store(dest)).spark
    assert new.exists(f"{at.folder}/sources/0/0")
    assert open_store(dest).list("spark") == []


def test_parent_and_branch_diverge_and_each_stays_whole(store: Store, dest: str) -> None:
    parent = running(store)
    branch(store, 4, dest)
    child = Driver(open_store(dest), folder="spark/000000000001")
    child.collector.sweep(time.time())
    at_first = rows(open_store(dest), newest(open_store(dest)))
    for _ in range(60):
        parent.epoch(collect=True)
        child.epoch(collect=True)
        assert verify(store).ok and verify(open_store(dest)).ok
    assert at_first == [0, 1, 2]
    assert newest(store).number == 66 and newest(open_store(dest)).number == 62
    assert held(store) == set(), "the branch needs nothing of the parent any more"


def test_the_parents_collector_keeps_what_the_branch_needs_until_it_is_removed(
    store: Store, dest: str
) -> None:
    parent = running(store)
    epoch = parent.log.epoch(4)
    branch(store, 4, dest)
    parent.epochs(60, base=True)
    assert parent.log.oldest_kept() > 4
    assert object_paths([epoch]) <= state_paths(store)
    assert rows(open_store(dest), newest(open_store(dest))) == [0, 1, 2]
    delete_checkpoint(open_store(dest))
    assert held(store) == set()
    assert not Path(dest).exists()
    parent.epochs(1)
    assert not object_paths([epoch]) & state_paths(store)
    assert verify(store).ok


def test_a_branchs_collector_removes_no_file_of_the_parent_and_shrinks_its_hold(
    store: Store, dest: str
) -> None:
    running(store)
    branch(store, 4, dest)
    child = Driver(open_store(dest))
    there = state_paths(store)
    child.collector.sweep(time.time() + LATER_S)
    for _ in range(60):
        # Never fewer than the retained epochs of the branch need.
        epochs = [r for r in Log(child.store).records() if isinstance(r, Epoch)]
        assert set().union(*map(foreign, epochs)) <= held(store)
        child.epoch(collect=True)
        assert state_paths(store) == there
    assert find_holds(store).holds == {}
    assert child.collector.after_epoch() == (0, 0, 0)


def test_a_parent_that_is_gone_does_not_fail_the_branch(
    store: Store, dest: str, caplog: pytest.LogCaptureFixture
) -> None:
    running(store)
    branch(store, 4, dest)
    child = Driver(open_store(dest))
    child.epoch(base=True)
    delete_checkpoint(store, force=True)
    child.epochs(60)
    assert newest(child.store).number == 63
    assert verify(child.store).ok


def test_a_branch_whose_shared_files_are_gone_is_damaged(store: Store, dest: str) -> None:
    running(store)
    branch(store, 4, dest)
    child = open_store(dest)
    path = sorted(foreign(newest(child)))[0]
    store.delete([path])
    assert [damage.path for damage in verify(child).damage] == [f"{store.url}/{path}"]
    delete_checkpoint(store, force=True)
    assert not verify(child).ok


def test_a_branch_of_a_branch_holds_in_both(store: Store, dest: str, tmp_path: Path) -> None:
    grandparent = running(store)
    branch(store, 4, dest)
    middle = open_store(dest)
    parent = Driver(middle, folder="spark/000000000001")
    parent.epochs(2)
    epoch = newest(middle)
    info = branch(middle, None, str(tmp_path / "third"))
    third = open_store(str(tmp_path / "third"))
    assert {file.store for file in files_of(newest(third))} == {store.url, middle.url}
    hold = branch_hold_path(info.job_id)
    assert set(find_holds(store).holds[hold].paths) == foreign(epoch)
    assert set(find_holds(middle).holds[hold].paths) == object_paths([epoch])
    grandparent.epochs(60)
    parent.epochs(60)
    assert rows(third, newest(third)) == [0, 1, 2, 0, 1]
    with pytest.raises(RestoreError, match="needed by its branches"):
        delete_checkpoint(middle)
    child = Driver(third)
    child.epochs(60)
    assert find_holds(store).holds == {} and find_holds(middle).holds == {}


def test_the_parent_can_be_rolled_back_under_a_branch(store: Store, dest: str) -> None:
    running(store)
    branch(store, 6, dest)
    rollback(store, 3)
    later = Driver(store)
    later.epochs(60)
    assert rows(open_store(dest), newest(open_store(dest))) == [0, 1, 2, 3, 4]
    assert verify(open_store(dest)).ok


def test_an_epoch_that_is_retired_or_no_epoch_is_refused_and_leaves_no_hold(
    store: Store, dest: str
) -> None:
    running(store, 60)
    for number in (1, 5, 99):
        with pytest.raises(RestoreError):
            branch(store, number, dest)
    assert find_holds(store).holds == {}


def test_a_job_without_epochs_or_no_job_has_nothing_to_branch(
    store: Store, dest: str, tmp_path: Path
) -> None:
    with pytest.raises(RestoreError, match="without a committed epoch"):
        branch(store, None, dest)
    with pytest.raises(RestoreError, match="it is not a checkpoint"):
        branch(open_store(str(tmp_path / "empty")), None, dest)


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(
    store: Store, dest: str, tmp_path: Path
) -> None:
    running(store)
    Path(dest).mkdir()
    (Path(dest) / "letter.txt").write_text("hello")
    for wrong in (dest, str(tmp_path / "parent"), str(tmp_path / "parent" / "inside")):
        with pytest.raises(RestoreError):
            branch(store, None, wrong)
    assert [file.name for file in Path(dest).iterdir()] == ["letter.txt"]
    assert find_holds(store).holds == {}


def test_of_a_hold_and_a_retirement_one_always_sees_the_other(store: Store, dest: str) -> None:
    driver = running(store, 19)

    class Late(FaultyStore):
        """The parent retires the epoch right before the hold is written."""

        def put(self, path: str, data: bytes) -> None:
            if path.startswith("holds/"):
                driver.epochs(60)
            super().put(path, data)

    with pytest.raises(RestoreError, match="retired"):
        branch(Late(store), 5, dest)
    assert find_holds(store).holds == {}
    assert not Path(dest).exists() or not any(Path(dest).iterdir())


class DeadError(BaseException):
    """The process is gone; nothing it would do afterwards happens."""


class DyingStore(FaultyStore):
    """Dies at a write, and stays dead. `steps` is shared between stores of one process."""

    def __init__(self, inner: Store, steps: list[int]) -> None:
        super().__init__(inner)
        self.steps = steps

    def _run(self, operation: str, call: Any) -> Any:
        if self.steps[0] <= 0:
            raise DeadError
        if operation in ("put", "put_if_absent", "delete"):
            self.steps[0] -= 1
        return super()._run(operation, call)


def test_a_crash_at_any_write_leaves_the_parent_with_at_most_a_stale_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cairn.snapshots.branch as module

    real = open_store
    for survived in range(1, 100):
        store = new_store(str(tmp_path / f"parent{survived}"))
        running(store)
        before = {found.path for found in store.list()}
        dest = str(tmp_path / f"branch{survived}")
        steps = [survived]
        monkeypatch.setattr(
            module, "open_store", lambda url, steps=steps: DyingStore(real(url), steps)
        )
        try:
            branch(DyingStore(store, steps), 4, dest)
            break
        except DeadError:
            pass
        new = {found.path for found in store.list()} - before
        assert new == set(find_holds(store).holds)
        report = verify(store)
        assert report.ok
        child = real(dest)
        if Log(child).newest_epoch() is None:
            assert [hold.path for hold in report.stale_holds] == sorted(new)
            if child.list():
                with pytest.raises(RestoreError, match="not finished"):
                    create_or_open_job(child, "j", 8)
                delete_checkpoint(child)
                assert child.list() == []
                assert find_holds(store).holds == {}
        else:
            assert not report.stale_holds and verify(child).ok
    assert survived > 6, "hold, job.json, Spark's files, the first epoch"


@pytest.mark.parametrize("nth", range(1, 8))
@pytest.mark.parametrize("operation", ["put", "put_if_absent", "get", "list"])
def test_an_error_half_way_leaves_nothing_behind_or_a_whole_branch(
    operation: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cairn.snapshots.branch as module

    store = new_store(str(tmp_path / "parent"))
    running(store)
    before = {found.path for found in store.list()}
    dest = FaultyStore(open_store(str(tmp_path / "branch")), [Fault(operation, nth, "enospc")])
    monkeypatch.setattr(module, "open_store", lambda url: dest)
    try:
        branch(store, 4, "anywhere")
    except CommitUnknownError as error:
        assert "cairn verify" in error.__notes__[0]
        assert verify(dest.inner).ok and not verify(store).stale_holds
    except OSError:
        assert {found.path for found in store.list()} == before
        assert dest.inner.list() == []
    else:
        assert verify(dest.inner).ok


def test_a_hold_names_every_object_of_a_base_of_many(store: Store, dest: str) -> None:
    import msgspec

    driver = running(store)
    epoch = driver.log.epoch(4)
    (file, *rest) = files_of(epoch)
    for path in ("state/000000000001/a.sst", "state/000000000001/b.sst"):
        store.put(path, b"12")
    many: FileRef = msgspec.structs.replace(
        file, objects=["state/000000000001/a.sst", "state/000000000001/b.sst"], objects_bytes=4
    )
    entry = epoch.operators["op"]
    part = msgspec.structs.replace(entry.ranges[0], files=[many, *rest])
    entry = msgspec.structs.replace(entry, ranges=[part])
    driver.log.append(
        lambda n: msgspec.structs.replace(epoch, number=n, parent=6, operators={"op": entry})
    )
    info = branch(store, None, dest)
    hold = json.loads(store.get(branch_hold_path(info.job_id)))
    assert {"state/000000000001/a.sst", "state/000000000001/b.sst"} <= set(hold["paths"])
    assert (hold["epochs"], hold["url"]) == ([], open_store(dest).url)
    driver.epochs(60, base=True)
    assert verify(open_store(dest)).ok
    assert store.exists("state/000000000001/a.sst")
