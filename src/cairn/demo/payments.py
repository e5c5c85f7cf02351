"""Generated payments that arrive over time, the same for the same seed.

Always true here:
- a file appears whole, under its final name, or not at all;
- payments are in order of time, within a file and from file to file, and so are the
  modification times of files: Spark reads them in that order.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SHOPS = (
    "bakery", "bookshop", "cinema", "florist", "garage", "grocer", "hotel", "jeweller",
    "pharmacy", "railway", "tailor", "tavern",
)  # fmt: skip
FILE_PAYMENTS = 2_500
HELD_BACK_SHARE = 0.2
AHEAD_SHARE = 0.04
"""Payments that may wait for their epoch while a process is to be killed in the middle of one."""
TINY_SHARE = 0.04
LARGE_SHARE = 0.05
FIRST_US = 1_767_225_600_000_000  # 2026-01-01
STEP_US = 250


@dataclass(frozen=True)
class Stream:
    """The size of the stream, and its seed."""

    payments: int
    accounts: int
    seconds: float
    seed: int

    @property
    def files(self) -> int:
        return -(-self.payments // FILE_PAYMENTS)

    def file(self, index: int) -> pa.Table:
        first = index * FILE_PAYMENTS
        ids = np.arange(first, min(first + FILE_PAYMENTS, self.payments))
        chance = np.random.default_rng((self.seed, index))
        cents = chance.lognormal(7.5, 1.0, len(ids)).astype(np.int64).clip(100, 49_999)
        kind = chance.random(len(ids))
        cents = np.where(kind < TINY_SHARE, chance.integers(1, 100, len(ids)), cents)
        large = chance.integers(50_000, 400_000, len(ids))
        cents = np.where(kind > 1 - LARGE_SHARE, large, cents)
        times = pa.array(FIRST_US + ids * STEP_US, pa.timestamp("us", "UTC"))
        shops = pa.array(SHOPS).take(pa.array(chance.integers(0, len(SHOPS), len(ids))))
        return pa.table(
            {
                "id": ids,
                "ts": times,
                "account": chance.integers(0, self.accounts, len(ids)),
                "shop": shops,
                "cents": cents,
            }
        )


class Arrivals(threading.Thread):
    """Writes the files of a stream into a folder, at even intervals."""

    def __init__(self, stream: Stream, folder: Path) -> None:
        super().__init__(daemon=True, name="payments")
        self.stream = stream
        self.folder = folder
        self.arrived = 0
        self.committed = 0
        self.is_paced = True
        """Payments wait for epochs: on a slow machine, one epoch would take them all."""
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._released = threading.Event()

    def run(self) -> None:
        try:
            self._write_all()
        except BaseException as error:
            self.error = error

    def _write_all(self) -> None:
        started_s = time.monotonic()
        modified_ns = 0
        held_at = int(self.stream.files * (1 - HELD_BACK_SHARE))
        for index in range(self.stream.files):
            if index == held_at:
                waited_s = time.monotonic()
                while not self._released.wait(0.1):
                    if self._ended.is_set():
                        return
                started_s += time.monotonic() - waited_s
            due_s = started_s + self.stream.seconds * index / self.stream.files
            if self._ended.wait(max(0.0, due_s - time.monotonic())):
                return
            while self.is_paced and self.arrived - self.committed > self._ahead_max:
                if self._ended.wait(0.02):
                    return
            table = self.stream.file(index)
            # Spark ignores names that begin with a dot.
            hidden = self.folder / f".{index:06d}"
            pq.write_table(table, hidden)
            # Spark sorts by milliseconds; two files must never share one.
            modified_ns = max(time.time_ns(), modified_ns + 2_000_000)
            os.utime(hidden, ns=(modified_ns, modified_ns))
            hidden.rename(self.folder / f"payments-{index:06d}.parquet")
            self.arrived += table.num_rows

    @property
    def _ahead_max(self) -> float:
        return AHEAD_SHARE * self.stream.payments

    def release(self) -> None:
        """Let the last payments come, which wait for the second act."""
        self._released.set()

    def end(self) -> None:
        self._ended.set()
