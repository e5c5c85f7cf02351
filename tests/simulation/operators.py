"""Jobs with the operators that keep rows, join, or emit changes, over one seeded input.

Most rows are out of order by less than the watermark's delay, and some are late. The output of a
job is what its batches have published together, whoever led it. All are exact: the order of rows
within a batch, the parallelism and the backend make no difference.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn import BatchProcess, Job, KeyedProcess, state, windows
from cairn.operators.window_process import WindowPlan
from cairn.plan.graph import Graph, Inlet, Node, Port, ProcessNode, SinkNode, SourceNode, Watermark
from cairn.plan.levels import build_graph
from cairn.sinks import Files
from cairn.stream import Stream
from tests.aggregates_model import SCHEMA, Row, make_aggregation, make_partial_rows
from tests.simulation.world import World

GROUP_COUNT = 8
DELAY_MS = 20
ASKED = {"n": "count(*)", "total": "sum(v)", "kinds": "count(distinct s)", "last": "last(s)"}
COUNTED = {"n": "count(*)", "total": "sum(v)", "last": "last(s)"}
AGAIN = {"n": "count(*)", "total": "sum(v)", "high": "max(v)", "kinds": "count(distinct s)"}
Inputs = Mapping[str, pa.StructArray]


@dataclass(frozen=True)
class Shape:
    graph: Callable[[Files], Graph]
    inputs: Callable[[Sequence[Row]], Inputs]


def make_row(seed: int, seq: int) -> Row:
    chance = random.Random(f"{seed} {seq}")
    lag_ms = 5 * DELAY_MS if chance.random() < 0.05 else chance.randrange(DELAY_MS)
    # Several rows have the same time.
    at = 1_000 + (2 * seq - lag_ms) // 3 * 3
    text = chance.choice([None, "", "é", f"text of more than sixteen bytes {seq % 3}"])
    # The number makes rows with equal keys and times different from each other.
    return Row(chance.choice([None, "", "a", "b", "é"]), at, seq, text, None)


def as_arrow(rows: Sequence[Row]) -> pa.StructArray:
    dicts = [{name: getattr(row, name) for name in SCHEMA.names} for row in rows]
    return pa.array(dicts, pa.struct(list(SCHEMA)))


# Jobs of one stream, or of two


def _source(job: Job, name: str) -> Stream:
    job._nodes[name] = SourceNode(name, None, SCHEMA, "at", Watermark(DELAY_MS))
    return Stream(job, (Port(name),), SCHEMA)


def _of_one(build: Callable[[Stream], Stream]) -> Shape:
    def graph(sink: Files) -> Graph:
        job = Job("operators", max_parallelism=GROUP_COUNT)
        build(_source(job, "rows")).sink_to(sink, uid="out")
        return job.graph()

    return Shape(graph, lambda rows: {"rows": as_arrow(rows)})


def _of_two(build: Callable[[Stream, Stream], Stream]) -> Shape:
    def graph(sink: Files) -> Graph:
        job = Job("operators", max_parallelism=GROUP_COUNT)
        build(_source(job, "left"), _source(job, "right")).sink_to(sink, uid="out")
        return job.graph()

    def inputs(rows: Sequence[Row]) -> Inputs:
        sides = {"left": [row for row in rows if row.v and row.v % 3]}
        sides["right"] = [row for row in rows if row not in sides["left"]]
        return {name: as_arrow(side) for name, side in sides.items()}

    return Shape(graph, inputs)


class Balance(BatchProcess):
    """Adds up what comes on the left, less what comes on the right, per key and text."""

    total = state.Value("bigint")
    parts = state.Map("string", "bigint")

    def begin_epoch(self, ctx: Any) -> None:
        self.touched: set[str | None] = set()

    def on_left(self, batch: pa.RecordBatch, ctx: Any) -> None:
        self._add(batch, ctx, 1)

    def on_right(self, batch: pa.RecordBatch, ctx: Any) -> None:
        self._add(batch, ctx, -1)

    def _add(self, batch: pa.RecordBatch, ctx: Any, sign: int) -> None:
        for key, text, value in zip(
            ctx.keys.to_pylist(), batch["s"].to_pylist(), batch["v"].to_pylist(), strict=True
        ):
            held = self.total.get_many([key])[0].as_py() or 0
            self.total.put_many([key], [held + sign * value])
            part = self.parts.get_many([key], [text])[0].as_py() or 0
            self.parts.put_many([key], [text], [part + sign * value])
            self.touched.add(key)

    def end_epoch(self, ctx: Any) -> Any:
        keys = pa.array(sorted(self.touched, key=repr), pa.string())
        totals = self.total.get_many(keys)
        at, _, parts = self.parts.of_keys(keys)
        sums: Counter[int] = Counter()
        for number, part in zip(at.to_pylist(), parts.to_pylist(), strict=True):
            sums[number] += part
        assert totals.to_pylist() == [sums[number] for number in range(len(keys))]
        return pa.table({"k": keys, "total": totals})


class Brief(KeyedProcess[Any]):
    """Tells what it remembers of a key, in each kind of state that expires."""

    last = state.Value("bigint", ttl=state.TTL("30 ms", clock="event"))
    seen = state.List("bigint", ttl=state.TTL("21 ms", clock="event"))
    texts = state.Map("string", "bigint", ttl=state.TTL("24 ms", clock="event"))

    def process(self, row: Any, ctx: Any) -> Any:
        told = (row.k, row.v, self.last.get(), str(list(self.seen)), str(dict(self.texts)))
        if row.v % 5:
            self.last.set(row.v)
            self.seen.append(row.v)
            self.texts[row.s or ""] = row.v
        else:
            self.last.clear()
            self.seen.clear()
        return told


def _brief(rows: Stream) -> Stream:
    schema = "k string, v bigint, last bigint, seen string, texts string"
    return rows.key_by("k", "at").process(Brief(), schema=schema, uid="op")


def _connect(left: Stream, right: Stream) -> Stream:
    connected = left._job.connect(left=left.key_by("k"), right=right.key_by("k"))
    return connected.process_batch(Balance(), schema="k string, total bigint", uid="op")


def _bounded(left: Stream, right: Stream) -> Stream:
    """Operators of one level in two subtasks and in all, before one in three."""
    few = left.deduplicate(on=["k", "at"], uid="few", parallelism=2)
    many = right.deduplicate(on=["k", "at"], uid="many")
    return few.union(many).top(3, by="at desc", per="k", uid="op", parallelism=3)


# Aggregations: the partials that Spark would make are the input


def _aggregated(plan: WindowPlan | None, asked: dict[str, str], **options: Any) -> Shape:
    _, partials = make_aggregation(plan, asked, **options)

    def graph(sink: Files) -> Graph:
        function, _ = make_aggregation(plan, asked, **options)
        return _graph(
            {
                **_partial_source(partials.schema, partials.layout.time),
                "op": _keyed("op", "rows", partials.layout.keys, function, function.schema),
                "out": SinkNode("out", (Port("op"),), sink),
            }
        )

    return Shape(graph, lambda rows: {"rows": make_partial_rows(partials, rows, asked)})


class Regroup(BatchProcess):
    """Makes the partials of an aggregation from the changes of another one."""

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        rows = [
            Row(str(n % 3), 0, total, key, None, change)
            for key, n, total, _, _, change in zip(*batch.to_pydict().values(), strict=True)
        ]
        _, partials = make_aggregation(None, AGAIN, takes_back=True, changes=True)
        return pa.RecordBatch.from_struct_array(make_partial_rows(partials, rows, AGAIN))


def _aggregated_twice() -> Shape:
    _, partials = make_aggregation(None, ASKED, changes=True)
    _, others = make_aggregation(None, AGAIN, takes_back=True, changes=True)

    def graph(sink: Files) -> Graph:
        first, _ = make_aggregation(None, ASKED, changes=True)
        second, _ = make_aggregation(None, AGAIN, takes_back=True, changes=True)
        return _graph(
            {
                **_partial_source(partials.schema, None),
                "first": _keyed("first", "rows", ("k",), first, first.schema),
                "regroup": _keyed("regroup", "first", ("k",), Regroup(), others.schema),
                "op": _keyed("op", "regroup", ("k",), second, second.schema),
                "out": SinkNode("out", (Port("op"),), sink),
            }
        )

    return Shape(graph, lambda rows: {"rows": make_partial_rows(partials, rows, ASKED)})


def _graph(nodes: dict[str, Node]) -> Graph:
    return build_graph("operators", GROUP_COUNT, nodes)


def _partial_source(schema: pa.Schema, time: str | None) -> dict[str, Node]:
    watermark = None if time is None else Watermark(DELAY_MS)
    return {"rows": SourceNode("rows", None, schema, time, watermark)}


def _keyed(
    uid: str, input: str, keys: tuple[str, ...], function: BatchProcess, schema: pa.Schema
) -> ProcessNode:
    return ProcessNode(uid, (Inlet((Port(input),), keys),), function, schema)


_TUMBLING = windows.tumbling("30 ms")
SHAPES: dict[str, Shape] = {
    "latest": _of_one(lambda rows: rows.key_by("k").latest(uid="op")),
    "latest with ttl": _of_one(
        lambda rows: rows.key_by("k").latest(uid="op", ttl=state.TTL("40 ms", clock="event"))
    ),
    "top": _of_one(lambda rows: rows.top(3, by="at desc", per="k", uid="op")),
    "deduplicate": _of_one(lambda rows: rows.deduplicate(on=["k", "at"], uid="op")),
    "deduplicate within": _of_one(lambda rows: rows.deduplicate(on="k", within="9 ms", uid="op")),
    "join within": _of_two(
        lambda left, right: left.join(right, on="k", within="12 ms", how="full", uid="op")
    ),
    "join with ttl": _of_two(
        lambda left, right: left.join(right, on="k", ttl="30 ms", how="left", uid="op")
    ),
    "join": _of_two(lambda left, right: left.join(right, on=["k", "s"], uid="op")),
    "join as of": _of_two(
        lambda left, right: left.join_as_of(
            right, on="k", how="left", valid_until="15 ms", uid="op"
        )
    ),
    "connected": _of_two(_connect),
    "bounded": _of_two(_bounded),
    "changes": _aggregated_twice(),
    "count windows": _aggregated(WindowPlan(windows.count(5, every=2)), COUNTED),
    "windows with changes": _aggregated(
        WindowPlan(_TUMBLING, 15, early_rows=1), ASKED, changes=True
    ),
    "sessions with changes": _aggregated(
        WindowPlan(windows.session("3 ms"), 15, early_rows=1), ASKED, changes=True
    ),
    "state that expires": _of_one(_brief),
    "windows of all rows": _aggregated(WindowPlan(_TUMBLING), ASKED, keys=()),
}


class OperatorsWorld(World):
    """One of the jobs, and what it has published."""

    def __init__(self, shape: str, folder: Any, backend: str) -> None:
        super().__init__(5, folder, group_count=GROUP_COUNT, backend=backend)
        self.shape = SHAPES[shape]

    def graph(self) -> Graph:
        return self.shape.graph(Files(self.files))

    def inputs(self, start: int, stop: int) -> dict[str, pa.StructArray]:
        return dict(self.shape.inputs([make_row(self.seed, seq) for seq in range(start, stop)]))

    def output(self) -> Counter[str]:
        """Return the published rows as text, because some are not hashable."""
        found: Counter[str] = Counter()
        for row, count in self.branched().items():
            found[json.dumps(row, default=str)] += count
        return found
