"""Crash points: every one has a name, dies as told, and only as told."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cairn
from cairn.crash import POINTS, crash_point
from cairn.testing import (
    SimulatedCrash,
    call_at_points,
    crash_env,
    crash_points,
    simulated_crash,
)


def test_crash_points_are_those_of_drivers_and_those_of_slots() -> None:
    assert crash_points() == tuple(POINTS)
    assert set(crash_points("driver")) | set(crash_points("slot")) == set(POINTS)
    assert not set(crash_points("driver")) & set(crash_points("slot"))


def test_the_points_in_the_code_are_exactly_those_with_a_name() -> None:
    passed: set[str] = set()
    for file in Path(cairn.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "crash_point":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), file
                passed.add(argument.value)
    assert passed == set(POINTS)


def test_a_simulated_crash_strikes_at_the_given_pass_and_once() -> None:
    with simulated_crash("driver.collected", nth=2):
        crash_point("driver.collected")
        crash_point("driver.recovered")
        with pytest.raises(SimulatedCrash) as caught:
            crash_point("driver.collected")
        assert caught.value.point == "driver.collected"
        crash_point("driver.collected")
    crash_point("driver.collected")


def test_a_simulated_crash_is_no_exception_that_anybody_handles() -> None:
    assert not issubclass(SimulatedCrash, Exception)


def test_whoever_is_told_of_a_pass_may_pass_points_itself() -> None:
    told = []

    def tell(point: str) -> None:
        told.append(point)
        crash_point("driver.recovered")

    with call_at_points(tell):
        crash_point("driver.collected")
        crash_point("driver.collected")
    crash_point("driver.collected")
    assert told == ["driver.collected"] * 2


def test_unknown_points_and_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="no crash point"):
        crash_env("driver.lunch")
    with pytest.raises(ValueError, match="counted from 1"):
        crash_env("driver.collected", nth=0)
    with pytest.raises(ValueError, match="no crash point"), simulated_crash("nowhere"):
        pass


THREE_TURNS = """
from cairn.crash import crash_point
for turn in range(3):
    print(turn, flush=True)
    crash_point("driver.collected")
"""
EVERY_POINT = """
from cairn.crash import POINTS, crash_point
for point in POINTS:
    crash_point(point)
    print(point, flush=True)
"""


def run(environment: dict[str, str], program: str = THREE_TURNS) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_a_process_that_was_told_nothing_lives_through_every_point() -> None:
    assert run({}, EVERY_POINT) == (0, "".join(f"{point}\n" for point in POINTS))


def test_a_process_dies_by_sigkill_at_the_nth_pass() -> None:
    assert run(crash_env("driver.collected", nth=2)) == (-signal.SIGKILL, "0\n1\n")
    assert run(crash_env("driver.recovered")) == (0, "0\n1\n2\n")


def test_with_once_the_next_process_lives(tmp_path: Path) -> None:
    environment = crash_env("driver.collected", once=tmp_path / "crashed")
    assert run(environment) == (-signal.SIGKILL, "0\n")
    assert run(environment) == (0, "0\n1\n2\n")


def test_a_misspelt_point_in_the_environment_is_an_error() -> None:
    code, _ = run({"CAIRN_CRASH_AT": "driver.colected"})
    assert code == 1
