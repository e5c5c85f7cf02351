"""How many point queries of live state are answered, how fast, and what do they cost the job?

A counting job holds a million keys. `run.query` of random keys is called by one thread and by
four, while the job has nothing to do and while it works through rows as fast as it can. Then the
job runs alone and with a thousand queries a second, in many short turns, each compared with the
turns before and after it: a machine that others use is now faster, now slower. The median ratio
of its rows/s, and of the processor time that a row takes, clients included. With `--http` they
go over HTTP too, from clients in processes of their own.

The clients, the driver, Spark and the slots share the cores there are.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from harness import Feed, file_stream, note, percentile, report, work_dir
from keyed_count import counting_job

import cairn
from cairn import sinks
from cairn.slot.folders import living_slots, run_folder
from cairn.storage.log import Log
from cairn.storage.store import open_store

TARGET_SLOWDOWN = 0.10
LOAD_RATE = 1000
CLIENTS = (1, 4)
UID = STATE = "count"
Ask = Callable[[int], Any]


class Client(threading.Thread):
    """Asks for random keys until told to stop, each `every_s` (0: at once) after the last."""

    def __init__(self, ask: Ask, keys: int, over: threading.Event, every_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._ask, self._keys, self._over, self._every_s = ask, keys, over, every_s
        self.took_ms: list[float] = []
        self.sources: dict[str, int] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        rng = random.Random(id(self))
        due = time.perf_counter() + rng.random() * self._every_s
        try:
            while not self._over.is_set():
                if self._every_s:
                    time.sleep(max(0.0, due - time.perf_counter()))
                    due += self._every_s
                key = rng.randrange(self._keys)
                started = time.perf_counter()
                source = self._ask(key)
                self.took_ms.append((time.perf_counter() - started) * 1000)
                self.sources[source] = self.sources.get(source, 0) + 1
        except BaseException as error:
            self.error = error


def ask_for(
    ask: Ask, keys: int, clients: int, seconds: float, every_s: float = 0.0
) -> dict[str, Any]:
    """Return the rates and latencies of this number of clients in this time."""
    over = threading.Event()
    asking = [Client(ask, keys, over, every_s) for _ in range(clients)]
    started = time.perf_counter()
    for client in asking:
        client.start()
    time.sleep(seconds)
    over.set()
    for client in asking:
        client.join()
        if client.error is not None:
            raise client.error
    spent = time.perf_counter() - started
    took = [ms for client in asking for ms in client.took_ms]
    told = summary(took, clients, spent)
    return told | {"from_checkpoint": sum(c.sources.get("checkpoint", 0) for c in asking)}


def summary(took_ms: list[float], clients: int, seconds: float) -> dict[str, Any]:
    return {
        "clients": clients,
        "queries_per_s": round(len(took_ms) / seconds),
        "median_ms": round(statistics.median(took_ms), 3),
        "p99_ms": percentile(took_ms, 99),
        "max_ms": percentile(took_ms, 100),
    }


def ask_over_http(url: str, keys: int, seconds: float, seed: int) -> list[float]:
    """A client in a process of its own; how long each answer took."""
    rng = random.Random(seed)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    took = []
    until = time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        connection.request("GET", f"/api/state/{UID}/{STATE}/{rng.randrange(keys)}")
        answer = connection.getresponse()
        told = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {told[:500]!r}")
        took.append((time.perf_counter() - started) * 1000)
    return took


def over_http(url: str, keys: int, clients: int, seconds: float) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(clients, mp_context=spawn) as pool:
        asking = [pool.submit(ask_over_http, url, keys, seconds, seed) for seed in range(clients)]
        took = [ms for each in asking for ms in each.result()]
    return summary(took, clients, seconds)


class Turn:
    """The job for a while: its rows per second, and the processor time that a row took."""

    def __init__(self, run_id: str, checkpoint: Path, rows_per_epoch: int) -> None:
        self._run_id, self._checkpoint, self._rows = run_id, checkpoint, rows_per_epoch
        self._began_ms = now_ms()
        self._cpu_s = cpu_s(run_id)

    def end(self) -> tuple[float, float]:
        """(rows/s, microseconds of all processes together per row)."""
        cpu = cpu_s(self._run_id) - self._cpu_s
        log = Log(open_store(str(self._checkpoint)))
        ends = sorted(e.wall_ms for e in log.lineage() if self._began_ms <= e.wall_ms <= now_ms())
        if len(ends) < 3:
            raise SystemExit(f"only {len(ends)} epochs in a turn; more --seconds")
        per_s = self._rows * (len(ends) - 1) / (ends[-1] - ends[0]) * 1000
        return per_s, cpu / (per_s * (now_ms() - self._began_ms) / 1000) * 1e6


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def cpu_s(run_id: str) -> float:
    """Return the processor time of this process, its clients, Spark and the slots."""
    own = psutil.Process()
    slots = [psutil.Process(slot.process.pid) for slot in living_slots(run_folder(run_id))]
    found = {p.pid: p.cpu_times() for p in [own, *own.children(recursive=True), *slots]}
    return float(sum(times.user + times.system for times in found.values()))


def serve_settings() -> Any:
    """Return settings without a limit on requests: the rate is measured."""
    return cairn.Serve(requests_per_s=1_000_000)


def lay_work(feed: Feed, keys: int, rows: int, files: int) -> None:
    """Write this number of input files; a few contents repeat under different names."""
    rng = random.Random(0)
    first = feed.files
    for _ in range(min(files, 5)):
        feed.put_some_keys(keys, rows)
    made = sorted(feed.folder.glob("*.parquet"))[first:]
    for number in range(feed.files, first + files):
        os.link(rng.choice(made), feed.folder / f"{number:06d}.parquet")


def measure(spark: Any, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    keys, seconds = options.keys, options.seconds
    feed = Feed(work / "input")
    feed.put_all_keys(keys)
    job = counting_job(file_stream(spark, work / "input"), sinks.Noop())
    started = job.start(
        checkpoint=str(work / "ckpt"),
        parallelism=options.parallelism,
        backend=options.backend,
        trigger="0 seconds",
        retained_epochs=1000,
        **({"serve": serve_settings()} if options.http else {}),
    )
    http: dict[str, Any] = {}
    with started as run:
        ask: Ask = lambda key: run.query(UID, STATE, key).source  # noqa: E731
        while run.metrics() is None:
            run.wait(0.1)
        run.process_all_available()
        idle = [ask_for(ask, keys, clients, seconds) for clients in CLIENTS]
        note(f"idle: {idle}")
        if options.http:
            http["idle"] = [over_http(run.url, keys, clients, seconds) for clients in CLIENTS]
            note(f"idle, over HTTP: {http['idle']}")
        busy_s = (2 * len(CLIENTS) + 1) * seconds + (2 * options.turns + 1) * options.turn_seconds
        files = round(5 * busy_s)
        lay_work(feed, keys, options.rows, files)
        time.sleep(seconds)
        busy = [ask_for(ask, keys, clients, seconds) for clients in CLIENTS]
        note(f"busy: {busy}")
        if options.http:
            http["busy"] = [over_http(run.url, keys, clients, seconds) for clients in CLIENTS]
            note(f"busy, over HTTP: {http['busy']}")
        turn = (run._engine.coordinator.run_id, work / "ckpt", options.rows)
        alone, asked, loads = [], [], []
        for number in range(2 * options.turns + 1):
            begun = Turn(*turn)
            if number % 2:
                loads.append(ask_for(ask, keys, 4, options.turn_seconds, 4 / options.rate))
                asked.append(begun.end())
                note(f"(rows/s, us/row) alone {alone[-1]}, asked {asked[-1]}: {loads[-1]}")
            else:
                time.sleep(options.turn_seconds)
                alone.append(begun.end())
    rows, cpu = (
        {"alone": [each[at] for each in alone], "asked": [each[at] for each in asked]}
        for at in (0, 1)
    )
    return {
        "idle": idle,
        "busy": busy,
        **({"http": http} if http else {}),
        "rows_per_s": {name: [round(each) for each in found] for name, found in rows.items()},
        "cpu_us_per_row": {name: [round(v, 2) for v in found] for name, found in cpu.items()},
        "asked": loads,
        "slowdown": round(1 - ratio(**rows), 3),
        "more_cpu": round(ratio(**cpu) - 1, 3),
    }


def ratio(alone: list[float], asked: list[float]) -> float:
    """The median of turns, each against its neighbours."""
    neighbours = [(before + after) / 2 for before, after in pairwise(alone)]
    return statistics.median(mine / other for mine, other in zip(asked, neighbours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=100_000, help="of an epoch")
    parser.add_argument("--rate", type=int, default=LOAD_RATE, help="queries a second")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--turn-seconds", type=float, default=4)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--http", action="store_true", help="ask over HTTP too")
    parser.add_argument("--quick", action="store_true", help="a trial of a minute; not kept")
    options = parser.parse_args()
    if options.quick:
        options.keys, options.rows, options.seconds, options.turns = 200_000, 50_000, 4, 3
    spark = cairn.session("bench", master="local[2]", ui__enabled=False, driver__memory="3g")
    with work_dir() as work:
        result = measure(spark, work, options)
    name = "query" if options.backend == "heap" else f"query_{options.backend}"
    report(
        name,
        {
            "slowdown": result["slowdown"],
            "more_cpu": result["more_cpu"],
            "required": {"slowdown": TARGET_SLOWDOWN},
            "rate": options.rate,
            "keys": options.keys,
            "rows_per_epoch": options.rows,
            **result,
        },
        keep=not options.quick,
    )


if __name__ == "__main__":
    main()
