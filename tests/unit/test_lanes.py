"""Lanes share the tests of a folder: see tests/lanes.py."""

from __future__ import annotations

import os
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


def lane(folder: Path) -> subprocess.Popen[str]:
    call = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lanes", "-p", "no:cacheprovider"]
    call += ["--import-mode=importlib", "--lanes=taken", "--tell=told", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(call, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def test_lanes_run_every_test_once_and_fast_ones_before_slow_ones(folder: Path) -> None:
    lanes = [lane(folder), lane(folder)]
    assert [each.communicate(timeout=60) and each.returncode for each in lanes] == [0, 0]
    ran = [name for name in log(folder) if name.startswith("test_")]
    assert sorted(ran) == [f"test_{name}" for name in "abcdef"]
    # Each lane goes from fast to slow; of one file, tests follow each other.
    assert ran.index("test_a") < ran.index("test_b") and ran.index("test_e") < ran.index("test_f")


def test_a_lane_keeps_what_is_of_the_session_from_its_first_file_to_its_last(folder: Path) -> None:
    only = lane(folder)
    only.communicate(timeout=60)
    assert log(folder) == ["begin", *(f"test_{name}" for name in "abcefd"), "end"]


def test_no_lane_begins_a_slow_test_when_a_fast_one_has_failed(folder: Path) -> None:
    file = folder / "tests/unit/test_x.py"
    file.write_text(file.read_text().replace("True", "False", 1))
    first = lane(folder)
    first.communicate(timeout=60)
    assert first.returncode == 1
    assert log(folder) == ["begin", "test_a", "test_b", "test_c", "end"]
    assert "FAILED tests/unit/test_x.py::test_a" in (folder / "told").read_text()
    second = lane(folder)
    second.communicate(timeout=60)
    assert log(folder) == ["begin", "test_a", "test_b", "test_c", "end"]
