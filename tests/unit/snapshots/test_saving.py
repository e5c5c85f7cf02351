"""A savepoint is written whole or not at all, of an epoch that is held meanwhile."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pytest

from cairn.errors import CorruptFileError, RestoreError, StaleEpochError
from cairn.key_groups import key_hasher
from cairn.snapshots import open_savepoint, saving, write_savepoint
from cairn.snapshots.destination import Destination
from cairn.storage.holds import read_holds
from cairn.storage.notes import read_savepoint_notes
from cairn.storage.paths import HOLDS_FOLDER
from cairn.storage.removal import delete_savepoint
from cairn.storage.store import StoredObject, open_store
from cairn.testing import FaultyStore
from tests.unit.slot.scoped_job import GROUP_COUNT, ScopedJob
from tests.unit.snapshots.checkpoints import UID, Checkpoint, state_of
from tests.unit.snapshots.savepoints import STATES, holds, saved, shop


def test_the_checkpoint_knows_which_savepoints_were_taken_of_it() -> None:
    checkpoint = shop()
    savepoint = saved(checkpoint, 3)
    (found,) = read_savepoint_notes(checkpoint.store)
    assert (found.url, found.epoch) == (savepoint.url, 3)
    assert (found.id, found.bytes) == (savepoint.info.id, savepoint.info.bytes)


def test_the_epoch_is_held_while_it_is_written_and_no_longer() -> None:
    checkpoint = shop()
    epoch = checkpoint.newest
    assert epoch is not None
    seen = []

    def look(done: int, total: int) -> None:
        seen.append(read_holds(checkpoint.store).epochs)

    write_savepoint(checkpoint.store, None, open_store("memory:").url, progress=look)
    assert seen and set(seen) == {frozenset({epoch.number})}
    assert holds(checkpoint.store) == []


def test_progress_ends_with_everything_done() -> None:
    counted: list[tuple[int, int]] = []
    dest = open_store("memory:")
    write_savepoint(
        shop().store, None, dest.url, progress=lambda done, total: counted.append((done, total))
    )
    assert counted == sorted(counted)
    assert counted[-1] == (8, 8)


def test_after_an_error_neither_hold_nor_files_are_left() -> None:
    checkpoint, dest = shop(), open_store("memory:")
    assert checkpoint.newest is not None
    path = checkpoint.newest.operators[UID].ranges[-1].files[-1].path
    checkpoint.store.delete([path])
    checkpoint.store.put("spark/000000000001/sources/0/0", b"{}")
    with pytest.raises(CorruptFileError, match=path) as caught:
        write_savepoint(checkpoint.store, None, dest.url)
    assert caught.value.__cause__ is not caught.value
    assert holds(checkpoint.store) == []
    assert dest.list() == []


def test_after_an_interrupt_neither_hold_nor_files_are_left() -> None:
    checkpoint, dest = shop(), open_store("memory:")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_savepoint(checkpoint.store, None, dest.url, progress=interrupt)
    assert holds(checkpoint.store) == []
    assert dest.list() == []


def test_an_epoch_that_is_retired_is_refused() -> None:
    checkpoint = Checkpoint(STATES, keep=1)
    first = checkpoint.commit({"n": {1: 1}})
    while checkpoint.log.oldest_kept() <= first.number:
        checkpoint.commit({"n": {1: 2}})
    dest = open_store("memory:")
    with pytest.raises(StaleEpochError, match=f"epoch {first.number} is retired"):
        write_savepoint(checkpoint.store, first.number, dest.url)
    assert (holds(checkpoint.store), dest.list()) == ([], [])


def test_an_epoch_retired_between_look_and_hold_is_refused() -> None:
    """The leader retires it after the hold's owner has chosen it, before the hold is there."""
    checkpoint = Checkpoint(STATES, keep=1)
    first = checkpoint.commit({"n": {1: 1}})

    class LateHold(FaultyStore):
        def put(self, path: str, data: bytes) -> None:
            if path.startswith(HOLDS_FOLDER):
                while checkpoint.log.oldest_kept() <= first.number:
                    checkpoint.commit({"n": {1: 2}})
            super().put(path, data)

    with pytest.raises(StaleEpochError, match="is retired"):
        write_savepoint(LateHold(checkpoint.store), first.number, open_store("memory:").url)
    assert holds(checkpoint.store) == []


def test_a_newer_epoch_is_saved_when_the_newest_was_retired_before_the_hold() -> None:
    checkpoint = Checkpoint(STATES, keep=1)
    first = checkpoint.commit({"n": {1: 1}})

    class LateHold(FaultyStore):
        def put(self, path: str, data: bytes) -> None:
            if path.startswith(HOLDS_FOLDER):
                retire(checkpoint, first.number)
            super().put(path, data)

    info = write_savepoint(LateHold(checkpoint.store), None, open_store("memory:").url)
    assert info.epoch > first.number
    assert holds(checkpoint.store) == []


def test_a_collector_at_work_meanwhile_removes_nothing_that_is_needed() -> None:
    checkpoint = Checkpoint(STATES, keep=1, group_count=8)
    first = checkpoint.commit({"n": {k: k for k in range(100)}})
    model = checkpoint.model
    removed = []

    def go_on(done: int, total: int) -> None:
        # Every epoch rewrites everything, so that all older files become garbage.
        for _ in range(25):
            checkpoint.commit({"n": {k: -k for k in range(100)}}, base=True)
            removed.append(checkpoint.collector.after_epoch().objects_removed)

    dest = open_store("memory:")
    write_savepoint(checkpoint.store, first.number, dest.url, progress=go_on)
    assert state_of(open_savepoint(dest.url)) == {**model, "n": {k: k for k in range(100)}}
    assert sum(removed) == 0
    checkpoint.commit(base=True)
    assert checkpoint.collector.after_epoch().objects_removed > 0


def test_without_epochs_there_is_nothing_to_save() -> None:
    checkpoint = Checkpoint(STATES)
    with pytest.raises(StaleEpochError, match="no epoch is committed yet"):
        write_savepoint(checkpoint.store, None, open_store("memory:").url)
    with pytest.raises(RestoreError, match="no job"):
        write_savepoint(open_store("memory:"), None, open_store("memory:").url)


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_fails_now_and_then_gives_a_whole_savepoint_or_none(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = shop()
    dest = open_store("memory:")
    faulty = FaultyStore(dest, seed=seed, fault_rate=0.15)
    monkeypatch.setattr(saving, "open_store", lambda url: faulty)
    for _ in range(20):
        try:
            write_savepoint(checkpoint.store, None, dest.url)
        except Exception:
            assert not dest.exists("savepoint.json")
            dest.delete([found.path for found in dest.list()])
        else:
            savepoint = open_savepoint(dest.url)
            assert savepoint.verify() == []
            assert state_of(savepoint) == checkpoint.model
            return
    pytest.fail("no attempt got through")


def test_a_rocksdb_job_that_was_rescaled_has_a_savepoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0.1")
    group_of = key_hasher([pa.int64()])
    low = [k for k in range(100) if group_of([k]) % GROUP_COUNT < GROUP_COUNT // 2]
    job = ScopedJob(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    job.lead(1, backend="rocksdb")
    # A file of the lower key groups in a base, then one of the upper ones.
    for keys in (low, set(range(100)) - set(low)):
        job.run([(k, 1) for k in keys])
        for _ in range(3):
            job.run()
            for slot in job.cluster.slots.values():
                slot.compactor.work()
    job.coordinator.subtasks.rescale(2)
    job.run()
    files = [part.files[0] for part in job.newest.operators["alerts"].ranges]
    assert [len(file.objects) for file in files] == [2, 2]
    write_savepoint(job.store, job.newest.number, str(tmp_path / "sp"))
    rows = open_savepoint(str(tmp_path / "sp")).rows("alerts", "n")
    assert sum(batch.num_rows for batch in rows) == 100


# Writers that are killed, or sleep


def expire_holds(checkpoint: Checkpoint) -> None:
    """So much time passes that no hold counts any more."""
    for found in checkpoint.store.list(HOLDS_FOLDER):
        hold = json.loads(checkpoint.store.get(found.path)) | {"until_ms": 1}
        checkpoint.store.put(found.path, json.dumps(hold).encode())


def retire(checkpoint: Checkpoint, number: int) -> None:
    while checkpoint.log.oldest_kept() <= number:
        checkpoint.commit({"n": {k: -k for k in range(100)}}, base=True)
        checkpoint.collector.after_epoch()


def test_a_writer_that_is_killed_holds_its_epoch_for_a_while_only() -> None:
    class KilledError(BaseException):
        pass

    checkpoint = Checkpoint(STATES, keep=1)
    first = checkpoint.commit({"n": {k: k for k in range(100)}})
    left = {}

    def die(done: int, total: int) -> None:
        left.update({f.path: checkpoint.store.get(f.path) for f in holds_of(checkpoint)})
        raise KilledError

    with pytest.raises(KilledError):
        write_savepoint(checkpoint.store, None, open_store("memory:").url, progress=die)
    # A process that is killed cleans up nothing.
    for path, data in left.items():
        checkpoint.store.put(path, data)
    (hold,) = [json.loads(data) for data in left.values()]
    assert 0 < hold["until_ms"] <= time.time() * 1000 + saving.SAVE_MS
    for _ in range(50):
        checkpoint.commit({"n": {1: 1}})
        checkpoint.collector.after_epoch()
    assert checkpoint.log.oldest_kept() <= first.number, "it counts meanwhile"
    expire_holds(checkpoint)
    retire(checkpoint, first.number)
    assert holds(checkpoint.store) == []


def holds_of(checkpoint: Checkpoint) -> list[StoredObject]:
    return checkpoint.store.list(HOLDS_FOLDER)


@pytest.mark.parametrize("has_read_all", [True, False])
def test_a_writer_that_slept_past_its_hold_seals_nothing(has_read_all: bool) -> None:
    checkpoint = Checkpoint(STATES, keep=1)
    checkpoint.commit({"n": {k: k for k in range(100)}})
    first = checkpoint.newest
    assert first is not None
    now_ms = [time.time_ns() // 1_000_000]
    dest = open_store("memory:")

    def sleep(done: int, total: int) -> None:
        if (done == total) is has_read_all and checkpoint.log.oldest_kept() <= first.number:
            now_ms[0] += 2 * saving.SAVE_MS
            expire_holds(checkpoint)
            retire(checkpoint, first.number)

    with pytest.raises(StaleEpochError, match=f"epoch {first.number} is retired"):
        write_savepoint(checkpoint.store, None, dest.url, progress=sleep, now_ms=lambda: now_ms[0])
    assert (dest.list(), holds(checkpoint.store)) == ([], [])


def test_a_writer_that_slept_past_its_hold_seals_an_epoch_that_is_still_kept() -> None:
    checkpoint, dest = shop(), open_store("memory:")
    now_ms = [time.time_ns() // 1_000_000]

    def sleep(done: int, total: int) -> None:
        now_ms[0] += 2 * saving.SAVE_MS
        expire_holds(checkpoint)

    write_savepoint(checkpoint.store, None, dest.url, progress=sleep, now_ms=lambda: now_ms[0])
    assert state_of(open_savepoint(dest.url)) == checkpoint.model
    assert holds(checkpoint.store) == []


def test_the_hold_is_renewed_while_a_savepoint_is_written() -> None:
    checkpoint = shop()
    now_ms, ends = [time.time_ns() // 1_000_000], []

    def work(done: int, total: int) -> None:
        (hold,) = holds_of(checkpoint)
        ends.append(json.loads(checkpoint.store.get(hold.path))["until_ms"])
        now_ms[0] += saving.SAVE_MS * 2 // 3

    write_savepoint(
        checkpoint.store, None, open_store("memory:").url, progress=work, now_ms=lambda: now_ms[0]
    )
    assert len(ends) > 1 and ends[1] > ends[0]


@pytest.mark.parametrize("has_another", [True, False])
def test_a_savepoint_that_was_removed_while_it_was_written_is_not_sealed(
    has_another: bool,
) -> None:
    checkpoint, dest = shop(), open_store("memory:")

    def remove(done: int, total: int) -> None:
        if done == total:
            delete_savepoint(dest)
            if has_another:
                Destination(open_store(dest.url), "another", 1).put_sources({"0/0": b"theirs"})

    with pytest.raises(RestoreError, match="this savepoint was removed"):
        write_savepoint(checkpoint.store, None, dest.url, progress=remove)
    left = {found.path for found in dest.list()}
    assert left == ({"unfinished.json", "sources/0/0"} if has_another else set())
