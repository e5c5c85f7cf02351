"""How fast are `latest`, `top` and `deduplicate` in the slot, compared with pandas on one epoch?

One core, in one process, without Spark: bids as in Nexmark, with three texts each, through the
operator with its state, results and delta. Pandas has no state and sees one epoch at a time; its
`within` cuts time into pieces, which is less than what is asked. Both take the best of several
epochs, in CPU time.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from harness import SEED, note, report

from cairn.functions import BatchProcess
from cairn.operators.deduplicate import Distinct, DistinctWithin
from cairn.operators.latest import Latest
from cairn.operators.top import RANK, By, Top
from cairn.testing import Harness
from cairn.types import parse_schema

DDL = (
    "auction bigint, bidder bigint, price bigint, channel string, url string, ts timestamp, "
    "extra string"
)
SCHEMA = parse_schema(DDL)
EPOCH_US = 10_000_000
WITHIN_US = 2_000_000


class Case(NamedTuple):
    function: Callable[[], BatchProcess]
    keys: tuple[str, ...]
    pandas: Callable[[pd.DataFrame], pd.DataFrame]
    out: pa.Schema = SCHEMA


def top_ten(rows: pd.DataFrame) -> pd.DataFrame:
    ordered = rows.sort_values(["auction", "price"], ascending=[True, False])
    return ordered.groupby("auction", sort=False).head(10)


def once_per_piece(rows: pd.DataFrame) -> pd.DataFrame:
    pieces = rows.assign(piece=rows["ts"].astype("int64") // WITHIN_US)
    return rows[~pieces.duplicated(["auction", "piece"])]


CASES = {
    "latest per bidder and auction": Case(
        lambda: Latest(SCHEMA, None, is_timed=True),
        ("bidder", "auction"),
        lambda rows: rows.drop_duplicates(["bidder", "auction"], keep="last"),
    ),
    "latest per auction": Case(
        lambda: Latest(SCHEMA, None, is_timed=True),
        ("auction",),
        lambda rows: rows.drop_duplicates(["auction"], keep="last"),
    ),
    "top 10 per auction": Case(
        lambda: Top(10, [By("price", True)], SCHEMA, None),
        ("auction",),
        top_ten,
        SCHEMA.append(pa.field(RANK, pa.int32())),
    ),
    "deduplicate by bidder and auction": Case(
        Distinct, ("bidder", "auction"), lambda rows: rows.drop_duplicates(["bidder", "auction"])
    ),
    "deduplicate by text": Case(Distinct, ("url",), lambda rows: rows.drop_duplicates(["url"])),
    "deduplicate within 2 s": Case(
        lambda: DistinctWithin(WITHIN_US // 1000, by_event=True), ("auction",), once_per_piece
    ),
}


def make_rows(rng: np.random.Generator, rows: int, keys: int, epoch: int) -> pa.StructArray:
    channels = pa.array(["Google", "Facebook", "Baidu", "Apple"])
    urls = pa.array([f"https://www.nexmark.com/item.htm?query=1&id={i:07}" for i in range(keys)])
    extras = pa.array(["x" * (40 + i % 60) for i in range(1000)])
    columns = [
        pa.array(1000 + rng.integers(0, keys, rows)),
        pa.array(1000 + rng.integers(0, keys, rows)),
        pa.array(rng.integers(1, 10_000_000, rows)),
        channels.take(pa.array(rng.integers(0, 4, rows))),
        urls.take(pa.array(rng.integers(0, keys, rows))),
        pa.array(np.sort(rng.integers(0, EPOCH_US, rows)) + epoch * EPOCH_US).cast(
            SCHEMA.field("ts").type
        ),
        extras.take(pa.array(rng.integers(0, 1000, rows))),
    ]
    return pa.StructArray.from_arrays(columns, fields=list(SCHEMA))


class Silent(Harness):
    """A harness that leaves results in Arrow."""

    def _take(self, tag: str | None, batch: pa.RecordBatch) -> None:
        pass

    def run_epoch(self, rows: pa.StructArray) -> None:
        self._begin()
        times = rows.field("ts").cast(pa.int64())
        self._operator.run(pa.array(np.zeros(len(rows), np.int32)), times, rows)
        self.commit()


def timed(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(case: Case, *, rows: int, keys: int, epochs: int, backend: str) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    ours, theirs = [], []
    with Silent(case.function(), DDL, case.keys, case.out, event_time="ts", backend=backend) as h:
        for epoch in range(epochs):
            fresh = make_rows(rng, rows, keys, epoch)
            ours.append(timed(functools.partial(h.run_epoch, fresh)))
            h.advance_watermark((epoch + 1) * EPOCH_US // 1000)
            frame = pa.Table.from_batches([pa.RecordBatch.from_struct_array(fresh)]).to_pandas()
            theirs.append(timed(functools.partial(case.pandas, frame)))
    best, bare = rows / min(ours), rows / min(theirs)
    return {"rows_per_second": round(best), "pandas": round(bare), "ratio": round(best / bare, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000, help="rows of an epoch")
    parser.add_argument("--keys", type=int, default=20_000, help="auctions, and bidders")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--backend", default="heap")
    parser.add_argument("--case", choices=CASES, help="only this one")
    options = parser.parse_args()
    found = {}
    for name in [options.case] if options.case else CASES:
        found[name] = measure(
            CASES[name],
            rows=options.rows,
            keys=options.keys,
            epochs=options.epochs,
            backend=options.backend,
        )
        note(f"{name}: {found[name]}")
    report("keyed_operators", {"options": vars(options), "cases": found})


if __name__ == "__main__":
    main()
