"""Transforms whose rows are in slots run there, if slots can: see `operators/select`.

Always true here:
- each epoch plans them again, as it does those that Spark runs: constants may be others by then;
- rows of a loop's beginning stay in Spark: they come from its input and from the way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cairn.operators.select import Select, Selection
from cairn.plan.loops import loops_at
from cairn.plan.nodes import Inlet, Node, Port, ProcessNode, SelectNode, TransformNode
from cairn.plan.ports import bare_ports
from cairn.plan.times import unite_times


def selects_in_slots(nodes: dict[str, Node]) -> dict[str, Node]:
    """Return the nodes with operators in place of transforms that slots can run on their rows."""
    found: dict[str, Node] = {}
    for name, node in nodes.items():
        found[name] = node
        if not isinstance(node, TransformNode) or node.select is None:
            continue
        if not are_behind_operators(found, node.inputs):
            continue
        time = unite_times(nodes, node.inputs)
        function = Select(
            node.select.selection,
            node.schema,
            node.event_time or "",
            0 if time is None else time.shift_us,
        )
        inlet = Inlet(node.inputs, way="spread")
        found[name] = SelectNode(name, (inlet,), function, node.schema, select=node.select)
    return found


def are_behind_operators(nodes: dict[str, Node], ports: Sequence[Port]) -> bool:
    """True if operators emit all rows of some streams, or transforms that slots can run."""
    if loops_at(nodes, ports):
        return False
    feeding = [nodes[port.node] for port in bare_ports(nodes, ports)]
    return all(
        isinstance(node, ProcessNode)
        or (isinstance(node, TransformNode) and node.select is not None)
        for node in feeding
    )


class Selects:
    """The selections of a job's slots, as the next epoch needs them."""

    def __init__(self, operators: Iterable[ProcessNode]) -> None:
        self._nodes = [node for node in operators if isinstance(node, SelectNode)]
        self._now: dict[str, Selection] = {n.uid: n.select.selection for n in self._nodes}

    def plan(self) -> bool:
        """Plan all transforms again; True if slots need other functions than before."""
        found = {node.uid: node.select.again() for node in self._nodes}
        is_changed = found != self._now
        self._now = found
        return is_changed

    def functions(self) -> dict[str, Select]:
        """Return the functions, by operator, that are others than when the job was made."""
        changed = {}
        for node in self._nodes:
            selection = self._now[node.uid]
            if selection != node.select.selection:
                assert isinstance(node.function, Select), "selects_in_slots makes them"
                changed[node.uid] = node.function.with_selection(selection)
        return changed
