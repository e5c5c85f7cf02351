"""The demo as people run it, in a short setting; and proof that its check can fail."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from cairn.cli import main
from cairn.demo.check import Comparison, compare
from cairn.demo.play import Play
from tests.marks import for_soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = ("--events", "60000", "--seconds", "6")


def run_demo(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "cairn.demo", "--folder", str(folder), *SHORT, *more]
    return subprocess.run(call, capture_output=True, text=True, timeout=800)


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line:
            found.append(line)
    return found


class Lent:
    """The session of all tests, for one who would stop it."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        pass


def lend(spark: SparkSession, patch: pytest.MonkeyPatch) -> None:
    """Let the demo compare on this session instead of one of its own."""
    patch.setattr("cairn.demo.play.session", lambda *name, **conf: Lent(spark))


@pytest.fixture(scope="module", params=["here", for_soak("alone")])
def played(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, str]:
    """The demo, played to its end: what it has left, its exit code, what it printed.

    Its drivers are processes of their own, each with its Spark. The demo itself is one too, or
    runs here and compares with the session of all tests.
    """
    folder = tmp_path_factory.mktemp("played") / "demo"
    if request.param == "alone":
        result = run_demo(folder)
        return folder, result.returncode, result.stdout + result.stderr
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        lend(spark, patch)
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--folder", str(folder), *SHORT])
    assert isinstance(ended.value.code, int)
    return folder, ended.value.code, printed.getvalue()


def test_demo_kills_a_slot_and_two_drivers_and_loses_nothing(played: tuple[Path, int, str]) -> None:
    folder, code, printed = played
    assert code == 0, printed
    assert "60,000 events in, 60,000 counted, 0 lost, 0 duplicated" in printed
    assert "killed in mid-epoch: 1 slot, 1 driver" in printed
    assert "the standby goes on with epoch" in printed
    assert "\x1b" not in printed
    assert processes_of(folder) == []


@pytest.mark.soak
def test_demo_fails_when_a_row_of_the_output_is_dropped_and_one_doubled(
    played: tuple[Path, int, str],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From where the acts with a driver end, on what they have left."""

    def as_played(play: Play) -> None:
        shutil.copytree(played[0], tmp_path / "demo", dirs_exist_ok=True)
        play.kills, play.went_well = {"slot": 1, "driver": 1}, True

    monkeypatch.setattr(Play, "stream_and_kill", as_played)
    lend(spark, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--folder", str(tmp_path / "demo"), *SHORT, "--tamper"])
    assert ended.value.code == 1
    said = "60,000 events in, 60,000 counted, 1 lost, 1 duplicated"
    assert said in capsys.readouterr().out


def test_demo_leaves_a_folder_alone_that_it_has_not_made(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    result = run_demo(tmp_path)
    assert result.returncode == 2
    assert "not from a demo" in result.stderr
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
