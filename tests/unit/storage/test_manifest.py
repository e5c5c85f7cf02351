"""Records on disk: whole again after decoding, and damage never goes unseen."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import CorruptFileError, RestoreError
from cairn.report.epoch import Measured, Timings
from cairn.storage import manifest
from cairn.storage.manifest import (
    EMPTY_VERSION,
    FULL_EVERY,
    Ancestor,
    Epoch,
    EpochOperator,
    FileRef,
    JobInfo,
    RangeState,
    Restore,
    SparkPosition,
    StateDecl,
    StoredEpoch,
    Takeover,
    next_version,
)


def file_ref(n: int) -> FileRef:
    return FileRef(
        id=f"{n:032x}", path=f"state/{n}", offset=0, length=n + 1, kind="delta",
        tier=0, rows=n, first_epoch=n, last_epoch=n, first_group=0, group_count=128,
    )  # fmt: skip


def epoch(number: int, parent: int | None, operators: dict[str, EpochOperator]) -> Epoch:
    return Epoch(
        number=number, parent=parent, term=1, nonce=f"n{number}", wall_ms=5, now_ms=6,
        watermarks={"pays": None, "täg": 7},
        spark=SparkPosition(folder="spark/0", batch_id=number, offsets='v1\n{"a":1}\n'),
        operators=operators, committables={"out": [{"file": "x", "rows": 3}, "y", None]},
        timings=Timings(run_ms=1.5), metrics=Measured(restored=12),
        watermark_ms=7, passed_ms=-3, seen_ms={"pays": 6}, timers={"a": (8, None)},
    )  # fmt: skip


files = st.lists(st.integers(0, 9).map(file_ref), max_size=6)
cuts = st.sampled_from([[(0, 8)], [(0, 4), (4, 4)], [(0, 2), (2, 3), (5, 3)]])


@st.composite
def operators(draw: st.DrawFn) -> dict[str, EpochOperator]:
    found = {}
    for uid in draw(st.sets(st.sampled_from(["a", "b", "c"]))):
        names = draw(st.permutations(["k1", "k2"]))
        found[uid] = EpochOperator(
            uid=uid,
            function_version=draw(st.sampled_from(["v1", "v2"])),
            key_types=dict.fromkeys(names, "bigint"),
            states={"total": StateDecl(kind="value", type=draw(st.sampled_from(["int", "long"])))},
            parallelism=2,
            ranges=[
                RangeState(
                    first_group=first,
                    group_count=count,
                    version=draw(st.sampled_from([EMPTY_VERSION, "1" * 32])),
                    files=draw(files),
                    state_keys=draw(st.none() | st.integers(0, 2)),
                    state_entries=draw(st.integers(0, 2)),
                    state_bytes=0,
                )
                for first, count in draw(cuts)
            ],
        )
    return found


@given(st.lists(st.tuples(operators(), st.integers(1, 9)), min_size=1, max_size=12))
def test_a_chain_of_manifests_resolves_to_the_epochs_that_were_written(
    chain: list[tuple[dict[str, EpochOperator], int]],
) -> None:
    number, parent, read = 0, None, None
    for entries, step in chain:
        number += step
        written = epoch(number, parent.number if parent else None, entries)
        stored = manifest.decode_record(manifest.encode_epoch(written, parent), "x")
        assert isinstance(stored, StoredEpoch)
        read = manifest.resolve(stored, read if stored.relative_to is not None else None)
        assert read == written
        assert [list(o.key_types) for o in read.operators.values()] == [
            list(o.key_types) for o in written.operators.values()
        ]
        parent = written


def test_a_manifest_holds_only_what_changed_and_is_full_once_in_a_run() -> None:
    state = RangeState(
        first_group=0, group_count=8, version="v", files=[file_ref(n) for n in range(50)],
        state_keys=1, state_bytes=1,
    )  # fmt: skip
    entry = EpochOperator(
        uid="a", function_version="1", key_types={"k": "long"}, states={}, parallelism=1,
        ranges=[state],
    )  # fmt: skip
    more = msgspec.structs.replace(state, files=[*state.files, file_ref(50)])
    first = epoch(21, None, {"a": entry})
    second = epoch(22, 21, {"a": msgspec.structs.replace(entry, ranges=[more])})
    full, small = manifest.encode_epoch(first, None), manifest.encode_epoch(second, first)
    assert len(small) < len(full) / 5
    fulls = [n for n in range(2, 100) if manifest.is_full(n, n - 1)]
    assert fulls == [20, 40, 60, 80] and FULL_EVERY == 20
    # After a rollback across runs the manifest is full as well.
    assert manifest.is_full(59, 21) and not manifest.is_full(59, 41)


RECORDS: list[Any] = [
    Takeover(number=3, term=3, nonce="x", wall_ms=1, host="h", pid=2, previous=None),
    Restore(number=4, term=3, nonce="x", wall_ms=1, epoch=2),
]


@pytest.mark.parametrize("record", RECORDS)
def test_other_records_come_back_as_written(record: Any) -> None:
    assert manifest.decode_record(manifest.encode_record(record), "x") == record


def test_every_damaged_byte_and_every_cut_is_noticed() -> None:
    data = manifest.encode_epoch(epoch(1, None, {}), None)
    for position in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[position] ^= flip
            with pytest.raises(CorruptFileError, match=r"epochs/1\.json"):
                manifest.decode_record(bytes(damaged), "epochs/1.json")
        with pytest.raises(CorruptFileError):
            manifest.decode_record(data[:position], "epochs/1.json")


def test_a_newer_format_says_which_cairn_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobInfo(name="j", job_id="0", max_parallelism=8, created_ms=1)
    monkeypatch.setattr(manifest, "FORMAT", "2.0")
    monkeypatch.setattr(manifest, "FORMAT_NEEDS_CAIRN", "3.1")
    data = manifest.encode_record(job)
    monkeypatch.setattr(manifest, "FORMAT", "1.0")
    with pytest.raises(RestoreError, match=r"cairn 3\.1 or newer") as caught:
        manifest.decode_job(data, "job.json")
    assert not isinstance(caught.value, CorruptFileError)


def test_a_newer_minor_format_is_read_and_unknown_fields_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newer(Restore, frozen=True, kw_only=True, tag="restore", tag_field="kind"):
        reason: str = "because"

    monkeypatch.setattr(manifest, "FORMAT", "1.7")
    data = manifest.encode_record(Newer(number=4, term=3, nonce="x", wall_ms=1, epoch=2))
    monkeypatch.setattr(manifest, "FORMAT", "1.0")
    assert manifest.decode_record(data, "x") == RECORDS[1]


def test_versions_depend_on_every_delta_and_their_order() -> None:
    one = next_version(next_version(EMPTY_VERSION, "a"), "b")
    other = next_version(next_version(EMPTY_VERSION, "b"), "a")
    assert len({one, other, EMPTY_VERSION}) == 3 and len(one) == len(EMPTY_VERSION)


def test_a_manifest_on_the_wrong_parent_is_refused() -> None:
    first, second = epoch(1, None, {}), epoch(2, 1, {})
    stored = manifest.decode_record(manifest.encode_epoch(second, first), "x")
    assert isinstance(stored, StoredEpoch)
    with pytest.raises(CorruptFileError):
        manifest.resolve(stored, epoch(7, None, {}))


def test_a_record_of_before_there_were_watermarks_is_read_and_knows_nothing_of_timers() -> None:
    written = epoch(3, None, {})
    fields = json.loads(manifest.encode_epoch(written, None))["record"]
    for name in ("watermark_ms", "passed_ms", "seen_ms", "timers"):
        del fields[name]
    old = manifest.resolve(msgspec.json.decode(json.dumps(fields), type=StoredEpoch), None)
    assert (old.watermark_ms, old.passed_ms, old.seen_ms, old.timers) == (None, None, {}, None)


def test_names_on_disk_are_those_that_older_versions_wrote() -> None:
    ancestor = Ancestor(kind="branch", id="p", url="s3://x", epoch=4)
    job = JobInfo(name="j", job_id="i", max_parallelism=8, created_ms=1, ancestor=ancestor)
    data = manifest.encode_record(job)
    assert json.loads(data)["record"]["origin"]["epoch"] == 4
    assert manifest.decode_job(data, "job.json") == job
    stored = json.loads(manifest.encode_epoch(epoch(5, 4, {}), epoch(4, 3, {})))["record"]
    assert stored["base"] == 4
