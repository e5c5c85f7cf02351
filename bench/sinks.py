"""How fast do rows get into each sink, compared with the plain writer?

A job that only passes rows on, source to sink, in epochs of one file each; beside it, for the same
files in the same run, what one would write by hand: `df.write` for files, `COPY` over as many
connections as there are subtasks for PostgreSQL (without Spark), and for what Spark cannot write
the client's own way with the rows of a DataFrame: a pipeline for Redis, `write_deltalake`, a loop.
Runs alternate; the first file of each is left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import real_servers as servers
from harness import SEED, note, report, work_dir

import cairn
from cairn import Job, sinks

SCHEMA = "id long, account string, amount double, made timestamp, note string"
SUBTASKS = 2
TARGET = 0.6


def write_input(folder: Path, files: int, rows: int) -> list[Path]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    made = []
    for number in range(files):
        accounts = rng.integers(0, 100_000, rows)
        table = pa.table(
            {
                "id": np.arange(number * rows, (number + 1) * rows),
                "account": [f"account-{at:06d}" for at in accounts],
                "amount": np.round(rng.random(rows) * 1000, 2),
                "made": pa.array(1_700_000_000_000_000 + accounts, pa.timestamp("us", "UTC")),
                "note": [f"paid by card {at % 9973}" for at in accounts],
            }
        )
        path = folder / f"{number:04d}.parquet"
        # Several row groups, so that all cores read.
        pq.write_table(table, path, row_group_size=max(1, rows // 8))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
        made.append(path)
    return made


@dataclass
class Input:
    folder: Path
    files: list[Path]
    rows: int
    """Rows of one file."""

    def rate(self, ends: list[float]) -> float:
        """Rows per second after the first file."""
        return self.rows * (len(ends) - 1) / (ends[-1] - ends[0])


def through_cairn(spark: Any, given: Input, work: Path, sink: sinks.Sink) -> float:
    job = Job("sinks")
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    job.source("rows", stream.parquet(str(given.folder))).sink_to(sink, uid="out")
    run = job.start(
        checkpoint=str(work / "checkpoint"),
        parallelism=SUBTASKS,
        trigger="available-now",
        retained_epochs=len(given.files) + 1,
    )
    run.wait()
    ends = sorted(epoch.wall_ms / 1000 for epoch in run.epochs())
    assert len(ends) == len(given.files), "a file is an epoch"
    return given.rate(ends)


def file_by_file(given: Input, write: Callable[[Path], object]) -> float:
    ends = []
    for file in given.files:
        write(file)
        ends.append(time.time())
    return given.rate(ends)


# Writers by hand, to compare with


def spark_writer(spark: Any, given: Input, work: Path, form: str) -> float:
    def write(file: Path) -> None:
        rows = spark.read.schema(SCHEMA).parquet(str(file))
        writer = rows.write.mode("append").format(form)
        (writer.option("header", True) if form == "csv" else writer).save(str(work / "plain"))

    return file_by_file(given, write)


_connections: dict[str, Any] = {}


def copy_share(uri: str, file: Path, share: int, upsert: bool) -> None:
    """In a process of its own: some row groups of a file, over a connection that stays."""
    import psycopg

    connection = _connections.get(uri)
    if connection is None:
        connection = _connections[uri] = psycopg.connect(uri)
        connection.execute("create temporary table part (like plain)")
        connection.commit()
    into = "part" if upsert else "plain"
    source = pq.ParquetFile(file)
    names = [field.name for field in source.schema_arrow]
    with connection.cursor() as cursor:
        with cursor.copy(f"copy {into} ({', '.join(names)}) from stdin (format csv)") as copy:
            for group in range(share, source.num_row_groups, SUBTASKS):
                text = pa.BufferOutputStream()
                pa.csv.write_csv(
                    source.read_row_group(group),
                    text,
                    pa.csv.WriteOptions(include_header=False),
                )
                copy.write(text.getvalue())
        if upsert:
            sets = ", ".join(f"{name} = excluded.{name}" for name in names if name != "id")
            cursor.execute(
                f"insert into plain select * from part on conflict (id) do update set {sets}"
            )
            cursor.execute("truncate part")
    connection.commit()


def plain_copy(uri: str, given: Input, pool: ProcessPoolExecutor, *, upsert: bool) -> float:
    import psycopg

    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("drop table if exists plain")
        connection.execute(
            "create table plain (id bigint, account text, amount double precision, "
            "made timestamptz, note text" + (", primary key (id))" if upsert else ")")
        )

    def write(file: Path) -> None:
        shares = [pool.submit(copy_share, uri, file, n, upsert) for n in range(SUBTASKS)]
        for share in shares:
            share.result()

    return file_by_file(given, write)


def pipeline(spark: Any, given: Input) -> float:
    client = servers.redis()

    def write(file: Path) -> None:
        rows = spark.read.schema(SCHEMA).parquet(str(file)).toArrow().to_pylist()
        for at in range(0, len(rows), 1000):
            pipe = client.pipeline(transaction=False)
            for row in rows[at : at + 1000]:
                fields = {name: str(value) for name, value in row.items() if name != "id"}
                pipe.hset(f"plain:{row['id']}", mapping=fields)
            pipe.execute()

    return file_by_file(given, write)


def delta_writer(spark: Any, given: Input, work: Path) -> float:
    from deltalake import write_deltalake

    def write(file: Path) -> None:
        rows = spark.read.schema(SCHEMA).parquet(str(file)).toArrow()
        write_deltalake(str(work / "plain"), rows, mode="append")

    return file_by_file(given, write)


def loop(spark: Any, given: Input, call: Callable[[Any, int], object]) -> float:
    def write(file: Path) -> None:
        for row in spark.read.schema(SCHEMA).parquet(str(file)).collect():
            call(row, 0)

    return file_by_file(given, write)


# The contest


@dataclass
class Contest:
    name: str
    plain_is: str
    sink: Callable[[Path], sinks.Sink]
    plain: Callable[[Path], float]
    given: Input


@contextmanager
def copying() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(SUBTASKS, multiprocessing.get_context("spawn")) as pool:
        yield pool


def contests(spark: Any, large: Input, small: Input, pool: ProcessPoolExecutor) -> list[Contest]:
    def files(form: str) -> Contest:
        return Contest(
            f"files, {form}",
            f"df.write.{form}",
            lambda work: sinks.Files(str(work / "out"), format=form),
            lambda work: spark_writer(spark, large, work, form),
            large,
        )

    uri = servers.postgres()

    def postgres(mode: str) -> Contest:
        upsert = mode == "upsert"

        def sink(work: Path) -> sinks.Sink:
            import psycopg

            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute("drop table if exists bench_out")
            key = ("id",) if upsert else ()
            return sinks.Postgres(uri, "bench_out", mode=mode, key=key, create=True)

        by_hand = "COPY, INSERT … ON CONFLICT" if upsert else "COPY"
        return Contest(
            f"postgres, {mode}",
            f"{by_hand} over {SUBTASKS} connections",
            sink,
            lambda work: plain_copy(uri, large, pool, upsert=upsert),
            large,
        )

    seen = [0]

    def count(row: Any, epoch: int) -> None:
        seen[0] += 1

    return [
        *map(files, ("parquet", "json", "csv")),
        *map(postgres, ("append", "prepared", "upsert")),
        Contest(
            "delta",
            "write_deltalake(df.toArrow())",
            lambda work: sinks.Delta(str(work / "out")),
            lambda work: delta_writer(spark, large, work),
            large,
        ),
        Contest(
            "spark (wal)",
            "df.write.parquet",
            lambda work: sinks.Spark("parquet", path=str(work / "out")),
            lambda work: spark_writer(spark, large, work, "parquet"),
            large,
        ),
        Contest(
            "redis",
            "pipeline of HSET",
            lambda work: sinks.Redis(servers.redis_url(), key="cairn:{id}"),
            lambda work: pipeline(spark, small),
            small,
        ),
        Contest(
            "foreach",
            "a loop over df.collect()",
            lambda work: sinks.Foreach(count),
            lambda work: loop(spark, small, count),
            small,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a file")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", default="", help="sinks whose name begins so")
    parser.add_argument("--quick", action="store_true", help="one small run, not kept")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.files, options.runs = min(options.rows, 60_000), 3, 1
    spark = cairn.session(
        "bench",
        master=f"local[{SUBTASKS}]",
        ui__enabled=False,
        sql__files__openCostInBytes=1 << 20,
    )
    found: dict[str, dict[str, Any]] = {}
    with work_dir() as work, copying() as pool:
        sizes = {"large": options.rows, "small": max(1, options.rows // 20)}
        inputs = {
            name: Input(work / name, write_input(work / name, options.files, rows), rows)
            for name, rows in sizes.items()
        }
        ceiling = through_cairn(spark, inputs["large"], work / "noop", sinks.Noop())
        note(f"into no sink at all: {ceiling:,.0f} rows/s")
        for contest in contests(spark, inputs["large"], inputs["small"], pool):
            if not contest.name.startswith(options.only):
                continue
            rates: dict[str, list[float]] = {"plain": [], "cairn": []}
            for number in range(options.runs):
                at = work / f"{contest.name.replace(', ', '-')}-{number}"
                rates["plain"].append(contest.plain(at))
                rates["cairn"].append(through_cairn(spark, contest.given, at, contest.sink(at)))
            medians = {name: statistics.median(values) for name, values in rates.items()}
            found[contest.name] = {
                "of_plain": round(medians["cairn"] / medians["plain"], 3),
                "rows_per_s": {name: round(value) for name, value in medians.items()},
                "plain_is": contest.plain_is,
                "rows": contest.given.rows * (options.files - 1),
            }
            note(f"{contest.name}: {found[contest.name]}")
    print(f"\n{'sink':18} {'of plain':>8} {'cairn':>12} {'plain':>12}   rows/s; plain is")
    for name, each in found.items():
        ours, plain = each["rows_per_s"]["cairn"], each["rows_per_s"]["plain"]
        print(f"{name:18} {each['of_plain']:8.2f} {ours:12,} {plain:12,}   {each['plain_is']}")
    keep = not (options.quick or options.only)
    report(
        "sinks",
        {
            "of_plain": {name: each["of_plain"] for name, each in found.items()},
            "required": {"of_plain": TARGET},
            "into_no_sink_rows_per_s": round(ceiling),
            "sinks": found,
            "subtasks": SUBTASKS,
            "runs": options.runs,
        },
        keep=keep,
    )


if __name__ == "__main__":
    main()
