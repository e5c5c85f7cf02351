"""Graphs of many shapes, run by real slots: every row arrives where the program says, once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import Job, sinks
from cairn.driver.coordinator.epoch import Coordinator
from cairn.plan.deploy import job_spec
from cairn.sinks.base import SinkContext
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import SparkPosition
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from cairn.testing import ManualClock
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.simulation.cluster import Cluster, Trouble
from tests.unit.plan.programs import ROW, process, source

Rows = list[tuple[int, int]]
S: Rows = [(k, k) for k in range(12)]
T: Rows = [(k, 100 + k) for k in range(12)]


def published(
    job: Job, parallelism: int, scratch: Path, trouble: float = 0.0, epochs: int = 2
) -> dict[str, Counter[Any]]:
    """What each sink has after some epochs, each with all rows of S and T."""
    graph, store, clock = job.graph(), open_store("memory:"), ManualClock()
    info = create_or_open_job(store, graph.name, graph.group_count)
    spec = job_spec(graph, job_id=info.job_id, checkpoint=store.url, backend="heap")
    ends: dict[str, Any] = {node.uid: node.sink for node in graph.sinks}
    for uid, end in ends.items():
        end.open(SinkContext(info.job_id, graph.name, uid, pa.schema([])))
    coordinator = Coordinator(
        spec,
        store,
        ends,
        parallelism=parallelism,
        retained_epochs=2,
        attempts_max=20,
        clock=clock,
        sleep=clock.sleep,
    )
    coordinator.take_over()
    coordinator.recover()
    cluster = Cluster(graph, spec, store, str(scratch), Trouble(random.Random(1), trouble))
    struct = codec(pa.struct(list(parse_schema(ROW))))
    inputs = {
        name: struct.encode([struct.normalise(row) for row in rows])
        for name, rows in (("s", S), ("t", T))
        if name in graph.nodes
    }
    for batch in range(epochs):
        position = SparkPosition(folder="spark", batch_id=batch, offsets="")
        coordinator.run_batch(position, lambda begin: cluster.execute(inputs, begin))
    assert verify(store).ok
    return {uid: Counter(map(tuple, end.rows)) for uid, end in ends.items()}


def times(count: int, *rows: Rows) -> Counter[Any]:
    return Counter({row: count for part in rows for row in part})


@pytest.mark.parametrize("trouble", [0.0, 0.05])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_forks_unions_and_skipped_levels_bring_every_row_where_it_belongs(
    parallelism: int, trouble: float, tmp_path: Path
) -> None:
    job = Job("shapes", max_parallelism=8)
    s, t = source(job, "s"), source(job, "t")
    a = process(s, "a")
    b = process(a.union(t), "b", key="v")
    c = process(b.union(s), "c")
    a.sink_to(sinks.Collect(), uid="of-a")
    b.union(t).sink_to(sinks.Collect(), uid="of-b-and-t")
    c.sink_to(sinks.Collect(), uid="of-c")
    c.sink_to(sinks.Collect(), uid="of-c-again")
    t.sink_to(sinks.Collect(), uid="of-t")
    found = published(job, parallelism, tmp_path, trouble)
    assert found == {
        "of-a": times(2, S),
        "of-b-and-t": times(2, S) + times(4, T),
        "of-c": times(4, S) + times(2, T),
        "of-c-again": times(4, S) + times(2, T),
        "of-t": times(2, T),
    }


@pytest.mark.parametrize("parallelism", [1, 4])
def test_a_job_without_operators_only_moves_rows(parallelism: int, tmp_path: Path) -> None:
    job = Job("pipe", max_parallelism=8)
    source(job, "s").sink_to(sinks.Collect(), uid="out")
    assert published(job, parallelism, tmp_path) == {"out": times(2, S)}


def test_an_operator_without_a_sink_runs_all_the_same(tmp_path: Path) -> None:
    job = Job("quiet", max_parallelism=8)
    process(process(source(job, "s"), "a"), "b")
    assert published(job, 2, tmp_path) == {}
