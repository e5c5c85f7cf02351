"""The README's program runs when pasted, survives a kill and continues; its numbers are real."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn.cli import app
from cairn.storage.log import Log
from cairn.storage.manifest import Record
from cairn.storage.store import open_store
from tests.marks import for_soak
from tests.spark.attached import Attachment
from tests.spark.conftest import spark as spark

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def program() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return str(code)


def records(checkpoint: Path) -> list[Record]:
    return list(Log(open_store(str(checkpoint))).records()) if checkpoint.exists() else []


def milestones(output: str) -> list[tuple[int, int, int]]:
    rows = re.findall(r"account=(\d+), payments=(\d+), spent=(\d+)", output)
    return [(int(a), int(p), int(s)) for a, p, s in rows]


def test_quickstart_is_the_program_of_the_readme() -> None:
    assert (ROOT / "examples" / "quickstart.py").read_text() == program()


def test_every_command_the_readme_shows_exists() -> None:
    commands = set(re.findall(r"^cairn (\w+)", README, flags=re.MULTILINE))
    assert commands >= {"ls", "show", "verify"}
    for command in commands:
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0, command


def test_numbers_of_readme_and_benchmarks_page_are_those_of_the_results() -> None:
    script = runpy.run_path(str(ROOT / "bench" / "readme.py"))
    pages = {README: script["comparisons"]()}
    pages[(ROOT / "docs" / "benchmarks.md").read_text()] = script["measurements"]()
    for text, table in pages.items():
        assert script["fill_in"](text, table) == text, "run bench/readme.py"
    assert len(pages[README].splitlines()) <= 2 + 10, "ten numbers are enough for a README"
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    marks = script["FAILOVER_START"], script["FAILOVER_END"]
    assert script["fill_in"](page, script["failovers"](), *marks) == page, "run bench/readme.py"
    marks = script["NEXMARK_START"], script["NEXMARK_END"]
    assert script["fill_in"](README, script["nexmark"](), *marks) == README, "run bench/readme.py"


def start_program(folder: Path, on: Attachment | None = None) -> subprocess.Popen[str]:
    """Start the program, with its own Spark or on that of the tests.

    It runs until a file says that it is enough, however busy the machine is.
    """
    wait = "run.wait(20)"
    assert program().count(wait) == 1
    patient = program().replace(wait, "while not run.wait(0.1) and not ENOUGH.exists(): pass")
    header = "from pathlib import Path\nENOUGH = Path('enough')\n"
    (folder / "quickstart.py").write_text(header + patient)
    runner = [] if on is None else ["-m", "tests.spark.attached"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, *runner, "quickstart.py"],
        cwd=folder,
        env={**os.environ, **environment, **({} if on is None else on.environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("own_spark", [False, for_soak(True)])
def test_the_program_killed_and_started_again_counts_every_payment_once(
    spark: Any, tmp_path: Path, own_spark: bool
) -> None:
    """It is killed with the Spark it has started; its second run starts another or uses ours."""
    checkpoint = tmp_path / "checkpoint" / "spending"

    def watch(child: subprocess.Popen[str], epochs: int) -> list[tuple[int, int, int]]:
        """Read what it prints until it has reached a milestone and committed more epochs."""
        assert child.stdout is not None
        found: list[tuple[int, int, int]] = []
        before = len(records(checkpoint))
        for line in child.stdout:
            found += milestones(line)
            if found and len(records(checkpoint)) >= before + epochs:
                return found
        raise AssertionError(f"it ended too early: {child.communicate()[1]}")

    with start_program(tmp_path) as first:
        before = watch(first, epochs=3)
        first.send_signal(signal.SIGKILL)
        before += milestones(first.communicate()[0])
    with contextlib.ExitStack() as stack:
        on = None if own_spark else stack.enter_context(contextlib.closing(Attachment(spark)))
        second = stack.enter_context(start_program(tmp_path, on))
        after = watch(second, epochs=3)
        (tmp_path / "enough").touch()
        printed, errors = second.communicate(timeout=200)
    assert second.returncode == 0, errors
    after += milestones(printed)
    # A payment lost or counted twice would show in every total that follows.
    for account, payments, spent in before + after:
        assert (payments, spent) in possible_totals(account), account


def possible_totals(account: int) -> set[tuple[int, int]]:
    """Return every (payments, spent) of an account, by the program's own arithmetic."""
    totals = set()
    spent = 0
    for count in range(1, 600):
        spent += spark_hash(account + 20 * (count - 1)) % 1000
        totals.add((count, spent))
    return totals


def spark_hash(value: int) -> int:
    """Return Spark's `hash` of a long: Murmur3 (x86, 32 bits) with seed 42, as a signed int."""
    h = 42
    for word in (value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF):
        k = word * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        k = k * 0x1B873593 & 0xFFFFFFFF
        h ^= k
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 8
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h
