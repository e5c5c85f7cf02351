"""A leader reduced to storage: each epoch adds a delta, now and then a base."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.report.epoch import Measured
from cairn.storage.files import encode_segment
from cairn.storage.log import Log, create_or_open_job, new_nonce
from cairn.storage.manifest import (
    EMPTY_VERSION,
    Epoch,
    EpochOperator,
    FileRef,
    RangeState,
    Restore,
    SparkPosition,
)
from cairn.storage.pack import write_segment
from cairn.storage.published import note_published
from cairn.storage.retention import Collector
from cairn.storage.spark_log import spark_folder
from cairn.storage.store import Store, open_store
from cairn.testing.clock import ManualClock
from tests.unit.report.reports import measured

LATER_S = 10_000.0
OFFSETS = 'v1\n{}\n{"topic":{"0":7}}'


class Driver:
    def __init__(
        self,
        store: Store,
        keep: int = 2,
        *,
        keep_s: float | None = None,
        clock: ManualClock | None = None,
        folder: str = "",
    ) -> None:
        self.store = store
        self.clock = clock or ManualClock(1)
        self.log = Log(store, sleep=lambda seconds: None)
        self.term = self.log.take_over(host="h", pid=1, wall_ms=1).term
        self.collector = Collector(
            store, self.log, keep, self.term, keep_s=keep_s, clock_ms=self.clock
        )
        self.folder = folder
        self.counter = itertools.count()

    def write(self, kind: Any) -> FileRef:
        n = next(self.counter)
        batch = pa.record_batch({"group": np.array([0], np.int32), "v": [n]})
        epoch = (self.log.last or 0) + 1
        segment = encode_segment(kind, "op", {"s": batch}, first_epoch=epoch, last_epoch=epoch)
        file = write_segment(self.store, segment, self.term)
        return file.list_for(range(128), first_epoch=epoch, last_epoch=epoch)

    def epoch(self, *, base: bool = False, collect: bool = False) -> Epoch:
        parent = self.log.newest_epoch()
        files = parent.operators["op"].ranges[0].files if parent else []
        files = [self.write("base")] if base or len(files) > 6 else [*files, self.write("delta")]
        state = RangeState(
            first_group=0,
            group_count=8,
            version=EMPTY_VERSION,
            files=files,
            state_keys=len(files),
            state_bytes=0,
        )
        entry = EpochOperator(
            uid="op", function_version="1", key_types={}, states={}, parallelism=1, ranges=[state]
        )
        oldest = self.collector.oldest_to_keep()
        epoch = self.log.append(
            lambda number: Epoch(
                number=number,
                parent=parent.number if parent else None,
                term=self.term,
                nonce=new_nonce(),
                wall_ms=self.clock(),
                now_ms=1,
                watermarks={"w": 5},
                operators={"op": entry},
                spark=SparkPosition(
                    folder=self.folder, batch_id=number, offsets=OFFSETS, sources=["topic"]
                ),
                committables={"out": [{"files": 1}]} if number % 2 else {"out": []},
                metrics=Measured(operators={"op": measured(rows_in=10, state_keys=len(files))}),
                oldest_kept=oldest,
            )
        )
        note_published(self.store, epoch.number, epoch.nonce)
        if self.folder and self.store.exists(f"{self.folder}/metadata"):
            self.store.put(f"{self.folder}/offsets/{epoch.number}", OFFSETS.encode())
        if collect:
            self.collector.after_epoch()
        return epoch

    def epochs(self, count: int, *, base: bool = False) -> list[Epoch]:
        """That many epochs, each followed by collection."""
        return [self.epoch(base=base, collect=True) for _ in range(count)]

    def restore(self, epoch: int) -> None:
        self.log.append(
            lambda number: Restore(
                number=number, term=self.term, nonce=new_nonce(), wall_ms=1, epoch=epoch
            )
        )


def new_store(url: str = "memory:") -> Store:
    store = open_store(url)
    create_or_open_job(store, "j", 8)
    return store


def lay_spark_folder(store: Store, term: int) -> str:
    """What Spark leaves in a folder of its own, hidden checksums included."""
    folder = spark_folder(term)
    store.put(f"{folder}/metadata", b'{"id":"x"}')
    store.put(f"{folder}/offsets/0", OFFSETS.encode())
    store.put(f"{folder}/offsets/.0.crc", b"crc")
    store.put(f"{folder}/sources/0/0", b"v1\n")
    return folder


def state_paths(store: Store) -> set[str]:
    return {found.path for found in store.list("state")}
