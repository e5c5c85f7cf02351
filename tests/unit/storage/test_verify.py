"""verify lists every kind of damage and raises for none."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from cairn.errors import CorruptFileError
from cairn.storage.files import encode_segment
from cairn.storage.log import Log, create_or_open_job, new_nonce, record_path
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Epoch,
    EpochOperator,
    FileRef,
    RangeState,
    SparkPosition,
)
from cairn.storage.pack import write_pack
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify


@pytest.fixture
def store() -> Store:
    """A job of three epochs, each with a pack of two segments."""
    store = open_store("memory:")
    create_or_open_job(store, "j", 8)
    log = Log(store)
    term = log.take_over(host="h", pid=1, wall_ms=1).term
    files: list[FileRef] = []
    for number in (2, 3, 4):
        segments = []
        for value in (0, 1):
            batch = pa.record_batch({"group": np.array([0], np.int32), "v": [value]})
            segments.append(encode_segment("delta", "op", {"s": batch}, first_epoch=number))
        files = files + [
            file.list_for(range(128), first_epoch=number, last_epoch=number)
            for file in write_pack(store, segments, term)
        ]
        state = RangeState(
            first_group=0,
            group_count=8,
            version=EMPTY_VERSION,
            files=files,
            state_keys=0,
            state_bytes=0,
        )
        entry = EpochOperator(
            uid="op", function_version="1", key_types={}, states={}, parallelism=1, ranges=[state]
        )
        log.append(
            lambda n, entry=entry: Epoch(  # type: ignore[misc]
                number=n,
                parent=n - 1 if n > 2 else None,
                term=term,
                nonce=new_nonce(),
                wall_ms=1,
                now_ms=1,
                watermarks={},
                operators={"op": entry},
                spark=SparkPosition(folder="", batch_id=0, offsets=""),
            )
        )
    return store


def packs(store: Store) -> list[str]:
    return [found.path for found in store.list("state")]


def test_a_whole_checkpoint_has_no_damage_and_progress_reaches_the_total(store: Store) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(store, lambda done, total: seen.append((done, total)))
    assert report.ok and report.orphans == []
    assert (report.records, report.epochs, report.files) == (4, 3, 3)
    assert seen == [(n, 6) for n in range(1, 7)]


def test_an_empty_store_lacks_its_job_file() -> None:
    assert [d.path for d in verify(open_store("memory:")).damage] == ["job.json"]


def test_all_damage_is_listed_at_once(store: Store) -> None:
    missing, flipped, cut = packs(store)
    store.delete([missing])
    data = bytearray(store.get(flipped))
    data[20] ^= 1
    store.put(flipped, bytes(data))
    store.put(cut, store.get(cut)[:-1])
    store.put("job.json", b"{}")
    store.put("state/extra", b"12")
    report = verify(store)
    found = {damage.path for damage in report.damage}
    assert found == {missing, flipped, cut, "job.json"}
    assert [(o.path, o.size) for o in report.orphans] == [("state/extra", 2)]


def test_a_missing_and_a_damaged_record_are_named(store: Store) -> None:
    store.delete([record_path(3)])
    report = verify(store)
    # Epoch 4 was written against 3, so it cannot be read either.
    assert {damage.path for damage in report.damage} == {record_path(3), record_path(4)}
    store.put(record_path(4), b"junk")
    assert record_path(4) in {damage.path for damage in verify(store).damage}
    store.put("holds/x", b"junk")
    assert "holds" in {damage.path for damage in verify(store).damage}


def hold(store: Store, name: str, **fields: object) -> None:
    store.put(f"holds/{name}.json", json.dumps(fields).encode())


def test_a_hold_is_stale_when_its_branch_is_gone_and_that_is_no_damage(
    store: Store, tmp_path: Path
) -> None:
    branch = open_store(str(tmp_path / "branch"))
    job = create_or_open_job(branch, "j", 8)
    Log(branch).take_over(host="h", pid=1, wall_ms=1)
    store.put("state/kept", b"1")
    hold(store, f"branch-{job.job_id}", paths=["state/kept"], url=branch.url)
    report = verify(store)
    assert report.ok and not report.stale_holds and not report.orphans
    hold(store, "branch-another", paths=["state/kept"], url=branch.url)
    hold(store, "branch-nowhere", paths=["state/kept"], url=f"file://{tmp_path}/nowhere")
    report = verify(store)
    assert report.ok
    assert [found.path for found in report.stale_holds] == [
        "holds/branch-another.json",
        "holds/branch-nowhere.json",
    ]
    assert f"delete {store.url}/holds/branch-nowhere.json" in report.stale_holds[1].what
    assert not (tmp_path / "nowhere").exists()


def test_a_branch_that_was_not_finished_leaves_a_stale_hold(store: Store, tmp_path: Path) -> None:
    branch = open_store(str(tmp_path / "branch"))
    job = create_or_open_job(branch, "j", 8)
    hold(store, f"branch-{job.job_id}", paths=["x"], url=branch.url)
    (found,) = verify(store).stale_holds
    assert "was not finished" in found.what


def test_the_hold_of_a_process_that_is_gone_is_stale(store: Store) -> None:
    host = socket.gethostname()
    hold(store, "savepoint-1", epochs=[3], by=f"pid {os.getpid()} on {host}")
    hold(store, "savepoint-2", epochs=[3], by="pid 1 on another-host")
    assert not verify(store).stale_holds
    hold(store, "savepoint-3", epochs=[3], by=f"pid 4194305 on {host}")
    assert [found.path for found in verify(store).stale_holds] == ["holds/savepoint-3.json"]


def with_objects(store: Store, *, objects_bytes: int = 5) -> None:
    """One more epoch, whose first file is a base made of two more objects."""
    log = Log(store)
    epoch = log.epoch(4)
    entry = epoch.operators["op"]
    first, *rest = entry.ranges[0].files
    for name in ("a.sst", "b.sst"):
        store.put(f"state/000000000001/{name}", b"12345"[: 2 + (name == "b.sst")])
    base = msgspec.structs.replace(
        first,
        format="rocksdb",
        objects=["state/000000000001/a.sst", "state/000000000001/b.sst"],
        objects_bytes=objects_bytes,
    )
    part = msgspec.structs.replace(entry.ranges[0], files=[base, *rest])
    entry = msgspec.structs.replace(entry, ranges=[part])
    log.append(
        lambda n: msgspec.structs.replace(epoch, number=n, parent=4, operators={"op": entry})
    )


def test_a_base_of_many_objects_is_checked_by_whoever_knows_its_format(store: Store) -> None:
    with_objects(store)
    seen: list[FileRef] = []

    def check(found: Store, ref: FileRef) -> None:
        assert found is store
        seen.append(ref)

    report = verify(store, checkers={"rocksdb": check})
    assert report.ok and not report.orphans
    assert [ref.format for ref in seen] == ["rocksdb"]

    def refuse(found: Store, ref: FileRef) -> None:
        raise CorruptFileError("its manifest is damaged", file=ref.path)

    (damage,) = verify(store, checkers={"rocksdb": refuse}).damage
    assert damage.what == "its manifest is damaged"


def test_a_missing_object_of_a_base_is_damage_with_or_without_a_checker(store: Store) -> None:
    with_objects(store)
    store.delete(["state/000000000001/a.sst"])
    assert [d.path for d in verify(store).damage] == ["state/000000000001/a.sst"]


def test_objects_of_another_size_are_damage(store: Store) -> None:
    with_objects(store, objects_bytes=7)
    (damage,) = verify(store).damage
    assert "5 bytes, not 7" in damage.what
