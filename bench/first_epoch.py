"""How long from `python quickstart.py` to the first epoch, compared with a bare PySpark program?

The bare program is what a user writes without us: a plain session, the same source and trigger, a
`mapInArrow` that changes nothing, a writer that drops the rows. Each run is a process of its own in
an empty folder; runs alternate. "first" is a start without an archive of the JVM's classes, as the
first one on a machine, "later" one that finds the archive which the first has left.

CPU seconds of all processes are measured too: on a busy machine they say more than the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from harness import note, report, work_dir

from cairn.storage.log import Log
from cairn.storage.store import open_store

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"
MARK = "CAIRN_BENCH_RUN"
TIMEOUT_S = 600

BARE = """
from pyspark.sql import SparkSession


def same(batches):
    yield from batches


def write(rows, batch):
    rows.mapInArrow(same, rows.schema).write.format("noop").mode("overwrite").save()


spark = SparkSession.builder.appName("bare").getOrCreate()
payments = (
    spark.readStream.format("rate-micro-batch")
    .option("rowsPerBatch", 200)
    .load()
    .selectExpr("value % 20 AS account", "pmod(hash(value), 1000) AS amount")
)
writer = payments.writeStream.foreachBatch(write).option("checkpointLocation", "checkpoint")
writer.trigger(processingTime="1 second").start().awaitTermination()
"""


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float


def has_batch(folder: Path) -> bool:
    return (folder / "checkpoint" / "commits" / "0").exists()


def has_epoch(folder: Path) -> bool:
    checkpoint = folder / "checkpoint" / "spending"
    is_there = (checkpoint / "epochs").exists()
    return is_there and Log(open_store(str(checkpoint))).newest_epoch() is not None


def measure(
    program: str, folder: Path, is_done: Callable[[Path], bool], cache: Path, archive: str
) -> Spent:
    """Run a program until it is done, then end it with every process it has started."""
    folder.mkdir(parents=True)
    (folder / "quickstart.py").write_text(program)
    environment = {
        **os.environ,
        MARK: str(folder),
        "PYSPARK_PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(cache),
        "CAIRN_CLASS_ARCHIVE": archive,
        "CAIRN_RUNTIME_DIR": str(folder / "r"),
    }
    (folder / "r").mkdir(mode=0o700)
    began_s = time.monotonic()
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "quickstart.py"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        while not is_done(folder):
            if child.poll() is not None or time.monotonic() - began_s > TIMEOUT_S:
                raise SystemExit(f"no epoch:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        wall_s = time.monotonic() - began_s
        cpu_s = 0.0
        for process in find_processes(folder):
            with contextlib.suppress(psutil.NoSuchProcess):  # A worker may just have ended.
                cpu_s += sum(process.cpu_times()[:4])
        return Spent(wall_s, cpu_s)
    finally:
        for process in find_processes(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return every process with the mark of a run, slots and workers included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder):
                found.append(process)
        except psutil.Error:
            pass
    return found


def make_archive(cache: Path) -> None:
    """Have a first program leave its archive behind, while nothing is measured."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYSPARK_PYTHON": sys.executable}
    program = "import cairn; cairn.session('first').stop()"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    began_s = time.monotonic()
    while not list(cache.glob("cairn/classes/*.jsa")):
        failed = [path.read_text() for path in cache.glob("cairn/classes/*.failed")]
        if failed or time.monotonic() - began_s > TIMEOUT_S:
            raise SystemExit(f"no archive of classes was made: {failed}")
        time.sleep(0.5)


def medians(runs: list[Spent]) -> dict[str, float]:
    return {
        "wall_s": round(statistics.median(run.wall_s for run in runs), 2),
        "cpu_s": round(statistics.median(run.cpu_s for run in runs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    programs: list[tuple[str, str, Callable[[Path], bool], str]] = [
        ("bare", BARE, has_batch, "0"),
        ("first", QUICKSTART.read_text(), has_epoch, "0"),
        ("later", QUICKSTART.read_text(), has_epoch, "1"),
    ]
    spent: dict[str, list[Spent]] = {name: [] for name, *_ in programs}
    with work_dir() as work:
        note("making the archive of classes that later starts find")
        make_archive(work / "cache")
        for index in range(options.runs):
            for name, program, is_done, archive in programs:
                run = measure(program, work / f"{name}{index}", is_done, work / "cache", archive)
                spent[name].append(run)
                note(f"{name}: {run.wall_s:.1f} s, {run.cpu_s:.1f} s of CPU")
    result: dict[str, Any] = {name: medians(runs) for name, runs in spent.items()}
    ratios = {
        name: round(result[name]["wall_s"] / result["bare"]["wall_s"], 3)
        for name in ("first", "later")
    }
    cpu = {
        name: round(result[name]["cpu_s"] / result["bare"]["cpu_s"], 3)
        for name in ("first", "later")
    }
    report(
        "first_epoch",
        {
            "of_bare": ratios["later"],
            "of_bare_without_archive": ratios["first"],
            "cpu_of_bare": cpu,
            "aim": {"of_bare": 1.15},
            "medians": result,
            "runs": {name: [run._asdict() for run in runs] for name, runs in spent.items()},
        },
    )


if __name__ == "__main__":
    main()
