"""Jobs with loops, simulated: records that hop from key to key, and labels that spread.

Hops: each row of the input goes around a number of times, through two operators with keys of
their own. Every hop is told of once, so a record that is lost, or counted twice, is seen.

Labels: connected components of a stream of edges, by label propagation; a union-find over
the same edges says what the labels must come to.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa

from cairn import KeyedProcess, Process, state
from cairn.driver.coordinator.rounds import records_of
from cairn.plan.graph import (
    Graph,
    Inlet,
    LoopNode,
    Node,
    Port,
    ProcessNode,
    SinkNode,
    SourceNode,
    Watermark,
)
from cairn.plan.levels import build_graph
from cairn.sinks.base import Sink
from cairn.snapshots.reader import EpochReader
from cairn.storage.verify import verify
from cairn.types import parse_schema
from tests.simulation.world import Transactional, World, stored_state

HOP = parse_schema("node long, seq long, hops long")
SEEN = parse_schema("seq long, hops long, node long")
MESSAGE = parse_schema("node long, peer long, label long")
LABEL = parse_schema("node long, label long")
NODES = 7
HOPS_MAX = 9


class Visit(KeyedProcess[Any]):
    """Counts who comes by, tells of it and passes it on."""

    visits = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.visits.set(self.visits.get() + 1)
        ctx.output("seen", (row.seq, row.hops, row.node))
        return tuple(row)


class Forward(KeyedProcess[Any]):
    """Sends each record on to the next node, until it has no hops left."""

    sent = state.Map("long", "long")

    def process(self, row: Any, ctx: Any) -> Any:
        if not row.hops:
            return None
        self.sent[row.node] = self.sent.get(row.node, 0) + 1
        return (next_node(row.node, row.seq), row.seq, row.hops - 1)


class Sorted(KeyedProcess[Any]):
    """Visit, in a loop of its own for most of the hops; every third goes the long way."""

    visits = state.Value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.visits.set(self.visits.get() + 1)
        ctx.output("seen", (row.seq, row.hops, row.node))
        if row.hops % 3:
            ctx.output("near", (next_node(row.node, row.seq), row.seq, row.hops - 1))
            return None
        return tuple(row)


class Connected(Visit):
    """Visit, as one of two inputs; nothing comes by the other."""

    def on_hops(self, row: Any, ctx: Any) -> Any:
        return self.process(row, ctx)

    def on_others(self, row: Any, ctx: Any) -> Any:
        raise AssertionError("nothing comes this way")


class Spreading(Process[Any]):
    """Visit without a key: by whichever subtask."""

    def process(self, row: Any, ctx: Any) -> Any:
        ctx.output("seen", (row.seq, row.hops, row.node))
        return tuple(row)


def next_node(node: int, seq: int) -> int:
    return (node * 3 + seq + 1) % NODES


def hops_graph(group_count: int, sink: Sink, rounds_max: int, shape: str = "plain") -> Graph:
    near = (("seen", SEEN), ("near", HOP))
    looped = Inlet((Port("loop"),), ("node",))
    inlets = {
        "plain": (looped,),
        "timed": (looped,),
        "nested": (Inlet((Port("inner"),), ("node",)),),
        "spread": (Inlet((Port("loop"),), way="spread"),),
        "connected": (
            Inlet((Port("others"),), ("node",), name="others"),
            Inlet((Port("loop"),), ("node",), name="hops"),
        ),
    }[shape]
    visits = {
        "plain": Visit,
        "timed": Visit,
        "nested": Sorted,
        "spread": Spreading,
        "connected": Connected,
    }
    # What goes around is soon older than the watermark, which the rows of the input are not.
    time, watermark = ("seq", Watermark(0)) if shape == "timed" else (None, None)
    nodes: dict[str, Node] = {
        "rows": SourceNode("rows", None, HOP, time, watermark),
        "others": SourceNode("others", None, HOP, None, None),
        "loop": LoopNode("loop", (Port("rows"),), HOP, (Port("forward"),), rounds_max),
    }
    if shape == "nested":
        inner = (Port("visit", "near"),)
        nodes["inner"] = LoopNode("inner", (Port("loop"),), HOP, inner, rounds_max)
    nodes |= {
        "visit": ProcessNode("visit", inlets, visits[shape](), HOP, near),
        "forward": ProcessNode("forward", (Inlet((Port("visit"),), ("seq",)),), Forward(), HOP),
        "seen": SinkNode("seen", (Port("visit", "seen"),), sink),
    }
    return build_graph("hops", group_count, nodes)


class HopsWorld(World):
    """Every record is published once per hop, or it is on its way back."""

    def __init__(self, seed: int, folder: Any, rounds_max: int = 1, shape: str = "plain") -> None:
        super().__init__(seed, folder)
        self.rounds_max = rounds_max
        self.shape = shape

    def graph(self) -> Graph:
        sink = Transactional(self.published.url)
        return hops_graph(self.group_count, sink, self.rounds_max, self.shape)

    def row(self, seq: int) -> dict[str, int]:
        chance = random.Random(f"hop {self.seed} {seq}")
        return {"node": chance.randrange(NODES), "seq": seq, "hops": chance.randrange(HOPS_MAX)}

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        return pa.array([self.row(seq) for seq in range(start, stop)], pa.struct(list(HOP)))

    def expected(self) -> Counter[tuple[int, int, int]]:
        """All hops of what is committed, whether they are done or not."""
        found: Counter[tuple[int, int, int]] = Counter()
        for seq in range(self.committed_rows()):
            found.update(trail(**self.row(seq)))
        return found

    def in_flight(self) -> list[dict[str, int]]:
        newest = self.newest()
        if newest is None:
            return []
        with EpochReader(self.store, newest) as reader:
            batches = [b for uid in records_of(newest) for b in reader.rows(uid, "records")]
        return [row for batch in batches for row in batch["value"].to_pylist()]

    def done(self) -> Counter[tuple[int, int, int]]:
        """The hops that are done: all but those of what is on its way back."""
        to_come: Counter[tuple[int, int, int]] = Counter()
        for record in self.in_flight():
            to_come.update(trail(**record))
        expected = self.expected()
        assert to_come <= expected
        return expected - to_come

    def check_output(self) -> None:
        assert self.seen() == self.done()

    def check_all(self) -> None:
        self.check_output()
        self.check_log()
        self.check_state()

    def check_state(self) -> None:
        report = verify(self.store)
        assert report.ok, report.damage
        newest = self.newest()
        assert newest is not None
        stored = stored_state(self.store, self.graph(), newest)
        done = list(self.done().elements())
        if self.shape != "spread":
            visits = Counter(node for _, _, node in done)
            assert {node: held["visits"] for node, held in stored["visit"].items()} == visits
        sent = Counter(
            seq for seq, hops, _ in done if hops and (self.shape != "nested" or not hops % 3)
        )
        found = {seq: sum(held["sent"].values()) for seq, held in stored["forward"].items()}
        assert found == sent


def trail(node: int, seq: int, hops: int) -> list[tuple[int, int, int]]:
    """What a record tells of on its way."""
    found = [(seq, hops, node)]
    while hops:
        node, hops = next_node(node, seq), hops - 1
        found.append((seq, hops, node))
    return found


class Spread(KeyedProcess[Any]):
    """Keeps the least label that came by, and tells the neighbours of it."""

    label = state.Value("long")
    peers = state.Map("long", "boolean")

    def process(self, row: Any, ctx: Any) -> Any:
        label = self.label.get()
        if label is None:
            label = row.node
            self.label.set(label)
            ctx.output("labels", (row.node, label))
        if row.peer is not None:
            self.peers[row.peer] = True
            yield row.peer, None, label
        elif row.label < label:
            self.label.set(row.label)
            ctx.output("labels", (row.node, row.label))
            for peer in self.peers:
                yield peer, None, row.label


def labels_graph(group_count: int, sink: Sink, rounds_max: int) -> Graph:
    nodes: dict[str, Node] = {
        "rows": SourceNode("rows", None, MESSAGE, None, None),
        "loop": LoopNode("loop", (Port("rows"),), MESSAGE, (Port("spread"),), rounds_max),
        "spread": ProcessNode(
            "spread", (Inlet((Port("loop"),), ("node",)),), Spread(), MESSAGE, (("labels", LABEL),)
        ),
        "labels": SinkNode("labels", (Port("spread", "labels"),), sink),
    }
    return build_graph("labels", group_count, nodes)


class LabelsWorld(World):
    def __init__(self, seed: int, folder: Any, rounds_max: int = 1) -> None:
        super().__init__(seed, folder)
        self.rounds_max = rounds_max

    def graph(self) -> Graph:
        return labels_graph(self.group_count, Transactional(self.published.url), self.rounds_max)

    def edge(self, index: int) -> tuple[int, int]:
        chance = random.Random(f"edge {self.seed} {index}")
        return chance.randrange(60), chance.randrange(60)

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        rows = []
        for index in range(start, stop):
            a, b = self.edge(index)
            rows += [{"node": a, "peer": b}, {"node": b, "peer": a}]
        return pa.array(rows, pa.struct(list(MESSAGE)))

    def components(self) -> dict[int, int]:
        """By union-find: of each node the least one it is connected with."""
        parent: dict[int, int] = {}

        def find(node: int) -> int:
            while parent.setdefault(node, node) != node:
                node = parent[node]
            return node

        for index in range(self.committed_rows()):
            left, right = map(find, self.edge(index))
            parent[max(left, right)] = min(left, right)
        return {node: find(node) for node in parent}

    def check_output(self) -> None:
        assert not [row for row, count in self.seen().items() if count > 1], "told twice"

    def check_all(self) -> None:
        """When nothing goes around any more."""
        self.check_output()
        self.check_log()
        assert verify(self.store).ok
        newest = self.newest()
        assert newest is not None
        told: dict[int, int] = {}
        for node, label in self.seen():
            told[node] = min(label, told.get(node, label))
        assert told == self.components()
        stored = stored_state(self.store, self.graph(), newest)["spread"]
        assert {node: held["label"] for node, held in stored.items()} == told
