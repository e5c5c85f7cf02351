"""Streams as ports: their columns, and where their rows come from.

Always true here:
- each node is looked at once, however many ways lead to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from cairn.plan.nodes import (
    LoopNode,
    Node,
    PartialNode,
    Port,
    ProcessNode,
    SinkNode,
    SourceNode,
    TimeNode,
    TransformNode,
)


def port_schema(nodes: dict[str, Node], port: Port) -> pa.Schema:
    node = nodes[port.node]
    if isinstance(node, ProcessNode) and port.tag is not None:
        return dict(node.sides)[port.tag]
    if isinstance(node, SinkNode):
        raise AssertionError("a sink has no output")
    return node.schema


def unite_schemas(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns in the order of the first, null where any of them may be."""
    first, *others = schemas
    return pa.schema(
        f.with_nullable(f.nullable or any(other.field(f.name).nullable for other in others))
        for f in first
    )


def bare_ports(nodes: dict[str, Node], ports: Sequence[Port]) -> tuple[Port, ...]:
    """Return the outputs that streams are made of, without time and loop nodes."""
    found: list[Port] = []
    for port in ports:
        node = nodes[port.node]
        if isinstance(node, TimeNode | LoopNode):
            found += bare_ports(nodes, node.inputs)
        else:
            found.append(port)
    return tuple(found)


def read_ports(nodes: dict[str, Node], node: TransformNode) -> tuple[Port, ...]:
    """Return the outputs that a transform reads."""
    if isinstance(node, PartialNode) and node.reads:
        return node.reads
    return bare_ports(nodes, node.inputs)


def root_ports(nodes: dict[str, Node], ports: Sequence[Port]) -> tuple[Port, ...]:
    """The sources and outputs of operators that transforms start from, each once."""
    return tuple(
        port
        for port in ports_before(nodes, ports, through_operators=False)
        if not isinstance(nodes[port.node], TransformNode | TimeNode | LoopNode)
    )


def ports_before(
    nodes: dict[str, Node], ports: Sequence[Port], *, through_operators: bool = True
) -> list[Port]:
    """These streams and all that they come from: each once, after those it comes from."""
    found: dict[Port, None] = {}
    entered: set[Port] = set()
    waiting = list(reversed(ports))
    while waiting:
        port = waiting[-1]
        if port in entered:
            found.setdefault(waiting.pop())
            continue
        entered.add(port)
        node = nodes[port.node]
        if isinstance(node, PartialNode) and not through_operators:
            waiting += reversed(node.reads or node.inputs)
        elif not isinstance(node, SourceNode) and (
            through_operators or not isinstance(node, ProcessNode)
        ):
            waiting += reversed(node.inputs)
    return list(found)
