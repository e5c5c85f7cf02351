"""Does the memory of a slot grow with the keys that have timers, a ttl or open windows?

Drives what a slot does, without Spark: epochs of new keys, bases, a restore in a new process, and
epochs in which keys are due. Prints for RocksDB and PostgreSQL the memory above that of the empty
slot, and what a restore reads before the first epoch. With `--before` the same runs with the code
of another commit; the result has both.

    python bench/slot_memory.py [--keys 5000000] [--backends rocksdb,postgres] [--before COMMIT]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import os
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import msgspec
import numpy as np
import pyarrow as pa

from cairn import state
from cairn.backends import BaseTarget, make_backend
from cairn.backends.files import open_rows
from cairn.backends.handles import make_batch_handle, make_batch_table
from cairn.backends.overlay import Table, make_table
from cairn.storage.manifest import FileRef
from cairn.storage.store import open_store

GROUP_COUNT = 128
GROUPS = range(GROUP_COUNT)
EPOCH_KEYS = 50_000
EPOCH_MS = 1_000
BASE_EVERY = 3
DUE_EPOCHS = 5
FEW_KEYS = 300_000
WINDOW_FIELDS = pa.struct([("start", pa.int64()), ("rows", pa.int64()), ("n", pa.int64())])


def rss_mb() -> float:
    """Memory of this process, once what is free is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def name_of(number: int) -> str:
    return f"user-{number:08d}"


class Kind:
    """State of keys that are due: those of an epoch are all due at the same time."""

    def __init__(self, backend: Any, epochs: int) -> None:
        self.backend = backend
        self.epochs = epochs
        self.tables: dict[str, Table] = {}

    def due_ms(self, epoch: int) -> int:
        """The time at which the keys of an epoch are due."""
        return (self.epochs + epoch) * EPOCH_MS

    def put(self, epoch: int, keys: Any) -> None:
        """Process an epoch of new keys, and look whether something is due."""

    def begin(self) -> None:
        """Do what a slot does before it can say what is due."""

    def take(self, epoch: int) -> int:
        """Take what is due when the keys of an epoch are, and return their number."""
        raise NotImplementedError

    def commit(self) -> None:
        for table in self.tables.values():
            table.delta()
        for table in self.tables.values():
            table.promote()

    def row_table(self, declaration: Any, name: str) -> Table:
        declaration.name = name
        table = make_table(declaration, pa.string(), self.backend, GROUP_COUNT)
        table.assign(GROUPS)
        self.tables[name] = table
        return table


class Timers(Kind):
    """A value and an event timer per key."""

    def __init__(self, backend: Any, epochs: int) -> None:
        from cairn.functions import EVENT_TIMERS

        super().__init__(backend, epochs)
        self.value = self.row_table(state.Value("bigint"), "value")
        self.timers = self.row_table(state.Map("bigint", "boolean"), EVENT_TIMERS)
        try:
            from cairn.slot.stored_timers import make_index

            self.index: Any = make_index(self.timers)
        except ImportError:  # The code of before has all timers in memory.
            from cairn.slot.timers import TimerIndex

            self.index = TimerIndex(self.timers)

    def put(self, epoch: int, keys: Any) -> None:
        self.index.build()
        at = self.due_ms(epoch)
        for number in keys.tolist():
            group, key = number % GROUP_COUNT, name_of(number)
            self.value.changes[group][key] = number
            self.index.set(group, key, at)
        self.index.first()

    def begin(self) -> None:
        self.index.build()
        assert self.index.first() == self.due_ms(0)

    def take(self, epoch: int) -> int:
        count = 0
        while due := self.index.take(self.due_ms(epoch)):
            count += len(due[1])
        return count

    def commit(self) -> None:
        for table in self.tables.values():
            table.delta()
        if hasattr(self.index, "commit"):
            self.index.commit()
        super().commit()


class Expiring(Kind):
    """A value per key, with a ttl of as long as all epochs take."""

    def __init__(self, backend: Any, epochs: int) -> None:
        super().__init__(backend, epochs)
        ttl = f"{epochs * EPOCH_MS} ms"
        self.value = self.row_table(state.Value("bigint", ttl=ttl), "value")

    @property
    def expiry(self) -> Any:
        return self.value.expiry

    def put(self, epoch: int, keys: Any) -> None:
        at = epoch * EPOCH_MS
        self.expiry.begin(at)
        self.expiry.reclaim(0.05)
        for number in keys.tolist():
            self.value.changes[number % GROUP_COUNT][name_of(number)] = (at, number)

    def begin(self) -> None:
        # The slice of an epoch, over and over until nothing is left to be looked at.
        self.expiry.begin(self.due_ms(-1))
        while self.expiry.reclaim(0.05):
            pass

    def take(self, epoch: int) -> int:
        before = self.expiry.removed_keys
        self.expiry.begin(self.due_ms(epoch))
        while self.expiry.reclaim(0.05):
            pass
        return int(self.expiry.removed_keys - before)


class Windows(Kind):
    """An open window per key, as aggregates keep them."""

    def __init__(self, backend: Any, epochs: int) -> None:
        super().__init__(backend, epochs)
        declaration: Any = state.Map("bigint", WINDOW_FIELDS)
        declaration.name, declaration.by_time = "windows", True
        table = make_batch_table(declaration, pa.string(), backend, GROUP_COUNT)
        table.assign(GROUPS)
        self.tables["windows"] = table
        self.handle: Any = make_batch_handle(table)

    def put(self, epoch: int, keys: Any) -> None:
        end_us = self.due_ms(epoch) * 1000
        counts = pa.array(keys)
        values = pa.StructArray.from_arrays([counts] * 3, fields=list(WINDOW_FIELDS))
        names = pa.array(map(name_of, keys.tolist()))
        self.handle.put_many(names, pa.array(np.full(len(keys), end_us)), values)
        assert not len(self.handle.between(None, self.due_ms(-1) * 1000)[0])
        assert self.handle.entry_above(None) == self.due_ms(0) * 1000

    def begin(self) -> None:
        assert not len(self.handle.between(None, self.due_ms(-1) * 1000)[0])
        assert self.handle.entry_above(None) == self.due_ms(0) * 1000

    def take(self, epoch: int) -> int:
        keys, ends, values = self.handle.between(None, self.due_ms(epoch) * 1000)
        self.handle.put_many(keys, ends, pa.nulls(len(keys), values.type))
        return len(keys)


KINDS: dict[str, type[Kind]] = {"timers": Timers, "ttl": Expiring, "windows": Windows}


class Counter:
    """Counts the rows that are read from databases."""

    def __init__(self) -> None:
        self.rows = 0

    def watch(self, database: type) -> None:
        for name in ("get_many", "read_pages"):
            if hasattr(database, name):
                setattr(database, name, self._counted(getattr(database, name)))
        scan = database.scan  # type: ignore[attr-defined]

        def counted_scan(*args: Any) -> Iterator[Any]:
            for row in scan(*args):
                self.rows += 1
                yield row

        database.scan = counted_scan  # type: ignore[attr-defined]

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            found = read(*args)
            self.rows += sum(len(each[0]) if isinstance(each, tuple) else 1 for each in found)
            return found

        return counted


class Peak:
    """The most memory of this process, sampled."""

    def __enter__(self) -> Peak:
        self.mb = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        size = os.sysconf("SC_PAGE_SIZE") / 2**20
        while not self._is_over.wait(0.02):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.mb = max(self.mb, pages * size)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    folder = Path(task["folder"])
    epochs = task["keys"] // EPOCH_KEYS
    reads = Counter()
    _watch_databases(reads)
    backend = make_backend(
        task["backend"],
        str(folder / f"slot-{task['phase']}"),
        task["memory_mb"] << 20,
        job_id=task["job_id"],
        operator="op",
    )
    kind = KINDS[task["kind"]](backend, epochs)
    # An epoch of its own, so that libraries, threads and connections are not counted.
    kind.commit()
    reads.rows = 0
    empty_mb = rss_mb()
    with Peak() as peak:
        found = (_fill if task["phase"] == "fill" else _restore)(kind, task, folder, reads)
    found |= {"mb": round(rss_mb() - empty_mb, 1), "peak_mb": round(peak.mb - empty_mb, 1)}
    backend.close()
    return found


def _watch_databases(reads: Counter) -> None:
    from cairn.backends.rocksdb.database import RocksDatabase

    try:
        from cairn.backends.versioned.database import VersionedDatabase
    except ImportError:  # The code of before.
        from cairn.backends.postgres.database import PostgresDatabase as VersionedDatabase
    reads.watch(VersionedDatabase)
    reads.watch(RocksDatabase)


def _fill(kind: Kind, task: dict[str, Any], folder: Path, reads: Counter) -> dict[str, Any]:
    store = open_store(str(folder / "store"))
    known: tuple[FileRef, ...] = ()
    started, cpu_started = time.perf_counter(), time.process_time()
    for epoch in range(kind.epochs):
        kind.put(epoch, np.arange(epoch * EPOCH_KEYS, (epoch + 1) * EPOCH_KEYS))
        kind.commit()
        if epoch % BASE_EVERY == BASE_EVERY - 1 or epoch == kind.epochs - 1:
            base = kind.backend.begin_base(kind.tables, GROUPS)
            target = BaseTarget(store, 1, "op", epoch + 1, str(folder), 0, known)
            stored = base.write(target, lambda: None)
            base.close()
            known = (stored.list_for(GROUPS, first_epoch=0, last_epoch=epoch + 1),)
    (folder / "base.json").write_bytes(msgspec.json.encode(known[0]))
    cpu_s = time.process_time() - cpu_started
    return {"s": round(time.perf_counter() - started, 1), "cpu_s": round(cpu_s, 1)}


def _restore(kind: Kind, task: dict[str, Any], folder: Path, reads: Counter) -> dict[str, Any]:
    store = open_store(str(folder / "store"))
    ref = msgspec.json.decode((folder / "base.json").read_bytes(), type=FileRef)
    started = time.perf_counter()
    if not kind.backend.load(store, ref, GROUPS):
        # A base of tables in arrays is a segment, and a small database is read into arrays.
        with open_rows(store, ref, str(folder)) as reader:
            for name, table in kind.tables.items():
                for batch in reader.read(name, GROUPS):
                    reads.rows += batch.num_rows if ref.format == "segment" else 0
                    table.apply(batch)
    loaded_s = time.perf_counter() - started
    loaded_rows = reads.rows
    kind.begin()
    begun_s = time.perf_counter() - started
    begun_rows = reads.rows
    kind.commit()
    begun_mb = rss_mb()
    due_s = []
    for epoch in range(DUE_EPOCHS):
        started = time.perf_counter()
        count = kind.take(epoch)
        kind.commit()
        due_s.append(time.perf_counter() - started)
    return {
        "loaded_s": round(loaded_s, 2),
        "loaded_rows": loaded_rows,
        "first_due_s": round(begun_s, 2),
        "first_due_rows": begun_rows,
        "first_due_rss_mb": round(begun_mb, 1),
        "due_epoch_s": round(float(np.median(due_s)), 2),
        "due_in_last_epoch": count,
    }


def measure(
    backend: str, kind: str, keys: int, memory_mb: int, source: str | None
) -> dict[str, Any]:
    import real_servers

    url = real_servers.postgres() if backend == "postgres" else backend
    environment = {} if source is None else {"PYTHONPATH": source}
    found: dict[str, Any] = {}
    # Few keys show what does not grow: the epoch's own changes, and what memory is bounded to.
    for size, count, phases in (("few", FEW_KEYS, ["fill"]), ("all", keys, ["fill", "restore"])):
        with harness.work_dir() as folder:
            task = {
                "backend": url,
                "kind": kind,
                "keys": count,
                "memory_mb": memory_mb,
                "folder": str(folder),
                "job_id": f"{harness.SEED}{size}",
            }
            for phase in phases:
                name = phase if size == "all" else size
                found[name] = harness.in_fresh_process({**task, "phase": phase}, **environment)
                harness.note(f"{backend} {kind} {count} {phase} {source or ''}: {found[name]}")
    growth = found["fill"]["mb"] - found["few"]["mb"]
    return {"bytes_per_key": round(growth * 2**20 / (keys - FEW_KEYS), 1), **found}


def unpack_source(commit: str, folder: Path) -> str:
    """Return a folder with cairn as of a commit."""
    done = subprocess.run(
        ["git", "archive", commit, "src"],
        stdout=subprocess.PIPE,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return str(folder / "src")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--memory-mb", type=int, default=16)
    parser.add_argument("--backends", default="rocksdb,postgres")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--before", metavar="COMMIT", help="the same with the code of a commit")
    parser.add_argument("--trial", action="store_true", help="do not keep the result")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(run_task(json.loads(args.task))))
        return
    path = harness.RESULTS / "slot_memory.json"
    # Each part is measured on its own, and takes minutes.
    kept = json.loads(path.read_text())["cases"] if path.exists() and not args.trial else []
    cases = {(case["backend"], case["kind"], case["code"]): case for case in kept}
    with harness.work_dir() as folder:
        source = None if args.before is None else unpack_source(args.before, folder)
        for backend in args.backends.split(","):
            for kind in args.kinds.split(","):
                found = measure(backend, kind, args.keys, args.memory_mb, source)
                code = "now" if args.before is None else f"before, {args.before}"
                case = {"backend": backend, "kind": kind, "code": code, "keys": args.keys}
                cases[backend, kind, code] = {**case, "memory_mb": args.memory_mb, **found}
    harness.report("slot_memory", {"cases": list(cases.values())}, keep=not args.trial)


if __name__ == "__main__":
    main()
