"""The job as an immutable graph, and its cut into levels at the shuffles.

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
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import hooks_of
from cairn.plan.greatest import keep_greatest
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
    RowsNode,
    SelectNode,
    SinkNode,
    SourceNode,
    TimeNode,
    TransformNode,
    Watermark,
    Way,
)
from cairn.plan.partials import divide_ports, partials_in_slots, read_parts
from cairn.plan.ports import bare_ports, port_schema, read_ports, root_ports, unite_schemas
from cairn.plan.selects import selects_in_slots
from cairn.plan.times import Times, is_letters, is_text, is_time, keep_time, port_time, unite_times

MAX_GROUP_COUNT = 32768


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


def build_graph(
    name: str,
    group_count: int,
    nodes: dict[str, Node],
    *,
    chaining: bool = True,
    rows_in_slots: bool = False,
) -> Graph:
    """Number the edges, cut at the shuffles. Refuses what cannot run.

    With `rows_in_slots`, all functions of `.map` and its like are operators: only an operator
    can put rows aside that a function fails on.
    """
    if rows_in_slots:
        nodes = {
            key: rows_operator(node) if isinstance(node, RowsNode) else node
            for key, node in nodes.items()
        }
    check_time_nodes(nodes)
    if chaining:
        nodes = keep_greatest(partials_in_slots(selects_in_slots(nodes)))
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
    in_loops = {back.operator for back in returns}
    level_of, chained, inlets = _levels(graph, consumers, in_loops)
    nodes, returns = _apart(graph, level_of, returns)
    graph = replace(
        graph,
        nodes=nodes,
        returns=returns,
        chained=frozenset(chained),
        chained_inlets=frozenset(inlets),
    )
    edges: list[Edge] = []
    for uid in level_of:
        if uid not in chained:
            edges += _edges(graph, _consumer(graph, uid), len(edges), level_of[uid])
    for back in returns:
        edges.append(_edge_back(graph, back, len(edges), level_of))
    depth = 1 + max(*level_of.values(), *(edge.level for edge in edges))
    levels = []
    for index in range(depth):
        here = [_consumer(graph, uid) for uid, level in level_of.items() if level == index]
        levels.append(
            Level(
                index=index,
                operators=tuple(node for node in here if isinstance(node, ProcessNode)),
                sinks=tuple(node for node in here if isinstance(node, SinkNode)),
                edges=tuple(e for e in edges if e.level == index and not _is_counted(graph, e)),
                counted=tuple(e for e in edges if e.level == index and _is_counted(graph, e)),
                passing=tuple(
                    e
                    for e in edges
                    if e.level > index
                    and any(_level_of_origin(graph, port, level_of) < index for port in e.inputs)
                ),
            )
        )
    return replace(graph, edges=tuple(edges), levels=tuple(levels))


def _is_counted(graph: Graph, edge: Edge) -> bool:
    """True if a sink drops rows that come to it from the sources."""
    node = graph.nodes.get(edge.consumer)
    return edge.level == 0 and isinstance(node, SinkNode) and node.sink.drops_rows


def _consumer(graph: Graph, uid: str) -> Consumer:
    node = graph.nodes[uid]
    assert isinstance(node, ProcessNode | SinkNode), "levels are of operators and sinks"
    return node


def _levels(
    graph: Graph, consumers: Sequence[Consumer], in_loops: set[str]
) -> tuple[dict[str, int], set[str], set[tuple[str, int]]]:
    """Return the level of each, those that are chained, and the chained inlets of others."""
    level_of: dict[str, int] = {}
    chained: set[str] = set()
    inlets: set[tuple[str, int]] = set()
    for node in consumers:
        ports = graph.bare(node.inputs)
        before = _levels_before(graph, ports, level_of)
        if (
            len(before) == 1
            and all(isinstance(graph.nodes[port.node], ProcessNode) for port in ports)
            and _needs_no_shuffle(graph, node)
        ):
            chained.add(node.uid)
            level_of[node.uid] = max(before)
            continue
        level_of[node.uid] = 1 + max(before)
        if isinstance(node, ProcessNode) and node.uid not in in_loops:
            level, mine = _find_chained_inlets(graph, node, level_of)
            level_of[node.uid] = level
            inlets |= {(node.uid, index) for index in mine}
    return level_of, chained, inlets


def _levels_before(graph: Graph, ports: Sequence[Port], level_of: dict[str, int]) -> set[int]:
    return {
        _level_of_origin(graph, each, level_of)
        for port in ports
        for each in _partial_inputs(graph, port)
    }


def _find_chained_inlets(
    graph: Graph, node: ProcessNode, level_of: dict[str, int]
) -> tuple[int, list[int]]:
    """Return the level of an operator of connected streams, and the inlets chained to others.

    These get their rows from operators of that level which have the same key. The rows of the
    other inlets, at least one, come by a shuffle into the same level.
    """
    level = level_of[node.uid]
    takes_any_order = not hooks_of(node.function).wants_order
    has_ways = all(inlet.way == "keyed" for inlet in node.inlets)
    if len(node.inlets) < 2 or not (graph.chaining and takes_any_order and has_ways):
        return level, []
    before = [_levels_before(graph, graph.bare(each.ports), level_of) for each in node.inlets]
    mine = [
        index
        for index, inlet in enumerate(node.inlets)
        if before[index] == {level - 1}
        and _have_key(graph, node, inlet)
        and not _is_text_time(graph, inlet.ports)
    ]
    others = [max(each) for index, each in enumerate(before) if index not in mine]
    if not mine or not others or max(others) >= level - 1:
        return level, []
    return level - 1, mine


def _partial_inputs(graph: Graph, port: Port) -> tuple[Port, ...]:
    """Return the streams that partials are made from: they may come from several levels."""
    node = graph.nodes[port.node]
    return graph.read(node) if isinstance(node, PartialNode) else (port,)


def _apart(
    graph: Graph, level_of: dict[str, int], returns: Sequence[Return]
) -> tuple[dict[str, Node], tuple[Return, ...]]:
    """Partials of streams of several levels have a node for each level: they are merged anyway."""
    parts: dict[Port, tuple[Port, ...]] = {}
    nodes: dict[str, Node] = {}

    for name, node in graph.nodes.items():
        if isinstance(node, PartialNode):
            by_level: dict[int, list[Port]] = {}
            for port in graph.read(node):
                by_level.setdefault(_level_of_origin(graph, port, level_of), []).append(port)
            if len(by_level) > 1:
                made = [
                    replace(node, name=name if not n else f"{name}:{n + 1}", reads=tuple(ports))
                    for n, ports in enumerate(by_level.values())
                ]
                nodes |= {each.name: each for each in made}
                parts[Port(name)] = tuple(Port(each.name) for each in made)
                continue
        if isinstance(node, ProcessNode):
            node = replace(node, inlets=tuple(read_parts(inlet, parts) for inlet in node.inlets))
        nodes[name] = node
    return nodes, tuple(replace(back, ports=divide_ports(back.ports, parts)) for back in returns)


def _needs_no_shuffle(graph: Graph, node: Consumer) -> bool:
    """True if the rows may stay in the subtask they are in."""
    if isinstance(node, SinkNode):
        return True
    return (
        graph.chaining
        and (_takes_any_place(graph, node) or _has_same_key(graph, node))
        and (hooks_of(node.function).ignores_time or not _is_text_time(graph, node.inputs))
    )


def _takes_any_place(graph: Graph, node: ProcessNode) -> bool:
    """True if the operator has no keys, and may run in the subtasks of those that feed it."""
    if any(inlet.way != "spread" for inlet in node.inlets):
        return False
    return not node.parallelism or _have_its_bound(graph, node)


def _have_its_bound(graph: Graph, node: ProcessNode) -> bool:
    """True if all operators that feed it run in as many subtasks as it does."""
    feeding = (graph.nodes[port.node] for port in graph.bare(node.inputs))
    return all(
        isinstance(each, ProcessNode) and each.parallelism == node.parallelism for each in feeding
    )


def _has_same_key(graph: Graph, node: ProcessNode) -> bool:
    """True if operators emit all rows in the subtask that has their key, in an order that will do.

    The key group is a hash of values and types: both must be the same.
    """
    inlet = node.inlets[0]
    if len(node.inlets) > 1 or inlet.way != "keyed" or hooks_of(node.function).wants_order:
        return False
    return _have_key(graph, node, inlet)


def _have_key(graph: Graph, node: ProcessNode, inlet: Inlet) -> bool:
    """True if operators emit all rows of an inlet in the subtask that has their key."""
    types = key_types(graph, node.inlets)
    schema = graph.input_schema(inlet)
    if tuple(schema.field(name).type for name in inlet.keys) != types:
        return False
    for port in inlet.ports:
        feeding = graph.nodes[port.node]
        if not isinstance(feeding, ProcessNode) or port.tag is not None:
            return False
        if feeding.parallelism != node.parallelism:
            return False
        keys = hooks_of(feeding.function).result_keys
        if keys != inlet.keys or key_types(graph, feeding.inlets) != types:
            return False
    return True


def _is_text_time(graph: Graph, ports: Sequence[Port]) -> bool:
    """True if only Spark can read the event time of these streams."""
    time = graph.times.unite(ports)
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


def _edges(graph: Graph, node: Consumer, first: int, level: int) -> list[Edge]:
    """A sink's edge, or one for each inlet of an operator."""
    if isinstance(node, SinkNode):
        inlets: tuple[Inlet, ...] = (Inlet(node.inputs, way="spread"),)
    else:
        inlets = node.inlets
    times = [inlet_time(graph, node, inlet) for inlet in inlets]
    # Rows of several inputs come in one order, so all of them tell their time or none does.
    is_timed = all(t for t, i in zip(times, inlets, strict=True) if i.way != "broadcast")
    edges: list[Edge] = []
    for index, (inlet, time) in enumerate(zip(inlets, times, strict=True)):
        if (node.uid, index) in graph.chained_inlets:
            continue
        if not is_timed and inlet.way != "broadcast":
            time = None
        edges.append(
            Edge(
                index=first + len(edges),
                consumer=node.uid,
                inputs=graph.bare(inlet.ports),
                keys=inlet.keys,
                key_types=key_types(graph, inlets) if inlet.keys else (),
                schema=graph.input_schema(inlet),
                event_time=None if time is None else time.column,
                level=level,
                shift_us=0 if time is None else time.shift_us,
                wants_order=isinstance(node, ProcessNode) and hooks_of(node.function).wants_order,
                way=inlet.way,
                inlet=index,
                parallelism=node.parallelism if isinstance(node, ProcessNode) else 0,
            )
        )
    return edges


def inlet_time(graph: Graph, node: Consumer, inlet: Inlet) -> EventTime | None:
    """Return the event time of an inlet's rows, None for sinks and functions that ignore it."""
    if isinstance(node, SinkNode) or hooks_of(node.function).ignores_time:
        return None
    return graph.times.unite(inlet.ports)


def rows_operator(node: RowsNode) -> ProcessNode:
    """Return the operator that runs the function of a node in the slots."""
    return ProcessNode(node.name, (Inlet(node.inputs, way="spread"),), node.function, node.schema)


def check_time_nodes(nodes: dict[str, Node]) -> None:
    """Refuse a watermark that is declared behind an operator, whose output follows another one."""
    for node in nodes.values():
        if not isinstance(node, TimeNode) or node.watermark is None:
            continue
        roots = [nodes[port.node] for port in root_ports(nodes, node.inputs)]
        for root in roots:
            if isinstance(root, ProcessNode):
                raise PlanError(
                    f"watermark of column {node.event_time!r}: operator {root.uid!r} emits these "
                    "rows, and its output follows the watermark of its input\n"
                    "  next: declare the watermark before the first operator; behind .map, "
                    ".filter or .flat_map it needs on_error='fail' and no side output of theirs"
                )


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
    "RowsNode",
    "SelectNode",
    "SinkNode",
    "SourceNode",
    "TimeNode",
    "Times",
    "TransformNode",
    "Watermark",
    "Way",
    "bare_ports",
    "build_graph",
    "common_type",
    "inlet_time",
    "is_letters",
    "is_text",
    "is_time",
    "keep_time",
    "key_types",
    "port_schema",
    "port_time",
    "root_ports",
    "rows_operator",
    "unite_schemas",
    "unite_times",
]
