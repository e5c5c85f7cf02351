"""Ctrl-C at every stage of a start: no traceback, the exit of a signal, whole epochs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.storage.log import Log
from cairn.storage.store import open_store
from tests.marks import for_soak

pytestmark = pytest.mark.slow  # Each test starts Spark.

PROGRAM = """
import cairn
from cairn import Job, KeyedProcess, sinks, state

class Count(KeyedProcess):
    n = state.Value("long", default=0)
    def process(self, row, ctx):
        self.n.set(self.n.get() + 1)
        yield row.k, self.n.get()

def build(spark):
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    job = Job("ticks")
    keyed = job.source("in", rows.selectExpr("value % 3 AS k")).key_by("k")
    keyed.process(Count(), schema="k long, n long", uid="c").sink_to(sinks.Noop(), uid="o")
    return job

if __name__ == "__main__":
    spark = cairn.session("ticks", master="local[2]")
    with build(spark).start(checkpoint="ckpt", parallelism=2) as run:
        run.wait()
"""


def interrupt(folder: Path, command: list[str], at: str) -> tuple[int, str]:
    """Press Ctrl-C when a stage is reached; the exit code and all of stderr."""
    (folder / "job.py").write_text(PROGRAM)
    child = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "CAIRN_PROGRESS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    said = ""
    try:
        for line in child.stderr:
            said += line
            if at in line:
                child.send_signal(signal.SIGINT)
        return child.wait(120), said
    finally:
        if child.poll() is None:
            child.kill()


@pytest.mark.parametrize(
    "at", [for_soak("starting Spark"), for_soak("is taken over"), "first epoch is committed"]
)
def test_ctrl_c_ends_a_program_without_a_traceback_at_any_stage(at: str, tmp_path: Path) -> None:
    code, said = interrupt(tmp_path, ["job.py"], at)
    assert code == -signal.SIGINT, said
    assert at in said
    # Nothing of Spark or Python, only stages that were reached; Java announces a test's options.
    known = ("cairn ", "NOTE: Picked up JDK_JAVA_OPTIONS")
    assert [line for line in said.splitlines() if not line.startswith(known)] == []
    if at == "first epoch is committed":
        assert Log(open_store(str(tmp_path / "ckpt"))).newest_epoch() is not None


def test_ctrl_c_while_spark_starts_ends_a_command_with_exit_code_130(tmp_path: Path) -> None:
    command = ["-m", "cairn", "run", "job.py:build", "--checkpoint", "ckpt", "--master", "local[2]"]
    code, said = interrupt(tmp_path, command, "starting Spark")
    assert code == 130, said
    assert "Traceback" not in said
