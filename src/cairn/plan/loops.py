"""Loops: what goes back, to which inlets, and what of that cannot be.

A loop passes its input on. Whoever takes rows from it, straight or through transforms, also
gets what is sent back, through the same transforms: those are applied to the way back too.

Always true here:
- the graph has no cycle: a way back ends where its rows are kept until the next epoch or round;
- what is sent back comes from operators behind the loop, and goes to operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cairn.errors import PlanError
from cairn.plan.nodes import (
    LoopNode,
    Node,
    Port,
    ProcessNode,
    SinkNode,
    SourceNode,
    TimeNode,
    TransformNode,
)


@dataclass(frozen=True)
class Return:
    """Rows that a loop sends back into one inlet of an operator."""

    uid: str
    """What they are called in an epoch."""
    loop: str
    operator: str
    inlet: int
    ports: tuple[Port, ...]
    """Where they come from."""


def returns_of(nodes: dict[str, Node]) -> tuple[dict[str, Node], tuple[Return, ...]]:
    """The nodes with the transforms of ways back, and all ways back. Refuses what cannot be."""
    nodes = dict(nodes)
    found: list[Return] = []
    for node in list(nodes.values()):
        if isinstance(node, SinkNode):
            for loop in loops_at(nodes, node.inputs):
                raise PlanError(
                    f"sink {node.uid!r} is on loop {loop!r} itself, where rows come again and "
                    "again\n  next: write what an operator in the loop emits",
                    uid=node.uid,
                )
        if not isinstance(node, ProcessNode):
            continue
        for index, inlet in enumerate(node.inlets):
            for loop in loops_at(nodes, inlet.ports):
                if inlet.way == "broadcast":
                    raise PlanError(
                        f"operator {node.uid!r} has loop {loop!r} as its broadcast: rows that are "
                        "sent back go to one subtask\n"
                        "  next: broadcast what an operator in the loop emits",
                        uid=node.uid,
                    )
                name = f"{loop}:{node.uid}" + (f":{inlet.name}" if inlet.name else "")
                ports = _sent_back(nodes, inlet.ports, loop)
                found.append(Return(name, loop, node.uid, index, ports))
    return nodes, tuple(found)


def loops_at(nodes: dict[str, Node], ports: Sequence[Port]) -> list[str]:
    """The loops whose rows come out here with nothing but transforms on the way."""
    found: list[str] = []
    for port in ports:
        node = nodes[port.node]
        if isinstance(node, LoopNode):
            found.append(node.uid)
        if isinstance(node, LoopNode | TimeNode | TransformNode):
            found += loops_at(nodes, node.inputs)
    return list(dict.fromkeys(found))


def check_feedback(nodes: dict[str, Node], loop: str, ports: Sequence[Port]) -> None:
    """Only what operators of the loop emit can be sent back."""
    if loops_at(nodes, ports):
        raise PlanError(
            f"loop {loop!r} sends back what it gets, and nothing would ever leave it\n"
            "  next: send back what an operator in the loop emits",
            uid=loop,
        )
    for port in _senders(nodes, ports):
        if loop not in _before(nodes, port):
            raise PlanError(
                f"loop {loop!r}: {port.node!r} is no part of it, and cannot be sent back\n"
                "  next: unite the stream with the one that is iterated, before the loop",
                uid=loop,
            )


def _sent_back(nodes: dict[str, Node], ports: Sequence[Port], loop: str) -> tuple[Port, ...]:
    """Where the rows that a loop sends back come from, as these streams have them."""
    found: list[Port] = []
    for port in ports:
        node = nodes[port.node]
        if isinstance(node, LoopNode) and node.uid == loop:
            found += node.feedback
        elif isinstance(node, LoopNode | TimeNode):
            # Their time is told by the column, wherever it was declared.
            found += _sent_back(nodes, node.inputs, loop)
        elif isinstance(node, TransformNode):
            inputs = _sent_back(nodes, node.inputs, loop)
            if inputs:
                name = f"{loop}:{node.name}"
                nodes[name] = replace(node, name=name, inputs=inputs)
                found.append(Port(name))
    return tuple(dict.fromkeys(found))


def _senders(nodes: dict[str, Node], ports: Sequence[Port]) -> Iterator[Port]:
    for port in ports:
        node = nodes[port.node]
        if isinstance(node, TimeNode | TransformNode | LoopNode):
            yield from _senders(nodes, node.inputs)
        else:
            yield port


def _before(nodes: dict[str, Node], port: Port) -> set[str]:
    """All nodes that a stream comes from."""
    node = nodes[port.node]
    found = {port.node}
    if not isinstance(node, SourceNode):
        for upstream in node.inputs:
            found |= _before(nodes, upstream)
    return found
