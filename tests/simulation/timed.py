"""A job about time, simulated: windows made of timers, and windows over their results.

Most rows come out of order by less than the watermark's delay, so they are never late; some
come far too late and may be. However the input is cut into epochs, whoever dies: every row
is in exactly one place, a window's result, state, or the late side output.
"""

from __future__ import annotations

import datetime as dt
import json
import random
from collections import Counter
from typing import Any

import pyarrow as pa

from cairn import KeyedProcess, state
from cairn.functions import Hooks
from cairn.plan.graph import Graph, Inlet, Node, Port, ProcessNode, SinkNode, SourceNode, Watermark
from cairn.plan.levels import build_graph
from cairn.storage.log import Log
from cairn.storage.store import Store, open_store
from cairn.storage.verify import verify
from cairn.types import parse_schema
from tests.simulation.world import Transactional, World, end_of, stored_state

ROW = parse_schema("account long, seq long, ts timestamp")
RESULT = parse_schema("account long, kind string, end timestamp, seqs string")
DELAY_MS = 20_000
BEAT_MS = 3_000


class Windows(Hooks, KeyedProcess[Any]):
    """Tumbling windows: which rows fell into each. Each row is also told of by the clock."""

    windows = state.Map("long", "string")
    beats = state.Map("long", "string")

    def __init__(self, size_ms: int) -> None:
        self.size_ms = size_ms
        self.result_time = "end"

    def process(self, row: Any, ctx: Any) -> Any:
        seqs = [row.seq] if hasattr(row, "seq") else json.loads(row.seqs)
        end_ms = (ctx.event_time_ms // self.size_ms + 1) * self.size_ms
        self.windows[end_ms] = json.dumps(json.loads(self.windows.get(end_ms, "[]")) + seqs)
        ctx.timers.event(end_ms)
        beat_ms = ctx.now_ms + BEAT_MS
        self.beats[beat_ms] = json.dumps(json.loads(self.beats.get(beat_ms, "[]")) + seqs)
        ctx.timers.processing(beat_ms)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        if ctx.timer_kind == "event":
            return ctx.key, "window", moment(time_ms), self.windows.pop(time_ms)
        ctx.output("beats", (ctx.key, self.beats.pop(time_ms)))
        return None


def moment(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def timed_graph(group_count: int, sinks: dict[str, Transactional]) -> Graph:
    beats = parse_schema("account long, seqs string")
    small, large = Windows(10_000), Windows(60_000)
    nodes: dict[str, Node] = {
        "rows": SourceNode("rows", None, ROW, "ts", Watermark(DELAY_MS, 5_000)),
        "small": ProcessNode(
            "small", (Inlet((Port("rows"),), ("account",)),), small, RESULT,
            (("late", ROW), ("beats", beats)),
        ),
        "large": ProcessNode("large", (Inlet((Port("small"),), ("account",)),), large, RESULT,
            (("late", RESULT), ("beats", beats)),
        ),
    }  # fmt: skip
    for uid in ("small", "large"):
        for tag in (None, "late", "beats"):
            name = f"{uid}-{tag or 'results'}"
            nodes[name] = SinkNode(name, (Port(uid, tag),), sinks[name])
    return build_graph("timed", group_count, nodes)


class TimedWorld(World):
    """What is published and stored, as the places that each row is in."""

    def __init__(self, seed: int, folder: Any) -> None:
        super().__init__(seed, folder)
        self.stores: dict[str, Store] = {
            f"{uid}-{what}": open_store("memory:")
            for uid in ("small", "large")
            for what in ("results", "late", "beats")
        }

    def graph(self) -> Graph:
        ends = {name: Transactional(store.url) for name, store in self.stores.items()}
        return timed_graph(self.group_count, ends)

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        return pa.array([self.row(seq) for seq in range(start, stop)], pa.struct(list(ROW)))

    def row(self, seq: int) -> dict[str, Any]:
        chance = random.Random(f"{self.seed} {seq}")
        lag_ms = chance.randrange(DELAY_MS)
        if self.is_straggler(seq):
            lag_ms = 40 * DELAY_MS
        at_ms = 1_000_000_000 + 2_000 * seq - lag_ms
        return {"account": chance.randrange(4), "seq": seq, "ts": moment(at_ms)}

    def is_straggler(self, seq: int) -> bool:
        return random.Random(f"straggler {self.seed} {seq}").random() < 0.05

    # The promises

    def published_rows(self, name: str) -> list[list[Any]]:
        store = self.stores[name]
        found = [json.loads(store.get(each.path)) for each in store.list("published/")]
        return [row for rows in found for row in rows]

    def check_output(self) -> None:
        """Nothing is published twice, and only what is in the log."""
        for name in self.stores:
            seqs = self._seqs(name)
            assert not [seq for seq, count in seqs.items() if count > 1], f"doubled in {name}"
            assert max(seqs, default=-1) < self.committed_rows()
        assert all(map(self.is_straggler, self._seqs("small-late"))), "a row in time was late"
        for row in self.published_rows("large-late"):
            assert all(map(self.is_straggler, json.loads(row[3]))), "a result in time was late"

    def check_all(self) -> None:
        self.check_output()
        self.check_log()
        report = verify(self.store)
        assert report.ok, report.damage
        newest = self.newest()
        assert newest is not None
        stored = stored_state(self.store, self.graph(), newest)
        rows = Counter(range(self.committed_rows()))
        small, late = self._seqs("small-results"), self._seqs("small-late")
        assert small + late + _held(stored["small"], "windows") == rows
        assert self._seqs("small-beats") + _held(stored["small"], "beats") == rows - late
        large, too_late = self._seqs("large-results"), self._seqs("large-late")
        assert large + too_late + _held(stored["large"], "windows") == small
        assert self._seqs("large-beats") + _held(stored["large"], "beats") == small - too_late

    def committed_rows(self) -> int:
        newest = Log(self.store).newest_epoch()
        return 0 if newest is None else end_of(newest.spark.offsets)

    def _seqs(self, name: str) -> Counter[int]:
        found: Counter[int] = Counter()
        for row in self.published_rows(name):
            found.update([row[1]] if name == "small-late" else json.loads(row[-1]))
        return found


def _held(keys: dict[Any, dict[str, Any]], name: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for states in keys.values():
        for seqs in states.get(name, {}).values():
            found.update(json.loads(seqs))
    return found
