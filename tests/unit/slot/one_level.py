"""A job of one level with one function, and a slot that runs it: what Spark and the driver do
around a slot, in a few lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from cairn import KeyedProcess, state
from cairn.driver.coordinator.ranges import advance, apply_compaction, pieces_of, ranges_for
from cairn.ids import new_id
from cairn.key_groups import key_hasher, subtask_of
from cairn.plan.deploy import job_spec
from cairn.plan.graph import Graph, Inlet, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.protocol.messages import Ack, Begin, Compacted, Compaction, Part, Piece, Token
from cairn.protocol.scoped_state import states_by_scope
from cairn.sinks import Collect, Sink
from cairn.sinks.base import Execution
from cairn.slot.level import LevelRuntime
from cairn.slot.runtime import Runtime
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, EpochOperator, SparkPosition
from cairn.storage.store import Store, open_store
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.restored import held_contents

ROW = parse_schema("k long, v long")
OUT = parse_schema("k long, n long, total long")
GROUP_COUNT = 6
INLINE_BYTES_MAX = 1 << 20


class Count(KeyedProcess[Any]):
    n = state.Value("long", default=0)
    values = state.List("long")
    last = state.Map("long", "long")

    def process(self, row: Any, ctx: Any) -> Any:
        if row.v is None:
            self.n.clear()
            self.values.clear()
            self.last.clear()
            return None
        self.n.set(self.n.get() + 1)
        self.values.append(row.v)
        self.last[row.v % 3] = row.v
        return row.k, self.n.get(), sum(self.values)


def count_graph(function: KeyedProcess[Any] | None = None, sink: Sink | None = None) -> Graph:
    return build_graph(
        "count",
        GROUP_COUNT,
        {
            "rows": SourceNode("rows", None, ROW, None, None),
            "count": ProcessNode(
                "count", (Inlet((Port("rows"),), ("k",)),), function or Count(), OUT, ()
            ),
            "out": SinkNode("out", (Port("count"),), sink or Collect()),
        },
    )


def group_of(key: int) -> int:
    return key_hasher([pa.int64()])([key]) % GROUP_COUNT


def batch_of(rows: list[tuple[int, int | None]]) -> pa.RecordBatch:
    row_codec = codec(pa.struct(list(ROW)))
    encoded = row_codec.encode([row_codec.normalise(row) for row in rows])
    return pa.RecordBatch.from_pydict(
        {
            "group": pa.array([group_of(k) for k, _ in rows], pa.int32()),
            "c0": encoded.field("k"),
            "c1": encoded.field("v"),
        }
    )


class Checkpoint:
    """The driver's side: what each epoch starts from, and its manifest."""

    def __init__(
        self,
        store: Store | None = None,
        function: KeyedProcess[Any] | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.store = store or open_store("memory:")
        self.log = Log(self.store)
        self.term = self.log.take_over(host="", pid=0, wall_ms=0).term
        self.graph = count_graph(function, sink)
        self.spec = job_spec(self.graph, job_id="j", checkpoint=self.store.url, backend="heap")
        self.parallelism = 1
        self.settled: list[str] = []

    def slot(self, scratch: Any) -> LevelRuntime:
        runtime = Runtime(scratch=str(scratch), store=self.store, threaded=False)
        runtime.load(*self.spec.pickle())
        return runtime.level(0)

    @property
    def newest(self) -> Epoch | None:
        return self.log.newest_epoch()

    def ranges(self) -> Any:
        entry = None if self.newest is None else self.newest.operators["count"]
        return ranges_for(entry, self.parallelism, GROUP_COUNT)

    def begin(
        self,
        attempt: int = 0,
        compaction: Compaction | None = None,
        inline_bytes_max: int = INLINE_BYTES_MAX,
    ) -> Begin:
        assert self.log.last is not None
        return Begin(
            run_id="run",
            term=self.term,
            epoch=self.log.last + 1,
            execution=Execution(attempt=attempt),
            parent=None if self.newest is None else self.newest.number,
            now_ms=1000,
            watermark_ms=None,
            parallelism=self.parallelism,
            group_count=GROUP_COUNT,
            inline_bytes_max=inline_bytes_max,
            parts={
                subtask: Part(
                    {"count": owned.version},
                    {} if compaction is None else {"count": compaction},
                    {uid: each[subtask] for uid, each in self.pieces().items()},
                    self.settled,
                )
                for subtask, owned in enumerate(self.ranges())
            },
        )

    def pieces(self) -> dict[str, list[list[Piece]]]:
        entry = None if self.newest is None else self.newest.operators["count"]
        if entry is None or entry.parallelism == self.parallelism:
            return {}
        owned = [range(p.first_group, p.first_group + p.group_count) for p in self.ranges()]
        return {"count": [pieces_of(entry, groups) for groups in owned]}

    def publish(self, begin: Begin, acks: list[Ack], compacted: Sequence[Compacted] = ()) -> Epoch:
        """The manifest of an epoch whose deltas were all written to the store."""
        by_subtask = {ack.subtask: ack.operators[0] for ack in acks}
        parts = self.ranges()
        for file in compacted:
            parts = [apply_compaction(part, file) or part for part in parts]
        self.settled = [file.stored.id for file in compacted]
        entry = EpochOperator(
            uid="count",
            function_version="",
            key_types={"k": "bigint"},
            states=states_by_scope(self.spec.levels[0].operators[0])[0].decls,
            parallelism=self.parallelism,
            ranges=[
                advance(part, by_subtask[subtask], begin.epoch)
                for subtask, part in enumerate(parts)
            ],
        )
        return self.log.append(
            lambda number: Epoch(
                number=number,
                parent=begin.parent,
                term=self.term,
                nonce=new_id(),
                wall_ms=0,
                now_ms=0,
                watermarks={},
                spark=SparkPosition(folder="", batch_id=0, offsets=""),
                operators={"count": entry},
            )
        )

    def run_batch(
        self,
        slots: list[LevelRuntime],
        rows: list[tuple[int, int | None]],
        compaction: Compaction | None = None,
    ) -> Epoch:
        """One epoch over as many slots as there are subtasks, committed."""
        begin = self.begin(compaction=compaction, inline_bytes_max=0)
        acks = []
        for subtask, slot in enumerate(slots):
            mine = [
                row
                for row in rows
                if subtask_of(group_of(row[0]), self.parallelism, GROUP_COUNT) == subtask
            ]
            acks.append(run(slot, begin, mine, subtask=subtask))
            slot.compactor.work()
        compacted = [file for slot in slots for file in slot.compactor.list_unconfirmed()]
        return self.publish(begin, acks, compacted)


def token_of(begin: Begin, task_attempt: int = 0) -> Token:
    return begin.token(task_attempt)


def run(
    slot: LevelRuntime,
    begin: Begin,
    rows: list[tuple[int, int | None]],
    *,
    task_attempt: int = 0,
    subtask: int = 0,
) -> Ack:
    """One task, from begin to acknowledgement."""
    token = token_of(begin, task_attempt)
    slot.begin(token, begin, subtask)
    slot.attach(token, lambda batch: None)
    if rows:
        slot.run(token, batch_of(rows))
    return slot.finish(token)


def held(slots: Sequence[Any]) -> dict[int, tuple[int | None, list[int], dict[int, int]]]:
    """(n, values, last) by key, of what the slots hold as committed."""
    found: dict[int, list[Any]] = {}
    for slot in slots:
        for at, name in enumerate(("n", "values", "last")):
            table = slot.operators[0].tables[name]
            for key, value in held_contents(table).items():
                found.setdefault(key, [None, [], {}])[at] = value
    return {k: (n, list(values), dict(last)) for k, (n, values, last) in found.items()}


def model(rows: list[tuple[int, int | None]]) -> dict[int, Any]:
    """What the slots must hold after these rows."""
    found: dict[int, Any] = {}
    for key, value in rows:
        if value is None:
            found.pop(key, None)
            continue
        n, values, last = found.get(key, (0, [], {}))
        found[key] = (n + 1, [*values, value], {**last, value % 3: value})
    return found
