"""How evenly keys lie over subtasks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cairn.key_groups import key_group
from cairn.storage.store import open_store
from cairn.types import parse_type
from cairn.web.groups import spread_of
from tests.backends import backend_name
from tests.simulation.world import Driver, World
from tests.unit.driver.coordinator.manifests import entry, epoch, part


def test_subtasks_that_own_nothing_of_an_operator_do_not_count_as_light(tmp_path: Path) -> None:
    few = entry(part(range(4), keys=30), part(range(4, 8), keys=10), part(range(8, 8)), uid="few")
    found = spread_of(open_store(str(tmp_path)), epoch(5, few), "few", 8)
    assert [each["group_count"] for each in found["subtasks"]] == [4, 4, 0]
    assert found["skew"]["state_entries"] == 1.5


@pytest.mark.parametrize("backend", ["heap", "rocksdb", "postgres", "redis"])
def test_rows_of_a_base_count_in_their_key_groups_wherever_they_are(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_BASE_RATIO", "0")
    world = World(7, tmp_path, backend=backend_name(backend))
    driver = Driver(world, parallelism=2)
    driver.start()
    # The base after the last rows comes with the epochs that have none.
    for rows in (9, 9, 9, 0, 0, 0):
        driver.run_batch(rows)
    expected: Counter[int] = Counter()
    for branch, held in world.model(world.committed_rows()).branches.items():
        expected[key_group([branch], [parse_type("long")], world.group_count)] += len(held)
    newest = world.newest()
    assert newest is not None
    found = spread_of(world.store, newest, "branch", world.group_count)["groups"]
    assert found["is_exact"]
    assert found["stored_rows"] == [expected[group] for group in range(world.group_count)]
