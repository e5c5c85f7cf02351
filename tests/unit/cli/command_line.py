"""`cairn` as somebody types it, in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from cairn.cli import app


def call(*args: object, columns: int | None = None) -> Any:
    env = {} if columns is None else {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def json_of(*args: object) -> Any:
    result = call(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)
