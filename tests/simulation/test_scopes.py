"""Operator lists and broadcast state while slots die, tasks run twice and ranges change."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.simulation.cluster import Trouble
from tests.simulation.test_exactly_once import seeds
from tests.unit.slot.scoped_job import ScopedJob, Waiting


@pytest.mark.parametrize("seed", seeds(3, more=5))
def test_no_item_and_no_rule_is_lost_or_seen_by_some_only(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    job = ScopedJob(tmp_path)
    job.lead(chance.randint(1, 5))
    trouble = Trouble(chance, 0.05)
    job.cluster.trouble = trouble
    job.coordinator._attempts_max = 50
    rules: dict[str, int] = {}
    seen = 0
    for _ in range(25):
        if chance.random() < 0.3:
            job.coordinator.subtasks.rescale(chance.randint(1, 5))
        if chance.random() < 0.1:
            job.lead(chance.randint(1, 5))
            job.cluster.trouble = trouble
            job.coordinator._attempts_max = 50
        rows = [(v, v) for v in range(seen, seen + chance.randint(0, 6))]
        seen += len(rows)
        said: list[tuple[str, int | None]] = []
        for _ in range(chance.randint(0, 3)):
            name = f"r{chance.randint(0, 4)}"
            level = None if name in rules and chance.random() < 0.4 else chance.randint(0, 9)
            said.append((name, level))
            if level is None:
                del rules[name]
            else:
                rules[name] = level
        told = job.run(rows, said)
        expected = ",".join(f"{name}={rules[name]}" for name in sorted(rules))
        assert [(row[1], row[3]) for row in told] == [(v, expected) for _, v in rows]
        assert job.rules() == rules
        assert sorted(v for each in job.lists("own") for v in each) == list(range(seen))
        united = job.lists("all")
        assert {v for each in united for v in each} == set(range(seen))
        assert all(len(set(each)) == len(each) for each in united)
    before = {v for each in job.lists("all") for v in each}
    parallelism = job.coordinator.parallelism % 5 + 1
    job.coordinator.subtasks.rescale(parallelism)
    job.run()
    assert [set(each) for each in job.lists("all")] == [before] * parallelism
    sizes = [len(each) for each in job.lists("own")]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", seeds(3, more=5))
def test_no_item_lies_where_no_row_comes_under_any_bound(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    job = ScopedJob(tmp_path)
    trouble = Trouble(chance, 0.05)
    bound = seen = 0
    for number in range(25):
        if number == 0 or chance.random() < 0.2:
            bound = chance.randint(0, 5)
            job.lead(chance.randint(1, 5), Waiting(), bound=bound)
            job.cluster.trouble = trouble
            job.coordinator._attempts_max = 50
        elif chance.random() < 0.3:
            job.coordinator.subtasks.rescale(chance.randint(1, 5))
        rows = [(v, v) for v in range(seen, seen + chance.randint(0, 6))]
        seen += len(rows)
        job.run(rows)
        lists = job.lists("own")
        assert sorted(v for each in lists for v in each) == list(range(seen))
        assert not any(lists[bound or len(lists) :])
