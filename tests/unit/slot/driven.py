"""An operator with timers, driven epoch after epoch without a slot around it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import cloudpickle
import pyarrow as pa

from cairn import KeyedProcess
from cairn.backends import make_backend
from cairn.protocol.messages import Begin
from cairn.protocol.spec import InletSpec, OperatorSpec, OutletSpec
from cairn.sinks.base import Execution
from cairn.slot.operator import Operator
from cairn.storage.manifest import EMPTY_VERSION
from cairn.types import parse_schema
from cairn.types.codec import codec

GROUP_COUNT = 4
SCHEMA = parse_schema("k long, at timestamp, ask string")
OUT = parse_schema("what string, k long, at long")


class Asked(KeyedProcess[Any]):
    """Rows say what to set: "event 5", "processing 7", "delete_event 5"; all is told."""

    def process(self, row: Any, ctx: Any) -> Any:
        for order in (row.ask or "").split(", "):
            if order:
                name, at = order.split()
                getattr(ctx.timers, name)(int(at))
        assert ctx.timer_kind is None
        return ("row", ctx.key, ctx.event_time_ms)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        assert ctx.event_time_ms == (time_ms if ctx.timer_kind == "event" else None)
        return (ctx.timer_kind, ctx.key, time_ms)


class Driven:
    """An operator, epoch after epoch."""

    def __init__(
        self,
        function: KeyedProcess[Any],
        *,
        is_downstream: bool = False,
        has_watermark: bool = True,
        delay_ms: int = 0,
        event_time: str | None = "at",
        backend: str = "heap",
        scratch: str = "",
    ) -> None:
        spec = OperatorSpec(
            "op",
            (InletSpec(0, SCHEMA, ("k",), event_time),),
            cloudpickle.dumps(function),
            (OutletSpec(None, OUT, (), ()),),
            is_downstream=is_downstream,
            has_watermark=has_watermark,
            delay_ms=delay_ms,
        )
        self.operator = Operator(spec, make_backend(backend, scratch), group_count=GROUP_COUNT)
        self.batches: list[list[tuple[Any, ...]]] = []
        self.operator.main.targets.append(
            lambda batch: self.batches.append([tuple(r.values()) for r in batch.to_pylist()])
        )
        self.operator.declare()
        self.operator.state.bring_to(EMPTY_VERSION, range(GROUP_COUNT), [])
        self.operator.state.version = EMPTY_VERSION
        self.number = 0

    def begin(self, watermark: int | None = None, now: int = 0, *, draining: bool = False) -> None:
        self.number += 1
        begin = Begin(
            "run", 1, self.number, Execution(), None, now, watermark, 1, GROUP_COUNT, 0,
            passed_ms=None, is_draining=draining,
        )  # fmt: skip
        self.operator.open(begin, 0)
        self.batches.clear()
        self.operator.begin_rows()

    def push(self, *rows: tuple[int, int, str]) -> None:
        struct = codec(pa.struct(list(SCHEMA)))
        given = [
            (k, dt.datetime.fromtimestamp(at / 1000, dt.UTC), ask or None) for k, at, ask in rows
        ]
        array = struct.encode([struct.normalise(row) for row in given])
        times = None
        if self.operator.spec.event_time is not None:
            times = array.field("at").cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        groups = pa.array([k % GROUP_COUNT for k, _, _ in rows], pa.int32())
        self.operator.run(groups, times, array)
        self.operator.flush()

    def end(self, *, commit: bool = True) -> list[tuple[Any, ...]]:
        """Finish the epoch; gives what it emitted."""
        parts = self.operator.finish()
        self.operator.state.name_pending(f"delta-{self.number}" if parts else None)
        assert self.operator.state.pending is not None
        version = self.operator.state.pending if commit else self.operator.state.version
        assert not self.operator.state.bring_to(version, range(GROUP_COUNT), [])
        return self.emitted()

    def emitted(self) -> list[tuple[Any, ...]]:
        return [row for batch in self.batches for row in batch]

    def epoch(self, *rows: tuple[int, int, str], **begin: Any) -> list[tuple[Any, ...]]:
        self.begin(**begin)
        if rows:
            self.push(*rows)
        return self.end()


def timers_only(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [row for row in rows if row[0] != "row"]


class Chain(KeyedProcess[Any]):
    """Each timer sets the next one, ten milliseconds later."""

    def process(self, row: Any, ctx: Any) -> None:
        ctx.timers.event(after=10)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        ctx.timers.event(after="10 ms")
        ctx.timers.processing(after=1)
        return (ctx.timer_kind, ctx.key, time_ms)
