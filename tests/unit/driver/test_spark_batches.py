"""Spark's batches in a run, when another driver is still at work in Spark's folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cairn.driver.coordinator.rewind import Position, Stand
from cairn.driver.spark_batches import SparkBatches
from cairn.driver.spark_place import SparkPlace
from cairn.storage.store import open_store
from tests.unit.storage.spark_folders import OLD, files_seen
from tests.unit.storage.test_source_logs import ran


@pytest.mark.parametrize("setting", [2, 3, 10, 30])
@pytest.mark.parametrize("last", [5, 12, 25])
def test_a_folder_laid_out_beside_another_driver_is_one_that_this_session_reads(
    last: int, setting: int
) -> None:
    store = open_store("memory:")
    coordinator: Any = SimpleNamespace(
        newest=ran(store, last), store=store, term=7, log=SimpleNamespace(is_leading=lambda: True)
    )
    position = Position(OLD, Stand.EQUAL)
    batches = SparkBatches(
        coordinator,
        SparkPlace(store),
        position,
        ["files"],
        gives_up=False,
        compact_interval=setting,
    )
    assert batches.go_elsewhere()
    folder = batches.url.removeprefix(f"{store.url}/")
    assert folder != OLD
    assert files_seen(store, setting=setting, folder=folder) == list(range(last + 1))
