"""The job as an immutable graph, and its cut into levels at the shuffles.

A level is one Spark stage. Slot i runs subtask i of every operator of a level. What is
fed straight from an operator and needs no shuffle, a sink or an operator without keys, is
chained: it runs in that operator's level, in the same process. Everything else has an edge
per inlet, however many streams are united into it. What a loop sends back has an edge of its
own, which ends in the level after those that send it.

Always true here:
- nothing in this module touches Spark: DataFrames and functions are carried, not called;
- a uid names one operator or sink; edges are numbered in the order of the program;
- an edge that skips levels passes through the ones between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import ERRORS, LATE
from cairn.letters import SCHEMA as LETTERS
from cairn.plan.loops import Return, returns_of
from cairn.plan.nodes import (
    Consumer,
    EventTime,
    Inlet,
    LoopNode,
    Node,
    PartialNode,
    Port,
    ProcessNode,
    SinkNode,
    SourceNode,
    TimeNode,
    TransformNode,
    Watermark,
    Way,
)

MAX_GROUP_COUNT = 32768


@dataclass(frozen=True)
class Edge:
    """Rows on their way to one inlet of a consumer, through a shuffle."""

    index: int
    consumer: str
    inputs: tuple[Port, ...]
    """Of sources, transforms and operators."""
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
    """Which of the consumer's."""


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
    returns: tuple[Return, ...] = ()
    """What loops send back, and to whom."""
    chaining: bool = True
    """Operators that need no shuffle run in the process of the one that feeds them."""

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
    def loops(self) -> tuple[LoopNode, ...]:
        return tuple(node for node in self.nodes.values() if isinstance(node, LoopNode))

    def schema(self, port: Port) -> pa.Schema:
        return port_schema(self.nodes, port)

    def input_schema(self, node: SinkNode | Inlet) -> pa.Schema:
        """What comes in, of all the streams united there."""
        ports = node.inputs if isinstance(node, SinkNode) else node.ports
        return united_schema([self.schema(port) for port in ports])

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
            elif isinstance(node, TransformNode | LoopNode):
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
        if isinstance(node, ProcessNode) and (
            is_letters(node, port) or port.tag in {late_tag(inlet) for inlet in node.row_inlets}
        ):
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
        inputs = node.row_inputs if isinstance(node, ProcessNode) else node.inputs
        return any(self.has_watermark(upstream) for upstream in inputs)

    def delay_ms(self, port: Port) -> int:
        """How far behind the job's watermark the rows of a stream may be without being late."""
        node = self.nodes[port.node]
        if isinstance(node, ProcessNode):
            own = node.function.result_delay_ms if port.tag is None else 0
            return own + max(map(self.delay_ms, node.row_inputs))
        return max(map(self.delay_ms, getattr(node, "inputs", ())), default=0)

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
        if isinstance(node, TimeNode | LoopNode):
            found += bare_ports(nodes, node.inputs)
        else:
            found.append(port)
    return tuple(found)


def root_ports(nodes: dict[str, Node], ports: Sequence[Port]) -> tuple[Port, ...]:
    found: list[Port] = []
    for port in ports:
        node = nodes[port.node]
        if isinstance(node, TransformNode | TimeNode | LoopNode):
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
    if isinstance(node, LoopNode):
        return united_time(nodes, node.inputs)
    if isinstance(node, ProcessNode) and is_letters(node, port):
        return None  # Its column `event_time` is of rows and of timers, and may be null.
    time = united_time(nodes, _rows_before(nodes, node, port))
    if isinstance(node, TransformNode):
        return time if time is not None and time.column == node.event_time else None
    schema = port_schema(nodes, port)
    result = node.function.result_time
    if port.tag is None and result is not None:
        # Results about the time up to an end that is, as a rule, no part of it.
        shift_us = node.function.result_shift_us
        return EventTime(result, shift_us) if result in schema.names else None
    if time is None or time.column not in schema.names:
        return None
    inputs = _rows_before(nodes, node, port)
    types = {port_schema(nodes, upstream).field(time.column).type for upstream in inputs}
    type_ = schema.field(time.column).type
    # A column of another type may well count in other units.
    return time if types == {type_} or pa.types.is_timestamp(type_) else None


def _rows_before(
    nodes: dict[str, Node], node: TransformNode | ProcessNode, port: Port
) -> tuple[Port, ...]:
    """The streams that an output has its time from."""
    if isinstance(node, TransformNode):
        return node.inputs
    late = [inlet.ports for inlet in node.inlets if inlet.name and port.tag == late_tag(inlet)]
    inputs = late[0] if late else node.row_inputs
    fed = nodes[inputs[0].node]
    # A side output has the rows as they were before they became partials.
    return fed.inputs if port.tag and isinstance(fed, PartialNode) else inputs


def is_letters(node: ProcessNode, port: Port) -> bool:
    """Whether an output is of the rows that the function failed on."""
    return port.tag == ERRORS and dict(node.sides)[ERRORS] == LETTERS


def late_tag(inlet: Inlet) -> str:
    """The side output that late rows of an inlet go to."""
    return f"{LATE}.{inlet.name}" if inlet.name else LATE


def united_time(nodes: dict[str, Node], ports: Sequence[Port]) -> EventTime | None:
    """The event time of several streams as one: none, where they differ in it."""
    times = {port_time(nodes, port) for port in ports}
    return times.pop() if len(times) == 1 else None


def build_graph(
    name: str, group_count: int, nodes: dict[str, Node], *, chaining: bool = True
) -> Graph:
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
    nodes, returns = returns_of(nodes)
    graph = Graph(name, group_count, sources, nodes, chaining=chaining)
    level_of: dict[str, int] = {}
    edges: list[Edge] = []
    for node in consumers:
        level_of[node.uid] = _level(graph, node, level_of)
        if not is_chained(graph, node):
            edges += _edges(graph, node, len(edges), level_of[node.uid])
    for back in returns:
        edges.append(_edge_back(graph, back, len(edges), level_of))
    depth = 1 + max(*level_of.values(), *(edge.level for edge in edges))
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
    return Graph(name, group_count, sources, nodes, tuple(edges), levels, returns, chaining)


def is_chained(graph: Graph, node: Consumer) -> bool:
    """Whether a consumer is fed inside the slot, without a shuffle, by one operator."""
    inputs = graph.bare(node.inputs)
    needs_no_shuffle = isinstance(node, SinkNode) or (
        graph.chaining
        and all(inlet.way == "spread" for inlet in node.inlets)
        and not _is_text_time(graph, node.inputs)
    )
    return (
        needs_no_shuffle
        and all(isinstance(graph.nodes[port.node], ProcessNode) for port in inputs)
        and len({port.node for port in inputs}) == 1
    )


def _is_text_time(graph: Graph, ports: Sequence[Port]) -> bool:
    """Whether it takes Spark to read the event time of these streams."""
    time = united_time(graph.nodes, ports)
    return time is not None and is_text(graph.schema(ports[0]).field(time.column).type)


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
    upstream = max(_level_of_origin(graph, port, level_of) for port in graph.bare(node.inputs))
    return upstream if is_chained(graph, node) else upstream + 1


def _edges(graph: Graph, node: Consumer, first: int, level: int) -> list[Edge]:
    """A sink's edge, or one for each inlet of an operator."""
    if isinstance(node, SinkNode):
        inlets: tuple[Inlet, ...] = (Inlet(node.inputs, way="spread"),)
    else:
        inlets = node.inlets
    times = [united_time(graph.nodes, inlet.ports) for inlet in inlets]
    # Rows of several inputs come in one order, so all of them tell their time or none does.
    is_timed = all(t for t, i in zip(times, inlets, strict=True) if i.way != "broadcast")
    edges = []
    for index, (inlet, time) in enumerate(zip(inlets, times, strict=True)):
        if not is_timed and inlet.way != "broadcast":
            time = None
        edges.append(
            Edge(
                index=first + index,
                consumer=node.uid,
                inputs=graph.bare(inlet.ports),
                keys=inlet.keys,
                key_types=key_types(graph, inlets) if inlet.keys else (),
                schema=graph.input_schema(inlet),
                event_time=None if time is None else time.column,
                level=level,
                shift_us=0 if time is None else time.shift_us,
                wants_order=isinstance(node, ProcessNode) and node.function.wants_order,
                way=inlet.way,
                inlet=index,
            )
        )
    return edges


def _edge_back(graph: Graph, back: Return, index: int, level_of: dict[str, int]) -> Edge:
    """By the same keys as the inlet it leads to, in a level after those that send the rows."""
    node = graph.nodes[back.operator]
    assert isinstance(node, ProcessNode), "rows go back to operators"
    into = _edges(graph, node, 0, 0)[back.inlet]
    if into.event_time is not None and is_text(into.schema.field(into.event_time).type):
        raise PlanError(
            f"loop {back.loop!r}: operator {back.operator!r} has its event time as text, in column "
            f"{into.event_time!r}; what is sent back is timed without Spark\n"
            "  next: make it a timestamp with .transform(...) before the loop",
            uid=back.loop,
        )
    ports = graph.bare(back.ports)
    return replace(
        into,
        index=index,
        consumer=back.uid,
        inputs=ports,
        level=1 + max(_level_of_origin(graph, port, level_of) for port in ports),
        event_time=None,
        wants_order=False,
    )


def key_types(graph: Graph, inlets: Sequence[Inlet]) -> tuple[pa.DataType, ...]:
    """The types of the key columns that the keys of all inlets fit into."""
    found = []
    keyed = [inlet for inlet in inlets if inlet.way == "keyed"]
    for columns in zip(*(inlet.keys for inlet in keyed), strict=True):
        types = [
            graph.input_schema(inlet).field(column).type
            for inlet, column in zip(keyed, columns, strict=True)
        ]
        found.append(common_type(types))
    if any(type_ is None for type_ in found):
        raise AssertionError("inlets whose keys have no common type are refused when connected")
    return tuple(found)


_WIDENED = (
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.float32(), pa.float64()),
)


def common_type(types: Sequence[pa.DataType]) -> pa.DataType | None:
    """The widest of these types, if equal values of all of them are equal in it; else None."""
    if len(set(types)) == 1:
        return types[0]
    for widening in _WIDENED:
        if all(type_ in widening for type_ in types):
            return max(types, key=widening.index)
    return None


__all__ = [
    "MAX_GROUP_COUNT",
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
    "SinkNode",
    "SourceNode",
    "TimeNode",
    "TransformNode",
    "Watermark",
    "Way",
    "bare_ports",
    "build_graph",
    "common_type",
    "is_chained",
    "is_letters",
    "is_text",
    "is_time",
    "key_types",
    "late_tag",
    "port_event_time",
    "port_schema",
    "port_time",
    "root_ports",
    "united_schema",
    "united_time",
]
