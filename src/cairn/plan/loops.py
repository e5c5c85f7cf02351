"""Loops: what goes back, to which inlets, and what of that cannot be.

A loop passes its input on. A reader that takes rows from it, straight or through transforms, also
gets what is sent back, through the same transforms: those are applied to the way back too.

Always true here:
- the graph has no cycle: a way back ends where its rows are kept until the next epoch or round;
- what is sent back comes from operators behind the loop, and goes to operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cairn.errors import PlanError
from cairn.plan.nodes import (
    LoopNode,
    Node,
    Port,
    ProcessNode,
    SinkNode,
    TimeNode,
    TransformNode,
)
from cairn.plan.ports import ports_before, root_ports


@dataclass(frozen=True)
class Return:
    """Rows that a loop sends back into one inlet of an operator."""

    uid: str
    """Their name in an epoch."""
    loop: str
    operator: str
    inlet: int
    ports: tuple[Port, ...]
    """The outputs they come from."""


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
                ports = _find_feedback(nodes, inlet.ports, loop)
                found.append(Return(name, loop, node.uid, index, ports))
    return nodes, tuple(found)


def loops_at(nodes: dict[str, Node], ports: Sequence[Port]) -> list[str]:
    """The loops whose rows come out here with nothing but transforms on the way."""
    before = ports_before(nodes, ports, through_operators=False)
    return [port.node for port in before if isinstance(nodes[port.node], LoopNode)]


def check_feedback(nodes: dict[str, Node], loop: str, ports: Sequence[Port]) -> None:
    """Only what operators of the loop emit can be sent back."""
    if loops_at(nodes, ports):
        raise PlanError(
            f"loop {loop!r} sends back what it gets, and nothing would ever leave it\n"
            "  next: send back what an operator in the loop emits",
            uid=loop,
        )
    for port in root_ports(nodes, ports):
        if Port(loop) not in ports_before(nodes, (port,)):
            raise PlanError(
                f"loop {loop!r}: {port.node!r} is not part of it, and cannot be sent back\n"
                "  next: unite the stream with the one that is iterated, before the loop",
                uid=loop,
            )


def _find_feedback(nodes: dict[str, Node], ports: Sequence[Port], loop: str) -> tuple[Port, ...]:
    """Return the outputs of the rows that a loop sends back into these streams."""
    back: dict[Port, tuple[Port, ...]] = {}
    for port in ports_before(nodes, ports, through_operators=False):
        node = nodes[port.node]
        back[port] = ()
        if isinstance(node, LoopNode) and node.uid == loop:
            back[port] = node.feedback
        elif isinstance(node, LoopNode | TimeNode | TransformNode):
            # Their time is told by the column, wherever it was declared.
            sent = dict.fromkeys(each for upstream in node.inputs for each in back[upstream])
            back[port] = tuple(sent)
            if sent and isinstance(node, TransformNode):
                name = f"{loop}:{node.name}"
                nodes[name] = replace(node, name=name, inputs=tuple(sent))
                back[port] = (Port(name),)
    return tuple(dict.fromkeys(each for port in ports for each in back[port]))
