"""The job as an immutable graph, cut into levels at the shuffles.

A level is one Spark stage. Slot i runs subtask i of every operator of a level. What is
fed straight from operators of one level and needs no shuffle is chained: a sink, an operator
without keys, or one that has the key of those that feed it. It runs in their level, in the same
process. Everything else has an edge per inlet, however many streams are united into it. What a
loop sends back has an edge of its own, which ends in the level after those that send it.

Always true here:
- nothing in this module touches Spark: DataFrames and functions are carried, not called;
- a uid names one operator or sink; edges are numbered in the order of the program;
- an edge that skips levels passes through the ones between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from cairn.plan.loops import Return
from cairn.plan.nodes import (
    Consumer,
    EventTime,
    Inlet,
    LoopNode,
    Node,
    PartialNode,
    Port,
    ProcessNode,
    RowsNode,
    SelectNode,
    SinkNode,
    SourceNode,
    TimeNode,
    TransformNode,
    Watermark,
    Way,
)
from cairn.plan.ports import bare_ports, port_schema, read_ports, root_ports, unite_schemas
from cairn.plan.times import Times, is_time, keep_time, port_time, unite_times


@dataclass(frozen=True)
class Edge:
    """Rows on their way to one inlet of a consumer, through a shuffle."""

    index: int
    consumer: str
    inputs: tuple[Port, ...]
    """Outputs of sources, transforms and operators."""
    keys: tuple[str, ...]
    key_types: tuple[pa.DataType, ...] = field(repr=False)
    """As the state has them: narrower ones are cast, so that equal keys meet."""
    schema: pa.Schema = field(repr=False)
    event_time: str | None
    level: int
    shift_us: int = 0
    """Added to the event time."""
    wants_order: bool = True
    """The consumer gets the rows of a key in the order of their event time."""
    way: Way = "keyed"
    inlet: int = 0
    """Index of the consumer's inlet."""
    parallelism: int = 0
    """The largest number of subtasks of the consumer that get rows; 0: all that the job has."""


@dataclass(frozen=True)
class Level:
    index: int
    operators: tuple[ProcessNode, ...]
    sinks: tuple[SinkNode, ...]
    edges: tuple[Edge, ...]
    """Consumed in this level."""
    counted: tuple[Edge, ...]
    """Edges to sinks that drop their rows: Spark counts these and sends them nowhere."""
    passing: tuple[Edge, ...]
    """On their way to a later level."""

    @property
    def is_straight(self) -> bool:
        """True if its rows come from the sources and may go to any subtask."""
        is_first = self.index == 0 and not self.passing
        return is_first and all(edge.way == "spread" for edge in self.edges)


@dataclass(frozen=True)
class Graph:
    name: str
    group_count: int
    sources: tuple[SourceNode, ...]
    nodes: dict[str, Node] = field(repr=False)
    edges: tuple[Edge, ...] = ()
    levels: tuple[Level, ...] = ()
    returns: tuple[Return, ...] = ()
    """The ways back of loops."""
    chaining: bool = True
    """Operators that need no shuffle run in the process of those that feed them."""
    chained: frozenset[str] = frozenset()
    """The operators and sinks that do, with all their rows."""
    chained_inlets: frozenset[tuple[str, int]] = frozenset()
    """The inlets of other operators that get their rows there, by uid and index."""

    @property
    def source_names(self) -> list[str]:
        return [source.name for source in self.sources]

    @property
    def operators(self) -> tuple[ProcessNode, ...]:
        return tuple(op for level in self.levels for op in level.operators)

    @property
    def sinks(self) -> tuple[SinkNode, ...]:
        return tuple(sink for level in self.levels for sink in level.sinks)

    @property
    def needs_slots(self) -> bool:
        """False if all rows go from the sources to sinks that drop them."""
        return any(level.operators or level.edges for level in self.levels)

    @property
    def loops(self) -> tuple[LoopNode, ...]:
        return tuple(node for node in self.nodes.values() if isinstance(node, LoopNode))

    def schema(self, port: Port) -> pa.Schema:
        return port_schema(self.nodes, port)

    def input_schema(self, node: SinkNode | Inlet) -> pa.Schema:
        """Return the columns of all the streams united there."""
        ports = node.inputs if isinstance(node, SinkNode) else node.ports
        return unite_schemas([self.schema(port) for port in ports])

    def origins(self, *ports: Port) -> tuple[Port, ...]:
        """The sources or operator outputs that a chain of transforms starts from."""
        return root_ports(self.nodes, ports)

    def bare(self, ports: Sequence[Port]) -> tuple[Port, ...]:
        """Return the outputs that these streams are made of, without time and loop nodes."""
        return bare_ports(self.nodes, ports)

    def read(self, node: TransformNode) -> tuple[Port, ...]:
        """Return the outputs that a transform reads."""
        return read_ports(self.nodes, node)

    @cached_property
    def bounds(self) -> dict[str, int]:
        """The largest number of subtasks that get rows of each operator; 0: all of the job's.

        An operator without keys that is chained gets them where those that feed it do.
        """
        found: dict[str, int] = {}
        in_loops = {back.operator for back in self.returns}
        for node in (each for level in self.levels for each in level.operators):
            found[node.uid] = node.parallelism
            is_fed_here = node.uid in self.chained and node.uid not in in_loops
            if is_fed_here and not node.parallelism and not node.keys:
                feeding = [found[port.node] for port in self.bare(node.inputs)]
                found[node.uid] = max(feeding) if all(feeding) else 0
        return found

    @cached_property
    def times(self) -> Times:
        return Times(self.nodes)

    @cached_property
    def time_origins(self) -> dict[str, SourceNode | TimeNode]:
        """The nodes that declare watermarks: for each consumer, those nearest to it."""
        found: dict[str, SourceNode | TimeNode] = {}
        seen: set[Port] = set()
        waiting = [
            port
            for node in reversed(self.nodes.values())
            if isinstance(node, ProcessNode | SinkNode)
            for port in reversed(node.inputs)
        ]
        while waiting:
            port = waiting.pop()
            if port in seen:
                continue
            seen.add(port)
            node = self.nodes[port.node]
            if isinstance(node, SourceNode | TimeNode):
                if node.watermark is not None:
                    found[node.name] = node
            elif isinstance(node, TransformNode | LoopNode):
                waiting += reversed(node.inputs)
        return found

    @property
    def watermarks(self) -> dict[str, Watermark]:
        """By the name of their origin."""
        return {n: node.watermark for n, node in self.time_origins.items() if node.watermark}

    def level_of(self, uid: str) -> int:
        return next(
            level.index
            for level in self.levels
            if uid in {op.uid for op in level.operators} | {sink.uid for sink in level.sinks}
        )


__all__ = [
    "Consumer",
    "Edge",
    "EventTime",
    "Graph",
    "Inlet",
    "Level",
    "LoopNode",
    "Node",
    "PartialNode",
    "Port",
    "ProcessNode",
    "Return",
    "RowsNode",
    "SelectNode",
    "SinkNode",
    "SourceNode",
    "TimeNode",
    "TransformNode",
    "Watermark",
    "bare_ports",
    "is_time",
    "keep_time",
    "port_schema",
    "port_time",
    "root_ports",
    "unite_schemas",
    "unite_times",
]
