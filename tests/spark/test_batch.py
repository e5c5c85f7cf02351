"""process_batch in real jobs: the same as Spark's own groupBy over all that came."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cairn import BatchProcess, FunctionError, Job, KeyedProcess, PlanError, sinks, state
from tests.marks import for_soak
from tests.spark.support import epochs, eventually, finish, published, slot_pids

ROWS = "k bigint, name string, day date, v bigint"
OUT = "n bigint, total bigint, big bigint"
KEYS = {"bigint": ("k",), "string": ("name",), "several": ("name", "k", "day")}


class Tally(BatchProcess):
    """Count, sum and biggest value per key: what it knows so far, for each key of a batch."""

    sums = state.Value("struct<n: bigint, total: bigint>", default={"n": 0, "total": 0})
    big = state.Map("string", "bigint")

    def __init__(self, *keys: str) -> None:
        self.names = keys

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        rows = pa.Table.from_batches([batch]).group_by(list(self.names), use_threads=False)
        found = rows.aggregate([([], "count_all"), ("v", "sum"), ("v", "max")])
        columns = [found[name].combine_chunks() for name in self.names]
        keys = columns[0]
        if len(columns) > 1:
            keys = pa.StructArray.from_arrays(columns, fields=list(ctx.keys.type))
        n, total, big = (found[name].combine_chunks() for name in ("count_all", "v_sum", "v_max"))
        held = self.sums.get_many(keys)
        n, total = pc.add(n, held.field("n")), pc.add(total, held.field("total"))
        self.sums.put_many(keys, pa.StructArray.from_arrays([n, total], ["n", "total"]))
        entries = pa.array(["big"] * len(keys))
        big = pc.max_element_wise(big, self.big.get_many(keys, entries))
        self.big.put_many(keys, entries, big)
        out = dict(zip(self.names, columns, strict=True))
        return pa.record_batch(out | {"n": n, "total": total, "big": big})


def tally_job(name: str, stream: Any, keys: tuple[str, ...], sink: sinks.Sink) -> Job:
    job = Job(name, max_parallelism=16)
    types = {"k": "k bigint", "name": "name string", "day": "day date"}
    schema = ", ".join([*(types[key] for key in keys), OUT])
    keyed = job.source("rows", stream).key_by(*keys)
    keyed.process_batch(Tally(*keys), schema=schema, uid="tally").sink_to(sink, uid="out")
    return job


def random_rows(count: int, seed: int) -> list[tuple[Any, ...]]:
    chance = random.Random(seed)
    days = [None, dt.date(2026, 1, 1), dt.date(1969, 12, 31)]
    names = [None, "", "ä", "a name of more than sixteen bytes", *"abcdef"]
    return [
        (
            chance.choice([None, *range(20)]),
            chance.choice(names),
            chance.choice(days),
            chance.randrange(-50, 100),
        )
        for _ in range(count)
    ]


def by_spark(spark: Any, source: Any, keys: tuple[str, ...]) -> dict[Any, Any]:
    """What Spark makes of all the input."""
    from pyspark.sql import functions as f

    grouped = spark.read.parquet(str(source.folder)).groupBy(*keys)
    found = grouped.agg(f.count("*").alias("n"), f.sum("v").alias("t"), f.max("v").alias("b"))
    return {tuple(row[: len(keys)]): tuple(row[len(keys) :]) for row in found.collect()}


def last_words(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[Any, Any]:
    """Of each key the row with the highest count."""
    found: dict[Any, Any] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        if row["n"] > found.get(key, (0,))[0]:
            found[key] = (row["n"], row["total"], row["big"])
    return found


@pytest.mark.parametrize(
    ("keys", "backend"),
    [
        for_soak("bigint", "heap"),
        ("string", "rocksdb"),
        for_soak("several", "heap"),
        for_soak("several", "rocksdb"),
    ],
)
def test_counts_are_those_of_group_by_over_restarts_at_other_parallelisms(
    spark: Any, make_input: Any, tmp_path: Any, keys: str, backend: str
) -> None:
    names = KEYS[keys]
    source = make_input(ROWS)
    for round_, parallelism in enumerate((1, 3, 2)):
        source.add_all(random_rows(300, 10 * round_ + at) for at in range(2))
        sink = sinks.Files(str(tmp_path / "out"))
        job = tally_job("tally", source.stream(spark), names, sink)
        finish(job, tmp_path / "checkpoint", parallelism, backend=backend)
        assert last_words(published(tmp_path / "out"), names) == by_spark(spark, source, names)


def test_a_live_rescale_a_lost_slot_and_an_upgrade_lose_nothing(
    spark: Any, make_input: Any, tmp_path: Any
) -> None:
    source = make_input(ROWS).add(*random_rows(200, 1))
    sink = sinks.Files(str(tmp_path / "out"))
    job = tally_job("live", source.stream(spark), ("k",), sink)
    with job.start(checkpoint=str(tmp_path / "c"), parallelism=2, trigger="50 milliseconds") as run:
        run.process_all_available()
        run.rescale(3)
        source.add(*random_rows(200, 2))
        run.process_all_available()
        for pid in slot_pids(run._engine.coordinator.run_id).values():
            os.kill(pid, signal.SIGKILL)
        source.add(*random_rows(200, 3))
        run.process_all_available()
        run.upgrade("tally", Tally("k"))
        source.add(*random_rows(200, 4))
        run.process_all_available()
        assert eventually(lambda: epochs(tmp_path / "c")[-1].operators["tally"].parallelism == 3)
    assert last_words(published(tmp_path / "out"), ("k",)) == by_spark(spark, source, ("k",))


class EpochEnds(BatchProcess):
    """Emits how many rows it has seen, at the end of each epoch."""

    seen = state.Map("int", "bigint")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        found = (
            pa.table({"k": ctx.keys})
            .group_by("k", use_threads=False)
            .aggregate([([], "count_all")])
        )
        keys, zeros = found["k"].combine_chunks(), pa.array([0] * len(found), pa.int32())
        before = pc.fill_null(self.seen.get_many(keys, zeros), 0)
        self.seen.put_many(keys, zeros, pc.add(before, found["count_all"].combine_chunks()))

    def end_epoch(self, ctx: Any) -> Any:
        _, _, counts = self.seen.between(None, None)
        return pa.table({"subtask": [ctx.subtask], "n": [pc.sum(counts).as_py() or 0]})


def test_every_subtask_ends_every_epoch_with_rows_or_without(
    spark: Any, make_input: Any, tmp_path: Any
) -> None:
    source = make_input("k bigint").add((1,), (1,)).add((1,)).add((1,))
    sink = sinks.Collect()
    job = Job("ends", max_parallelism=16)
    keyed = job.source("rows", source.stream(spark)).key_by("k")
    keyed.process_batch(EpochEnds(), schema="subtask int, n bigint", uid="e").sink_to(
        sink, uid="out"
    )
    finish(job, tmp_path / "c", 3)
    per_epoch = [sorted(n for _, n in rows) for _, rows in sorted(sink.epochs.items())]
    assert per_epoch == [[0, 0, 2], [0, 0, 3], [0, 0, 4]]


def test_a_batch_that_does_not_fit_fails_the_run_with_the_field(
    spark: Any, make_input: Any, tmp_path: Any
) -> None:
    class Wrong(BatchProcess):
        def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
            return batch.select(["name"])

    source = make_input(ROWS).add(*random_rows(10, 1))
    job = Job("wrong", max_parallelism=16)
    keyed = job.source("rows", source.stream(spark)).key_by("k")
    keyed.process_batch(Wrong(), schema="k bigint, name string", uid="wrong").sink_to(
        sinks.Noop(), uid="out"
    )
    with pytest.raises(FunctionError, match="field 'k': missing; found name"):
        finish(job, tmp_path / "c")


def test_functions_of_the_other_kind_are_refused(spark: Any, make_input: Any) -> None:
    class Single(KeyedProcess[Any]):
        def process(self, row: Any, ctx: Any) -> None: ...

    keyed = Job("other").source("rows", make_input(ROWS).stream(spark)).key_by("k")
    with pytest.raises(PlanError, match=r"run it with .*\.process\("):
        keyed.process_batch(Single(), schema="k bigint", uid="a")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"run it with .*\.process_batch\("):
        keyed.process(Tally("k"), schema="k bigint", uid="a")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"subclass cairn\.BatchProcess"):
        keyed.process_batch(lambda batch: batch, schema="k bigint", uid="a")
