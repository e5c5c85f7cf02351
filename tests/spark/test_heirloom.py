"""Checkpoints and savepoints of earlier cairns are read, and the job goes on from them."""

from __future__ import annotations

import fcntl
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.programs import heirloom

KEPT = Path(__file__).parents[1] / "heirloom"


@pytest.fixture
def place() -> Iterator[Path]:
    """The folder of the input, for one test run on this machine at a time."""
    with open("/tmp/cairn-heirloom.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(heirloom.PLACE, ignore_errors=True)
        # Spark plans the last batch again before it goes on, so its files must be there.
        for folder, schema in (("rows", heirloom.SCHEMA), ("rules", heirloom.RULES)):
            heirloom.feed(heirloom.PLACE / folder, 0, schema)
        yield heirloom.PLACE
        shutil.rmtree(heirloom.PLACE)


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(KEPT / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / Path(name).name


@pytest.mark.parametrize("made_by", ["first"])
@pytest.mark.parametrize("kept", ["checkpoint-heap", "checkpoint-rocksdb", "savepoint"])
def test_job_goes_on_from_what_an_earlier_cairn_wrote(
    spark: Any, tmp_path: Path, place: Path, made_by: str, kept: str
) -> None:
    folder = unpack(f"{made_by}/{kept}", tmp_path)
    if kept == "savepoint":
        checkpoint = tmp_path / "checkpoint"
        heirloom.run_part(spark, checkpoint, heirloom.FILES, "heap", savepoint=str(folder))
    else:
        checkpoint = folder
        heirloom.run_part(spark, checkpoint, heirloom.FILES, kept.removeprefix("checkpoint-"))
    expected = json.loads((KEPT / made_by / "state.json").read_text())
    found = heirloom.dump_state(checkpoint)
    assert without_join(found) == without_join(expected)
    for side in ("pairs.left", "pairs.right"):
        assert join_rows(found[side]) == [
            row for row in join_rows(expected[side]) if row["ts"] >= JOINABLE
        ]


JOINABLE = "2026-01-01T00:05:03Z"
"""The last watermark less the reach of the join: older rows find no other any more."""


def without_join(state: dict[str, list[str]]) -> dict[str, list[str]]:
    """The join has numbers of its own for its rows, and no panes and timers any more."""
    return {name: rows for name, rows in state.items() if not name.startswith("pairs.")}


def join_rows(rows: list[str]) -> list[dict[str, Any]]:
    """The rows that a side of the join keeps, by their ids."""
    return sorted((json.loads(row)["value"]["row"] for row in rows), key=lambda row: row["id"])
