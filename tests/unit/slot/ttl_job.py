"""A job with state of every kind that expires, led by the real coordinator, with Spark played."""

from __future__ import annotations

import operator
import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from cairn import KeyedProcess, state
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.resume import check_resume
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.sinks import Collect
from cairn.sinks.base import SinkContext
from cairn.snapshots import EpochReader, Savepoint
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.store import Store, open_store
from cairn.testing import ManualClock
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.simulation.cluster import Cluster, Trouble

GROUP_COUNT = 8
IN = parse_schema("k long, v long, ts timestamp")
SEEN = parse_schema("k long, v long, total long, items array<long>, entries array<string>")


def make_function(ttl: str | state.TTL | None, **more: Any) -> KeyedProcess[Any]:
    """Each row is written to every state; v=None only looks. Emits what is seen before."""

    def process(self: Any, row: Any, ctx: Any) -> Any:
        seen = (row.k, self.value.get(), self.total.get(), list(self.items), list(self.entries))
        if row.v is not None:
            self.value.set(row.v)
            self.total.add(row.v)
            self.items.append(row.v)
            self.entries[str(row.v)] = row.v
        return seen

    names: dict[str, Any] = {
        "value": state.Value("long", ttl=ttl, **more),
        "total": state.Reducing("long", operator.add, ttl=ttl),
        "items": state.List("long", ttl=ttl),
        "entries": state.Map("string", "long", ttl=ttl),
        "process": process,
    }
    return type("Keep", (KeyedProcess,), names)()


class TtlJob:
    """One driver after the other, each with new slots, on one checkpoint."""

    def __init__(
        self,
        scratch: Path,
        ttl: str | state.TTL | None = "1 minute",
        *,
        backend: str = "heap",
        parallelism: int = 2,
        store: Store | None = None,
        clock: ManualClock | None = None,
        trouble: Trouble | None = None,
    ) -> None:
        self.backend = backend
        self.scratch = str(scratch)
        self.store = store or open_store("memory:")
        self.clock = clock or ManualClock(1_000_000)
        self.trouble = trouble or Trouble(random.Random(7))
        self.epochs = 0
        self.passed_ms: int | None = None
        """The watermark that epochs before have run with."""
        self.lead(parallelism, ttl)

    def graph(self, function: KeyedProcess[Any], sink: Collect) -> Graph:
        nodes: dict[str, Any] = {
            "rows": SourceNode("rows", None, IN, "ts", None),
            "keep": ProcessNode("keep", (Inlet((Port("rows"),), ("k",)),), function, SEEN, ()),
            "out": SinkNode("out", (Port("keep"),), sink),
        }
        return build_graph("keep", GROUP_COUNT, nodes)

    def lead(self, parallelism: int, ttl: str | state.TTL | None, **more: Any) -> None:
        """A new driver takes over, with new slots and this ttl."""
        self.sink = Collect()
        function = make_function(ttl, **more)
        graph = self.graph(function, self.sink)
        job = create_or_open_job(self.store, "keep", GROUP_COUNT)
        spec = job_spec(graph, job_id=job.job_id, checkpoint=self.store.url, backend=self.backend)
        self.sink.open(SinkContext(job.job_id, "keep", "out", SEEN))
        self.coordinator = Coordinator(
            spec,
            self.store,
            {"out": self.sink},
            parallelism=parallelism,
            retained_epochs=50,
            attempts_max=20,
            clock=self.clock,
            sleep=lambda seconds: None,
        )
        self.cluster = Cluster(graph, spec, self.store, self.scratch, self.trouble)
        newest = self.coordinator.take_over()
        if newest is not None:
            rewrite = check_resume(
                newest,
                self.coordinator.scoped_states,
                job_name="keep",
                url="",
                allow_dropped_state=False,
            )
            self.coordinator.deploy(spec, rewrite=rewrite)
        self.coordinator.recover()

    def run(self, *rows: tuple[Any, ...], after_ms: int = 0) -> dict[int, tuple[Any, ...]]:
        """An epoch of (k, v) or (k, v, event time in ms). Gives what each key saw, by key."""
        self.clock.advance_ms(after_ms)
        row_codec = codec(pa.struct(list(IN)))
        array = pa.array(
            [{"k": row[0], "v": row[1], "ts": (*row, 0)[2] * 1000} for row in rows],
            pa.struct([("k", pa.int64()), ("v", pa.int64()), ("ts", pa.timestamp("us", "UTC"))]),
        ).cast(row_codec.arrow)
        position = SparkPosition(folder="spark", batch_id=self.epochs, offsets="")
        self.epochs += 1
        epoch = self.coordinator.run_batch(
            position,
            lambda begin: self.cluster.execute(
                {"rows": array},
                msgspec.structs.replace(
                    begin, watermark_ms=self.passed_ms, passed_ms=self.passed_ms
                ),
            ),
        )
        self.coordinator.note_published()
        return {
            row[0]: tuple(list(seen) if isinstance(seen, tuple) else seen for seen in row[1:])
            for row in self.sink.epochs[epoch.number]
        }

    @property
    def newest(self) -> Epoch:
        assert self.coordinator.newest is not None
        return self.coordinator.newest

    def held(self, name: str) -> int:
        """How many keys the slots hold of a state, expired or not."""
        return sum(
            op.tables[name].count_held().entries
            for number in self.coordinator.subtasks.slots
            for op in self.cluster.slot(number).level(0).operators
        )

    def sweep(self) -> None:
        """As when the slots have time."""
        for slot in self.cluster.slots.values():
            while slot.level(0).sweep(1.0):
                pass


def rows_of(reader: EpochReader | Savepoint, name: str) -> dict[Any, Any]:
    """What a reader shows of a state: by key (and entry) the value."""
    columns = reader.columns("keep")[name]
    return {
        (key if entry is None else (key, entry)): value
        for batch in reader.rows("keep", name)
        for key, entry, value in columns.decode(batch)
    }
