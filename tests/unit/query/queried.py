"""A job with state of every kind, led epoch by epoch over real slots, and asked meanwhile."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import msgspec
import pyarrow as pa

from cairn import BatchProcess, KeyedProcess, Process, state
from cairn.driver.coordinator.epoch import Coordinator
from cairn.driver.coordinator.rounds import Outcome
from cairn.functions import Function
from cairn.plan.graph import Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.protocol.lookups import LookupReply, LookupRequest, reply_decoder, request_decoder
from cairn.protocol.messages import Begin
from cairn.query.live import LiveState
from cairn.sinks import Collect
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.simulation.cluster import Cluster
from tests.simulation.led_job import LedJob

ROW = parse_schema("k long, v long")
OUT = parse_schema("k long")
GROUP_COUNT = 8

BACKENDS = ["heap", "rocksdb", "postgres", "redis"]
KEYS = list(range(12))
EPOCHS = [
    [(k, k) for k in KEYS],
    [(k, k + 1) for k in KEYS[:6]] + [(0, 7)],
    [(1, -1), (2, -1), (2, 5), (50, 1)],
    [],
    [(k, 100 + k) for k in KEYS[::2]],
]
during: list[Callable[[], None]] = []
"""Called for every row, in the middle of an epoch."""


class Mean:
    def create(self) -> Any:
        return 0, 0.0

    def add(self, held: Any, value: float) -> Any:
        return held[0] + 1, held[1] + value

    def merge(self, one: Any, other: Any) -> Any:
        return one[0] + other[0], one[1] + other[1]

    def result(self, held: Any) -> float:
        return float(held[1] / held[0])


class Everything(KeyedProcess[Any]):
    """What it holds of a key is a function of the values that came for it: see `model_of`."""

    last = state.Value("struct<v:long,text:string>")
    total = state.Reducing("long", lambda a, b: a + b)
    mean = state.Aggregating("struct<n:long,s:double>", Mean())
    items = state.List("long")
    seen = state.Map("long", "string")
    thing = state.Value(object)

    def process(self, row: Any, ctx: Any) -> Any:
        if row.v < 0:
            for held in (self.last, self.total, self.mean, self.items, self.seen, self.thing):
                held.clear()
            ctx.timers.delete_processing(10_000_000_000_000 + row.k)
        else:
            self.last.set((row.v, f"v{row.v}"))
            self.total.add(row.v)
            self.mean.add(float(row.v))
            self.items.append(row.v)
            self.seen[row.v % 3] = f"{row.v}"
            self.seen.pop((row.v + 1) % 3, None)
            self.thing.set({"v": {row.v}})
            ctx.timers.processing(10_000_000_000_000 + row.k)
        for ask in during:
            ask()

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        raise AssertionError("set for a time that does not come")


STATES = ("last", "total", "mean", "items", "seen", "thing", "timers.processing")


def model_of(values: list[int], key: int) -> dict[str, Any]:
    """What each state holds after these values of a key; a state without anything is left out."""
    for at in range(len(values) - 1, -1, -1):
        if values[at] < 0:
            values = values[at + 1 :]
            break
    if not values:
        return {}
    seen: dict[int, str] = {}
    for v in values:
        seen[v % 3] = f"{v}"
        seen.pop((v + 1) % 3, None)
    return {
        "last": (values[-1], f"v{values[-1]}"),
        "total": sum(values),
        "mean": sum(values) / len(values),
        "items": values,
        "seen": seen,
        "thing": {"v": {values[-1]}},
        "timers.processing": {10_000_000_000_000 + key: True},
    }


class ByBatch(BatchProcess):
    """The last value of a key, how often it came, and each value with that."""

    last = state.Value("struct<v:long,text:string>")
    seen = state.Map("long", "long")

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        for k, v in zip(batch["k"].to_pylist(), batch["v"].to_pylist(), strict=True):
            keys = pa.array([k], pa.int64())
            if v < 0:
                self.last.put_many(keys, pa.nulls(1, self.last_type))
                entries = self.seen.of_keys(keys)[1]
                gone = pa.nulls(len(entries), pa.int64())
                self.seen.put_many(pa.array([k] * len(entries), pa.int64()), entries, gone)
            else:
                value = pa.array([{"v": v, "text": f"v{v}"}], self.last_type)
                self.last.put_many(keys, value)
                self.seen.put_many(keys, pa.array([v]), pa.array([v * 2]))
            for ask in during:
                ask()

    last_type = pa.struct([("v", pa.int64()), ("text", pa.string())])


class Scoped(Process[Any]):
    own = state.OperatorList("long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.own.append(row.v)
        for ask in during:
            ask()


class Asked:
    """Slots of this process, asked as through their doors, but for the sockets."""

    def __init__(self, coordinator: Coordinator, cluster: Cluster) -> None:
        self._coordinator = coordinator
        self._cluster = cluster
        self.are_silent = False

    def ask(self, asked: Mapping[int, LookupRequest]) -> dict[int, LookupReply]:
        told = {}
        slots = self._coordinator.subtasks.slots
        for subtask, ask in asked.items():
            slot = self._cluster.slots.get(slots[subtask]) if subtask < len(slots) else None
            if slot is not None and not self.are_silent:
                sent = request_decoder.decode(msgspec.msgpack.encode(ask))
                told[subtask] = reply_decoder.decode(msgspec.msgpack.encode(slot.look_up(sent)))
        return told


def live_state(job: Any) -> LiveState:
    """Of a job that is led in this process."""
    asked = Asked(job.coordinator, job.cluster)
    return LiveState(job.coordinator, job.coordinator.spec.group_count, asked.ask, job="job")


class Queried(LedJob):
    """The job, with who asks it."""

    def __init__(
        self,
        function: Function,
        scratch: Path,
        *,
        keys: Any = ("k",),
        schema: pa.Schema = ROW,
        **more: Any,
    ) -> None:
        inlet = Inlet((Port("rows"),), keys)
        graph = build_graph(
            "job",
            GROUP_COUNT,
            {
                "rows": SourceNode("rows", None, schema, None, None),
                "op": ProcessNode("op", (inlet,), function, OUT, ()),
                "out": SinkNode("out", (Port("op"),), Collect()),
            },
        )
        super().__init__(SimpleNamespace(graph=lambda: graph), scratch, **more)  # type: ignore[arg-type]
        self.slots = Asked(self.coordinator, self.cluster)
        self.live = LiveState(self.coordinator, GROUP_COUNT, self.slots.ask, job="job")
        self.after_finish: Callable[[], None] = lambda: None
        execute = self.cluster.execute

        def executed(sources: Mapping[str, Any], begin: Begin) -> Outcome:
            outcome = execute(sources, begin)
            self.after_finish()
            return outcome

        self.cluster.execute = executed  # type: ignore[method-assign]

    def upgrade(self, uid: str, function: Function, rewrite: Sequence[str]) -> None:
        """From the next epoch on; state of `rewrite` gets another form in it."""
        spec = self.coordinator.spec.with_function(uid, cloudpickle.dumps(function))
        self.coordinator.deploy(spec, rewrite=rewrite)
        self.cluster.spec_id, pickled = spec.pickle()
        for slot in self.cluster.slots.values():
            slot.load(self.cluster.spec_id, pickled)


class Typed(KeyedProcess[Any]):
    held = state.Value(
        "struct<at:timestamp,day:date,amount:decimal(20,4),parts:array<struct<x:double,b:binary>>,"
        "tags:map<string,bigint>,none:string>"
    )

    def process(self, row: Any, ctx: Any) -> Any:
        self.held.set(row.held)


class TypedJob:
    """Keys of several columns, and values of every kind of type."""

    def __init__(self, scratch: Path) -> None:
        schema = parse_schema(
            "a string, b timestamp, c double, held struct<at:timestamp,day:date,"
            "amount:decimal(20,4),parts:array<struct<x:double,b:binary>>,tags:map<string,bigint>,"
            "none:string>"
        )
        at = dt.datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=dt.UTC)
        self.led = Queried(Typed(), scratch, keys=("a", "b", "c"), schema=schema)
        values = [
            (
                at,
                at.date(),
                Decimal("-1234567890.5000"),
                [(nan, b"\x00\xff"), None],
                {"a": 2**60},
                None,
            ),
            (None, None, None, [], {}, "text"),
        ]
        keys = [("x", at, 0.5), ("", None, nan), (None, at, -1e300), ("ü", at, inf)]
        normalise = Typed.held.type
        rows = [(*key, values[i % 2]) for i, key in enumerate(keys)]
        self.led.run(rows=rows)
        kept = codec(normalise)
        self.rows = [(key, kept.normalise(values[i % 2])) for i, key in enumerate(keys)]
