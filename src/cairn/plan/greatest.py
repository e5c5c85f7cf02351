"""Joins of windows with their own maximum get fewer rows: see `operators/greatest`.

    most = counts.window(...).aggregate(num="max(num)")
    counts.join(most, on=["window_end", "num"])

Always true here:
- a row that is left out has no match: the rows of a window come all in one batch, so whatever
  maximum there is of the window, it counts the greater row too;
- rows are left out only for the join: other readers of the stream get all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from cairn.operators.aggregates.ahead import AggregateAhead
from cairn.operators.aggregates.parse import find_column
from cairn.operators.aggregates.windowed import WindowAggregate
from cairn.operators.greatest import KeepGreatest
from cairn.operators.joins import Join
from cairn.plan.nodes import Inlet, Node, Port, ProcessNode
from cairn.windows import Sliding, Tumbling

END = "window_end"


def keep_greatest(nodes: dict[str, Node]) -> dict[str, Node]:
    """Return the nodes with one more operator before each join of windows with their maximum."""
    found: dict[str, Node] = {}
    for name, node in nodes.items():
        if isinstance(node, ProcessNode) and isinstance(node.function, Join):
            column = _find_column(nodes, node)
            if column is not None:
                left, right = node.inlets
                groups = [each for each in left.keys if each != column]
                windows = nodes[left.ports[0].node]
                assert isinstance(windows, ProcessNode), "_find_column has looked"
                kept = ProcessNode(
                    f"greatest:{name}",
                    (Inlet(left.ports, way="spread"),),
                    KeepGreatest(column, groups),
                    windows.schema,
                )
                found[kept.uid] = kept
                node = replace(node, inlets=(replace(left, ports=(Port(kept.uid),)), right))
        found[name] = node
    return found


def _find_column(nodes: dict[str, Node], join: ProcessNode) -> str | None:
    """Return the column of the left rows that a join compares with its maximum; None without."""
    assert isinstance(join.function, Join)
    plan = join.function.plan
    left, right = (_windows_of(nodes, inlet) for inlet in join.inlets)
    if plan.how != "inner" or join.sides or left is None or right is None:
        return None
    (ahead,) = (nodes[port.node] for port in right.inputs)
    if not isinstance(ahead, ProcessNode) or not isinstance(ahead.function, AggregateAhead):
        return None
    if ahead.inputs != join.inlets[0].ports or (END, END) not in plan.on:
        return None
    maxima = right.function
    assert isinstance(maxima, WindowAggregate), "_windows_of has looked"
    layout = maxima.layout
    keys = () if layout.is_keyless else layout.keys
    if any((key, key) not in plan.on for key in keys):
        return None
    for mine, theirs in plan.on:
        for aggregate in maxima.accumulators.aggregates:
            call = aggregate.call
            is_maximum = call.function == "max" and call.where is None
            if theirs == call.name and theirs not in keys and is_maximum:
                is_mine = find_column(left.schema, call.argument) == mine
                if is_mine and pa.types.is_integer(left.schema.field(mine).type):
                    return mine
    return None


def _windows_of(nodes: dict[str, Node], inlet: Inlet) -> ProcessNode | None:
    """Return what emits an inlet's rows, if it emits each window once, when it is complete."""
    if len(inlet.ports) != 1 or inlet.ports[0].tag is not None:
        return None
    node = nodes[inlet.ports[0].node]
    if not isinstance(node, ProcessNode) or not isinstance(node.function, WindowAggregate):
        return None
    plan, emitter = node.function.plan, node.function.emitter
    is_once = not plan.allowed_lateness_ms and plan.early_rows is None and plan.early_ms is None
    is_once = is_once and plan.windows.time == "event" and not emitter.changes
    return node if is_once and isinstance(plan.windows, Tumbling | Sliding) else None
