"""Aggregations led by a real coordinator over real slots: attempts fail, slots die, files are
compacted, the parallelism changes, and results stay those of all rows.
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.backends.cached.backend import CachedBackend
from cairn.backends.redis import backend as redis_backend
from cairn.driver.coordinator import compaction, epoch
from cairn.driver.coordinator.epoch import Coordinator
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.sinks import Collect
from cairn.sinks.base import SinkContext
from cairn.storage import manifest
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import SparkPosition
from cairn.storage.store import open_store
from cairn.testing import ManualClock
from tests.aggregates_model import (
    SIGNED,
    Row,
    expected_results,
    make_aggregation,
    make_partial_rows,
    sort_key,
)
from tests.backends import MORE_IN_SOAK, backend_name
from tests.property.test_aggregates import TURN, View, assert_same, group_by_key, take_turn
from tests.simulation.cluster import Cluster, Trouble

GROUP_COUNT = 8


class Machine:
    """An aggregation of changes that emits changes."""

    def __init__(self, backend: str, scratch: str) -> None:
        self.function, self.partials = make_aggregation(None, SIGNED, takes_back=True, changes=True)
        self.backend = backend_name(backend)
        self.scratch = scratch
        self.store = open_store("memory:")
        self.clock = ManualClock()
        self.epochs = 0
        self.outputs: list[Any] = []

    def graph(self, sink: Collect) -> Graph:
        inlet = Inlet((Port("rows"),), ("k",))
        return build_graph(
            "sums",
            GROUP_COUNT,
            {
                "rows": SourceNode("rows", None, self.partials.schema, None, None),
                "op": ProcessNode("op", (inlet,), self.function, self.function.schema, ()),
                "out": SinkNode("out", (Port("op"),), sink),
            },
        )

    def lead(self, parallelism: int, trouble: Trouble) -> None:
        self.sink = Collect()
        graph = self.graph(self.sink)
        job = create_or_open_job(self.store, graph.name, GROUP_COUNT)
        spec = job_spec(graph, job_id=job.job_id, checkpoint=self.store.url, backend=self.backend)
        self.sink.open(SinkContext(job.job_id, graph.name, "out", self.function.schema))
        self.coordinator = Coordinator(
            spec,
            self.store,
            {"out": self.sink},
            parallelism=parallelism,
            retained_epochs=2,
            attempts_max=6,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.cluster = Cluster(graph, spec, self.store, self.scratch, trouble)
        self.coordinator.take_over()
        self.coordinator.recover()

    def run_batch(self, rows: list[Row]) -> None:
        partials = make_partial_rows(self.partials, rows, SIGNED)
        array = pa.StructArray.from_arrays(partials.flatten(), fields=list(self.partials.schema))
        position = SparkPosition(folder="spark", batch_id=self.epochs, offsets="")
        self.epochs += 1
        self.coordinator.run_batch(
            position, lambda begin: self.cluster.execute({"rows": array}, begin)
        )
        newest = self.coordinator.newest
        assert newest is not None
        self.outputs += self.sink.epochs[newest.number]


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Any:
    """So that a few epochs are enough for merges, bases and stored deltas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FAN_IN", 2)
        # Some of the states do not fit in memory after a few epochs.
        patch.setattr(CachedBackend, "table_bytes_max", 300)
        patch.setattr(redis_backend, "APPLY_EPOCHS", 1)
        patch.setattr(compaction, "BASE_BYTES_MIN", 6_000)
        patch.setattr(epoch, "INLINE_BYTES_MAX", 2_500)
        patch.setattr(manifest, "FULL_EVERY", 3)
        yield


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@settings(suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(TURN | TURN | st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=9),
    trouble=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1 << 16),
)
def test_changes_add_up_under_failures_and_rescaling(
    backend: str, steps: list[Any], trouble: float, seed: int
) -> None:
    held: list[Row] = []
    view = View()
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(backend, scratch)
        machine.lead(2, Trouble(random.Random(seed), trouble))
        for step in steps:
            if isinstance(step, int):
                machine.lead(step, Trouble(random.Random(seed), trouble))
                continue
            machine.run_batch(take_turn(held, step))
            expected = [
                (key, *expected_results(rows, SIGNED)) for key, rows in group_by_key(held).items()
            ]
            assert_same(view.follow(machine.outputs), sorted(expected, key=sort_key), SIGNED)
