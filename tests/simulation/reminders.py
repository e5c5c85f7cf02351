"""A job that lives on timers, and its model in plain Python.

Level 0 sets and deletes timers as its rows say, and tells of those that are due. Level 1 gets
all that, ordered by event time, and counts what came between two of its own timers: a
timer that is called too early or too late among the rows gives another count.

The model is told what each epoch was run with: its rows, its watermark and its clock.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from cairn import KeyedProcess, state
from cairn.driver.coordinator.rounds import Outcome
from cairn.plan.graph import Graph, Inlet, Node, Port, ProcessNode, SinkNode, SourceNode, Watermark
from cairn.plan.levels import build_graph
from cairn.protocol.messages import Begin
from cairn.sinks.base import Sink
from cairn.storage.store import open_store
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.simulation.cluster import Cluster
from tests.simulation.world import Driver, Transactional, World, _Published

ROW = parse_schema("k long, at timestamp, ask string, span long, seq long")
PASSED = parse_schema("part long, at timestamp")
TOLD = parse_schema("k long, what string, at long, n long")
COUNTED = parse_schema("part long, at long, n long")
PARTS = 3
DELAY_MS = 20
COUNT_MS = 7
ASKS = ("event", "event", "event", "processing", "delete_event", "delete_processing", "none")


class Row(NamedTuple):
    k: int
    at: int
    ask: str
    span: int
    seq: int


def moment(ms: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=ms)


class Remind(KeyedProcess[Any]):
    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.set((self.n.get() or 0) + 1)
        if row.ask == "event":
            ctx.timers.event(after=row.span)
        elif row.ask == "processing":
            ctx.timers.processing(after=1000 * row.span)
        elif row.ask == "delete_event":
            ctx.timers.delete_event(ctx.event_time_ms + row.span)
        elif row.ask == "delete_processing":
            ctx.timers.delete_processing(ctx.now_ms + 1000 * row.span)
        return row.k % PARTS, row.at

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        ctx.output("told", (ctx.key, ctx.timer_kind, time_ms, self.n.get()))
        if time_ms % 4 == 0:
            # Due at once now and then, and sometimes far ahead.
            ctx.timers.event(time_ms + (3 if ctx.timer_kind == "event" else 0))
        self.n.clear()
        if ctx.timer_kind == "event":
            yield ctx.key % PARTS, moment(time_ms)


class Between(KeyedProcess[Any]):
    n = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> None:
        self.n.set((self.n.get() or 0) + 1)
        ctx.timers.event(ctx.event_time_ms - ctx.event_time_ms % COUNT_MS + COUNT_MS)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        n = self.n.get()
        self.n.clear()
        return ctx.key, time_ms, n


class Began(NamedTuple):
    """What an epoch was run with."""

    parent: int | None
    rows: tuple[Row, ...]
    watermark_ms: int | None
    passed_ms: int | None
    now_ms: int


class Model:
    """What the job must hold and must have emitted, epoch after epoch."""

    def __init__(self) -> None:
        self.n: Counter[int] = Counter()
        self.event: set[tuple[int, int]] = set()
        self.processing: set[tuple[int, int]] = set()
        self.between: Counter[int] = Counter()
        self.between_timers: set[tuple[int, int]] = set()
        self.told: Counter[tuple[Any, ...]] = Counter()
        self.counted: Counter[tuple[Any, ...]] = Counter()

    def run(self, epoch: Began) -> None:
        passed: list[tuple[int, int]] = []
        self._fire(epoch, passed)
        for row in sorted(epoch.rows, key=lambda row: row.at):
            if epoch.watermark_ms is not None and row.at < epoch.watermark_ms:
                continue
            self.n[row.k] += 1
            event = (row.at + row.span, row.k)
            processing = (epoch.now_ms + 1000 * row.span, row.k)
            if row.ask == "event":
                self.event.add(event)
            elif row.ask == "processing":
                self.processing.add(processing)
            elif row.ask == "delete_event":
                self.event.discard(event)
            elif row.ask == "delete_processing":
                self.processing.discard(processing)
            passed.append((row.at, row.k % PARTS))
        self._fire(epoch, passed)
        self._count(epoch, passed)

    def _fire(self, epoch: Began, passed: list[tuple[int, int]]) -> None:
        due = True
        while due:
            due = False
            for kind, timers, until in (
                ("event", self.event, epoch.watermark_ms),
                ("processing", self.processing, epoch.now_ms),
            ):
                while timers and until is not None and min(timers)[0] <= until:
                    due = True
                    time, k = min(timers)
                    timers.remove((time, k))
                    self.told[(k, kind, time, self.n.pop(k, 0))] += 1
                    if time % 4 == 0:
                        self.event.add((time + (3 if kind == "event" else 0), k))
                    if kind == "event":
                        passed.append((time, k % PARTS))

    def _count(self, epoch: Began, passed: list[tuple[int, int]]) -> None:
        for at, part in sorted(passed):
            if epoch.passed_ms is not None and at < epoch.passed_ms:
                continue
            self._count_until(at, epoch)
            self.between[part] += 1
            self.between_timers.add((at - at % COUNT_MS + COUNT_MS, part))
        if epoch.watermark_ms is not None:
            self._count_until(epoch.watermark_ms, epoch)

    def _count_until(self, until: int, epoch: Began) -> None:
        if epoch.watermark_ms is None:
            return
        until = min(until, epoch.watermark_ms)
        while self.between_timers and min(self.between_timers)[0] <= until:
            time, part = min(self.between_timers)
            self.between_timers.remove((time, part))
            self.counted[(part, time, self.between.pop(part, 0))] += 1

    def earliest(self) -> dict[str, tuple[int | None, int | None]]:
        """Per operator that has timers, the next ones: by event time, by the clock."""
        held = {
            "remind": (_first(self.event), _first(self.processing)),
            "between": (_first(self.between_timers), None),
        }
        return {uid: times for uid, times in held.items() if times != (None, None)}

    def state(self) -> dict[str, dict[int, dict[str, Any]]]:
        remind = _by_key({"timers.event": self.event, "timers.processing": self.processing})
        between = _by_key({"timers.event": self.between_timers})
        for held, counts in ((remind, self.n), (between, self.between)):
            for key, n in counts.items():
                held.setdefault(key, {})["n"] = n
        return {"remind": remind, "between": between}


def _first(timers: set[tuple[int, int]]) -> int | None:
    return min(timers)[0] if timers else None


def _by_key(timers: dict[str, set[tuple[int, int]]]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, held in timers.items():
        for time, key in held:
            found.setdefault(key, {}).setdefault(name, {})[time] = True
    return found


class TimedWorld(World):
    """The world of this job: it knows what each epoch was run with."""

    def __init__(self, seed: int, folder: Any, *, backend: str = "heap") -> None:
        super().__init__(seed, folder, backend=backend)
        self.counted = open_store("memory:")
        self._told, self._counted = _Published(), _Published()
        self.began: dict[int, Began] = {}
        self._applied: set[int] = set()
        self.timed = Model()

    def graph(self) -> Any:
        return reminders_graph(
            self.group_count, Transactional(self.published.url), Transactional(self.counted.url)
        )

    def timed_rows(self, start: int, stop: int) -> tuple[Row, ...]:
        chance = random.Random(f"reminders {self.seed}")
        rows = [
            Row(
                k=chance.randrange(9),
                at=1000 + 3 * seq + chance.randrange(-30, 31),
                ask=chance.choice(ASKS),
                span=chance.randrange(-3, 12),
                seq=seq,
            )
            for seq in range(stop)
        ]
        return tuple(rows[start:])

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        rows = codec(pa.struct(list(ROW)))
        given = (row._replace(at=moment(row.at)) for row in self.timed_rows(start, stop))  # type: ignore[arg-type]
        return rows.encode([rows.normalise(tuple(row)) for row in given])

    def note(self, begin: Begin, row_count: int) -> None:
        """An attempt at an epoch begins, with so many rows."""
        start = self.committed_rows()
        self.began[begin.epoch] = Began(
            begin.parent,
            self.timed_rows(start, start + row_count),
            begin.watermark_ms,
            begin.passed_ms,
            begin.now_ms,
        )

    def follow(self) -> Model:
        """The model as of the newest epoch."""
        newest = self.newest()
        number = None if newest is None else newest.number
        ahead: list[int] = []
        while number is not None and number not in self._applied:
            ahead.append(number)
            number = self.began[number].parent
        for number in reversed(ahead):
            self.timed.run(self.began[number])
            self._applied.add(number)
        return self.timed

    def check_output(self) -> None:
        model = self.follow()
        assert self._read(self.published, self._told) == model.told
        assert self._read(self.counted, self._counted) == model.counted

    def _read(self, store: Any, seen: _Published) -> Counter[tuple[Any, ...]]:
        paths = [each.path for each in store.list("published/")]
        return seen.read(paths, lambda path: msgspec.json.decode(store.get(path)))


class TimedCluster(Cluster):
    """Slots whose epochs are noted down."""

    world: TimedWorld

    def execute(self, sources: Any, begin: Begin) -> Outcome:
        self.world.note(begin, len(sources.get("rows", ())))
        return super().execute(sources, begin)


class TimedDriver(Driver):
    world: TimedWorld

    def __init__(self, world: TimedWorld, **given: Any) -> None:
        super().__init__(world, **given)
        self.cluster.__class__ = TimedCluster
        self.cluster.world = world  # type: ignore[attr-defined]


def reminders_graph(group_count: int, told: Sink, counted: Sink) -> Graph:
    nodes: dict[str, Node] = {
        "rows": SourceNode("rows", None, ROW, "at", Watermark(DELAY_MS)),
        "remind": ProcessNode(
            "remind", (Inlet((Port("rows"),), ("k",)),), Remind(), PASSED, (("told", TOLD),)
        ),
        "told": SinkNode("told", (Port("remind", "told"),), told),
        "between": ProcessNode(
            "between", (Inlet((Port("remind"),), ("part",)),), Between(), COUNTED, ()
        ),
        "counted": SinkNode("counted", (Port("between"),), counted),
    }
    return build_graph("reminders", group_count, nodes)
