"""Partials that are made in slots, by operators chained to those that emit the rows.

Always true here:
- the streams are read as before: only the place of the work changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cairn.plan.nodes import Inlet, Node, PartialNode, Port, ProcessNode


def partials_in_slots(nodes: dict[str, Node]) -> dict[str, Node]:
    """Return the nodes with operators in place of partials, where the rows are in slots.

    One for each output that is read, so that each is chained to the operator it reads from.
    """
    found: dict[str, Node] = {}
    parts: dict[Port, tuple[Port, ...]] = {}
    for name, node in nodes.items():
        if isinstance(node, PartialNode) and node.partials.ahead is not None:
            if all(isinstance(nodes[port.node], ProcessNode) for port in node.inputs):
                made = [
                    ProcessNode(
                        name if not at else f"{name}:{at + 1}",
                        (Inlet((port,), way="spread"),),
                        node.partials.ahead,
                        node.schema,
                    )
                    for at, port in enumerate(node.inputs)
                ]
                found |= {each.uid: each for each in made}
                parts[Port(name)] = tuple(Port(each.uid) for each in made)
                continue
        if isinstance(node, ProcessNode) and any(port in parts for port in node.inputs):
            node = replace(node, inlets=tuple(read_parts(inlet, parts) for inlet in node.inlets))
        found[name] = node
    return found


def read_parts(inlet: Inlet, parts: Mapping[Port, tuple[Port, ...]]) -> Inlet:
    """Return an inlet that reads the parts of the streams that are divided."""
    return replace(inlet, ports=divide_ports(inlet.ports, parts))


def divide_ports(ports: Sequence[Port], parts: Mapping[Port, tuple[Port, ...]]) -> tuple[Port, ...]:
    """Return streams with the parts of those that are divided."""
    return tuple(each for port in ports for each in parts.get(port, (port,)))
