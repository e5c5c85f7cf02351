"""`cairn explain`: a job in a file, shown without running it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn.cli import app

PROGRAM = """
from cairn import Job, sinks
from tests.unit.plan.programs import process, source

def build(spark, name):
    print("building")
    job = Job(name)
    process(source(job, "s"), "a").sink_to(sinks.Noop(), uid="out")
    return job

def nothing(spark):
    return None
"""


class Session:
    stopped = 0

    def stop(self) -> None:
        Session.stopped += 1


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job without Spark: the session is only handed on."""
    module = importlib.import_module("cairn.session")
    monkeypatch.setattr(module, "session", lambda name, **conf: Session())
    monkeypatch.setattr(Session, "stopped", 0)
    file = tmp_path / "shown.py"
    file.write_text(PROGRAM)
    return str(file)


def call(*args: str) -> Any:
    return CliRunner().invoke(app, ["explain", *args])


def test_explain_prints_the_graph_and_ends_the_session(program: str) -> None:
    result = call(f"{program}:build", "--", "shop")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("job shop: 1 level")
    assert "building" in result.stderr
    assert Session.stopped == 1


def test_explain_as_json_prints_nothing_else(program: str) -> None:
    facts = json.loads(call(f"{program}:build", "--json", "--", "shop").stdout)
    assert facts["job"] == "shop"
    assert [operator["uid"] for operator in facts["operators"]] == ["a"]


def test_explain_draws_into_a_file(program: str, tmp_path: Path) -> None:
    drawn = tmp_path / "shop.svg"
    result = call(f"{program}:build", "--svg", str(drawn), "--", "shop")
    assert result.exit_code == 0, result.output
    assert drawn.read_text().startswith("<svg")
    assert result.stdout == ""


def test_explain_says_what_is_wrong_with_the_command(program: str, tmp_path: Path) -> None:
    missing = call(f"{program}:build", "--svg", str(tmp_path / "no" / "x.svg"), "--", "shop")
    assert missing.exit_code != 0
    assert "the folder of" in missing.stderr
    assert Session.stopped == 0, "found before Spark starts"
    assert "expected a cairn.Job" in call(f"{program}:nothing").stderr
