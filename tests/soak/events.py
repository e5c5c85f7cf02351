"""What goes in: numbered rows in numbered batches, a file each, and what must come out of them.

Always true here:
- `id` counts through over all batches, so that a row that is lost or doubled shows;
- each row says which batch it is of and how many rows that has, so that a reader can tell
  a part of a batch from the whole of it;
- a batch is one file, and a file is an epoch of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.spark.support import Input

IN = "id bigint, account string, amount bigint, batch bigint, size bigint"
OUT = f"{IN}, n bigint, total bigint"


class Event(NamedTuple):
    id: int
    account: str
    amount: int
    batch: int
    size: int


class Row(NamedTuple):
    """An event as it is published: with the count and the sum of its account so far."""

    id: int
    account: str
    amount: int
    batch: int
    size: int
    n: int
    total: int


class Events:
    """Writes the input and remembers it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.source = Input(folder, IN)
        self.all: list[Event] = []
        self.batches = 0
        self._random = random.Random(seed)

    def add(self, batches: int = 1, rows: int | None = None) -> None:
        for _ in range(batches):
            size = rows or self._random.randint(5, 60)
            made = [
                Event(
                    len(self.all) + at,
                    f"a{self._random.randrange(23)}",
                    self._random.randrange(1000),
                    self.batches,
                    size,
                )
                for at in range(size)
            ]
            self.all += made
            self.batches += 1
            self.source.add(*made)

    def check_rows(self, rows: Iterable[Row], *, may_repeat: bool = False) -> None:
        """Each event came out once, and the state it met was right."""
        rows = list(rows)
        times = Counter(row.id for row in rows)
        expected = {event.id for event in self.all}
        lost, strange = sorted(expected - times.keys()), sorted(times.keys() - expected)
        assert not lost, f"{len(lost)} of {len(expected)} rows are lost: ids {lost[:5]} …"
        assert not strange, f"rows that never went in: ids {strange[:5]}"
        if may_repeat:
            rows = list(set(rows))
        doubled = [row for row, count in Counter(r.id for r in rows).items() if count > 1]
        assert not doubled, f"{len(doubled)} rows came out more than once: ids {doubled[:5]} …"
        for row in rows:
            assert row[:5] == self.all[row.id], f"another row than went in: {row}"
        by_account: dict[str, list[Row]] = {}
        for row in rows:
            by_account.setdefault(row.account, []).append(row)
        for account, found in by_account.items():
            found.sort(key=lambda row: row.n)
            total = 0
            for n, row in enumerate(found, 1):
                total += row.amount
                assert (row.n, row.total) == (n, total), f"state of {account} went wrong: {row}"

    def check_latest(self, rows: Iterable[Row]) -> None:
        """Of each account the last row, and no other."""
        found = sorted((row.account, row.n, row.total) for row in rows)
        counts = Counter(event.account for event in self.all)
        sums: Counter[str] = Counter()
        for event in self.all:
            sums[event.account] += event.amount
        assert found == sorted((account, counts[account], sums[account]) for account in counts)
