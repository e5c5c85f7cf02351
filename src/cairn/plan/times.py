"""Event time and watermarks of streams.

Always true here:
- each stream is asked once, however many ways lead to it;
- an output that has late rows, or rows a function failed on, is not judged again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from cairn.functions import ERRORS, hooks_of
from cairn.plan.nodes import (
    EventTime,
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
from cairn.plan.ports import port_schema, ports_before, root_ports
from cairn.protocol.letters import SCHEMA as LETTERS

Answer = TypeVar("Answer")


class Times:
    """The answers for the streams of a graph that changes no more."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self._times: dict[Port, EventTime | None] = {}
        self._marks: dict[Port, bool] = {}
        self._delays: dict[Port, int] = {}

    def event_time(self, port: Port) -> EventTime | None:
        """The event time of a stream: it follows the column's name through operators."""
        return self._answer(port, self._times, self._event_time)

    def unite(self, ports: Sequence[Port]) -> EventTime | None:
        """Return the event time of several streams as one; None if they differ in it."""
        times = {self.event_time(port) for port in ports}
        return times.pop() if len(times) == 1 else None

    def has_watermark(self, port: Port) -> bool:
        """True if a watermark is declared anywhere before this stream, for this stream."""
        return self._answer(port, self._marks, self._has_watermark)

    def delay_ms(self, port: Port) -> int:
        """Return how far rows may be behind the job's watermark without being late."""
        return self._answer(port, self._delays, self._delay_ms)

    def _answer(
        self, port: Port, answers: dict[Port, Answer], ask: Callable[[Port], Answer]
    ) -> Answer:
        if port not in answers:
            # From the sources on, so that what is asked on the way is answered already.
            for each in ports_before(self._nodes, (port,)):
                if each not in answers:
                    answers[each] = ask(each)
        return answers[port]

    def _event_time(self, port: Port) -> EventTime | None:
        node = self._nodes[port.node]
        if isinstance(node, SourceNode | TimeNode | PartialNode):
            return None if node.event_time is None else EventTime(node.event_time)
        if isinstance(node, SinkNode):
            raise AssertionError("a sink has no output")
        if isinstance(node, LoopNode):
            return self.unite(node.inputs)
        if isinstance(node, ProcessNode) and is_letters(node, port):
            return None  # Its column `event_time` is of rows and of timers, and may be null.
        inputs = self._rows_before(node, port)
        time = self.unite(inputs)
        if isinstance(node, TransformNode):
            if time is None or node.event_time is None:
                return None
            return EventTime(node.event_time, time.shift_us)
        schema = port_schema(self._nodes, port)
        hooks = hooks_of(node.function)
        result = hooks.result_time
        if port.tag is None and result is not None:
            # Results about the time up to an end that is, as a rule, no part of it.
            return EventTime(result, hooks.result_shift_us) if result in schema.names else None
        if time is None or time.column not in schema.names:
            return None
        types = {port_schema(self._nodes, each).field(time.column).type for each in inputs}
        type_ = schema.field(time.column).type
        # A column of another type may well count in other units.
        return time if types == {type_} or pa.types.is_timestamp(type_) else None

    def _rows_before(self, node: TransformNode | ProcessNode, port: Port) -> tuple[Port, ...]:
        """The streams that an output has its time from."""
        if isinstance(node, TransformNode):
            return node.inputs
        late = [each.ports for each in node.inlets if each.name and port.tag == each.late_tag]
        inputs = late[0] if late else node.row_inputs
        fed = self._nodes[inputs[0].node]
        # A side output has the rows as they were before they became partials.
        return fed.inputs if port.tag and isinstance(fed, PartialNode) else inputs

    def _has_watermark(self, port: Port) -> bool:
        node = self._nodes[port.node]
        if isinstance(node, ProcessNode) and (
            is_letters(node, port) or port.tag in {inlet.late_tag for inlet in node.row_inlets}
        ):
            return False
        if isinstance(node, SourceNode | TimeNode) and node.watermark is not None:
            return True
        if isinstance(node, SourceNode):
            return False
        if isinstance(node, TimeNode):
            # Operators follow the watermark of their input, whichever column has the time.
            return any(
                isinstance(self._nodes[root.node], ProcessNode) and self.has_watermark(root)
                for root in root_ports(self._nodes, (port,))
            )
        if isinstance(node, SinkNode):
            raise AssertionError("a sink has no output")
        inputs = node.row_inputs if isinstance(node, ProcessNode) else node.inputs
        return any(self.has_watermark(upstream) for upstream in inputs)

    def _delay_ms(self, port: Port) -> int:
        node = self._nodes[port.node]
        if isinstance(node, ProcessNode):
            own = hooks_of(node.function).result_delay_ms if port.tag is None else 0
            return own + max(map(self.delay_ms, node.row_inputs))
        return max(map(self.delay_ms, getattr(node, "inputs", ())), default=0)


def port_time(nodes: dict[str, Node], port: Port) -> EventTime | None:
    """The event time of a stream, in a program that is still being written."""
    return Times(nodes).event_time(port)


def unite_times(nodes: dict[str, Node], ports: Sequence[Port]) -> EventTime | None:
    """The same of several streams as one."""
    return Times(nodes).unite(ports)


def keep_time(nodes: dict[str, Node], ports: Sequence[Port], schema: pa.Schema) -> str | None:
    """Return the event time column of streams if rows of another schema still have it.

    A column of another type may count in other units: it has to be declared again.
    """
    time = unite_times(nodes, ports)
    if time is None or time.column not in schema.names:
        return None
    before = port_schema(nodes, ports[0]).field(time.column).type
    type_ = schema.field(time.column).type
    return time.column if type_ == before or pa.types.is_timestamp(type_) else None


def is_letters(node: ProcessNode, port: Port) -> bool:
    """True if an output has the rows that the function failed on."""
    return port.tag == ERRORS and dict(node.sides)[ERRORS] == LETTERS


def is_time(type_: pa.DataType) -> bool:
    """True if a column of this type can hold event time."""
    kinds = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer, is_text)
    return any(kind(type_) for kind in kinds)


def is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))
