"""Jobs with functions by the batch, led by a real coordinator over real slots: attempts fail,
slots die, files are compacted, the parallelism changes, and every row counts once.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import BatchProcess, state
from cairn.backends.cached.backend import CachedBackend
from cairn.backends.columnar import table as columns
from cairn.backends.redis import backend as redis_backend
from cairn.driver.coordinator import compaction, epoch
from cairn.driver.coordinator.epoch import Coordinator
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.sinks import Collect
from cairn.sinks.base import SinkContext
from cairn.slot import batches
from cairn.storage import manifest
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import SparkPosition
from cairn.storage.store import open_store
from cairn.storage.verify import verify
from cairn.testing import ManualClock
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.backends import MORE_IN_SOAK, backend_name
from tests.restored import restored_operator, stored_rows
from tests.simulation.cluster import Cluster, Trouble

GROUP_COUNT = 8
KEYS = {
    "k bigint": st.tuples(st.none() | st.integers(0, 9)),
    "k string": st.tuples(st.none() | st.sampled_from(["", "a", "a longer key than sixteen", "é"])),
    "a int, b date": st.tuples(st.none() | st.integers(0, 2), st.none() | st.dates()),
}
OUT = parse_schema("n bigint")


class Tally(BatchProcess):
    """Counts per key, and per key and value; forgets what was counted three times."""

    count = state.Value("bigint")
    values = state.Map("bigint", "struct<n: bigint, text: string>")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        names = batch.schema.names[:-1]
        rows = pa.Table.from_batches([batch])
        found = rows.group_by(names, use_threads=False).aggregate([([], "count_all")])
        keys = self._keys(found, names)
        n = pc.add(found["count_all"].combine_chunks(), pc.fill_null(self.count.get_many(keys), 0))
        self.count.put_many(keys, pc.if_else(pc.equal(n, 3), None, n))
        by_value = rows.group_by([*names, "v"], use_threads=False).aggregate([([], "count_all")])
        keys, entries = self._keys(by_value, names), by_value["v"].combine_chunks()
        held = self.values.get_many(keys, entries)
        n = pc.add(by_value["count_all"].combine_chunks(), pc.fill_null(held.field("n"), 0))
        text = pc.cast(n, pa.string())
        self.values.put_many(keys, entries, pa.StructArray.from_arrays([n, text], ["n", "text"]))
        return None

    def end_epoch(self, ctx: Any) -> Any:
        _, _, values = self.values.between(None, None)
        return pa.table({"n": [pc.sum(values.field("n")).as_py() or 0]})

    def _keys(self, found: pa.Table, names: list[str]) -> pa.Array:
        columns = [found[name].combine_chunks() for name in names]
        return columns[0] if len(names) == 1 else pa.StructArray.from_arrays(columns, names)


class Model:
    def __init__(self) -> None:
        self.count: dict[Any, int] = {}
        self.values: dict[Any, int] = defaultdict(int)

    def run(self, rows: list[Any]) -> None:
        """A call of process()."""
        added: dict[Any, int] = defaultdict(int)
        for key, value in rows:
            added[key] += 1
            self.values[key, value] += 1
        for key, n in added.items():
            total = self.count.pop(key, 0) + n
            if total != 3:
                self.count[key] = total


class Machine:
    out = OUT

    def __init__(self, ddl: str, backend: str, scratch: str) -> None:
        self.schema = parse_schema(f"{ddl}, v bigint")
        self.backend = backend_name(backend)
        self.scratch = scratch
        self.store = open_store("memory:")
        self.clock = ManualClock()
        self.epochs = 0

    def graph(self, sink: Collect) -> Graph:
        keys = tuple(self.schema.names[:-1])
        return build_graph(
            "tally",
            GROUP_COUNT,
            {
                "rows": SourceNode("rows", None, self.schema, None, None),
                "op": ProcessNode("op", (Inlet((Port("rows"),), keys),), Tally(), OUT, ()),
                "out": SinkNode("out", (Port("op"),), sink),
            },
        )

    def lead(self, parallelism: int, trouble: Trouble) -> None:
        self.sink = Collect()
        graph = self.graph(self.sink)
        job = create_or_open_job(self.store, graph.name, GROUP_COUNT)
        self.spec = job_spec(
            graph, job_id=job.job_id, checkpoint=self.store.url, backend=self.backend
        )
        self.sink.open(SinkContext(job.job_id, graph.name, "out", self.out))
        self.coordinator = Coordinator(
            self.spec,
            self.store,
            {"out": self.sink},
            parallelism=parallelism,
            retained_epochs=2,
            attempts_max=6,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.cluster = Cluster(graph, self.spec, self.store, self.scratch, trouble)
        self.coordinator.take_over()
        self.coordinator.recover()

    def run_batch(self, rows: list[tuple[Any, ...]]) -> list[Any]:
        row_codec = codec(pa.struct(list(self.schema)))
        array = row_codec.encode([row_codec.normalise(row) for row in rows])
        position = SparkPosition(folder="spark", batch_id=self.epochs, offsets="")
        self.epochs += 1
        self.coordinator.run_batch(
            position, lambda begin: self.cluster.execute({"rows": array}, begin)
        )
        newest = self.coordinator.newest
        assert newest is not None
        return self.sink.epochs[newest.number]

    def stored(self) -> tuple[dict[Any, Any], dict[Any, Any]]:
        newest = self.coordinator.newest
        assert newest is not None
        spec = self.spec.levels[0].operators[0]
        tables = restored_operator(spec, self.store, newest.number, GROUP_COUNT).tables
        return stored_rows(tables["count"]), stored_rows(tables["values"])


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    """So that a few epochs are enough for merges, bases, stored deltas and new layouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FAN_IN", 2)
        # Some of the states do not fit in memory after a few epochs.
        patch.setattr(CachedBackend, "table_bytes_max", 300)
        patch.setattr(redis_backend, "APPLY_EPOCHS", 1)
        patch.setattr(compaction, "BASE_BYTES_MIN", 6_000)
        patch.setattr(epoch, "INLINE_BYTES_MAX", 2_500)
        patch.setattr(manifest, "FULL_EVERY", 3)
        patch.setattr(columns, "DEAD_MIN", 2)
        patch.setattr(batches, "EMIT_ROWS_MAX", 2)
        yield


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("ddl", KEYS)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data(), trouble=st.sampled_from([0.0, 0.05]), seed=st.integers(0, 1 << 16))
def test_every_row_counts_once(
    ddl: str, backend: str, data: st.DataObject, trouble: float, seed: int
) -> None:
    rows = st.lists(st.tuples(KEYS[ddl], st.integers(0, 3)), max_size=12)
    leads = st.sampled_from([1, 2, 3, 5, GROUP_COUNT])
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(ddl, backend, scratch)
        machine.lead(2, Trouble(random.Random(seed), trouble))
        model = Model()
        for step in data.draw(st.lists(rows | rows | leads, min_size=1, max_size=12)):
            if isinstance(step, int):
                machine.lead(step, Trouble(random.Random(seed), trouble))
                continue
            totals = [n for (n,) in machine.run_batch([(*key, value) for key, value in step])]
            model.run([(key[0] if len(key) == 1 else key, value) for key, value in step])
            assert sum(totals) == sum(model.values.values())
            assert len(totals) == machine.coordinator.parallelism
        if machine.coordinator.newest is not None:
            assert verify(machine.store).ok
            count, values = machine.stored()
            assert count == model.count
            assert values == {name: (n, str(n)) for name, n in model.values.items()}
