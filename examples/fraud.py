"""Fraud: flag a large payment that follows a tiny one on the same account.

    cairn run examples/fraud.py:build --checkpoint ckpt -- payments out

reads Parquet files of payments as they arrive in `payments/` and writes, each exactly once,

    out/ledger     a row per payment: the number of payments on the account, and their sum
    out/alerts     the payments that look like fraud

A thief tries a stolen card with a few cents before spending real money. So a tiny payment arms
an account, and the very next one raises an alert if it is large.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cairn import Context, Job, KeyedProcess, sinks, state

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import SparkSession

PAYMENT = "id long, ts timestamp, account long, shop string, cents long"
LEDGER = "id long, account long, payments long, spent long"
ALERT = "id long, account long, shop string, cents long, payments_there long"

TINY_CENTS = 100
LARGE_CENTS = 50_000


class Payment(NamedTuple):
    id: int
    ts: datetime
    account: int
    shop: str
    cents: int


class Fraud(KeyedProcess[Payment]):
    """Keeps the books of an account and watches for a tiny payment before a large one."""

    armed = state.Value(bool, default=False)
    payments = state.Value(int, default=0)
    spent = state.Reducing("long", operator.add)
    shops: state.Map[str, int] = state.Map("string", "long")

    def process(self, row: Payment, ctx: Context) -> Iterator[tuple[Any, ...]]:
        there = self.shops.get(row.shop, 0) + 1
        if self.armed.get() and row.cents >= LARGE_CENTS:
            ctx.output("alerts", (row.id, row.account, row.shop, row.cents, there))
        if row.cents < TINY_CENTS:
            self.armed.set(True)
        else:
            self.armed.clear()
        self.shops[row.shop] = there
        payments = (self.payments.get() or 0) + 1
        self.payments.set(payments)
        self.spent.add(row.cents)
        yield row.id, row.account, payments, self.spent.get()


def build(spark: SparkSession, input_dir: str, out_dir: str) -> Job:
    """Return the job for `cairn run`: payments in `input_dir`, ledger and alerts in `out_dir`."""
    # Spark refuses a source folder that does not exist; the first payments may come later.
    Path(input_dir).mkdir(parents=True, exist_ok=True)
    payments = spark.readStream.schema(PAYMENT).option("maxFilesPerTrigger", 8).parquet(input_dir)
    job = Job("fraud")
    ledger = (
        job.source("payments", payments, event_time="ts")
        .key_by("account")
        .process(Fraud(), schema=LEDGER, uid="fraud")
    )
    ledger.sink_to(sinks.Files(f"{out_dir}/ledger"), uid="ledger")
    ledger.side("alerts", ALERT).sink_to(sinks.Files(f"{out_dir}/alerts"), uid="alerts")
    return job
