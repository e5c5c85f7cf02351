"""Alignment of a job on Spark: in the manifest, in run.metrics(), for every operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cairn import Job, KeyedProcess, sinks
from tests.spark.support import Input, epochs, finish


class Pass(KeyedProcess[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


def test_each_operator_tells_how_long_it_waited_for_the_subtasks_before(
    spark: Any, make_input: Any, tmp_path: Path
) -> None:
    rows: Input = make_input("k bigint, v bigint")
    rows.add(*((k, k) for k in range(50)))
    job = Job("aligned", max_parallelism=8)
    # Several tasks read it: without a shuffle of its own it would be one.
    stream: Any = job.source("s", rows.stream(spark)).transform(lambda df: df.repartition(3))
    for uid in ("a", "b"):
        stream = stream.key_by("k").process(Pass(), schema="k bigint, v bigint", uid=uid)
    stream.sink_to(sinks.Noop(), uid="out")
    measured = finish(job, tmp_path / "ckpt").metrics()
    waited = {uid: operator["alignment_ms"] for uid, operator in measured["operators"].items()}
    # Three tasks on two cores: the third ends after the first.
    assert waited["a"] is not None and waited["a"] >= 0
    spread = measured["timings"]["alignment_ms"]
    assert waited == {"a": spread["0"], "b": spread["1"]}
    (epoch,) = epochs(tmp_path / "ckpt")
    assert {u: o["alignment_ms"] for u, o in epoch.metrics["operators"].items()} == waited
