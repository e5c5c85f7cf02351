"""Is cairn faster than Flink SQL, and than Spark's own streaming SQL, on Nexmark?

The queries of examples/nexmark.py over the same events, with two cores each: cairn and Spark in
`local[2]`, Flink SQL from PyPI in an embedded cluster with parallelism 2. Rows end in a sink
that drops them. Engines take turns, query by query.

A rate is the rows a query reads, divided by the seconds from the start of the job to its end
less those of the same job over a thousand events, run just before. What remains is the work:
starting a JVM, planning and starting the job, and ending it, count for nobody. Each engine is
warmed up with 100,000 events of each query.

cairn commits an epoch every 500,000 events. Flink has exactly-once checkpoints every 10 s,
object reuse, 1 GB of managed memory, and no wait for a last checkpoint. `flink-mini-batch` is
Flink with the settings of the original benchmark: a row per key and mini-batch, not one per
input row. Spark has the state store that goes with `--backend`. `--format parquet` is for cairn and
Spark: Flink's package from PyPI reads no Parquet.

`--write FOLDER` only writes the events.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nexmark_spark
from flink import FLINK_VERSION, flink_python
from harness import SEED, note, report, work_dir
from nexmark_events import write_events

import cairn
from cairn import Job, sinks

PARALLELISM = 2
CHECKPOINT_INTERVAL_MS = 10_000
EPOCH_EVENTS = 500_000
WARM_UP_EVENTS = 100_000
TINY_EVENTS = 1_000
RATE = 10_000
"""Events per second of event time."""
ENGINES = ("cairn", "flink", "flink-mini-batch", "spark")

sys.path.insert(0, str(Path(__file__).parents[1]))
examples = importlib.import_module("examples.nexmark")


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

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"Flink ended; its log: {self._log.name}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


@dataclass
class Bench:
    """What the runs of all queries have in common."""

    spark: Any
    flink: Flink | None
    work: Path
    backend: str
    form: str
    runs: int = 0

    def seconds(self, engine: str, query: str, folder: Path) -> float | None:
        """Run a query from start to end; None if the engine cannot."""
        self.runs += 1
        if engine.startswith("flink"):
            assert self.flink is not None
            mini_batch = engine == "flink-mini-batch"
            answer = self.flink.run(query, folder, self.backend, mini_batch=mini_batch)
            if "refused" in answer:
                note(f"Flink refuses {query}: {answer['refused'][:300]}")
            return answer.get("seconds")
        if engine == "spark" and query not in nexmark_spark.QUERIES:
            return None
        checkpoint = self.work / f"{engine}-{self.runs}"
        tables = self.tables(query, folder)
        started = time.perf_counter()
        if engine == "spark":
            run = nexmark_spark.start(query, tables, str(checkpoint), self.backend)
            run.awaitTermination()
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

    def tables(self, query: str, folder: Path) -> dict[str, Any]:
        """Return the tables of a query as streams, a file of each to a batch."""
        from pyspark.sql import functions as F

        found = {}
        for name in examples.tables_of(query):
            schema = examples.TABLES[name]
            if self.form == "csv":
                schema = schema.replace(" timestamp", " long")
            rows = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
            rows = rows.format(self.form).load(str(folder / self.form / name))
            if self.form == "csv":
                times = [name for name in ("date_time", "expires") if name in rows.columns]
                rows = rows.withColumns({name: F.timestamp_millis(name) for name in times})
            found[name] = rows
        return found


def main() -> None:
    options = parse_options()
    if options.write:
        folder = Path(options.write)
        write_events(folder, options.events, rate=RATE, seed=SEED, slab_events=EPOCH_EVENTS)
        return
    queries = options.queries.split(",") if options.queries else list(examples.QUERIES)
    engines = options.engines.split(",")
    spark = cairn.session(
        "bench",
        master=f"local[{PARALLELISM}]",
        driver__memory="4g",
        ui__enabled=False,
        sql__shuffle__partitions=PARALLELISM,
        sql__session__timeZone="UTC",
    )
    with work_dir() as work:
        note(f"writing {options.events:,} events ...")
        made = {"rate": RATE, "seed": SEED, "slab_events": EPOCH_EVENTS}
        counts = write_events(work / "events", options.events, **made)
        write_events(work / "warm", WARM_UP_EVENTS, **made)
        few = write_events(work / "tiny", TINY_EVENTS, **made)
        uses_flink = any(engine.startswith("flink") for engine in engines)
        flink = Flink(work) if uses_flink else None
        bench = Bench(spark, flink, work, options.backend, options.format)
        rates: dict[str, dict[str, list[float]]] = {}
        for query in queries:
            tables = examples.tables_of(query)
            rows = sum(counts[name] - few[name] for name in tables)
            rates[query] = measure(bench, query, engines, rows, options.runs)
        if flink is not None:
            flink.close()
    finish(options, rates, engines)


def measure(
    bench: Bench, query: str, engines: list[str], rows: int, runs: int
) -> dict[str, list[float]]:
    """Run a query on every engine in turn; return the rates of each, in rows per second."""
    able = [e for e in engines if bench.seconds(e, query, bench.work / "warm") is not None]
    rates: dict[str, list[float]] = {engine: [] for engine in able}
    for index in range(runs):
        for engine in able if index % 2 == 0 else able[::-1]:
            tiny = bench.seconds(engine, query, bench.work / "tiny")
            whole = bench.seconds(engine, query, bench.work / "events")
            assert tiny is not None and whole is not None, "it could before"
            rates[engine].append(rows / max(whole - tiny, 0.001))
            note(f"{query} {engine}: {rates[engine][-1]:,.0f} rows/s ({whole:.2f} - {tiny:.2f} s)")
    return rates


def finish(
    options: argparse.Namespace, rates: dict[str, dict[str, list[float]]], engines: list[str]
) -> None:
    """Report medians, ratios and their geometric means, and print them as a table."""
    median = {
        query: {engine: statistics.median(found) for engine, found in each.items() if found}
        for query, each in rates.items()
    }
    ratios: dict[str, dict[str, float]] = {}
    for peer in engines:
        if peer != "cairn" and "cairn" in engines:
            ratios[peer] = {
                query: round(each["cairn"] / each[peer], 2)
                for query, each in median.items()
                if peer in each and "cairn" in each
            }
    parts = ["nexmark", options.backend, options.format]
    report(
        "_".join(part for part in parts if part not in ("heap", "csv")),
        {
            "ratios": ratios,
            "geometric_mean": {
                peer: round(math.exp(statistics.fmean(map(math.log, each.values()))), 2)
                for peer, each in ratios.items()
                if each
            },
            "required": {"each of flink": 1.0, "mean of flink": 1.5, "each of spark": 0.9},
            "rows_per_s": {q: {e: round(r) for e, r in each.items()} for q, each in median.items()},
            "runs": {
                query: {engine: [round(rate) for rate in found] for engine, found in each.items()}
                for query, each in rates.items()
            },
            "events": options.events,
            "events_per_s_of_event_time": RATE,
            "events_per_epoch": EPOCH_EVENTS,
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
    note("\n" + table(ratios))


def table(ratios: dict[str, dict[str, float]]) -> str:
    """Return cairn's ratios as Markdown: a row per peer, a column per query."""
    queries = list(dict.fromkeys(query for each in ratios.values() for query in each))
    lines = [["cairn over", *queries], ["---"] * (len(queries) + 1)]
    for peer, each in ratios.items():
        lines.append([peer, *(f"{each[q]:.2f}" if q in each else "-" for q in queries)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=3_000_000)
    parser.add_argument("--queries", default="", help="q0,q1,...; all without it")
    parser.add_argument("--engines", default="cairn,flink,spark", help=",".join(ENGINES))
    parser.add_argument("--backend", choices=["heap", "rocksdb"], default="heap")
    parser.add_argument("--format", choices=["csv", "parquet"], default="csv")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--write", metavar="FOLDER", help="only write the events")
    parser.add_argument("--quick", action="store_true", help="a trial; the result is not kept")
    options = parser.parse_args()
    unknown = set(options.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"unknown engines {', '.join(unknown)}; expected: {', '.join(ENGINES)}")
    return options


if __name__ == "__main__":
    main()
