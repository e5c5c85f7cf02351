"""Rows that a function fails on, through Spark: each one letter, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest
from pyspark.sql import functions as sf

from cairn import Job, KeyedProcess, sinks, state
from tests.spark.support import epochs, finish, published, stored_state

ROWS = "id long, k long, amount string"


class Adding(KeyedProcess):
    """Adds up what are numbers; the slot that first comes to a row of its own dies there."""

    total = state.Value("double", default=0.0)
    seen = state.List("long")

    def __init__(self, deadly_id, mark):
        self.deadly_id, self.mark = deadly_id, mark

    def process(self, row, ctx):
        self.seen.append(row.id)
        yield row.id, self.total.get()
        if row.id == self.deadly_id and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.total.set(self.total.get() + float(row.amount))


def add_input(rows):
    for epoch in range(4):
        numbers = range(epoch * 20, epoch * 20 + 20)
        rows.add(*((n, n % 3, "bad €" if n % 7 == 5 else str(n)) for n in numbers))
    return [n for n in range(80) if n % 7 == 5]


def build(spark, rows, folder, deadly_id=-1, *, takes_letters=True):
    job = Job("letters", max_parallelism=8)
    source = job.source("rows", rows.stream(spark))
    function = Adding(deadly_id, str(folder / "dead"))
    added = source.key_by("k").process(function, schema="id long, total double", uid="adding")
    added.sink_to(sinks.Files(str(folder / "out")), uid="out")
    if takes_letters:
        added.side("errors").sink_to(sinks.Files(str(folder / "errors")), uid="errors")
    return job


def test_each_failing_row_is_one_letter_though_a_slot_dies_in_the_middle(
    spark, make_input, tmp_path
):
    rows = make_input(ROWS)
    bad = add_input(rows)
    job = build(spark, rows, tmp_path, deadly_id=33)
    run = finish(job, tmp_path / "c", on_error="dead-letter")
    assert (tmp_path / "dead").exists()
    found = epochs(tmp_path / "c")
    assert max(epoch.timings.attempts for epoch in found) > 1
    assert sorted(row["id"] for row in published(tmp_path / "out")) == [
        n for n in range(80) if n not in bad
    ]
    totals = stored_state(job, tmp_path / "c")["adding"]
    good = {k: [n for n in range(80) if n % 3 == k and n not in bad] for k in range(3)}
    assert totals["total"] == {k: float(sum(ids)) for k, ids in good.items()}
    assert {k: sorted(ids) for k, ids in totals["seen"].items()} == good
    # What a letter holds can be processed again.
    letters = spark.read.parquet(str(tmp_path / "errors"))
    again = letters.select("*", sf.from_json("row", ROWS).alias("r")).orderBy("r.id").collect()
    assert [(row.r.id, row.r.k, row.r.amount) for row in again] == [
        (n, n % 3, "bad €") for n in bad
    ]
    assert {(row.operator, row.key) for row in again} == {("adding", str(k)) for k in range(3)}
    assert {row.error for row in again} == {
        "ValueError: could not convert string to float: 'bad €'"
    }
    assert all("in process" in row.traceback for row in again)
    numbers = [epoch.number for epoch in found]
    assert [row.epoch for row in again] == [numbers[row.r.id // 20] for row in again]
    counted = [epoch.metrics.operators["adding"].error_rows for epoch in found]
    assert counted == [sum(n // 20 == epoch for n in bad) for epoch in range(4)]
    assert run.metrics().error_rows == counted[-1]


@pytest.mark.soak
def test_letters_that_nobody_takes_are_warned_of_and_counted(spark, make_input, tmp_path):
    rows = make_input(ROWS)
    bad = add_input(rows)
    job = build(spark, rows, tmp_path, takes_letters=False)
    with pytest.warns(UserWarning, match=r"adding fail on .* take \.side\('errors'\)"):
        finish(job, tmp_path / "c", on_error="dead-letter")
    counted = [e.metrics.operators["adding"].error_rows for e in epochs(tmp_path / "c")]
    assert sum(counted) == len(bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finish(build(spark, rows, tmp_path), tmp_path / "c", on_error="dead-letter")
