"""The rows of a batch in slices."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F

from cairn import Job, KeyedProcess, sinks, state
from cairn.plan.slices import SlicedRows
from cairn.protocol.messages import Slice
from cairn.storage.store import open_store
from tests.spark.support import Input, epochs, finish, published


def test_each_row_is_in_one_slice_even_if_it_is_another_one_when_computed_again(spark):
    @F.udf("double")
    def chance():
        import random

        return random.random()

    rows = spark.range(0, 103, 1, 3).withColumn("place", F.lit("its own"))
    rows = rows.withColumn("x", chance.asNondeterministic()())
    whole = SlicedRows(rows)
    slices = [whole.take(Slice(index, 4)).collect() for index in range(4)]
    assert sum(map(len, slices)) == 103
    assert {row.id for each in slices for row in each} == set(range(103))
    again = {row.x for index in range(2) for row in whole.take(Slice(index, 2)).collect()}
    assert again == {row.x for each in slices for row in each}
    # The next rows of every partition, in their order.
    assert [row.id for row in slices[0]] == [*range(9), *range(34, 43), *range(68, 77)]
    assert slices[0][0].place == "its own" and len(slices[0][0]) == 3
    whole.close()


def test_a_batch_without_rows_has_slices_without_rows(spark):
    empty = SlicedRows(spark.range(0))
    assert [empty.take(Slice(index, 2)).count() for index in range(2)] == [0, 0]
    empty.close()


class Long(KeyedProcess):
    """Keeps a long text for each key: all of it is in the overlay of the running round."""

    text = state.Value(str)

    def process(self, row, ctx):
        self.text.set(f"{row.k:08d}" * 256)
        return row


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_batch_that_does_not_fit_into_a_slot_is_divided_and_no_slot_dies(spark, tmp_path):
    """240,000 texts of 2 KiB are 480 MiB; a slot has 400, and RocksDB 64 of them."""
    count = 240_000
    rows = Input(tmp_path / "in", "k long").add(*((key,) for key in range(count)))
    job = Job("long", max_parallelism=4)
    kept = job.source("rows", rows.stream(spark)).key_by("k")
    kept = kept.process(Long(), schema="k long", uid="long")
    kept.sink_to(sinks.Files(str(tmp_path / "out")), uid="out")
    finish(
        job,
        tmp_path / "c",
        parallelism=1,
        backend="rocksdb",
        backend_memory_mb=64,
        slot_memory_mb=400,
    )
    (epoch,) = epochs(tmp_path / "c")
    assert epoch.timings.rounds > 1 and epoch.timings.attempts > 1
    assert epoch.metrics.operators["long"].state_keys == count
    assert sorted(row["k"] for row in published(tmp_path / "out")) == list(range(count))
    store = open_store(str(tmp_path / "c"))
    failures = "".join(store.get(found.path).decode() for found in store.list("failures"))
    assert "a slot uses" in failures and "is gone" not in failures
