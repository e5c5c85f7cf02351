"""`cairn run` as a person or a scheduler calls it: a process of its own, real Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.marks import for_soak
from tests.spark.attached import Attachment
from tests.spark.support import ROOT

pytestmark = pytest.mark.slow

JOB = '''
import sys
from pyspark.sql import functions as F
from cairn import Job, KeyedProcess, sinks, state

class Count(KeyedProcess):
    """Known to this file only: it must reach the slots by value."""
    n = state.Value(int, default=0)
    def process(self, row, ctx):
        if row.v < 0:
            raise ValueError("negative: " + str(row.v))
        self.n.set(self.n.get() + 1)
        yield row.k, self.n.get(), row.v

def double(v):
    return v * 2

def build(spark, input_dir, out_dir):
    print("a line the job prints")
    df = spark.readStream.schema("k long, v long").parquet(input_dir)
    doubled = F.udf(double, "long")
    job = Job("count")
    (
        job.source("in", df)
        .transform(lambda rows: rows.withColumn("v", doubled("v")))
        .key_by("k")
        .process(Count(), schema="k long, n long, v long", uid="count")
        .sink_to(sinks.Files(out_dir), uid="out")
    )
    return job

def build_ticks(spark):
    df = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    job = Job("ticks")
    rows = job.source("in", df.selectExpr("value % 3 as k", "value as v")).key_by("k")
    rows.process(Count(), schema="k long, n long, v long", uid="c").sink_to(sinks.Noop(), uid="o")
    return job
'''


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "in").mkdir()
    return tmp_path


def command(job: Path, build: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "cairn", "run", f"{job}/job.py:{build}",
        "--checkpoint", str(job / "ckpt"), "--master", "local[2]", "--parallelism", "2", *more,
    ]  # fmt: skip


def cairn_run(job: Path, *more: str, on: Any = None) -> subprocess.CompletedProcess[str]:
    """Run the job in a process of its own, on its own Spark or that of a session."""
    call = command(job, "build", "--trigger", "available-now", *more)
    call += ["--", str(job / "in"), str(job / "out")]
    if on is None:
        return subprocess.run(call, capture_output=True, text=True, timeout=240)
    attachment = Attachment(on)
    call[2:2] = ["tests.spark.attached"]
    environment = {**os.environ, **attachment.environment}
    try:
        return subprocess.run(
            call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
        )
    finally:
        attachment.close()


def write(job: Path, name: str, keys: list[int], values: list[int]) -> None:
    pq.write_table(pa.table({"k": keys, "v": values}), job / "in" / f"{name}.parquet")


def written(job: Path) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for file in (job / "out").glob("*.parquet"):
        rows += [tuple(row.values()) for row in pq.read_table(file).to_pylist()]
    return sorted(rows)


def test_a_second_run_goes_on_and_json_is_all_there_is_on_stdout(spark: Any, job: Path) -> None:
    write(job, "a", [1, 1, 2], [10, 11, 12])
    first = cairn_run(job, "--json", on=spark)
    assert first.returncode == 0, first.stderr
    (epoch,) = [json.loads(line) for line in first.stdout.splitlines()]
    assert (epoch["rows_in"], epoch["rows_out"], epoch["parent"]) == (3, 3, None)
    assert epoch["state_keys"] == 2 and epoch["commit_ms"] >= 0
    assert "a line the job prints" in first.stderr

    write(job, "b", [2, 3], [13, 14])
    second = cairn_run(job, on=spark)
    assert second.returncode == 0, second.stderr
    printed, head, line, end = second.stdout.splitlines()
    assert printed == "a line the job prints" and head.startswith("count on file://")
    assert line.startswith(f"epoch {epoch['epoch'] + 2}: 2 rows, ")
    assert "2 restored" in line
    assert end.startswith("finished: 2 rows in 1 epochs")
    assert written(job) == [(1, 1, 20), (1, 2, 22), (2, 1, 24), (2, 2, 26), (3, 1, 28)]


@pytest.mark.parametrize("own_spark", [False, for_soak(True)])
def test_a_function_that_raises_ends_the_run_with_its_message_and_exit_code_1(
    spark: Any, job: Path, own_spark: bool
) -> None:
    write(job, "a", [1], [-5])
    result = cairn_run(job, "--json", on=None if own_spark else spark)
    assert result.returncode == 1
    assert result.stdout == ""
    report = result.stderr[result.stderr.rindex("FunctionError: ") :]
    assert "process() of operator 'count' raised ValueError: negative: -10" in report
    assert "Traceback" not in report
    # A line that the job prints may come in between.
    facts = [line for line in report.splitlines()[1:] if line.startswith("  ")]
    assert [line.split(":")[0] for line in facts] == ["  key", "  row", "  at", "  log", "  next"]
    # Neither Spark nor its gateway says anything of it.
    assert "org.apache.spark." not in result.stderr and "py4j" not in result.stderr
    assert result.stderr.count("negative: -10") == 1
    assert written(job) == []


@pytest.mark.soak
def test_ctrl_c_ends_the_run_after_the_epoch_under_way_with_exit_code_0(job: Path) -> None:
    call = command(job, "build_ticks", "--trigger", "0 seconds", "--json")
    with subprocess.Popen(
        call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        try:
            json.loads(child.stdout.readline())
            child.send_signal(signal.SIGINT)
            rest = [json.loads(line) for line in child.stdout]
            assert child.wait(120) == 0
        finally:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
    # What was shown is what is committed: nothing was cut off, nothing invented.
    listed = subprocess.run(
        [sys.executable, "-m", "cairn", "ls", str(job / "ckpt"), "--json"],
        capture_output=True, check=True,
    )  # fmt: skip
    newest = json.loads(listed.stdout)["records"][0]
    assert not rest or rest[-1]["epoch"] == newest["epoch"]
