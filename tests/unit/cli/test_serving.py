"""`cairn dashboard` and `cairn run --serve`: where, to whom, and that it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cairn.cli import app
from cairn.cli.serving import serve_settings
from cairn.errors import PlanError
from tests.unit.web.sites import TOKEN, content, make_checkpoint


@pytest.mark.parametrize(
    ("given", "address"),
    [(None, "127.0.0.1:0"), ("8080", "127.0.0.1:8080"), ("localhost:1", "localhost:1")],
)
def test_addresses_are_of_this_machine_unless_said_otherwise(
    given: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAIRN_TOKEN", raising=False)
    assert serve_settings(given).address == address
    with pytest.raises(PlanError, match="no token"):
        serve_settings("0.0.0.0:8080")
    monkeypatch.setenv("CAIRN_TOKEN", TOKEN)
    assert serve_settings("0.0.0.0:8080").token == TOKEN
    assert TOKEN not in repr(serve_settings("0.0.0.0:8080"))
    monkeypatch.setenv("CAIRN_TLS_KEY", "key.pem")
    with pytest.raises(PlanError, match="must both be set"):
        serve_settings("0.0.0.0:8080")


def test_dashboard_of_nothing_is_refused_and_makes_no_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["dashboard", str(tmp_path / "nothing")])
    assert result.exit_code == 2 and "the folder does not exist" in result.stderr
    assert not (tmp_path / "nothing").exists()


def test_dashboard_serves_a_checkpoint_until_it_is_told_to_end(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "ckpt")
    before = content(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "cairn", "dashboard", str(tmp_path / "ckpt")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            assert "dashboard of" in process.stdout.readline()
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{url}/api/state/count/n/5") as answer:
                assert b'"value":50' in answer.read()
            with urllib.request.urlopen(url) as answer:
                assert b"<html" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.kill()
    assert content(tmp_path) == before
