"""Build the graph of a job: cut it into levels at the shuffles, and number its edges.

Always true here:
- a level comes after those that its rows come from;
- a graph that cannot run is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cairn.errors import PlanError
from cairn.functions import hooks_of
from cairn.plan.chaining import have_key, is_text_time, needs_no_shuffle
from cairn.plan.edges import edge_back, level_of_origin, list_edges
from cairn.plan.graph import Edge, Graph, Level
from cairn.plan.greatest import keep_greatest
from cairn.plan.loops import Return, returns_of
from cairn.plan.nodes import (
    Consumer,
    Inlet,
    Node,
    PartialNode,
    Port,
    ProcessNode,
    RowsNode,
    SinkNode,
    SourceNode,
    TimeNode,
)
from cairn.plan.partials import divide_ports, partials_in_slots, read_parts
from cairn.plan.ports import root_ports
from cairn.plan.selects import selects_in_slots

MAX_GROUP_COUNT = 32768


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
            edges += list_edges(graph, _consumer(graph, uid), len(edges), level_of[uid])
    for back in returns:
        edges.append(edge_back(graph, back, len(edges), level_of))
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
                    and any(level_of_origin(graph, port, level_of) < index for port in e.inputs)
                ),
            )
        )
    return replace(graph, edges=tuple(edges), levels=tuple(levels))


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
            and needs_no_shuffle(graph, node)
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
        level_of_origin(graph, each, level_of)
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
        and have_key(graph, node, inlet)
        and not is_text_time(graph, inlet.ports)
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
                by_level.setdefault(level_of_origin(graph, port, level_of), []).append(port)
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


__all__ = ["MAX_GROUP_COUNT", "build_graph", "rows_operator"]
