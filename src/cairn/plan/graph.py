"""The job as an immutable graph, and its cut into levels at the shuffles.

A level is one Spark stage. Slot i runs subtask i of every operator of a level;
a sink fed straight from an operator runs in that operator's level. Every
consumer has one edge, however many streams are united into it.

Always true here:
- nothing in this module touches Spark: DataFrames and functions are carried, not called;
- a uid names one operator or sink; edges are numbered in the order of the program;
- an edge that skips levels passes through the ones between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from cairn.aggregates.partial import Partials
from cairn.errors import PlanError
from cairn.functions import LATE, Function
from cairn.sinks.base import Sink

MAX_GROUP_COUNT = 32768


@dataclass(frozen=True)
class Port:
    """An output of a node: the main one, or the side output of a tag."""

    node: str
    tag: str | None = None


@dataclass(frozen=True)
class Watermark:
    """How late rows may come, and for how long a silent source is waited for (None: for ever)."""

    delay_ms: int
    idle_ms: int | None = None


@dataclass(frozen=True)
class EventTime:
    """The column that tells a row's time, and what is added to it."""

    column: str
    shift_us: int = 0


@dataclass(frozen=True)
class SourceNode:
    name: str
    dataframe: Any = field(repr=False)
    schema: pa.Schema = field(repr=False)
    event_time: str | None
    watermark: Watermark | None


@dataclass(frozen=True)
class TransformNode:
    """A function DataFrame -> DataFrame, run by Spark on the rows of one epoch."""

    name: str
    inputs: tuple[Port, ...]
    function: Any = field(repr=False)
    schema: pa.Schema = field(repr=False)
    event_time: str | None


@dataclass(frozen=True)
class PartialNode(TransformNode):
    """What an aggregation is fed: partials that Spark makes row by row, or aggregates ahead.

    The two give the same results; which one it is is chosen epoch by epoch.
    """

    uid: str = field(kw_only=True)
    """The operator it feeds."""
    partials: Partials = field(kw_only=True, repr=False)


@dataclass(frozen=True)
class TimeNode:
    """Streams as they are, with another event time and watermark from here on."""

    name: str
    inputs: tuple[Port, ...]
    schema: pa.Schema = field(repr=False)
    event_time: str
    watermark: Watermark | None


@dataclass(frozen=True)
class ProcessNode:
    uid: str
    inputs: tuple[Port, ...]
    keys: tuple[str, ...]
    function: Function = field(repr=False)
    schema: pa.Schema = field(repr=False)
    sides: tuple[tuple[str, pa.Schema], ...] = field(repr=False)


@dataclass(frozen=True)
class SinkNode:
    uid: str
    inputs: tuple[Port, ...]
    sink: Sink = field(repr=False)


Node = SourceNode | TransformNode | TimeNode | ProcessNode | SinkNode
Consumer = ProcessNode | SinkNode


@dataclass(frozen=True)
class Edge:
    """Rows on their way to one consumer, through a shuffle."""

    index: int
    consumer: str
    inputs: tuple[Port, ...]
    """Of sources, transforms and operators."""
    keys: tuple[str, ...]
    schema: pa.Schema = field(repr=False)
    event_time: str | None
    level: int
    shift_us: int = 0
    """Added to the event time."""
    wants_order: bool = True
    """The consumer gets the rows of a key in the order of their event time."""


@dataclass(frozen=True)
class Level:
    index: int
    operators: tuple[ProcessNode, ...]
    sinks: tuple[SinkNode, ...]
    edges: tuple[Edge, ...]
    """Consumed in this level."""
    passing: tuple[Edge, ...]
    """On their way to a later level."""


@dataclass(frozen=True)
class Graph:
    name: str
    group_count: int
    sources: tuple[SourceNode, ...]
    nodes: dict[str, Node] = field(repr=False)
    edges: tuple[Edge, ...] = ()
    levels: tuple[Level, ...] = ()

    @property
    def source_names(self) -> list[str]:
        return [source.name for source in self.sources]

    @property
    def operators(self) -> tuple[ProcessNode, ...]:
        return tuple(op for level in self.levels for op in level.operators)

    @property
    def sinks(self) -> tuple[SinkNode, ...]:
        return tuple(sink for level in self.levels for sink in level.sinks)

    def schema(self, port: Port) -> pa.Schema:
        return port_schema(self.nodes, port)

    def input_schema(self, node: Consumer) -> pa.Schema:
        """What a consumer gets, of all the streams united into it."""
        return united_schema([self.schema(port) for port in node.inputs])

    def origins(self, port: Port) -> tuple[Port, ...]:
        """The sources or operator outputs that a chain of transforms starts from."""
        return root_ports(self.nodes, (port,))

    def bare(self, ports: Sequence[Port]) -> tuple[Port, ...]:
        """Where the rows of these streams come from, whatever time they were given since."""
        return bare_ports(self.nodes, ports)

    @property
    def time_origins(self) -> dict[str, SourceNode | TimeNode]:
        """Where watermarks are declared: for each consumer, the places nearest to it."""
        found: dict[str, SourceNode | TimeNode] = {}

        def visit(port: Port) -> None:
            node = self.nodes[port.node]
            if isinstance(node, SourceNode | TimeNode):
                if node.watermark is not None:
                    found[node.name] = node
            elif isinstance(node, TransformNode):
                for upstream in node.inputs:
                    visit(upstream)

        for node in self.nodes.values():
            if isinstance(node, ProcessNode | SinkNode):
                for port in node.inputs:
                    visit(port)
        return found

    @property
    def watermarks(self) -> dict[str, Watermark]:
        """By the name of their origin."""
        return {n: node.watermark for n, node in self.time_origins.items() if node.watermark}

    def has_watermark(self, port: Port) -> bool:
        """Whether a watermark is declared anywhere before this stream, for this stream.

        What was late once is not judged again.
        """
        node = self.nodes[port.node]
        if port.tag == LATE:
            return False
        if isinstance(node, SourceNode | TimeNode) and node.watermark is not None:
            return True
        if isinstance(node, SourceNode):
            return False
        if isinstance(node, TimeNode):
            # Operators follow the watermark of their input, whichever column tells the time.
            return any(
                isinstance(self.nodes[root.node], ProcessNode) and self.has_watermark(root)
                for root in self.origins(port)
            )
        if isinstance(node, SinkNode):
            raise AssertionError("a sink has no output")
        return any(self.has_watermark(upstream) for upstream in node.inputs)

    def level_of(self, uid: str) -> int:
        return next(
            level.index
            for level in self.levels
            if uid in {op.uid for op in level.operators} | {sink.uid for sink in level.sinks}
        )


def port_schema(nodes: dict[str, Node], port: Port) -> pa.Schema:
    node = nodes[port.node]
    if isinstance(node, ProcessNode) and port.tag is not None:
        return dict(node.sides)[port.tag]
    if isinstance(node, SinkNode):
        raise AssertionError("a sink has no output")
    return node.schema


def bare_ports(nodes: dict[str, Node], ports: Sequence[Port]) -> tuple[Port, ...]:
    found: list[Port] = []
    for port in ports:
        node = nodes[port.node]
        found += bare_ports(nodes, node.inputs) if isinstance(node, TimeNode) else (port,)
    return tuple(found)


def root_ports(nodes: dict[str, Node], ports: Sequence[Port]) -> tuple[Port, ...]:
    found: list[Port] = []
    for port in ports:
        node = nodes[port.node]
        if isinstance(node, TransformNode | TimeNode):
            found += root_ports(nodes, node.inputs)
        else:
            found.append(port)
    return tuple(found)


def united_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns in the order of the first, null where any of them may be."""
    first, *others = schemas
    return pa.schema(
        f.with_nullable(f.nullable or any(other.field(f.name).nullable for other in others))
        for f in first
    )


def is_time(type_: pa.DataType) -> bool:
    """Whether a column of this type can tell event time."""
    kinds = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer, is_text)
    return any(kind(type_) for kind in kinds)


def is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def port_event_time(nodes: dict[str, Node], port: Port) -> str | None:
    """The event-time column of a stream."""
    time = port_time(nodes, port)
    return None if time is None else time.column


def port_time(nodes: dict[str, Node], port: Port) -> EventTime | None:
    """The event time of a stream: it follows the column's name through operators."""
    node = nodes[port.node]
    if isinstance(node, SourceNode | TimeNode | PartialNode):
        return None if node.event_time is None else EventTime(node.event_time)
    if isinstance(node, SinkNode):
        raise AssertionError("a sink has no output")
    time = united_time(nodes, _rows_before(nodes, node) if port.tag else node.inputs)
    if isinstance(node, TransformNode):
        return time if time is not None and time.column == node.event_time else None
    schema = port_schema(nodes, port)
    result = node.function.result_time
    if port.tag is None and result is not None and result in schema.names:
        # Results about the time up to an end that is, as a rule, no part of it.
        return EventTime(result, node.function.result_shift_us)
    if time is None or time.column not in schema.names:
        return None
    inputs = _rows_before(nodes, node) if port.tag else node.inputs
    before = united_schema([port_schema(nodes, upstream) for upstream in inputs])
    type_ = schema.field(time.column).type
    # A column of another type may well count in other units.
    is_same = type_ == before.field(time.column).type or pa.types.is_timestamp(type_)
    return time if is_same else None


def _rows_before(nodes: dict[str, Node], node: TransformNode | ProcessNode) -> tuple[Port, ...]:
    """The streams that a side output has the rows of: those before they became partials."""
    fed = [nodes[port.node] for port in node.inputs]
    return fed[0].inputs if isinstance(fed[0], PartialNode) else node.inputs


def united_time(nodes: dict[str, Node], ports: Sequence[Port]) -> EventTime | None:
    """The event time of several streams as one: none, where they differ in it."""
    times = {port_time(nodes, port) for port in ports}
    return times.pop() if len(times) == 1 else None


def build_graph(name: str, group_count: int, nodes: dict[str, Node]) -> Graph:
    """Number the edges, cut at the shuffles. Refuses what cannot run."""
    if not 1 <= group_count <= MAX_GROUP_COUNT:
        raise PlanError(
            f"max_parallelism of job {name!r} must be between 1 and {MAX_GROUP_COUNT}, "
            f"found {group_count}"
        )
    sources = tuple(node for node in nodes.values() if isinstance(node, SourceNode))
    consumers = [node for node in nodes.values() if isinstance(node, ProcessNode | SinkNode)]
    if not sources:
        raise PlanError(f"job {name!r} has no source\n  next: add one with job.source(name, df)")
    if not consumers:
        raise PlanError(
            f"job {name!r} does nothing: it has neither an operator nor a sink\n"
            "  next: end a stream with .process(...) or .sink_to(...)"
        )
    graph = Graph(name, group_count, sources, nodes)
    level_of: dict[str, int] = {}
    edges: list[Edge] = []
    for node in consumers:
        level_of[node.uid] = _level(graph, node, level_of)
        if not is_chained(graph, node):
            edges.append(_edge(graph, node, len(edges), level_of[node.uid]))
    depth = 1 + max(level_of.values())
    levels = tuple(
        Level(
            index=index,
            operators=tuple(
                n for n in consumers if isinstance(n, ProcessNode) and level_of[n.uid] == index
            ),
            sinks=tuple(
                n for n in consumers if isinstance(n, SinkNode) and level_of[n.uid] == index
            ),
            edges=tuple(e for e in edges if e.level == index),
            passing=tuple(
                e
                for e in edges
                if e.level > index
                and any(_level_of_origin(graph, port, level_of) < index for port in e.inputs)
            ),
        )
        for index in range(depth)
    )
    return Graph(name, group_count, sources, nodes, tuple(edges), levels)


def is_chained(graph: Graph, node: Consumer) -> bool:
    """Whether a consumer is fed inside the slot, without a shuffle: a sink on an operator."""
    inputs = graph.bare(node.inputs)
    return (
        isinstance(node, SinkNode)
        and all(isinstance(graph.nodes[port.node], ProcessNode) for port in inputs)
        and len({port.node for port in inputs}) == 1
    )


def _level_of_origin(graph: Graph, port: Port, level_of: dict[str, int]) -> int:
    origins = [graph.nodes[origin.node] for origin in graph.origins(port)]
    levels = {level_of[o.uid] if isinstance(o, ProcessNode) else -1 for o in origins}
    if len(levels) > 1:
        names = ", ".join(repr(origin.node) for origin in graph.origins(port))
        raise PlanError(
            f"a transform of the union of {names} would need rows of different stages at once\n"
            "  next: transform the streams one by one and unite the results"
        )
    return levels.pop()


def _level(graph: Graph, node: Consumer, level_of: dict[str, int]) -> int:
    upstream = max(_level_of_origin(graph, port, level_of) for port in node.inputs)
    return upstream if is_chained(graph, node) else upstream + 1


def _edge(graph: Graph, node: Consumer, index: int, level: int) -> Edge:
    time = united_time(graph.nodes, node.inputs)
    return Edge(
        index=index,
        consumer=node.uid,
        inputs=graph.bare(node.inputs),
        keys=node.keys if isinstance(node, ProcessNode) else (),
        schema=graph.input_schema(node),
        event_time=None if time is None else time.column,
        level=level,
        shift_us=0 if time is None else time.shift_us,
        wants_order=isinstance(node, ProcessNode) and node.function.wants_order,
    )
