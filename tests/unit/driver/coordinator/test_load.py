"""Ranges by load: each key group has one owner, and the busiest subtask is as light as can be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.driver.coordinator.load import Load, busiest, count_moved, divide, starts_of
from cairn.key_groups import groups_of
from cairn.report.epoch import NOTHING_MEASURED, HotKey, Measured, SubtaskTimes, Timings
from cairn.storage.manifest import Epoch, SparkPosition
from tests.unit.driver.coordinator.leads import Lead

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=10)


@given(LOADS, st.data())
def test_any_division_gives_each_key_group_one_owner_and_each_subtask_a_key_group(loads, data):
    parallelism = data.draw(st.integers(1, len(loads)))
    starts = divide(np.array(loads, float), parallelism)
    owned = [groups_of(at, parallelism, len(loads), starts) for at in range(parallelism)]
    assert [group for groups in owned for group in groups] == list(range(len(loads)))
    assert all(owned)


@given(LOADS, st.data())
def test_no_other_ranges_have_a_lighter_busiest_subtask(loads, data):
    parallelism = data.draw(st.integers(1, len(loads)))
    array = np.array(loads, float)
    best = min(
        busiest(array, parallelism, (0, *inner))
        for inner in itertools.combinations(range(1, len(loads)), parallelism - 1)
    )
    found = busiest(array, parallelism, divide(array, parallelism))
    assert found == pytest.approx(best, rel=1e-4, abs=1e-3 * max(1, sum(loads)))


def test_ranges_without_load_are_divided_by_number():
    assert divide(np.zeros(12), 3) == (0, 4, 8)


def epoch_of(**group_rows: list[int]) -> Epoch:
    return Epoch(
        number=1, parent=None, term=0, nonce="", wall_ms=0, now_ms=0, watermarks={}, operators={},
        spark=SparkPosition(folder="", batch_id=0, offsets=""),
        timings=Timings(subtasks=[SubtaskTimes(process_ms=10.0)]),
        metrics=Measured(
            operators={
                uid: msgspec.structs.replace(
                    NOTHING_MEASURED, rows_in=sum(rows), group_rows=rows,
                    hot_keys=[HotKey("ann", max(rows))],
                )
                for uid, rows in group_rows.items()
            }
        ),
    )  # fmt: skip


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    return Lead(tmp_path).spec  # Six key groups, one operator: "count".


def test_skewed_rows_move_ranges_and_uniform_ones_do_not(spec):
    even = Load(6)
    even.note(epoch_of(count=[1000, 1010, 990, 1000, 1005, 1000]), spec)
    assert even.ranges_for(3)[0] == ()
    skewed = Load(6)
    skewed.note(epoch_of(count=[3000, 1000, 1000, 1000, 1000, 1000]), spec)
    starts, balance = skewed.ranges_for(2)
    assert starts == (0, 2)
    assert (balance.busiest_before, balance.busiest_after) == (1.25, 1.0)
    assert balance.groups_moved == 1 == count_moved(2, 6, (), starts)
    assert balance.limit is None


def test_ranges_stay_while_too_few_rows_were_measured(spec):
    load = Load(6)
    load.note(epoch_of(count=[300, 1, 1, 1, 1, 1]), spec)
    starts, balance = load.ranges_for(2, (0, 1))
    assert starts == (0, 1)
    assert balance.busiest_before is None and "too few rows" in balance.text()


def test_the_key_group_that_limits_the_ranges_is_named_with_its_hot_key(spec):
    load = Load(6)
    load.note(epoch_of(count=[100, 100, 9000, 100, 100, 100]), spec)
    starts, balance = load.ranges_for(3)
    assert starts == () and balance.groups_moved == 0
    assert balance.limit is not None
    assert balance.limit.startswith("key group 2 has 95% of the load")
    assert "'ann'" in balance.limit


def test_a_load_that_moves_is_followed_within_some_epochs(spec):
    load = Load(6)
    for _ in range(20):
        load.note(epoch_of(count=[6000, 500, 500, 500, 500, 500]), spec)
    before = load.ranges_for(2)[0]
    for _ in range(20):
        load.note(epoch_of(count=[500, 500, 500, 500, 500, 6000]), spec)
    assert before == (0, 1)
    assert load.ranges_for(2, before)[0] == (0, 5)


def test_an_epoch_without_rows_leaves_the_load_as_it_is(spec):
    load = Load(6)
    load.note(epoch_of(count=[1000] * 6), spec)
    before = load.per_group()
    load.note(epoch_of(count=[0] * 6), spec)
    assert (load.per_group() == before).all()


def test_buckets_of_key_groups_are_spread_over_them(spec):
    load = Load(300)  # Buckets of three.
    load.note(epoch_of(count=[30] + [3] * 99), spec)
    assert load.per_group()[:4].tolist() == pytest.approx(
        [load.per_group()[0]] * 3 + [load.per_group()[0] / 10]
    )
    assert len(divide(load.per_group(), 50)) == 50


def test_a_restart_continues_with_the_ranges_of_the_newest_epoch(tmp_path):
    lead = Lead(tmp_path, parallelism=2).start()
    lead.run_batch((1, 1), (2, 1), (3, 1))
    lead.coordinator.subtasks.starts = (0, 1)
    lead.run_batch()
    again = Lead(tmp_path, parallelism=2, store=lead.store).start()
    assert again.coordinator.subtasks.starts == (0, 1)
    other = Lead(tmp_path, parallelism=3, store=lead.store).start()
    assert other.coordinator.subtasks.starts == ()
    assert starts_of(again.coordinator.newest, 2, 6) == (0, 1)
