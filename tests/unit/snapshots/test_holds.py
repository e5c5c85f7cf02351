"""Reading while a job goes on: holds that end by themselves, and what is said without one."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import StaleEpochError
from cairn.snapshots.holds import Reading
from cairn.snapshots.tables import open_state
from cairn.storage.holds import find_holds
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from tests.unit.snapshots.checkpoints import UID, go_on, running


def values(source: Any) -> set[int]:
    batches = source.table(UID, "n").batches()
    return {row["value"] for batch in batches for row in batch.to_pylist()}


def test_an_epoch_stays_readable_while_a_job_retires_everything_before_its_newest() -> None:
    job = running()
    with open_state(job.store) as source:
        before = source.epoch
        go_on(job)
        assert values(source) == {before}
        assert job.log.oldest_kept() <= before
    go_on(job)
    assert not job.store.list("holds")
    assert job.log.oldest_kept() > before
    with pytest.raises(StaleEpochError, match=r"retired[\s\S]*next:"):
        open_state(job.store, before)


def test_a_reader_that_is_killed_keeps_its_epoch_no_longer_than_it_said() -> None:
    job = running()
    source = open_state(job.store, hold_ms=1)
    (hold,) = job.store.list("holds")
    record = json.loads(job.store.get(hold.path))
    assert record["until_ms"] <= time.time() * 1000 + 1
    go_on(job)
    assert values(source) == {source.epoch}, "clocks of two machines may differ a little"
    (hold,) = job.store.list("holds")
    record["until_ms"] -= 3_600_000
    job.store.put(hold.path, json.dumps(record).encode())
    assert not find_holds(job.store).holds
    go_on(job)
    assert not job.store.list("holds"), "the collector removes it"
    with pytest.raises(StaleEpochError, match=r"is retired[\s\S]*next: `cairn ls`"):
        values(source)


def test_what_only_an_ended_hold_kept_is_removed_without_any_other_change() -> None:
    job = running()
    source = open_state(job.store)
    paths = {ref.path for part in _ranges(source) for ref in part.files}
    go_on(job)
    (hold,) = job.store.list("holds")
    record = json.loads(job.store.get(hold.path)) | {"until_ms": 1, "paths": sorted(paths)}
    job.store.put(hold.path, json.dumps(record).encode())
    go_on(job, 40)
    assert not paths & {found.path for found in job.store.list("state")}


def _ranges(source: Any) -> Any:
    return source.states.epoch.operators[UID].ranges


def test_an_old_collector_keeps_what_a_hold_with_an_end_names() -> None:
    # It does not know the field: to it, the hold has no end.
    job = running()
    with open_state(job.store) as source:
        (hold,) = job.store.list("holds")
        record = json.loads(job.store.get(hold.path))
        del record["until_ms"]
        job.store.put(hold.path, json.dumps(record).encode())
        go_on(job)
        assert values(source) == {source.epoch}


def test_the_hold_is_renewed_while_rows_are_read() -> None:
    job = running()
    now = [10**12]
    reading = Reading(job.store, None, 60_000, now_ms=lambda: now[0])

    def until() -> int:
        (hold,) = job.store.list("holds")
        return int(json.loads(job.store.get(hold.path))["until_ms"])

    assert until() == 10**12 + 60_000
    now[0] += 10_000
    reading.renew()
    assert until() == 10**12 + 60_000, "not before half of it has passed"
    now[0] += 30_000
    reading.renew()
    assert until() == 10**12 + 100_000
    reading.release()
    assert not job.store.list("holds")
    reading.release()


def test_a_hold_renewed_too_late_says_that_the_epoch_is_gone() -> None:
    job = running()
    now = [int(time.time() * 1000)]
    reading = Reading(job.store, None, 1000, now_ms=lambda: now[0])
    job.store.delete([found.path for found in job.store.list("holds")])
    go_on(job)
    now[0] += 3_600_000
    with pytest.raises(StaleEpochError, match="retired"):
        reading.renew()
    reading.release()


def test_a_hold_renewed_while_the_collector_finds_it_over_goes_on_to_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = running()
    now = [int(time.time() * 1000)]
    reading = Reading(job.store, None, 1000, now_ms=lambda: now[0])
    (hold,) = job.store.list("holds")
    record = json.loads(job.store.get(hold.path)) | {"until_ms": 1}
    job.store.put(hold.path, json.dumps(record).encode())
    found = find_holds(job.store)
    assert found.over == [hold.path]
    now[0] += 5000
    reading.renew()
    job.collector._remove_garbage(found)
    assert find_holds(job.store).all.epochs == {reading.number}
    reading.release()
    assert not job.store.list("holds")


def test_a_renewal_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    job = running()
    now, fails = [int(time.time() * 1000)], [False]

    class Failing(ReadOnly):
        def put(self, path: str, data: bytes) -> None:
            if fails[0]:
                raise OSError("503")
            self._inner.put(path, data)

        def delete(self, paths: Any) -> None:
            self._inner.delete(paths)

    reading = Reading(Failing(job.store), None, 600_000, now_ms=lambda: now[0])  # type: ignore[arg-type]
    fails[0] = True
    now[0] += 400_000
    reading.renew()
    assert reading.is_held and "could not renew" in caplog.text
    (hold,) = job.store.list("holds")
    fails[0] = False
    reading.renew()
    assert job.store.list("holds") == [hold], "not at once"
    now[0] += 100_000
    reading.renew()
    (after,) = find_holds(job.store).holds.values()
    assert after.until_ms == now[0] + 600_000
    go_on(job)
    assert job.log.oldest_kept() <= reading.number


def test_a_reader_that_has_let_go_holds_no_more() -> None:
    job = running()
    reading = Reading(job.store, None, 1)
    reading.release()
    reading.renew()
    assert not job.store.list("holds")


def test_holds_of_readers_are_read_once_by_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    job = running()
    go_on(job)
    sources = [open_state(job.store) for _ in range(20)]
    read: list[str] = []
    get = type(job.store).get

    def spy(self: Any, path: str) -> bytes:
        read.extend([path] if path.startswith("holds/") else [])
        return get(self, path)

    monkeypatch.setattr(type(job.store), "get", spy)
    go_on(job, 10)
    assert len(read) == 20 == len(set(read))
    assert values(sources[0]) == {sources[0].epoch}
    for source in sources:
        source.close()
    go_on(job, 3)
    assert job.log.oldest_kept() > sources[0].epoch
    assert not job.collector._known_holds


def test_a_hold_that_gives_way_to_a_new_one_is_seen_in_one_of_the_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = running()
    now = [int(time.time() * 1000)]
    reading = Reading(job.store, None, 600_000, now_ms=lambda: now[0])
    listed = type(job.store).list
    raced = []

    def slow(self: Any, prefix: str = "") -> Any:
        found = listed(self, prefix)
        if not raced:
            raced.append(prefix)
            now[0] += 400_000
            reading.renew()
        return found

    monkeypatch.setattr(type(job.store), "list", slow)
    assert find_holds(job.store).all.epochs == {reading.number}
    assert raced == ["holds"]


def test_holds_that_are_gone_each_time_they_are_read_retire_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = running()
    listed = type(job.store).list

    def busy(self: Any, prefix: str = "") -> Any:
        if prefix != "holds":
            return listed(self, prefix)
        path = f"holds/reader-{uuid.uuid4().hex}.json"
        self.put(path, b"{}")
        found = listed(self, prefix)
        self.delete([path])
        return found

    before = job.log.oldest_kept()
    monkeypatch.setattr(type(job.store), "list", busy)
    go_on(job)
    assert job.log.oldest_kept() == before
    assert "change faster" in caplog.text
    monkeypatch.undo()
    go_on(job)
    assert job.log.oldest_kept() > before


class ReadOnly:
    """A store that nobody may write to."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, path: str, data: bytes) -> None:
        raise PermissionError("read only")

    def delete(self, paths: Any) -> None:
        raise PermissionError("read only")


Store.register(ReadOnly)


def test_a_checkpoint_that_cannot_be_written_is_read_without_a_hold() -> None:
    job = running()
    with open_state(ReadOnly(job.store)) as source:  # type: ignore[arg-type]
        assert values(source) == {source.epoch}
        assert not job.store.list("holds")
        go_on(job)
        with pytest.raises(StaleEpochError, match=r"retired[\s\S]*next:"):
            values(source)


def test_the_newest_epoch_is_found_though_the_job_retires_it_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = running()
    write = Reading._write
    raced = []

    def slow(self: Reading) -> None:
        if not raced:
            raced.append(self.number)
            go_on(job)
        write(self)

    monkeypatch.setattr(Reading, "_write", slow)
    with open_state(job.store) as source:
        assert source.epoch > raced[0]
        assert values(source) == {source.epoch}
    assert not job.store.list("holds")


def test_a_readers_hold_is_no_damage_and_no_stale_hold(tmp_path: Path) -> None:
    job = running(open_store(str(tmp_path)))
    with open_state(str(tmp_path)):
        (hold,) = job.store.list("holds")
        record = json.loads(job.store.get(hold.path)) | {"by": "pid 999999999 on nowhere"}
        job.store.put(hold.path, json.dumps(record).encode())
        report = verify(job.store)
        assert report.ok and not report.stale_holds
        record["until_ms"] = 1
        job.store.put(hold.path, json.dumps(record).encode())
        report = verify(job.store)
        assert report.ok and not report.stale_holds


def test_two_readers_of_one_epoch_do_not_release_each_other() -> None:
    job = running()
    with open_state(job.store) as one:
        with open_state(job.store) as other:
            assert other.epoch == one.epoch
        go_on(job)
        assert values(one) == {one.epoch}
