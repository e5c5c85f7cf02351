"""How long from the creation of an event until a reader sees it in the sink?

A process of its own makes events at a rate, each with the time it was made, in a file every tenth
of a second; it also polls the target and notes when it first sees each of them. The job only
passes them on. Beside it the bare `foreachBatch` of the same trigger that writes the same way:
`df.write.parquet`, or `COPY` over a connection that stays open. Then the curve over
`checkpoint_every`: output that is visible only after a checkpoint interval, as in Flink.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import real_servers as servers
from harness import RESULTS, note, percentile, report, work_dir
from plot import Panel, write_chart

import cairn
from cairn import Job, sinks

SCHEMA = "id long, made_ms long, text string"
FILE_EVERY_S = 0.1
POLL_EVERY_S = 0.01
TARGET = 1.5
RATES = (100, 1000, 10_000)
USUAL_RATE = 1000
AT_ONCE = "0 seconds"
"""A trigger: one batch right after the other."""
CURVE_TRIGGER = "500 milliseconds"
INTERVALS = (1, 2, 5, 10)
WARM_UP_FILES = 5


# The world outside: one process, with the only clock that counts


class Seen:
    """The latency of each event, from the creation times of those that arrived."""

    def __init__(self) -> None:
        self.made: list[np.ndarray[Any, Any]] = []
        self.took: list[np.ndarray[Any, Any]] = []

    def add(self, made_ms: Any) -> None:
        made = np.asarray(made_ms, dtype=np.int64)
        self.made.append(made)
        self.took.append(time.time() * 1000 - made)

    @property
    def count(self) -> int:
        return sum(map(len, self.made))


class Reader(ABC):
    """Polls a target; each event is new to it once."""

    @abstractmethod
    def look(self, seen: Seen) -> None: ...


class FolderReader(Reader):
    """Plain Parquet files in a folder, whole as soon as they are there."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._known: set[str] = set()

    def new_files(self) -> list[str]:
        if not os.path.isdir(self.folder):
            return []
        names = {n for n in os.listdir(self.folder) if n.endswith(".parquet") and n[0] not in "._"}
        new = names - self._known
        self._known |= new
        return [os.path.join(self.folder, name) for name in new]

    def look(self, seen: Seen) -> None:
        for file in self.new_files():
            seen.add(pq.read_table(file, columns=["made_ms"])["made_ms"].to_numpy())


class ListReader(FolderReader):
    """The files of committed epochs: those that their lists name."""

    def new_files(self) -> list[str]:
        lists = {str(path) for path in Path(self.folder).glob("_cairn/*/*/epochs/*.json")}
        new = lists - self._known
        self._known |= new
        return [
            os.path.join(self.folder, file["name"])
            for path in sorted(new)
            for file in json.loads(Path(path).read_bytes())["files"]
        ]


class TableReader(Reader):
    def __init__(self, uri: str, table: str) -> None:
        import psycopg

        self._connection = psycopg.connect(uri, autocommit=True)
        self._query = f"select id, made_ms from {table} where id > %s"
        self._last = -1 - WARM_UP_FILES

    def look(self, seen: Seen) -> None:
        rows = self._connection.execute(self._query, [self._last]).fetchall()
        if rows:
            self._last = max(id for id, _ in rows)
            seen.add([made for _, made in rows])


READERS = {"folder": FolderReader, "lists": ListReader, "table": TableReader}


def put(folder: Path, name: str, ids: Any, made_ms: Any) -> None:
    """A file of events; a stream sees all of it or nothing."""
    texts = [f"event {id}" for id in ids]
    hidden = folder / f".{name}.parquet"
    pq.write_table(pa.table({"id": ids, "made_ms": made_ms, "text": texts}), hidden)
    hidden.rename(folder / f"{name}.parquet")


def outside(source: str, rate: int, seconds: float, reader: tuple[str, ...], answers: Any) -> None:
    """Make events for so long, watch until all are seen, answer how long each took."""
    kind, *arguments = reader
    polls = READERS[kind](*arguments)
    folder = Path(source)
    warm_up = Seen()
    for number in range(WARM_UP_FILES):
        put(folder, f"warm-up-{number}", np.array([number - WARM_UP_FILES]), np.array([0]))
        _poll(polls, warm_up, lambda: warm_up.count > number, 90)  # noqa: B023
    seen = Seen()
    made = 0
    over = threading.Event()

    def make() -> None:
        nonlocal made
        rows = max(1, round(rate * FILE_EVERY_S))
        started = time.time()
        for number in range(int(seconds / FILE_EVERY_S)):
            end = started + (number + 1) * FILE_EVERY_S
            time.sleep(max(0.0, end - time.time()))
            # As if each had come by itself, evenly, since the file before.
            times = np.linspace(end - FILE_EVERY_S, end, rows, endpoint=False) * 1000
            put(folder, f"{number:06d}", np.arange(made, made + rows), times.astype(np.int64))
            made += rows
        over.set()

    threading.Thread(target=make, daemon=True).start()
    _poll(polls, seen, lambda: over.is_set() and seen.count >= made, seconds + 60)
    took = np.concatenate([*seen.took, np.empty(0)])
    answers.put({"made": made, "seen": seen.count, "took_ms": took.tolist()})


def _poll(reader: Reader, seen: Seen, is_done: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not is_done() and time.monotonic() < deadline:
        reader.look(seen)
        time.sleep(POLL_EVERY_S)


# The two ways in


def source_of(spark: Any, folder: Path) -> Any:
    return spark.readStream.schema(SCHEMA).parquet(str(folder))


def bare(spark: Any, work: Path, trigger: str, write: Callable[[Any, int], None]) -> Any:
    query = (
        source_of(spark, work / "in")
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(work / "checkpoint"))
        .trigger(processingTime=trigger)
        .start()
    )
    return query.stop


def through_cairn(spark: Any, work: Path, trigger: str, sink: sinks.Sink, every: int) -> Any:
    job = Job("latency")
    job.source("events", source_of(spark, work / "in")).sink_to(sink, uid="out")
    more = {"checkpoint_every": every} if every > 1 else {}
    run = job.start(checkpoint=str(work / "checkpoint"), parallelism=2, trigger=trigger, **more)
    return run.stop


class Measured:
    """Runs one after the other, on one session and one server."""

    def __init__(self, spark: Any, work: Path) -> None:
        self.spark = spark
        self.work = work
        self.uri = servers.postgres()
        self._runs = 0

    def run(
        self, way: str, target: str, rate: int, trigger: str, seconds: float, every: int = 1
    ) -> dict[str, Any]:
        self._runs += 1
        work = self.work / str(self._runs)
        (work / "in").mkdir(parents=True)
        start, reader = self._set_up(way, target, work, trigger, every)
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        world = context.Process(
            target=outside,
            args=(str(work / "in"), rate, seconds, reader, answers),
        )
        stop = start()
        world.start()
        try:
            answer = answers.get(timeout=seconds + 300)
        finally:
            stop()
            world.join(10)
        if answer["seen"] != answer["made"]:
            raise SystemExit(f"{way} {target}: {answer['seen']} of {answer['made']} events seen")
        took = answer["took_ms"]
        result = {f"p{p}_ms": percentile(took, p) for p in (25, 50, 75, 99)}
        note(f"{target}, {rate} rows/s, {trigger}, every {every}: {way} {result}")
        return result

    def _set_up(
        self, way: str, target: str, work: Path, trigger: str, every: int
    ) -> tuple[Callable[[], Any], tuple[str, ...]]:
        if target == "files":
            out = str(work / "out")
            if way == "bare":

                def append(df: Any, batch_id: int) -> None:
                    df.write.mode("append").parquet(out)

                return lambda: bare(self.spark, work, trigger, append), ("folder", out)
            sink: sinks.Sink = sinks.Files(out)
            return lambda: through_cairn(self.spark, work, trigger, sink, every), ("lists", out)
        table = f"out_{self._runs}"
        connection = self._new_table(table)
        reader = ("table", self.uri, table)
        if way == "bare":

            def copy(df: Any, batch_id: int) -> None:
                text = pa.BufferOutputStream()
                pa.csv.write_csv(df.toArrow(), text, pa.csv.WriteOptions(include_header=False))
                with (
                    connection.cursor() as cursor,
                    cursor.copy(f"copy {table} from stdin (format csv)") as into,
                ):
                    into.write(text.getvalue())
                connection.commit()

            return lambda: bare(self.spark, work, trigger, copy), reader
        into = sinks.Postgres(self.uri, table)
        return lambda: through_cairn(self.spark, work, trigger, into, every), reader

    def _new_table(self, table: str) -> Any:
        import psycopg

        connection = psycopg.connect(self.uri)
        connection.execute(f"create table {table} (id bigint, made_ms bigint, text text)")
        connection.commit()
        return connection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="of a run")
    parser.add_argument("--trigger", default="1 second")
    parser.add_argument("--targets", default="files,postgres")
    parser.add_argument("--quick", action="store_true", help="one rate, one interval, not kept")
    options = parser.parse_args()
    targets = options.targets.split(",")
    rates, intervals = ((USUAL_RATE,), (5,)) if options.quick else (RATES, INTERVALS)
    seconds = 4 if options.quick else options.seconds
    spark = cairn.session("bench", master="local[2]", ui__enabled=False)
    at_rates: dict[str, dict[str, Any]] = {}
    at_once: dict[str, dict[str, Any]] = {}
    curve: dict[str, dict[str, Any]] = {}
    with work_dir() as work:
        measured = Measured(spark, work)

        def compare(target: str, rate: int, trigger: str) -> dict[str, Any]:
            ways = {
                way: measured.run(way, target, rate, trigger, seconds) for way in ("bare", "cairn")
            }
            ratio = ways["cairn"]["p50_ms"] / ways["bare"]["p50_ms"]
            return {"p50_of_bare": round(ratio, 2), **ways}

        for target in targets:
            at_rates[target] = {str(r): compare(target, r, options.trigger) for r in rates}
            at_once[target] = compare(target, USUAL_RATE, AT_ONCE)
        for every in intervals:
            # Long enough for two intervals and more.
            curve[str(every)] = measured.run(
                "cairn", targets[0], USUAL_RATE, CURVE_TRIGGER, max(seconds, 1.3 * every), every
            )
    if not options.quick:
        draw(curve, targets[0])
    usual = {target: found[str(USUAL_RATE)] for target, found in at_rates.items()}
    report(
        "latency",
        {
            "p50_of_bare": {target: each["p50_of_bare"] for target, each in usual.items()},
            "p50_ms": {target: each["cairn"]["p50_ms"] for target, each in usual.items()},
            "required": {"p50_of_bare": TARGET},
            "trigger": options.trigger,
            "by_rate": at_rates,
            "one_batch_after_the_other": at_once,
            "by_checkpoint_every": {"trigger": CURVE_TRIGGER, targets[0]: curve},
        },
        keep=not options.quick,
    )


def draw(curve: dict[str, dict[str, Any]], target: str) -> None:
    panel = Panel(
        title=f"into {target}, {USUAL_RATE:,} rows/s",
        x_title="checkpoint_every",
        names=list(curve),
        values=[point["p50_ms"] for point in curve.values()],
        low=[point["p25_ms"] for point in curve.values()],
        high=[point["p75_ms"] for point in curve.values()],
    )
    write_chart(
        RESULTS / "latency.svg",
        "From the creation of an event until it is visible",
        "ms, median",
        f"exactly-once, a batch every {CURVE_TRIGGER}; bars: the middle half",
        [panel],
    )


if __name__ == "__main__":
    main()
