"""Make an archive of the classes that a job on Spark loads: see `cairn.driver.class_archive`.

    python -m cairn.driver.archiving TARGET SETTINGS

A small job runs in a JVM that writes its classes down when it ends. It runs at the lowest
priority, for a few minutes at most.

Always true here:
- of several processes that make the same archive one goes on, the others end at once;
- TARGET is there as a whole, or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import operator
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

from cairn import KeyedProcess, sinks, state
from cairn.driver import class_archive
from cairn.driver.class_archive import Archive
from cairn.job import Job
from cairn.session import session

SECONDS_MAX: Final = 900


class Count(KeyedProcess[Any]):
    n = state.Reducing(int, operator.add)

    def process(self, row: Any, ctx: Any) -> Iterator[Any]:
        self.n.add(1)
        yield row.k, self.n.get()


def main(archive: Archive) -> None:
    """Make it, unless another process does."""
    with archive.path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if archive.exists:
            return
        os.nice(19)
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(SECONDS_MAX)
        unfinished = archive.path.with_suffix(".unfinished")
        try:
            _dump(unfinished, archive.settings)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.rename(archive.path)
        except TimeoutError:
            pass  # The machine was busy; the next program tries again.
        except Exception as error:
            archive.failed.write_text(f"{type(error).__name__}: {error}\n")
        finally:
            unfinished.unlink(missing_ok=True)
        class_archive.remove_unused(archive.path.parent, keep=[archive.path])


def _dump(target: Path, settings: dict[str, str]) -> None:
    """Run a job as users write them, in a JVM that writes its classes to `target` at its end."""
    os.environ[class_archive.VARIABLE] = "0"
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{options} -XX:ArchiveClassesAtExit={target}".strip()
    spark = session("class-archive", **settings, master="local[2]", **{"spark.ui.port": 0})
    jvm = spark.sparkContext._gateway.proc
    try:
        with tempfile.TemporaryDirectory() as work:
            _run_job(spark, Path(work))
        spark.stop()
        # The end of its input is the end of the JVM, which then writes the archive.
        jvm.stdin.close()
        jvm.wait()
    finally:
        jvm.kill()
    if not target.exists():
        raise RuntimeError("this Java has written no archive")


def _give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _run_job(spark: Any, work: Path) -> None:
    (work / "in").mkdir()
    (work / "in" / "1.json").write_text('{"k": 1}\n')
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    files = spark.readStream.schema("k long").json(str(work / "in"))
    job = Job("class-archive")
    ticks = job.source("rate", rows.selectExpr("value % 3 AS k"))
    keyed = ticks.union(job.source("files", files)).key_by("k")
    keyed.process(Count(), schema="k long, n long", uid="count").sink_to(sinks.Noop(), uid="noop")
    with job.start(checkpoint=str(work / "checkpoint"), trigger="0 seconds") as run:
        while len(run.history()) < 3 and not run.wait(0.2):
            pass


if __name__ == "__main__":
    # An exit of the interpreter waits for nothing: the JVM is gone, slots end with it.
    with contextlib.suppress(KeyboardInterrupt):
        main(Archive(Path(sys.argv[1]), json.loads(sys.argv[2])))
