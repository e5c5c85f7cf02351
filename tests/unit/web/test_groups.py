"""How evenly keys lie over subtasks."""

from __future__ import annotations

from pathlib import Path

from cairn.storage.store import open_store
from cairn.web.groups import spread_of
from tests.unit.driver.coordinator.manifests import entry, epoch, part


def test_subtasks_that_own_nothing_of_an_operator_do_not_count_as_light(tmp_path: Path) -> None:
    few = entry(part(range(4), keys=30), part(range(4, 8), keys=10), part(range(8, 8)), uid="few")
    found = spread_of(open_store(str(tmp_path)), epoch(5, few), "few", 8)
    assert [each["group_count"] for each in found["subtasks"]] == [4, 4, 0]
    assert found["skew"]["state_entries"] == 1.5
