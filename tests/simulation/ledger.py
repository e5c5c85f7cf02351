"""The job that is simulated, and its model in plain Python.

Level 0 keeps a ledger per account with every kind of state and tells, for each row, what
it sees; level 1 sums up by branch, with another key. Rows are made from a seed.
"""

from __future__ import annotations

import operator
import random
from collections import Counter
from typing import Any, NamedTuple

import pyarrow as pa

from cairn import KeyedProcess, state
from cairn.plan.graph import Graph, Inlet, Node, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.sinks.base import Sink
from cairn.types import parse_schema
from cairn.types.codec import codec

ROW = parse_schema("account long, op string, amount long, seq long")
SEEN = parse_schema("account long, seq long, count long, total long, items string, tags string")
BRANCH = parse_schema("branch long, seq long, amount long")
BRANCHES = 3
OPS = ("add", "add", "add", "tag", "untag", "forget", "replace", "reset", "noop")


class Row(NamedTuple):
    account: int
    op: str
    amount: int
    seq: int


class Span:
    """An aggregate: the width between the smallest and the largest amount."""

    def create(self) -> Any:
        return (None, None)

    def add(self, accumulator: Any, value: int) -> Any:
        low, high = accumulator
        return (
            value if low is None else min(low, value),
            value if high is None else max(high, value),
        )

    def merge(self, left: Any, right: Any) -> Any:
        raise AssertionError("keyed state is never merged")

    def result(self, accumulator: Any) -> int:
        return int(accumulator[1] - accumulator[0])


class Ledger(KeyedProcess[Any]):
    count = state.Value("long", default=0)
    total = state.Reducing("long", operator.add)
    items = state.List("long")
    tags = state.Map("string", "long")
    span = state.Aggregating("struct<low:long,high:long>", Span())
    note = state.Value(object)

    def process(self, row: Any, ctx: Any) -> Any:
        if row.op == "noop":
            return None
        self.count.set(self.count.get() + 1)
        self.note.set({"last": row.seq})
        tag = f"t{row.amount % 4}"
        if row.op == "add":
            self.total.add(row.amount)
            self.items.append(row.amount)
            self.span.add(row.amount)
        elif row.op == "tag":
            self.tags[tag] = row.amount
        elif row.op == "untag":
            self.tags.pop(tag, None)
        elif row.op == "forget":
            self.items.clear()
            self.tags.clear()
        elif row.op == "replace":
            self.items.set([row.amount, row.amount + 1])
        elif row.op == "reset":
            for held in (self.count, self.total, self.items, self.tags, self.span, self.note):
                held.clear()
        ctx.output("branches", (row.account % BRANCHES, row.seq, row.amount))
        items = ",".join(map(str, self.items))
        tags = ",".join(f"{k}={v}" for k, v in self.tags.items())
        return row.account, row.seq, self.count.get(), self.total.get(), items, tags


class Branch(KeyedProcess[Any]):
    amounts = state.Map("long", "long")

    def process(self, row: Any, ctx: Any) -> Any:
        self.amounts[row.seq] = self.amounts.get(row.seq, 0) + row.amount
        return row.branch, row.seq, row.amount


class Model:
    """What the job must hold and must have emitted after some rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.accounts: dict[int, dict[str, Any]] = {}
        self.branches: dict[int, dict[int, int]] = {}
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.branched: Counter[tuple[Any, ...]] = Counter()

    def process(self, row: Row) -> None:
        self.rows += 1
        if row.op == "noop":
            return
        held = self.accounts.setdefault(row.account, {})
        held["count"] = held.get("count", 0) + 1
        held["note"] = {"last": row.seq}
        tag = f"t{row.amount % 4}"
        if row.op == "add":
            held["total"] = held.get("total", 0) + row.amount
            held.setdefault("items", []).append(row.amount)
            low, high = held.get("span", (row.amount, row.amount))
            held["span"] = (min(low, row.amount), max(high, row.amount))
        elif row.op == "tag":
            held.setdefault("tags", {})[tag] = row.amount
        elif row.op == "untag":
            held.get("tags", {}).pop(tag, None)
        elif row.op == "forget":
            held.pop("items", None)
            held.pop("tags", None)
        elif row.op == "replace":
            held["items"] = [row.amount, row.amount + 1]
        elif row.op == "reset":
            held.clear()
        branch = row.account % BRANCHES
        amounts = self.branches.setdefault(branch, {})
        amounts[row.seq] = amounts.get(row.seq, 0) + row.amount
        self.branched[(branch, row.seq, row.amount)] += 1
        items = ",".join(map(str, held.get("items", [])))
        tags = ",".join(f"{k}={v}" for k, v in sorted(held.get("tags", {}).items()))
        self.seen[(row.account, row.seq, held.get("count", 0), held.get("total"), items, tags)] += 1

    def state(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Per operator and key, what is stored; empty lists and maps are nothing."""
        accounts = {
            account: kept
            for account, held in self.accounts.items()
            if (kept := {name: value for name, value in held.items() if value not in ([], {})})
        }
        return {
            "ledger": accounts,
            "branch": {branch: {"amounts": held} for branch, held in self.branches.items()},
        }


def rows_of(seed: int, count: int, accounts: int = 9) -> list[Row]:
    """The input, as long as asked for; a longer one begins with the shorter one."""
    chance = random.Random(f"rows {seed}")
    return [
        Row(chance.randrange(accounts), chance.choice(OPS), chance.randrange(100), seq)
        for seq in range(count)
    ]


def as_arrow(rows: list[Row]) -> pa.StructArray:
    rows_codec = codec(pa.struct(list(ROW)))
    return rows_codec.encode([rows_codec.normalise(row) for row in rows])


def ledger_graph(group_count: int, seen: Sink, branched: Sink) -> Graph:
    nodes: dict[str, Node] = {
        "rows": SourceNode("rows", None, ROW, None, None),
        "ledger": ProcessNode(
            "ledger",
            (Inlet((Port("rows"),), ("account",)),),
            Ledger(),
            SEEN,
            (("branches", BRANCH),),
        ),
        "seen": SinkNode("seen", (Port("ledger"),), seen),
        "branch": ProcessNode(
            "branch", (Inlet((Port("ledger", "branches"),), ("branch",)),), Branch(), BRANCH, ()
        ),
        "branched": SinkNode("branched", (Port("branch"),), branched),
    }
    return build_graph("ledger", group_count, nodes)
