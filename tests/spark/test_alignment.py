"""Alignment of a job on Spark: in the manifest, in run.metrics(), for every operator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pyspark.sql import functions as sf

from cairn import Job, KeyedProcess, Process, sinks
from tests.spark.support import Input, epochs, finish


class Chained(Process[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


class Pass(KeyedProcess[Any]):
    def __init__(self, slow_key: int) -> None:
        self.slow_key = slow_key

    def process(self, row: Any, ctx: Any) -> Any:
        if row.k == self.slow_key:
            time.sleep(0.5)
        return row


def test_each_operator_tells_how_long_it_waited_for_the_slow_one_before(
    spark: Any, make_input: Any, tmp_path: Path
) -> None:
    """A task of Spark that reads slowly, then a subtask that has a slow key."""
    rows: Input = make_input("k bigint, v bigint")
    rows.add(*((k, k) for k in range(50)))

    read_slowly = sf.udf(lambda k: time.sleep(0.5 if k == 7 else 0) or k, "bigint")
    job = Job("aligned", max_parallelism=8)
    stream: Any = job.source("s", rows.stream(spark)).transform(
        lambda df: df.repartition(3, "k").withColumn("v", read_slowly("k"))
    )
    for uid, slow_key in (("a", 7), ("b", -1)):
        stream = stream.key_by("k").process(Pass(slow_key), schema="k bigint, v bigint", uid=uid)
    stream.process(Chained(), schema="k bigint, v bigint", uid="c").sink_to(sinks.Noop(), uid="out")
    measured = finish(job, tmp_path / "ckpt").metrics()
    waited = {uid: operator.alignment_ms for uid, operator in measured.operators.items()}
    assert waited["a"] > 0 and waited["b"] > 0 and waited["c"] == 0
    spread = measured.timings.alignment_ms
    assert waited == {"a": spread["0"], "b": spread["1"], "c": 0}
    (epoch,) = epochs(tmp_path / "ckpt")
    assert {u: o.alignment_ms for u, o in epoch.metrics.operators.items()} == waited
