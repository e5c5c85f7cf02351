"""Is cairn faster than Flink SQL, and than Spark's own streaming SQL, on Nexmark?

The queries of examples/nexmark.py over the same events, with two cores each: cairn and Spark in
`local[2]`, Flink SQL from PyPI in an embedded cluster with parallelism 2. Rows end in a sink
that drops them. Engines take turns, query by query.

A rate is the rows a query reads, divided by the seconds from the start of the job to its end
less those of the same job over a thousand events, run just before. What remains is the work:
starting a JVM, planning and starting the job, and ending it, count for nobody. Each engine is
warmed up with all events of the first query, and with 100,000 of each. The median of three runs
counts: in the first one, JVMs still compile code that only the larger input reaches. Rows per
second of CPU time, all processes of an engine together, are reported too: they change less when
something else uses the machine.

cairn commits an epoch about every 500,000 rows that a query reads, and Spark's batches are as
large. Flink has exactly-once checkpoints every 10 s, object reuse, 1 GB of managed memory, and no
wait for a last checkpoint. `flink-mini-batch` is Flink with the settings of the original
benchmark: a row per key and mini-batch, not one per input row. Spark has the state store that
goes with `--backend`. `--format parquet` is for cairn and Spark: Flink's package from PyPI reads
no Parquet.

The answers are the same (see below), the ways are not. Flink runs the SQL of the original: in q4
and q9 it joins and keeps every bid, where cairn keeps a bid until the watermark has passed it;
in q7 it joins every bid with the highest price, where cairn and Spark keep the highest bid. Flink
emits a row per input row, cairn and Spark a row per key and batch. In q14 all engines count the
letter with built-in functions.

`--write FOLDER` only writes the events. `--check` compares Flink's answers with those of a batch
query; tests/spark/test_nexmark.py does so with cairn's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nexmark_spark
import psutil
from flink import FLINK_VERSION, flink_python
from harness import SEED, note, report, work_dir
from nexmark_answers import KEYS, answers
from nexmark_events import CYCLE, SHARES, write_events

import cairn
from cairn import Job, sinks

PARALLELISM = 2
CHECKPOINT_INTERVAL_MS = 10_000
FILE_EVENTS = 500_000
"""Events in a file of each table."""
EPOCH_ROWS = 500_000
WARM_UP_EVENTS = 100_000
TINY_EVENTS = 1_000
RATE = 10_000
"""Events per second of event time."""
ENGINES = ("cairn", "flink", "flink-mini-batch", "spark")

sys.path.insert(0, str(Path(__file__).parents[1]))
examples = importlib.import_module("examples.nexmark")

Rates = dict[str, dict[str, list[float]]]
"""By query and engine, a rate per run."""
Ratios = dict[str, dict[str, float]]
"""By other engine and query, cairn's rate over its."""


class Flink:
    """A process with Flink in it, which runs one query after the other."""

    def __init__(self, work: Path) -> None:
        self._work = work
        script = Path(__file__).with_name("nexmark_flink.py")
        self._log = (work / "flink.log").open("w")
        self._process = subprocess.Popen(
            [str(flink_python()), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer()

    def run(self, query: str, folder: Path, backend: str, **more: Any) -> dict[str, Any]:
        task = {
            "query": query,
            "folder": str(folder / "halves"),
            "backend": backend,
            "mini_batch": False,
            "parallelism": PARALLELISM,
            "checkpoint_interval_ms": CHECKPOINT_INTERVAL_MS,
            "work": str(self._work),
            **more,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"Flink ended; its log: {self._log.name}")

    def close(self) -> None:
        """End it when its query has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._log.close()


class Cost(NamedTuple):
    """Time of a run: by the clock, of all cores together, and of these in cairn's slots."""

    seconds: float
    cpu_s: float
    slots_cpu_s: float


@dataclass
class Bench:
    """What the runs of all queries have in common."""

    spark: Any
    flink: Flink | None
    work: Path
    backend: str
    form: str
    runs: int = 0

    def run(self, engine: str, query: str, folder: Path) -> Cost | None:
        """Run a query from start to end; None if the engine cannot."""
        self.runs += 1
        is_flink = engine.startswith("flink")
        flink_pid = None if self.flink is None else self.flink.pid
        root, other = (flink_pid or 0, None) if is_flink else (os.getpid(), flink_pid)
        with CpuMeter(root, other) as meter:
            if is_flink:
                seconds = self.run_flink(query, folder, mini_batch=engine == "flink-mini-batch")
            elif engine == "spark" and query not in nexmark_spark.QUERIES:
                seconds = None
            else:
                seconds = self.run_here(engine, query, folder)
        return None if seconds is None else Cost(seconds, *meter.used_s())

    def run_flink(self, query: str, folder: Path, *, mini_batch: bool) -> float | None:
        assert self.flink is not None
        answer = self.flink.run(query, folder, self.backend, mini_batch=mini_batch)
        if "refused" in answer:
            note(f"Flink refuses {query}: {answer['refused'][:300]}")
        return answer.get("seconds")

    def run_here(self, engine: str, query: str, folder: Path) -> float:
        checkpoint = self.work / f"{engine}-{self.runs}"
        tables = self.tables(query, folder)
        started = time.perf_counter()
        if engine == "spark":
            run = nexmark_spark.start(query, tables, str(checkpoint), self.backend)
            run.awaitTermination()
            took = time.perf_counter() - started
            self.unload()
        else:
            job = Job(query)
            examples.ask(job, query, tables).sink_to(sinks.Noop(), uid="out")
            run = job.start(
                checkpoint=str(checkpoint),
                parallelism=PARALLELISM,
                backend=self.backend,
                trigger="available-now",
                drain=True,
            )
            run.wait()
            took = time.perf_counter() - started
        shutil.rmtree(checkpoint, ignore_errors=True)
        return took

    def unload(self) -> None:
        """Free the state of Spark's query that has ended: Spark keeps it for another minute.

        The state of a few queries fills the memory of the JVM, and all later runs pay for it.
        """
        jvm = self.spark._jvm
        stores = getattr(jvm.org.apache.spark.sql.execution.streaming.state, "StateStore$")
        getattr(stores, "MODULE$").unloadAll()
        jvm.java.lang.System.gc()

    def tables(self, query: str, folder: Path) -> dict[str, Any]:
        """Return the tables of a query as streams, cut into batches of about EPOCH_ROWS rows."""
        from pyspark.sql import functions as F

        found = {}
        names = examples.tables_of(query)
        files = max(1, EPOCH_ROWS // sum(FILE_EVENTS * SHARES[name] // CYCLE for name in names))
        for name in names:
            schema = examples.TABLES[name]
            if self.form == "csv":
                schema = schema.replace(" timestamp", " long")
            rows = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", files)
            rows = rows.format(self.form).load(str(folder / self.form / name))
            if self.form == "csv":
                times = [name for name in ("date_time", "expires") if name in rows.columns]
                rows = rows.withColumns({name: F.timestamp_millis(name) for name in times})
            found[name] = rows
        return found


class CpuMeter:
    """The CPU time of a process and its descendants, without those of another one.

    Slots end with their run, and nobody is told the time of a slot that has ended. So all
    processes are looked at several times a second; the last moments of one may be missing.
    """

    def __init__(self, root: int, other: int | None) -> None:
        self._root, self._other = root, other
        self._seen: dict[psutil.Process, tuple[float, bool]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuMeter:
        self._look()
        self._before = dict(self._seen)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def used_s(self) -> tuple[float, float]:
        """Return the time of all processes, and that of slots among them."""
        total = slots = 0.0
        for process, (after, is_slot) in self._seen.items():
            used = after - self._before.get(process, (0.0, False))[0]
            total += used
            slots += used if is_slot else 0.0
        return total, slots

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self._look()

    def _look(self) -> None:
        root = psutil.Process(self._root)
        found = {root, *root.children(recursive=True)}
        if self._other is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                other = psutil.Process(self._other)
                found -= {other, *other.children(recursive=True)}
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                is_slot = (
                    self._seen[process][1]
                    if process in self._seen
                    else "cairn.slot.nursery" in process.cmdline()
                )
                self._seen[process] = times.user + times.system, is_slot


def start_spark() -> Any:
    return cairn.session(
        "bench",
        master=f"local[{PARALLELISM}]",
        driver__memory="4g",
        ui__enabled=False,
        sql__shuffle__partitions=PARALLELISM,
        sql__session__timeZone="UTC",
    )


def check_flink(queries: list[str]) -> None:
    """Compare Flink's answers for a few events with those of a batch query."""
    with work_dir() as work:
        write_events(work / "few", 3000, rate=100, seed=SEED, slab_events=1000)
        expected = answers(work / "few" / "parquet", queries)
        flink = Flink(work)
        for query in queries:
            found = flink.run(query, work / "few", "heap", collect=True)
            if "refused" in found:
                raise SystemExit(f"Flink refuses {query}: {found['refused']}")
            is_same = apply_changes(query, found["changes"]) == sorted(
                [[as_text(value) for value in row] for row in expected[query]]
            )
            if not is_same:
                raise SystemExit(f"{query}: Flink's answer is not that of a batch query")
            note(f"{query}: Flink's answer is right, {len(expected[query]):,} rows")
        flink.close()


def apply_changes(query: str, changes: list[tuple[list[str], bool]]) -> list[list[str]]:
    """Return the rows that remain."""
    keys = KEYS.get(query)
    rows: dict[tuple[str, ...], list[list[str]]] = {}
    for row, is_put in changes:
        held = rows.setdefault(tuple(row[:keys]), [])
        if keys is not None:
            # The newest row replaces the one before, which Flink need not remove.
            held.clear()
        if is_put:
            held.append(row)
        elif keys is None:
            held.pop()
    return sorted(row for held in rows.values() for row in held)


def as_text(value: Any) -> str:
    """Return a value of a batch query as Flink shows it: without a zone, averages whole."""
    if isinstance(value, dt.datetime):
        return str(value.replace(tzinfo=None))
    return str(int(value)) if isinstance(value, float) else str(value)


def main() -> None:
    options = parse_options()
    if options.write:
        folder = Path(options.write)
        write_events(folder, options.events, rate=RATE, seed=SEED, slab_events=FILE_EVENTS)
        return
    queries = options.queries.split(",") if options.queries else list(examples.QUERIES)
    engines = options.engines
    if options.check:
        check_flink(queries)
        return
    spark = start_spark()
    with work_dir() as work:
        note(f"writing {options.events:,} events ...")
        made = {"rate": RATE, "seed": SEED, "slab_events": FILE_EVENTS}
        counts = write_events(work / "events", options.events, **made)
        write_events(work / "warm", WARM_UP_EVENTS, **made)
        few = write_events(work / "tiny", TINY_EVENTS, **made)
        uses_flink = any(engine.startswith("flink") for engine in engines)
        flink = Flink(work) if uses_flink else None
        bench = Bench(spark, flink, work, options.backend, options.format)
        rates: Rates = {}
        per_cpu: Rates = {}
        in_slots: dict[str, float] = {}
        # Interrupted, it reports the queries that are measured.
        with contextlib.suppress(KeyboardInterrupt):
            for engine in engines:
                # JVMs compile what all queries use, such as the parser, before one is measured.
                bench.run(engine, queries[0], work / "events")
            for query in queries:
                rows = sum(counts[name] - few[name] for name in examples.tables_of(query))
                costs = measure(bench, query, engines, rows, options.runs)
                rates[query] = {e: [rows / c.seconds for c in each] for e, each in costs.items()}
                per_cpu[query] = {e: [rows / c.cpu_s for c in each] for e, each in costs.items()}
                shares = [cost.slots_cpu_s / cost.cpu_s for cost in costs.get("cairn", ())]
                in_slots |= {query: round(statistics.median(shares), 2)} if shares else {}
        if flink is not None:
            flink.close()
    finish(options, rates, per_cpu, in_slots)


def measure(
    bench: Bench, query: str, engines: list[str], rows: int, runs: int
) -> dict[str, list[Cost]]:
    """Run a query on every engine in turn; return the cost of each run, without its start."""
    able = [e for e in engines if bench.run(e, query, bench.work / "warm") is not None]
    costs: dict[str, list[Cost]] = {engine: [] for engine in able}
    for index in range(runs):
        for engine in able if index % 2 == 0 else able[::-1]:
            tiny = bench.run(engine, query, bench.work / "tiny")
            whole = bench.run(engine, query, bench.work / "events")
            assert tiny is not None and whole is not None, "it could before"
            cost = Cost(*(max(a - b, 0.001) for a, b in zip(whole, tiny, strict=True)))
            costs[engine].append(cost)
            note(
                f"{query} {engine}: {rows / cost.seconds:,.0f} rows/s "
                f"({whole.seconds:.2f} - {tiny.seconds:.2f} s), "
                f"{rows / cost.cpu_s:,.0f} per CPU second ({whole.cpu_s:.2f} - {tiny.cpu_s:.2f} s, "
                f"slots {cost.slots_cpu_s:.2f} s)"
            )
    return costs


def finish(
    options: argparse.Namespace, rates: Rates, per_cpu: Rates, in_slots: dict[str, float]
) -> None:
    """Report medians, ratios and their geometric means, and print them as a table."""
    ratios, of_cpu = compare(medians(rates)), compare(medians(per_cpu))
    parts = ["nexmark", options.backend, options.format]
    report(
        "_".join(part for part in parts if part not in ("heap", "csv")),
        {
            "ratios": ratios,
            "geometric_mean": {peer: geometric_mean(each) for peer, each in ratios.items()},
            "ratios_per_cpu_s": of_cpu,
            "geometric_mean_per_cpu_s": {peer: geometric_mean(e) for peer, e in of_cpu.items()},
            "required": {"each of flink": 1.0, "mean of flink": 1.5, "each of spark": 0.9},
            "rows_per_s": medians(rates),
            "rows_per_cpu_s": medians(per_cpu),
            "cairn_cpu_in_slots": in_slots,
            "runs": {q: {e: [round(r) for r in x] for e, x in o.items()} for q, o in rates.items()},
            "events": options.events,
            "events_per_s_of_event_time": RATE,
            "rows_per_epoch": EPOCH_ROWS,
            "parallelism": PARALLELISM,
            "backend": options.backend,
            "format": options.format,
            "flink": {
                "version": FLINK_VERSION,
                "checkpoint_interval_ms": CHECKPOINT_INTERVAL_MS,
                "object_reuse": True,
                "managed_memory": "1g",
                "mini_batch": "allow-latency 2 s, size 50000, split distinct, where named so",
                "waits_for_last_checkpoint": False,
            },
        },
        keep=not options.quick,
    )
    note(f"rows/s, and rows per CPU second:\n{table(ratios)}\n\n{table(of_cpu)}")


def medians(rates: Rates) -> dict[str, dict[str, int]]:
    return {
        query: {engine: round(statistics.median(found)) for engine, found in each.items()}
        for query, each in rates.items()
    }


def compare(median: dict[str, dict[str, int]]) -> Ratios:
    """Return cairn's rate over that of each other engine, by query."""
    ratios: Ratios = {}
    for query, each in median.items():
        for peer in each:
            if peer != "cairn" and "cairn" in each:
                ratios.setdefault(peer, {})[query] = round(each["cairn"] / each[peer], 2)
    return ratios


def geometric_mean(ratios: dict[str, float]) -> float:
    return round(math.exp(statistics.fmean(map(math.log, ratios.values()))), 2)


def table(ratios: Ratios) -> str:
    """Return cairn's ratios as Markdown: a row per peer, a column per query."""
    queries = list(dict.fromkeys(query for each in ratios.values() for query in each))
    lines = [["cairn over", *queries, "mean"], ["---"] * (len(queries) + 2)]
    for peer, each in ratios.items():
        found = (f"{each[query]:.2f}" if query in each else "-" for query in queries)
        lines.append([peer, *found, f"{geometric_mean(each):.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=3_000_000)
    parser.add_argument("--queries", default="", help="q0,q1,...; all without it")
    parser.add_argument("--engines", default="", help=f"{','.join(ENGINES)}; all but mini-batch")
    parser.add_argument("--backend", choices=["heap", "rocksdb"], default="heap")
    parser.add_argument("--format", choices=["csv", "parquet"], default="csv")
    parser.add_argument("--runs", type=int, default=3, help="medians of this number of runs")
    parser.add_argument("--write", metavar="FOLDER", help="only write the events")
    parser.add_argument("--check", action="store_true", help="only compare Flink's answers")
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    options = parser.parse_args()
    able = [e for e in ENGINES if options.format == "csv" or not e.startswith("flink")]
    usual = [engine for engine in able if engine != "flink-mini-batch"]
    options.engines = options.engines.split(",") if options.engines else usual
    unable = set(options.engines) - set(able)
    if unable:
        parser.error(f"engines for {options.format} are {', '.join(able)}, not {', '.join(unable)}")
    return options


if __name__ == "__main__":
    main()
