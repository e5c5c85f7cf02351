"""State that expires in a whole job: slots, files, readers, savepoints, changes of the ttl."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.protocol.scoped_state import states_by_scope
from cairn.snapshots import (
    EpochReader,
    diff_epochs,
    load_savepoint,
    open_savepoint,
    write_savepoint,
)
from cairn.state import TTL
from cairn.storage.log import Log, create_or_open_job
from cairn.storage.store import open_store
from tests.backends import MORE_IN_SOAK, backend_name
from tests.marks import in_turn
from tests.simulation.cluster import Trouble
from tests.unit.slot.ttl_job import GROUP_COUNT, TtlJob, rows_of

NOTHING = (None, None, [], [])
Make = Callable[..., TtlJob]


@pytest.fixture(params=MORE_IN_SOAK)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return lambda *args, **more: TtlJob(
        tmp_path, *args, backend=backend_name(request.param), **more
    )


def test_what_expired_is_not_seen_and_leaves_the_slots(make: Make) -> None:
    job = make("1 minute")
    job.run((1, 10), (2, 20))
    assert job.run((1, 11), after_ms=40_000)[1] == (10, 10, [10], ["10"])
    # The first item and entry of key 1 are a minute old, all of key 2 is.
    assert job.run((1, None), (2, None), after_ms=30_000) == {
        1: (11, 21, [11], ["11"]),
        2: NOTHING,
    }
    assert job.run((1, None), after_ms=60_000)[1] == NOTHING
    job.sweep()
    assert [job.held(name) for name in ("value", "total", "items", "entries")] == [0, 0, 0, 0]


def test_removal_changes_neither_deltas_nor_versions(tmp_path: Path) -> None:
    found = []
    for sweeps in (True, False):
        (tmp_path / str(sweeps)).mkdir()
        job = TtlJob(tmp_path / str(sweeps), "1 minute")
        for step in range(12):
            job.run(*((key, step) for key in range(step % 5, 20, 5)), after_ms=20_000)
            if sweeps:
                job.sweep()
        found.append([part.version for part in job.newest.operators["keep"].ranges])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("clock", "refresh", "seed"), in_turn(["processing", "event"], ["write", "read-write"], [0, 1])
)
def test_lost_slots_reruns_and_removal_change_nothing_that_is_seen(
    make: Make, tmp_path: Path, seed: int, refresh: Any, clock: Any
) -> None:
    """Slots that run a stage again must acknowledge the same, whatever they have removed."""
    ttl = TTL("1 minute", clock=clock, refresh=refresh)
    chance = random.Random(seed)
    troubled = make(ttl, trouble=Trouble(random.Random(seed), 0.05))
    (tmp_path / "calm").mkdir()
    calm = TtlJob(tmp_path / "calm", ttl, parallelism=1)
    for step in range(25):
        if chance.random() < 0.1:
            troubled.lead(chance.choice([1, 2, 3]), ttl)
        elif chance.random() < 0.5:
            troubled.sweep()
        now_ms = step * 11_000
        passed_ms = calm.passed_ms = troubled.passed_ms = max(0, now_ms - 30_000)
        keys = chance.sample(range(12), chance.randrange(6))
        rows = [
            (key, chance.choice([None, key]), chance.randrange(passed_ms, now_ms + 10_000))
            for key in keys
        ]
        assert troubled.run(*rows, after_ms=11_000) == calm.run(*rows, after_ms=11_000)


def test_a_new_driver_with_another_parallelism_keeps_the_times(make: Make) -> None:
    job = make("1 minute", parallelism=3)
    job.run(*((key, key) for key in range(20)))
    job.run(*((key, key) for key in range(0, 20, 2)), after_ms=40_000)
    job.lead(2, "1 minute")
    seen = job.run(*((key, None) for key in range(20)), after_ms=30_000)
    assert {key for key, found in seen.items() if found[0] is not None} == set(range(0, 20, 2))
    assert job.held("value") == 10


def test_a_live_rescale_keeps_the_times_and_goes_on_removing(make: Make) -> None:
    job = make("1 minute", parallelism=2)
    job.run(*((key, key) for key in range(20)))
    job.coordinator.subtasks.rescale(3)
    job.run((0, 5), after_ms=30_000)
    job.coordinator.subtasks.rescale(1)
    seen = job.run(*((key, None) for key in range(20)), after_ms=31_000)
    assert {key for key, found in seen.items() if found[0] is not None} == {0}
    job.sweep()
    assert job.held("value") == 1


def test_readers_see_what_had_not_expired_as_of_the_epoch(make: Make) -> None:
    job = make("1 minute")
    job.run((1, 10), (2, 20))
    first = job.newest
    job.run((1, 11), after_ms=40_000)
    job.run(after_ms=30_000)
    for epoch, values, items in (
        (first, {1: 10, 2: 20}, {1: (10,), 2: (20,)}),
        (job.newest, {1: 11}, {1: (11,)}),
    ):
        with EpochReader(job.store, epoch) as reader:
            assert rows_of(reader, "value") == values
            assert rows_of(reader, "items") == items
            assert rows_of(reader, "entries") == {
                (key, str(value)): value for key, value in values.items()
            }


def test_a_reader_goes_by_the_watermark_where_event_time_counts(make: Make) -> None:
    job = make(TTL("1 minute", clock="event"))
    job.run((1, 10, 100_000), (2, 20, 130_000))
    for passed_ms, keys in ((None, {1, 2}), (159_999, {1, 2}), (160_000, {2})):
        # The next epoch's timers may be as old as that, wherever the watermark is by now.
        epoch = msgspec.structs.replace(job.newest, passed_ms=passed_ms, watermark_ms=500_000)
        with EpochReader(job.store, epoch) as reader:
            assert rows_of(reader, "value").keys() == keys


def test_where_event_time_is_behind_the_watermark_readers_see_what_the_operator_sees(
    make: Make,
) -> None:
    job = make(TTL("1 minute", clock="event"))
    job.run((1, 10, 100_000))
    (operator,) = job.coordinator.spec.levels[0].operators
    (entry,) = states_by_scope(dataclasses.replace(operator, delay_ms=5_000))
    held = msgspec.structs.replace(job.newest.operators["keep"], states=entry.decls)
    for passed_ms, keys in ((164_999, {1}), (165_000, set())):
        epoch = msgspec.structs.replace(job.newest, passed_ms=passed_ms, operators={"keep": held})
        with EpochReader(job.store, epoch) as reader:
            assert rows_of(reader, "value").keys() == keys


def test_a_diff_has_what_expired_in_between_though_no_file_differs(make: Make) -> None:
    job = make("1 minute")
    job.run((1, 10), (2, 20))
    first = job.newest.number
    job.run((1, 10), after_ms=40_000)
    refreshed = job.newest.number
    job.run(after_ms=30_000)
    diffs = {diff.state: diff for diff in diff_epochs(job.store, first, refreshed)}
    # Written again with the same value: its time is another, the value is not.
    assert diffs["value"].is_empty
    diffs = {diff.state: diff for diff in diff_epochs(job.store, refreshed, job.newest.number)}
    value = diffs["value"]
    assert (value.added, value.changed, value.removed) == (0, 0, 1)
    assert value.removed_examples[0].key == 2
    assert diffs["items"].removed == 1 and diffs["items"].changed == 1


def test_a_savepoint_has_no_expired_rows_and_keeps_the_times(make: Make, tmp_path: Path) -> None:
    job = make("1 minute")
    job.run((1, 10), (2, 20), (3, 30))
    job.run((1, 11), (3, 31), after_ms=40_000)
    job.run(after_ms=25_000)
    dest = open_store("memory:")
    info = write_savepoint(job.store, None, dest.url)
    savepoint = open_savepoint(dest.url)
    assert not savepoint.verify()
    assert rows_of(savepoint, "value") == {1: 11, 3: 31}
    assert info.operators["keep"].states["items"].ttl == TTL("1 minute").text

    store = open_store("memory:")
    create_or_open_job(store, "keep", GROUP_COUNT)
    log = Log(store)
    term = log.take_over(host="", pid=0, wall_ms=0).term
    log.append(
        lambda number: load_savepoint(
            savepoint, store, number=number, term=term, parallelism=3, spark_folder="s", wall_ms=0
        )
    )
    (tmp_path / "again").mkdir()
    again = TtlJob(tmp_path / "again", "1 minute", parallelism=3, store=store, clock=job.clock)
    assert again.run((1, None), (3, None), after_ms=34_999) == {
        1: (11, 21, [11], ["11"]),
        3: (31, 61, [31], ["31"]),
    }
    assert again.run((1, None), (3, None), after_ms=1) == {1: NOTHING, 3: NOTHING}


@pytest.mark.parametrize("refresh", ["write", "read-write"])
def test_event_time_counts_row_by_row_and_removal_waits_for_the_watermark(
    make: Make, refresh: Any
) -> None:
    job = make(TTL("1 minute", clock="event", refresh=refresh))
    job.run((1, 10, 100_000), (2, 20, 100_000))
    seen = job.run((1, None, 159_999), (2, None, 160_000))
    assert seen == {1: (10, 10, [10], ["10"]), 2: NOTHING}
    # A row of before may come as long as the watermark lets it: it sees what was there then.
    assert job.run((2, None, 120_000))[2] == (20, 20, [20], ["20"])
    # A database rounds the time of a key up to the next 64th of the ttl.
    job.passed_ms = 161_000
    lives_on = refresh == "read-write"
    seen = job.run((1, None, 165_000), (2, None, 165_000))
    assert seen[1][0] == (10 if lives_on else None)
    job.sweep()
    assert job.held("value") == (2 if lives_on else 0)
    job.passed_ms = 400_000
    job.run()
    job.sweep()
    assert [job.held(name) for name in ("value", "total", "items", "entries")] == [0, 0, 0, 0]


def test_a_write_by_event_time_never_shortens_a_life(make: Make) -> None:
    job = make(TTL("1 minute", clock="event"))
    job.run((1, 10, 100_000))
    job.run((1, 11, 70_000))
    assert job.run((1, None, 159_000))[1][:2] == (11, 21)


def test_an_epoch_that_runs_again_sees_what_was_visible(make: Make) -> None:
    job = make(TTL("1 minute", clock="event"))
    job.run((1, 10, 100_000))
    attempts = []
    execute = job.cluster.execute

    def fail_once(sources: Any, begin: Any) -> Any:
        attempts.append(begin.execution.attempt)
        outcome = execute(sources, begin)
        if len(attempts) == 1:
            for slot in job.cluster.slots.values():
                slot.level(0).sweep(1.0)
            raise OSError("the network is down")
        return outcome

    job.cluster.execute = fail_once  # type: ignore[method-assign]
    job.passed_ms = 150_000
    assert job.run((1, 11, 155_000))[1][0] == 10
    assert attempts == [0, 1]
    assert job.run((1, None, 160_000))[1][:2] == (11, 21)


# The ttl changes


def test_ttl_turned_on_counts_from_then_on(make: Make) -> None:
    job = make(None)
    job.run((1, 10), (2, 20))
    job.clock.advance_ms(3_600_000)
    job.run((1, 11))
    job.lead(2, "1 minute")
    assert job.run((1, None), after_ms=59_000)[1] == (11, 21, [10, 11], ["10", "11"])
    assert job.run((1, None), (2, None), after_ms=1_000) == {1: NOTHING, 2: NOTHING}


@pytest.mark.parametrize("longer", [None, "1 hour", TTL("1 minute", clock="event")])
def test_what_had_expired_stays_gone_when_ttl_is_turned_off_or_made_longer(
    make: Make, longer: Any
) -> None:
    job = make("1 minute")
    job.run((1, 10), (2, 20))
    job.run((1, 11), after_ms=40_000)
    job.run(after_ms=30_000)
    job.lead(3, longer)
    seen = job.run((1, None), (2, None), after_ms=120_000)
    if not (isinstance(longer, TTL) and longer.clock == "event"):
        assert seen == {1: (11, 21, [11], ["11"]), 2: NOTHING}
    with EpochReader(job.store, job.newest) as reader:
        assert rows_of(reader, "items") == {1: (11,)}
    declared = job.newest.operators["keep"].states["items"].ttl
    assert declared == (None if longer is None else TTL.of(longer).text)  # type: ignore[union-attr]
    # Nothing of the form before is left, and what comes now is of the new one.
    job.run((2, 21))
    job.lead(1, longer)
    assert job.run((2, None))[2] == (21, 21, [21], ["21"])


def test_a_shorter_ttl_rewrites_nothing_and_counts_at_once(make: Make) -> None:
    job = make("1 hour")
    job.run((1, 10))
    job.run((2, 20), after_ms=50_000)
    files = [ref.id for part in job.newest.operators["keep"].ranges for ref in part.files]
    job.lead(2, "1 minute")
    assert job.run((1, None), (2, None), after_ms=15_000) == {
        1: NOTHING,
        2: (20, 20, [20], ["20"]),
    }
    assert [ref.id for part in job.newest.operators["keep"].ranges for ref in part.files] == files


def test_a_longer_ttl_calls_no_migrate(make: Make) -> None:
    job = make("1 minute")
    job.run((1, 10))
    job.lead(2, "2 minutes", migrate=lambda value: value * 2)
    assert job.run((1, None), after_ms=90_000)[1][0] == 10
