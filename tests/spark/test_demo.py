"""The demo as people run it, in a short setting; and proof that its check can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from cairn.demo.check import Comparison, compare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_demo(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "cairn.demo", "--folder", str(folder)]
    call += ["--events", "150000", "--seconds", "10", *more]
    return subprocess.run(call, capture_output=True, text=True, timeout=800)


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line:
            found.append(line)
    return found


def test_demo_kills_a_slot_and_the_driver_and_loses_nothing(tmp_path: Path) -> None:
    result = run_demo(tmp_path / "demo")
    assert result.returncode == 0, result.stdout + result.stderr
    said = "150,000 events in, 150,000 counted, 0 lost, 0 duplicated"
    assert said in result.stdout
    assert "killed in mid-epoch: 1 slot, 1 driver" in result.stdout
    assert "\x1b" not in result.stdout
    assert processes_of(tmp_path / "demo") == []


def test_demo_fails_when_a_row_of_the_output_is_dropped_and_one_doubled(tmp_path: Path) -> None:
    result = run_demo(tmp_path / "demo", "--tamper")
    assert result.returncode == 1
    assert "150,000 events in, 150,000 counted, 1 lost, 1 duplicated" in result.stdout


def test_demo_leaves_a_folder_alone_that_it_has_not_made(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    result = run_demo(tmp_path)
    assert result.returncode == 2
    assert "no demo made it" in result.stderr
    assert (tmp_path / "letter.txt").exists()


def test_check_tells_lost_doubled_unknown_and_wrong_rows_apart(spark: SparkSession) -> None:
    expected = spark.createDataFrame([(1, 10), (2, 20), (3, 30), (4, 40)], "id long, v int")
    same = spark.createDataFrame([(4, 40), (3, 30), (2, 20), (1, 10)], "id long, v long")
    assert compare("x", expected, same, "id") == Comparison("x", 4, 4, 0, 0, 0, 0)
    faulty = [(1, 10), (2, 20), (2, 20), (2, 20), (3, 31), (9, 90)]
    found = spark.createDataFrame(faulty, "id long, v long")
    result = compare("x", expected, found, "id")
    assert result == Comparison("x", 4, 6, lost=1, duplicated=2, unknown=1, wrong=1)
    assert not result.ok
