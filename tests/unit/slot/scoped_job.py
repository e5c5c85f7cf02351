"""A job with state of every scope, led by the real coordinator in slots of this process.

`notes` keeps lists per subtask, `alerts` counts per key and compares with rules that are broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from cairn import KeyedProcess, Process, state
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.resume import check_resume
from cairn.driver.coordinator.rounds import Outcome
from cairn.functions import Function
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.protocol.messages import Begin
from cairn.protocol.scoped_state import shared_uid
from cairn.sinks import Collect
from cairn.sinks.base import SinkContext
from cairn.snapshots import EpochReader
from cairn.storage.log import create_or_open_job
from cairn.storage.manifest import Epoch, SparkPosition
from cairn.storage.store import open_store
from cairn.types import parse_schema
from tests.simulation.cluster import Cluster

ROW = parse_schema("k long, v long")
RULE = parse_schema("name string, level long")
OUT = parse_schema("k long, v long, subtask int, said string")
GROUP_COUNT = 8

Row = tuple[int, int]
Rule = tuple[str, int | None]


class Notes(Process[Any]):
    """Remembers what it sees, in a list that is split and in one that is united."""

    own = state.OperatorList("long")
    all = state.OperatorList("long", redistribute="union")

    def process(self, row: Any, ctx: Any) -> Any:
        self.own.append(row.v)
        self.all.append(row.v)


class Waiting(Process[Any]):
    """Holds rows back; so none may be where no row comes."""

    own = state.OperatorList("long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.own.append(row.v)


class Alerts(KeyedProcess[Any]):
    rules = state.Broadcast("string", "long")
    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        said = ",".join(f"{name}={level}" for name, level in self.rules.items())
        return row.k, row.v, ctx.subtask, said

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        if row.level is None:
            del ctx.broadcast[row.name]
        else:
            ctx.broadcast[row.name] = row.level


class ScopedJob:
    """A job as a driver leads it; a second driver may take over from the first."""

    def __init__(self, scratch: Any, url: str = "memory:") -> None:
        self.store = open_store(url)
        self.scratch = str(scratch)
        self.batches = 0
        self.failures: list[Callable[[], None]] = []
        """Attempts to come that fail when they have run, and what happens then."""

    def lead(
        self,
        parallelism: int,
        notes: Function | None = None,
        alerts: Function | None = None,
        *,
        broadcast: state.Declaration | None = Alerts.rules,
        backend: str = "heap",
        on_error: str = "fail",
        bound: int = 0,
        adopt: Callable[[Coordinator], None] | None = None,
        **options: Any,
    ) -> None:
        """A driver takes over, with slots of its own."""
        self.sink = Collect()
        graph = _graph(notes or Notes(), alerts or Alerts(), broadcast, self.sink, bound)
        job = create_or_open_job(self.store, "scoped", GROUP_COUNT)
        given: dict[str, Any] = {
            "checkpoint": self.store.url,
            "backend": backend,
            "on_error": on_error,
        }
        spec = job_spec(graph, job_id=job.job_id, **given)
        self.sink.open(SinkContext(job.job_id, "scoped", "out", OUT))
        self.coordinator = Coordinator(
            spec,
            self.store,
            {"out": self.sink},
            parallelism=parallelism,
            retained_epochs=50,
            sleep=lambda seconds: None,
        )
        self.cluster = Cluster(graph, spec, self.store, self.scratch)
        newest = self.coordinator.take_over()
        if adopt is not None:
            adopt(self.coordinator)
            newest = self.coordinator.newest
        if newest is not None:
            given = {"job_name": "scoped", "url": "", "allow_dropped_state": False, **options}
            rewrite = check_resume(newest, self.coordinator.scoped_states, **given)
            self.coordinator.deploy(spec, rewrite=rewrite)
        self.coordinator.recover()

    def run(self, rows: Sequence[Row] = (), rules: Sequence[Rule] = ()) -> list[Any]:
        """An epoch; gives what `alerts` said in it."""
        before = len(self.sink.rows)
        sources = {"rows": _array(ROW, rows), "rules": _array(RULE, rules)}

        def execute(begin: Begin) -> Outcome:
            outcome = self.cluster.execute(sources, begin)
            if self.failures:
                self.failures.pop(0)()
                raise RuntimeError("this attempt failed when it had run")
            return outcome

        self.batches += 1
        position = SparkPosition(folder="spark", batch_id=self.batches, offsets="")
        self.coordinator.run_batch(position, execute)
        self.coordinator.note_published()
        return sorted(self.sink.rows[before:])

    def kill(self) -> None:
        """Every slot is gone; others are started when they are needed."""
        self.cluster.slots.clear()

    @property
    def newest(self) -> Epoch:
        assert self.coordinator.newest is not None
        return self.coordinator.newest

    def lists(self, name: str, epoch: Epoch | None = None) -> list[list[int]]:
        """The lists of the subtasks, as they are stored."""
        epoch = epoch or self.newest
        found: dict[int, list[tuple[int, int]]] = {}
        with EpochReader(self.store, epoch) as reader:
            for batch in reader.rows("notes", name):
                columns = (batch["key"], batch["entry"], batch["value"])
                for subtask, place, value in zip(*(c.to_pylist() for c in columns), strict=True):
                    found.setdefault(subtask, []).append((place["at"], value))
        parallelism = len(epoch.operators["notes"].ranges)
        return [[v for _, v in sorted(found.get(subtask, []))] for subtask in range(parallelism)]

    def replicas(self) -> list[dict[str, int]]:
        """The broadcast state in each subtask, as it is there after the last epoch."""
        return [
            dict(self.cluster.slot(number).level(0).operators[-1].context.broadcast)
            for number in self.coordinator.subtasks.slots
        ]

    def rules(self) -> dict[str, int]:
        """As they are stored, read under the uid of the operator."""
        with EpochReader(self.store, self.newest) as reader:
            return {
                key: value
                for batch in reader.rows("alerts", "rules")
                for key, value in zip(
                    batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True
                )
            }

    @property
    def shared(self) -> Any:
        """The one range of broadcast state."""
        (part,) = self.newest.operators[shared_uid("alerts")].ranges
        return part


def _graph(
    notes: Function,
    alerts: Function,
    broadcast: state.Declaration | None,
    sink: Collect,
    bound: int,
) -> Graph:
    rows = (Port("rows"),)
    inlets = (Inlet(rows, ("k",)), Inlet((Port("rules"),), way="broadcast"))
    return build_graph(
        "scoped",
        GROUP_COUNT,
        {
            "rows": SourceNode("rows", None, ROW, None, None),
            "rules": SourceNode("rules", None, RULE, None, None),
            "notes": ProcessNode(
                "notes", (Inlet(rows, way="spread"),), notes, OUT, parallelism=bound
            ),
            "alerts": ProcessNode("alerts", inlets, alerts, OUT, broadcast=broadcast),
            "out": SinkNode("out", (Port("notes"), Port("alerts")), sink),
        },
    )


def _array(schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pa.StructArray:
    names = [dict(zip(schema.names, row, strict=True)) for row in rows]
    return pa.array(names, pa.struct(list(schema)))


def feed(job: ScopedJob, first: int, count: int) -> None:
    """So many rows, each with its number as key and value."""
    job.run([(v, v) for v in range(first, first + count)])
