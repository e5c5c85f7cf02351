"""`cairn new`: what it writes runs, and nothing that is there is touched."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cairn.cli.job_file import load_build
from tests.unit.cli import command_line

call = partial(command_line.call, "new")


def test_a_new_project_has_a_job_a_test_that_passes_and_how_to_run_it(tmp_path: Path) -> None:
    folder = tmp_path / "spending-2"
    result = call(folder)
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "job.py", "test_job.py"]
    assert result.stdout.splitlines()[-1] == f"next: cd {folder} && python job.py"
    module, build = load_build(f"{folder}/job.py:build", [])
    assert build is module.build
    assert 'Job("spending-2")' in (folder / "job.py").read_text()
    assert "job 'spending-2'" in str(ast.get_docstring(ast.parse((folder / "job.py").read_text())))
    tested = subprocess.run(
        [sys.executable, "test_job.py"],
        cwd=folder, env=os.environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (tested.stdout, tested.returncode) == ("passed\n", 0), tested.stderr


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("mine")
    result = call(tmp_path)
    assert result.exit_code == 2 and "already exists" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]
    assert (tmp_path / "job.py").read_text() == "mine"
    result = call(tmp_path / "job.py")
    assert result.exit_code == 2


@pytest.mark.parametrize("name", ["7days", "a b", "spending.py", 'x"'])
def test_a_name_that_cannot_be_a_jobs_is_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    result = call(tmp_path / name)
    assert result.exit_code == 2 and "is not a name for a job" in result.stderr
    assert not (tmp_path / name).exists()
