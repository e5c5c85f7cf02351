"""Chaining: the operators that need no shuffle, and run in the process of those that feed them.

Always true here:
- rows of a chained operator with keys are in the subtask that owns their key already;
- a function that wants its rows in the order of event time is not chained by its keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from cairn.functions import hooks_of
from cairn.plan.graph import Graph
from cairn.plan.key_types import key_types
from cairn.plan.nodes import Consumer, Inlet, Port, ProcessNode, SinkNode
from cairn.plan.times import is_text


def needs_no_shuffle(graph: Graph, node: Consumer) -> bool:
    """True if the rows may stay in the subtask they are in."""
    if isinstance(node, SinkNode):
        return True
    return (
        graph.chaining
        and (_takes_any_place(graph, node) or _has_same_key(graph, node))
        and (hooks_of(node.function).ignores_time or not is_text_time(graph, node.inputs))
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
    return have_key(graph, node, inlet)


def have_key(graph: Graph, node: ProcessNode, inlet: Inlet) -> bool:
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


def is_text_time(graph: Graph, ports: Sequence[Port]) -> bool:
    """True if only Spark can read the event time of these streams."""
    time = graph.times.unite(ports)
    return time is not None and is_text(graph.schema(ports[0]).field(time.column).type)


__all__ = ["have_key", "is_text_time", "needs_no_shuffle"]
