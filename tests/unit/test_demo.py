"""What the demo says, without Spark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cairn.demo import play
from cairn.demo.check import Comparison
from cairn.demo.stage import Stage, Standing


def test_the_verdict_is_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = Comparison("payments", 5000, 5000, 0, 0, 0, 0)
    bad = Comparison("alerts", 7, 6, lost=1, duplicated=0, unknown=0, wrong=0)
    Stage(Standing(5000)).verdict([good, bad], {"slot": 1, "driver": 0}, {"standby": 2.5})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert "✓ payments        5,000  5,000     0" in "\n".join(lines)
    assert "✗ alerts              7      6     1" in "\n".join(lines)
    assert "5,000 events in, 5,000 counted, 0 lost, 0 duplicated" in lines
    assert lines[-2:] == [
        "killed in mid-epoch: 1 slot, 0 driver",
        "without an epoch, standby: 2.5 s",
    ]


def test_the_command_to_look_around_with_can_be_typed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / ".venv" / "bin" / "cairn"
    there.parent.mkdir(parents=True)
    there.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(there.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert play._cairn() == ".venv/bin/cairn"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert play._cairn() == str(there)
    monkeypatch.setenv("PATH", str(there.parent))
    assert play._cairn() == "cairn"
