"""Connected streams, joins and deduplication through Spark, against batch results."""

from __future__ import annotations

import collections
import datetime as dt
import os
import signal

import pytest

from cairn import Job, KeyedProcess, sinks, state, windows
from tests.marks import for_soak
from tests.spark.support import T0, epochs, finish


def at(minutes):
    return T0 + dt.timedelta(minutes=minutes)


class Deliveries(KeyedProcess):
    """Every combination of an order, a payment and a parcel of one number."""

    orders = state.List("struct<customer: string>")
    payments = state.List("double")
    parcels = state.List("struct<place: string, weight: int>")

    def __init__(self, once):
        self.once = str(once)

    def on_orders(self, row, ctx):
        self.orders.append((row.customer,))
        for amount in self.payments:
            for parcel in self.parcels:
                yield ctx.key, row.customer, amount, parcel.place

    def on_payments(self, row, ctx):
        self.payments.append(row.amount)
        for order in self.orders:
            for parcel in self.parcels:
                yield ctx.key, order.customer, row.amount, parcel.place

    def on_parcels(self, row, ctx):
        if row.weight == 41 and not os.path.exists(self.once):
            open(self.once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.parcels.append((row.place, row.weight))
        for order in self.orders:
            for amount in self.payments:
                yield ctx.key, order.customer, amount, row.place


def test_three_inputs_with_other_key_columns_and_types_equal_a_batch_join(
    spark, make_input, tmp_path
):
    orders = make_input("id int, customer string")
    payments = make_input("amount double, order_id bigint")
    parcels = make_input("place string, weight int, ref smallint")
    out = tmp_path / "out"
    job = Job("deliveries", max_parallelism=8)
    job.connect(
        orders=job.source("orders", orders.stream(spark)).key_by("id"),
        payments=job.source("payments", payments.stream(spark)).key_by("order_id"),
        parcels=job.source("parcels", parcels.stream(spark)).key_by("ref"),
    ).process(
        Deliveries(tmp_path / "once"),
        schema="id bigint, customer string, amount double, place string",
        uid="deliveries",
    ).sink_to(sinks.Files(str(out)), uid="out")
    with job.start(
        checkpoint=str(tmp_path / "checkpoint"), parallelism=2, trigger="50 milliseconds"
    ) as run:
        for part, parallelism in enumerate((2, 3, 3, 1)):
            run.rescale(parallelism)
            ids = range(part, 60, 4)
            orders.add(*[(i if i % 7 else None, f"c{i % 5}") for i in ids])
            payments.add(*[(i / 2, (i * 3) % 60) for i in ids], (0.25, None))
            parcels.add(*[(f"p{i % 3}", i, 59 - i) for i in ids], ("twice", 100, part))
            run.process_all_available()
    assert (tmp_path / "once").exists(), "a slot was killed on the way"
    assert max(epoch.timings.attempts for epoch in epochs(tmp_path / "checkpoint")) > 1
    batch = spark.sql(
        f"""SELECT id, customer, amount, place
            FROM parquet.`{orders.folder}`
            JOIN parquet.`{payments.folder}` ON id <=> order_id
            JOIN parquet.`{parcels.folder}` ON id <=> ref"""
    )
    found = spark.read.parquet(str(out))
    assert collections.Counter(found.collect()) == collections.Counter(batch.collect())
    assert found.count() > 30


IMPRESSIONS = [(ad, at(10 * hour + ad), f"{hour}-{ad}") for hour in range(8) for ad in range(4)]
CLICKS = [
    (at(10 * hour + ad + 3 + n), n, ad)
    for hour in range(8)
    for ad in range(4)
    if (hour + ad) % 3
    for n in range(2)
]


@pytest.mark.parametrize("how", [for_soak("left"), for_soak("right")])
def test_a_window_after_a_join_of_deduplicated_rows_counts_every_row(
    spark, make_input, tmp_path, how
):
    impressions = make_input("ad int, at timestamp, id string")
    clicks = make_input("clicked timestamp, n int, ad_id bigint")
    for hour in range(8):
        impressions.add(*IMPRESSIONS[4 * hour : 4 * hour + 4])
        # They come an epoch later, and twice.
        rows = [row for row in CLICKS if at(10 * hour - 10) <= row[0] < at(10 * hour)]
        clicks.add(*(rows or [(at(0), 9, -1)]))
    clicks.add(*[row for row in CLICKS if row[0] >= at(70)])
    job = Job("ads", max_parallelism=8)
    shown = job.source("shown", impressions.stream(spark), event_time="at", watermark="15 minutes")
    clicked = job.source(
        "clicked", clicks.stream(spark), event_time="clicked", watermark="15 minutes"
    ).deduplicate(on="ad_id", within="2 minutes", uid="once")
    joined = shown.join(
        clicked, on={"ad": "ad_id"}, within=("0 seconds", "5 minutes"), how=how, uid="join"
    )
    assert joined.schema.names == ["ad", "at", "id", "clicked", "n"]
    pairs, counts, late, twice = (sinks.Collect() for _ in range(4))
    joined.sink_to(pairs, uid="pairs")
    counted = (
        joined.key_by("ad")
        .window(windows.tumbling("1 minute"))
        .aggregate(n="count(*)", clicks="count(clicked)", uid="counts")
    )
    counted.sink_to(counts, uid="out")
    counted.side("late").sink_to(late, uid="late")
    clicked.side("duplicates").sink_to(twice, uid="twice")
    finish(job, tmp_path / "checkpoint", drain=True)
    once = [(clicked, ad) for clicked, n, ad in CLICKS if n == 0]
    expected = [
        (ad, shown_at, id_, found, None if found is None else 0)
        for ad, shown_at, id_ in IMPRESSIONS
        for found in [
            c for c, other in once if other == ad and c == shown_at + dt.timedelta(minutes=3)
        ]
        or [None]
        if how == "left" or found is not None
    ]
    if how == "right":
        expected.append((-1, None, None, at(0), 9))
    assert collections.Counter(map(tuple, pairs.rows)) == collections.Counter(expected)
    assert late.rows == [], "what a join emits is not late for waiting in it"
    time_of = {"left": 1, "right": 3}[how]
    per_window = collections.Counter(
        (row[0], (row[time_of] - T0) // dt.timedelta(minutes=1)) for row in expected
    )
    assert {
        (row[0], (row[1] - T0) // dt.timedelta(minutes=1)): row[3] for row in counts.rows
    } == per_window
    assert sorted(map(tuple, twice.rows)) == sorted(row for row in CLICKS if row[1] == 1)
