"""verify lists every kind of damage and raises for none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from cairn.storage.files import StatePart, encode_segment
from cairn.storage.log import Log, create_or_open_job, new_nonce, record_path
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Epoch,
    FileRef,
    OperatorEntry,
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
            segments.append(
                encode_segment("delta", "op", [StatePart("s", batch)], first_epoch=number)
            )
        places = write_pack(store, [s.data for s in segments], term)
        files = files + [
            FileRef(
                id=s.id,
                path=p.path,
                offset=p.offset,
                length=p.length,
                kind="delta",
                tier=0,
                rows=1,
                first_epoch=number,
                last_epoch=number,
                first_group=0,
                group_count=128,
            )
            for s, p in zip(segments, places, strict=True)
        ]
        state = RangeState(
            first_group=0,
            group_count=8,
            version=EMPTY_VERSION,
            files=files,
            state_keys=0,
            state_bytes=0,
        )
        entry = OperatorEntry(
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
