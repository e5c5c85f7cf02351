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
from cairn.functions import Function
from cairn.sinks.base import Sink

MAX_GROUP_COUNT = 32768


@dataclass(frozen=True)
class Port:
    """An output of a node: the main one, or the side output of a tag."""

    node: str
    tag: str | None = None


@dataclass(frozen=True)
class SourceNode:
    name: str
    dataframe: Any = field(repr=False)
    schema: pa.Schema = field(repr=False)
    event_time: str | None
    watermark: str | None


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


Node = SourceNode | TransformNode | ProcessNode | SinkNode
Consumer = ProcessNode | SinkNode


@dataclass(frozen=True)
class Edge:
    """Rows on their way to one consumer, through a shuffle."""

    index: int
    consumer: str
    inputs: tuple[Port, ...]
    keys: tuple[str, ...]
    schema: pa.Schema = field(repr=False)
    event_time: str | None
    level: int


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
        node = self.nodes[port.node]
        if not isinstance(node, TransformNode):
            return (port,)
        return tuple(origin for upstream in node.inputs for origin in self.origins(upstream))

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


def united_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns in the order of the first, null where any of them may be."""
    first, *others = schemas
    return pa.schema(
        f.with_nullable(f.nullable or any(other.field(f.name).nullable for other in others))
        for f in first
    )


def port_event_time(nodes: dict[str, Node], port: Port) -> str | None:
    """The event-time column of a stream: it follows the column's name through operators."""
    node = nodes[port.node]
    if isinstance(node, SourceNode | TransformNode):
        return node.event_time
    if isinstance(node, SinkNode):
        raise AssertionError("a sink has no output")
    inherited = {port_event_time(nodes, upstream) for upstream in node.inputs}
    name = inherited.pop() if len(inherited) == 1 else None
    schema = port_schema(nodes, port)
    return name if name in schema.names and pa.types.is_timestamp(schema.field(name).type) else None


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
    return (
        isinstance(node, SinkNode)
        and all(isinstance(graph.nodes[port.node], ProcessNode) for port in node.inputs)
        and len({port.node for port in node.inputs}) == 1
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
    times = {port_event_time(graph.nodes, port) for port in node.inputs}
    return Edge(
        index=index,
        consumer=node.uid,
        inputs=node.inputs,
        keys=node.keys if isinstance(node, ProcessNode) else (),
        schema=graph.input_schema(node),
        event_time=times.pop() if len(times) == 1 else None,
        level=level,
    )
