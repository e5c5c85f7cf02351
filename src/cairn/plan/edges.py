"""The edges of a graph: rows on their way to the inlets of operators and sinks.

Always true here:
- all inlets of an operator that share an order have an event time, or none has;
- an edge of a loop has the keys of the inlet that it leads to.
"""

from __future__ import annotations

from dataclasses import replace

from cairn.errors import PlanError
from cairn.functions import hooks_of
from cairn.plan.graph import Edge, Graph
from cairn.plan.key_types import key_types
from cairn.plan.loops import Return
from cairn.plan.nodes import Consumer, EventTime, Inlet, Port, ProcessNode, SinkNode
from cairn.plan.times import is_text


def list_edges(graph: Graph, node: Consumer, first: int, level: int) -> list[Edge]:
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


def edge_back(graph: Graph, back: Return, index: int, level_of: dict[str, int]) -> Edge:
    """By the same keys as the inlet it leads to, in a level after those that send the rows."""
    node = graph.nodes[back.operator]
    assert isinstance(node, ProcessNode), "rows go back to operators"
    into = list_edges(graph, node, 0, 0)[back.inlet]
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
        level=1 + max(level_of_origin(graph, port, level_of) for port in ports),
        event_time=None,
        wants_order=False,
    )


def level_of_origin(graph: Graph, port: Port, level_of: dict[str, int]) -> int:
    origins = [graph.nodes[origin.node] for origin in graph.origins(port)]
    levels = {level_of[o.uid] if isinstance(o, ProcessNode) else -1 for o in origins}
    if len(levels) > 1:
        names = ", ".join(repr(origin.node) for origin in graph.origins(port))
        raise PlanError(
            f"a transform of the union of {names} would need rows of different stages at once\n"
            "  next: transform the streams one by one and unite the results"
        )
    return levels.pop()


__all__ = ["edge_back", "inlet_time", "level_of_origin", "list_edges"]
