"""The smallest job that ends in a place: rows are numbered by key and published.

    rows (k, seq) -> number (state: how many of k) -> (k, "<seq>-<number>") -> the place

Every row that is published is another one, so what is lost or repeated can be told.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn import KeyedProcess, state
from cairn.plan.graph import Graph, Inlet, Node, Port, ProcessNode, SinkNode, SourceNode
from cairn.plan.levels import build_graph
from cairn.sinks.base import Sink
from cairn.types import parse_schema
from cairn.types.codec import codec
from tests.places import SCHEMA, Place
from tests.places.files import FilesPlace
from tests.simulation.world import Driver, World

ROW = parse_schema("k long, seq long")
KEYS = 5


class Number(KeyedProcess[Any]):
    """Emits `k`, and the number in every column of text."""

    count = state.Value("long", default=0)

    def __init__(self, columns: Sequence[str] = tuple(SCHEMA.names)) -> None:
        self.columns = tuple(columns)

    def process(self, row: Any, ctx: Any) -> Any:
        self.count.set(self.count.get() + 1)
        text = f"{row.seq}-{self.count.get()}"
        return tuple(row.k if name == "k" else text for name in self.columns)


def numbered_graph(
    group_count: int, sink: Sink, schema: pa.Schema = SCHEMA, uid: str = "out"
) -> Graph:
    number, inlet = Number(schema.names), Inlet((Port("rows"),), ("k",))
    nodes: dict[str, Node] = {
        "rows": SourceNode("rows", None, ROW, None, None),
        "number": ProcessNode("number", (inlet,), number, schema, ()),
        uid: SinkNode(uid, (Port("number"),), sink),
    }
    return build_graph("numbered", group_count, nodes)


class OutletWorld(World):
    """A world whose only output is a place."""

    def __init__(self, seed: int, folder: Path, make_place: Callable[[Path], Place]) -> None:
        super().__init__(seed, folder, group_count=4)
        self.place = make_place(folder / "place")
        self.schema = SCHEMA
        """Columns of the rows that the program publishes."""
        self._drivers: list[OutletDriver] = []

    def graph(self) -> Any:
        return numbered_graph(self.group_count, self.place.make(), self.schema)

    def driver(self, **how: Any) -> OutletDriver:
        self._drivers.append(OutletDriver(self, **how))
        return self._drivers[-1]

    def end(self, *drivers: OutletDriver) -> None:
        """Their processes are gone, and so are the connections they had."""
        for driver in drivers or tuple(self._drivers):
            driver.close()
            self._drivers.remove(driver)

    def arrow(self, start: int, stop: int) -> pa.StructArray:
        keys = random.Random(f"keys {self.seed}").choices(range(KEYS), k=stop)
        rows_codec = codec(pa.struct(list(ROW)))
        rows = [(keys[seq], seq) for seq in range(start, stop)]
        return rows_codec.encode([rows_codec.normalise(row) for row in rows])

    def expected(self) -> list[tuple[int, str]]:
        counts: Counter[int] = Counter()
        found = []
        for row in self.arrow(0, self.committed_rows()).to_pylist():
            counts[row["k"]] += 1
            found.append((row["k"], f"{row['seq']}-{counts[row['k']]}"))
        return found

    def check_output(self) -> None:
        """What the place promises, when everything committed is published."""
        expected, sink = self.expected(), self._drivers[-1].sink
        seen = self.place.seen(sink)
        if self.place.is_keyed:
            expected = list(dict(expected).items())
        if sink.promise == "at-least-once" or self._drivers[-1].guarantee == "at-least-once":
            seen = sorted(set(seen), key=str)
        assert seen == sorted(expected, key=str), f"seen {seen}, expected {expected}"

    def check_all(self, *, with_repeated: bool = False) -> None:
        """Not the log: the simulations of drivers do.

        `with_repeated`: what a batch that is published again has left in sight may stay there.
        """
        self.check_output()
        leftovers = self.place.leftovers()
        if with_repeated and self.place.is_in_pieces and isinstance(self.place, FilesPlace):
            # In a folder without a list, files that were renamed into it.
            leftovers = [left for left in leftovers if left.startswith(("_cairn", "/"))]
        assert not leftovers, leftovers

    def close(self) -> None:
        self.end()
        self.place.close()


class OutletDriver(Driver):
    """A driver of this world, with its sink."""

    @property
    def sink(self) -> Sink:
        (sink,) = self.coordinator._publisher.sinks.values()
        return sink

    def close(self) -> None:
        for slot in self.cluster.slots.values():
            for outlet in slot.level(0).sinks.values():
                outlet.sink.close()
        self.cluster.slots.clear()
        self.sink.close()
