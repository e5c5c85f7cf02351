"""A job that looks like one of a bank: what the dashboard's tests and pictures show."""

from __future__ import annotations

import datetime as dt
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cairn import Context, Job, KeyedProcess, sinks, state, windows

T0 = dt.datetime(2026, 3, 2, 8, tzinfo=dt.UTC)
PAYMENT = "card string, merchant string, cents bigint, at timestamp"
LEDGER = "card string, merchant string, cents bigint, at timestamp, spent bigint"
ALERT = "card string, merchant string, cents bigint, average double"
MERCHANTS = (
    "Alba Market", "Bahn", "Cinema Lux", "Delta Fuel", "Elm Books", "Foto Klein", "Grid Energy",
    "Harbour Café", "Iris Optics", "Juno Travel", "Kiosk 24", "Lindt & Co",
)  # fmt: skip


class Score(KeyedProcess[Any]):
    """Keeps what a card spends where, and flags what is far above its average."""

    spent = state.Reducing("bigint", operator.add)
    payments = state.Value("bigint", default=0)
    merchants: state.Map[str, int] = state.Map("string", "bigint")

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        if row.cents < 0:
            raise ValueError(f"a payment of {row.cents} cents")
        count, spent = self.payments.get(), self.spent.get(0)
        if count >= 5 and row.cents * count > 8 * spent:
            ctx.output("alerts", (row.card, row.merchant, row.cents, spent / count))
        self.payments.set(count + 1)
        self.spent.add(row.cents)
        self.merchants[row.merchant] = self.merchants.get(row.merchant, 0) + 1
        yield row.card, row.merchant, row.cents, row.at, self.spent.get()


def build(spark: Any, folder: Path) -> Job:
    """Payments in `folder`/in; ledger, turnover and alerts beside it."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    rows = (
        spark.readStream.schema(PAYMENT).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    )
    job = Job("card-fraud")
    scored = (
        job.source("payments", rows, event_time="at", watermark="1 minute")
        .key_by("card")
        .process(Score(), schema=LEDGER, uid="score")
    )
    scored.sink_to(sinks.Files(str(folder / "ledger")), uid="ledger")
    scored.side("alerts", ALERT).sink_to(sinks.Files(str(folder / "alerts")), uid="alerts")
    scored.side("errors").sink_to(sinks.Files(str(folder / "rejected")), uid="rejected")
    turnover = (
        scored.key_by("merchant")
        .window(windows.tumbling("10 minutes"))
        .aggregate(uid="turnover", payments="count(*)", cents="sum(cents)")
    )
    turnover.sink_to(sinks.Files(str(folder / "turnover")), uid="by_merchant")
    return job


def payments(
    index: int,
    rows: int,
    *,
    cards: int = 4000,
    bad: int = 0,
    now: dt.datetime | None = None,
) -> list[tuple[Any, ...]]:
    """The rows of one file: a few cards and merchants have most of them.

    They happened within the 40 seconds before `now`, which is a minute later in each file.
    """
    now = now or T0 + dt.timedelta(minutes=index)
    random = np.random.default_rng(index)
    rows = max(1, round(rows * (1 + 0.35 * math.sin(index / 7) + 0.1 * random.standard_normal())))
    card = np.minimum((random.pareto(1.1, rows) * cards / 20).astype(int), cards - 1)
    shop = np.minimum(random.geometric(0.22, rows) - 1, len(MERCHANTS) - 1)
    cents = np.maximum(50, random.lognormal(7.4, 1.1, rows)).astype(int)
    late_s = random.integers(0, 40, rows)
    return [
        (
            f"card-{card[at]:04d}",
            MERCHANTS[shop[at]],
            int(-cents[at] if at < bad else cents[at]),
            now - dt.timedelta(seconds=int(late_s[at])),
        )
        for at in range(rows)
    ]
