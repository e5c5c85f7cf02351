"""What the Spark tests share: input in files, output from files, state read offline, slots counted.

A file is an epoch: the file source takes one per trigger, oldest first.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.job import Job
from cairn.plan.deploy import job_spec
from cairn.run import Run
from cairn.slot.folders import living_slots, run_folder
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch
from cairn.storage.store import open_store
from cairn.types import parse_schema, schema_ddl
from cairn.types.codec import codec
from tests.restored import held_contents, restored_operator
from tests.spark.attached import Attachment

ROOT = Path(__file__).parents[2]
T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Input:
    """A folder of Parquet files, read by Spark's file source one file per epoch."""

    def __init__(self, folder: Path, schema: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.schema = parse_schema(schema)
        self.count = len(list(self.folder.glob("*.parquet")))

    def add(self, *rows: Any) -> Input:
        """One more file: the rows of one epoch, as tuples in the order of the schema."""
        columns = [
            codec(field.type).encode(
                [None if v is None else codec(field.type).normalise(v) for v in column]
            )
            for field, column in zip(self.schema, zip(*rows, strict=True), strict=True)
        ]
        table = pa.Table.from_arrays(columns, schema=self.schema)
        target = self.folder / f"{self.count:05d}.parquet"
        hidden = self.folder / f".{target.name}"
        pq.write_table(table, hidden)
        # Spark orders files by modification time; a second apart leaves no doubt.
        at = T0.timestamp() + self.count
        os.utime(hidden, (at, at))
        hidden.rename(target)
        self.count += 1
        return self

    def add_all(self, files: Iterable[Iterable[Any]]) -> Input:
        for rows in files:
            self.add(*rows)
        return self

    def stream(self, spark: Any, files_per_epoch: int = 1) -> Any:
        return (
            spark.readStream.schema(schema_ddl(self.schema))
            .option("maxFilesPerTrigger", files_per_epoch)
            .parquet(str(self.folder))
        )


def finish(job: Job, checkpoint: Any, parallelism: int = 2, **more: Any) -> Any:
    """Run what is there to the end; the run, for a look at it."""
    with job.start(
        checkpoint=str(checkpoint), parallelism=parallelism, trigger="available-now", **more
    ) as run:
        assert run.wait(120), "the run did not end"
    return run


def published(folder: Any) -> list[dict[str, Any]]:
    """What a plain reader of a Files sink's folder sees."""
    files = sorted(Path(folder).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def epochs(checkpoint: Any) -> list[Epoch]:
    """The retained epochs, oldest first."""
    return list(Log(open_store(str(checkpoint))).lineage())[::-1]


def stored_state(job: Job, checkpoint: Any, epoch: int | None = None) -> dict[str, dict[str, Any]]:
    """{operator: {state: {key: value}}} of a committed epoch, restored without Spark."""
    store = open_store(str(checkpoint))
    log = Log(store)
    newest = log.newest_epoch() if epoch is None else log.epoch(epoch)
    assert newest is not None, "no epoch is committed"
    spec = job_spec(job.graph(), job_id="offline", checkpoint=store.url, backend="heap")
    found: dict[str, dict[str, Any]] = {}
    for level in spec.levels:
        for operator_spec in level.operators:
            operator = restored_operator(operator_spec, store, newest.number, spec.group_count)
            found[operator_spec.uid] = {
                name: {
                    key: list(value) if isinstance(value, list) else value
                    for key, value in held_contents(table).items()
                }
                for name, table in operator.tables.items()
            }
    return found


# Slots


def slot_pids(run_id: str) -> dict[int, int]:
    """{subtask: process id} of the slots of a run that live."""
    return {living.slot: living.process.pid for living in living_slots(run_folder(run_id))}


def slot_logs(run_id: str) -> str:
    files = sorted(run_folder(run_id).glob("*/slot-*.log"))
    return "".join(file.read_text() for file in files)


def epoch_of(run: Run) -> int:
    """The newest epoch that a run has committed; 0 before the first."""
    newest = run.metrics()
    return 0 if newest is None else newest.epoch


def eventually(holds: Callable[[], Any], within_s: float = 30.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# Driver programs


class Program:
    """A driver in a process of its own. It reports in lines of JSON on its output.

    It starts its own Spark, or runs on that of `on`, which outlives it.
    """

    def __init__(
        self,
        module: str,
        *arguments: Any,
        on: Any = None,
        run: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
        **environment: str,
    ) -> None:
        """`run` starts the process, by default on this host."""
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._attachment = None if on is None else Attachment(on)
        if self._attachment is not None:
            environment |= self._attachment.environment
        runner = [] if on is None else ["tests.spark.attached"]
        if run is subprocess.Popen:
            environment = {**os.environ, "PYTHONPATH": python_path, **environment}
        self.process = run(
            [sys.executable, "-m", *runner, f"tests.spark.programs.{module}", *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.errors = ""

    def reports(self) -> Iterator[dict[str, Any]]:
        """What it reports, as it comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def await_report(self, **wanted: Any) -> dict[str, Any]:
        """The first report that has these values."""
        for report in self.reports():
            if all(report.get(name) == value for name, value in wanted.items()):
                return report
        self.end()
        raise AssertionError(f"it ended without {wanted}:\n{self.errors[-3000:]}")

    def end(self, timeout_s: float = 120) -> list[dict[str, Any]]:
        """Wait for its end; the reports that were not read yet."""
        try:
            out, errors = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._detach()
        # Java's stack traces would bury what Python says.
        self.errors = "".join(line for line in errors.splitlines(True) if line[:4] != "\tat ")
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    @property
    def killed(self) -> bool:
        return self.process.returncode == -signal.SIGKILL

    def kill(self) -> None:
        """Also its JVM: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._detach()

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._detach()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
