"""How fast is state in RocksDB, against the heap, without Spark around it?

Drives what an operator does: a batch of keys is announced, a function counts and sums per key,
after an epoch the delta is made and the epoch comes down. Prints rows per second of each backend
and their ratio; with --bases also how long an epoch takes while a base is written.

    python bench/backend.py [--keys 1000000] [--epochs 8] [--epoch-rows 1000000]
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import tempfile
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa

from cairn import state
from cairn.backends import BaseTarget, make_backend
from cairn.backends.handles import make_handle
from cairn.backends.overlay import make_table
from cairn.storage.manifest import FileRef
from cairn.storage.store import open_store

GROUP_COUNT = 128
BATCH_ROWS = 10_000


class Scope:
    key: Any = None
    group = 0


class Job:
    """The state of a function that counts and sums per key."""

    def __init__(self, backend: str, scratch: str, memory_bytes: int) -> None:
        self.backend = make_backend(backend, f"{scratch}/state", memory_bytes)
        self.store = open_store(f"{scratch}/store")
        self.scratch = scratch
        self.scope = Scope()
        self.tables = {}
        self.handles = {}
        for name in ("count", "total"):
            declaration: Any = state.Value("bigint")
            declaration.name = name
            self.tables[name] = make_table(declaration, pa.int64(), self.backend, GROUP_COUNT)
            self.tables[name].assign(range(GROUP_COUNT))
            self.handles[name] = make_handle(self.tables[name], self.scope)
        self.known: tuple[FileRef, ...] = ()
        self.bases: list[Any] = []

    def epoch(self, keys: Any) -> dict[str, float]:
        scope, count, total = self.scope, self.handles["count"], self.handles["total"]
        times = {"prefetch": 0.0, "process": 0.0}
        for at in range(0, len(keys), BATCH_ROWS):
            started = time.perf_counter()
            batch = keys[at : at + BATCH_ROWS].tolist()
            groups = (keys[at : at + BATCH_ROWS] % GROUP_COUNT).tolist()
            self.backend.prefetch(groups, batch)
            fetched = time.perf_counter()
            for scope.group, scope.key in zip(groups, batch, strict=True):
                count.set(count.get(0) + 1)
                total.set(total.get(0) + scope.key)
            times["prefetch"] += fetched - started
            times["process"] += time.perf_counter() - fetched
        started = time.perf_counter()
        for table in self.tables.values():
            table.delta()
        times["delta"] = time.perf_counter() - started
        started = time.perf_counter()
        for table in self.tables.values():
            table.promote()
        times["promote"] = time.perf_counter() - started
        return times

    def base(self) -> threading.Thread:
        base = self.backend.begin_base(self.tables, range(GROUP_COUNT))
        target = BaseTarget(self.store, 1, "op", 1, self.scratch, 0, self.known)

        def write() -> None:
            started = time.perf_counter()
            stored = base.write(target, lambda: time.sleep(0.005))
            base.close()
            self.bases.append((stored, time.perf_counter() - started))
            self.known = (stored.list_for(range(GROUP_COUNT), first_epoch=0, last_epoch=1),)

        thread = threading.Thread(target=write)
        thread.start()
        return thread


def run(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    gc.disable()
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(backend, scratch, args.memory_mib << 20)
        times: list[float] = []
        during: list[float] = []
        parts: dict[str, float] = {}
        cpu_s = 0.0
        writer: threading.Thread | None = None
        for number in range(args.epochs):
            if args.bases and (writer is None or not writer.is_alive()) and number % 3 == 1:
                writer = job.base()
            keys = rng.integers(0, args.keys, args.epoch_rows)
            started, cpu_started = time.perf_counter(), time.process_time()
            spent = job.epoch(keys)
            busy = writer is not None and writer.is_alive()
            if number:
                cpu_s += time.process_time() - cpu_started
                (during if busy else times).append(time.perf_counter() - started)
                for name, seconds in spent.items():
                    parts[name] = parts.get(name, 0.0) + seconds
        if writer is not None:
            writer.join()
        result: dict[str, Any] = {
            "backend": backend,
            "rows_per_s": round(args.epoch_rows / statistics.median(times or during)),
            # On a busy machine this is the figure to compare; bases and compactions are in it.
            "rows_per_cpu_s": round(args.epoch_rows * (args.epochs - 1) / cpu_s),
            "ms_per_epoch": {
                name: round(1000 * seconds / (args.epochs - 1)) for name, seconds in parts.items()
            },
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        if during:
            result["epoch_s"] = round(statistics.median(times or [0.0]), 2)
            result["epoch_s_during_base"] = round(statistics.median(during), 2)
        if job.bases:
            result["bases"] = [
                {
                    "s": round(seconds, 2),
                    "uploaded_mib": round(stored.uploaded_bytes / 2**20, 1),
                    "size_mib": round((stored.length + stored.objects_bytes) / 2**20, 1),
                }
                for stored, seconds in job.bases
            ]
        job.backend.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--epoch-rows", type=int, default=1_000_000)
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument("--bases", action="store_true")
    parser.add_argument("--backend", action="append", choices=["heap", "rocksdb"])
    args = parser.parse_args()
    results = [run(backend, args) for backend in args.backend or ("heap", "rocksdb")]
    for result in results:
        print(json.dumps(result))
    if len(results) == 2:
        for figure in ("rows_per_s", "rows_per_cpu_s"):
            print(f"ratio of {figure}: {results[1][figure] / results[0][figure]:.2f}")


if __name__ == "__main__":
    main()
