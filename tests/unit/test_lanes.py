"""Lanes share the tests of a folder: see tests/lanes.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest

def say(text):
    with open("log", "a") as log:
        log.write(text + "\\n")

@pytest.fixture(scope="session")
def kept():
    say("begin")
    yield
    say("end")

@pytest.fixture(autouse=True)
def said(request, kept):
    say(request.node.name)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tests a to f, in two fast files and two slow ones."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for path, names in (("unit/x", "ab"), ("contract/x", "c"), ("spark/x", "d"), ("spark/y", "ef")):
        file = tmp_path / "tests" / path.replace("/", "/test_")
        file.parent.mkdir(parents=True, exist_ok=True)
        tests = "\n".join(f"def test_{name}():\n    assert True\n" for name in names)
        file.with_suffix(".py").write_text(tests)
    return tmp_path


def run_lanes(folder: Path, count: int) -> tuple[int, str]:
    """Run the tests; the exit code, and all that was printed."""
    call = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lanes", "-p", "no:cacheprovider"]
    call += ["--import-mode=importlib", f"--lanes={count}", "--basetemp=base", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        call, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    return ended.returncode, ended.stdout + ended.stderr


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def test_lanes_run_every_test_once_and_fast_ones_before_slow_ones(folder: Path) -> None:
    code, printed = run_lanes(folder, 3)
    assert code == 0, printed
    ran = [name for name in log(folder) if name.startswith("test_")]
    assert sorted(ran) == [f"test_{name}" for name in "abcdef"]
    # Each lane goes from fast to slow; of one file, tests follow each other.
    assert ran.index("test_a") < ran.index("test_b") and ran.index("test_e") < ran.index("test_f")
    # One report of each lane: together they have passed all.
    passed = [int(count) for count in re.findall(r"(\d+) passed", printed)]
    assert sum(passed) == 6 and printed.count(" in ") >= 3


def test_a_lane_keeps_what_is_of_the_session_from_its_first_file_to_its_last(folder: Path) -> None:
    run_lanes(folder, 1)
    assert log(folder) == ["begin", *(f"test_{name}" for name in "abcefd"), "end"]


def test_no_lane_begins_a_slow_test_when_a_fast_one_has_failed(folder: Path) -> None:
    file = folder / "tests/unit/test_x.py"
    file.write_text(file.read_text().replace("True", "False", 1))
    code, printed = run_lanes(folder, 1)
    assert code == 1
    assert log(folder) == ["begin", "test_a", "test_b", "test_c", "end"]
    assert "FAILED tests/unit/test_x.py::test_a" in printed


MEETS = """
import os, time
from pathlib import Path

COLLECTED_IN = os.getpid()

def test_{name}():
    Path("begun-{name}").touch()
    while len(list(Path().glob("begun-*"))) < 2:
        time.sleep(0.01)
    assert os.getpid() == COLLECTED_IN
"""


def test_a_failure_in_another_lane_is_told_at_once_and_fails_the_run(folder: Path) -> None:
    """Each of two lanes has a file that the other one waits for."""
    for name, path in (("a", "unit"), ("c", "contract")):
        (folder / "tests" / path / "test_x.py").write_text(MEETS.format(name=name))
    code, printed = run_lanes(folder, 2)
    assert code == 1
    assert len(re.findall(r"^FAILED tests/.*, in another lane$", printed, re.MULTILINE)) == 1
    assert "1 failed" in printed and "a lane has ended with exit code 1" in printed
