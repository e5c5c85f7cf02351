"""The nodes of a job's graph: what each call of a program adds to it.

Always true here:
- nodes are immutable; DataFrames and functions are carried, not called;
- streams are named by the ports they come out of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from cairn.functions import Function, late_tag
from cairn.operators.aggregates.partial import Partials
from cairn.operators.rows import RowFunction
from cairn.plan.select_plan import SelectPlan
from cairn.sinks.base import Sink
from cairn.state import Declaration


@dataclass(frozen=True)
class Port:
    """An output of a node: the main one, or the side output of a tag."""

    node: str
    tag: str | None = None


@dataclass(frozen=True)
class Watermark:
    """The allowed delay of rows, and how long to wait for a silent source (None: for ever)."""

    delay_ms: int
    idle_ms: int | None = None


@dataclass(frozen=True)
class EventTime:
    """The column of a row's time, and what is added to it."""

    column: str
    shift_us: int = 0


@dataclass(frozen=True)
class SourceNode:
    name: str
    dataframe: Any = field(repr=False)
    schema: pa.Schema = field(repr=False)
    event_time: str | None
    watermark: Watermark | None
    replayable: bool | None = None
    """True if rows can be read again after Spark is done with them; None: not declared."""


@dataclass(frozen=True)
class TransformNode:
    """A function DataFrame -> DataFrame, run by Spark on the rows of one epoch."""

    name: str
    inputs: tuple[Port, ...]
    function: Any = field(repr=False)
    schema: pa.Schema = field(repr=False)
    event_time: str | None
    calls_python: bool = field(default=False, kw_only=True)
    """True if Spark calls Python functions for it, in the stage that its rows are in."""
    select: SelectPlan | None = field(default=None, kw_only=True, repr=False)
    """Its plan in slots; None if only Spark can run it."""


@dataclass(frozen=True)
class PartialNode(TransformNode):
    """The input of an aggregation: partials that Spark makes row by row, or aggregates ahead.

    The two give the same results; which one it is is chosen epoch by epoch. Rows of an operator
    are aggregated ahead in its slot where that is possible: see `plan/partials`.
    """

    uid: str = field(kw_only=True)
    """The operator it feeds."""
    partials: Partials = field(kw_only=True, repr=False)
    reads: tuple[Port, ...] = field(default=(), kw_only=True)
    """The part of `inputs` from one level, if other levels have nodes of their own; else empty."""


@dataclass(frozen=True)
class RowsNode(TransformNode):
    """A `.map`, `.filter` or `.flat_map` that runs in the Spark stage of its input."""

    function: RowFunction = field(repr=False)
    read_schema: pa.Schema = field(kw_only=True, repr=False)
    """Columns of the rows that the function gets."""


@dataclass(frozen=True)
class TimeNode:
    """Streams as they are, with another event time and watermark from here on."""

    name: str
    inputs: tuple[Port, ...]
    schema: pa.Schema = field(repr=False)
    event_time: str
    watermark: Watermark | None


@dataclass(frozen=True)
class LoopNode:
    """Streams as they are, and what an operator behind it sends back, an epoch or a round later.

    The way back is not part of the graph, which has no cycle: see `loops`.
    """

    uid: str
    inputs: tuple[Port, ...]
    schema: pa.Schema = field(repr=False)
    feedback: tuple[Port, ...] = ()
    rounds_max: int = 1


Way = Literal["keyed", "spread", "broadcast"]


@dataclass(frozen=True)
class Inlet:
    """A way into an operator: streams united, and how their rows find a subtask.

    "keyed": by the key columns; "spread": any will do; "broadcast": all of them get each row,
    before the other rows of the epoch, in one order that is the same for all.
    """

    ports: tuple[Port, ...]
    keys: tuple[str, ...] = ()
    way: Way = "keyed"
    name: str = ""
    """Name of one of several inlets: the handler of its rows is `on_<name>`."""

    @property
    def late_tag(self) -> str:
        """The side output that its late rows go to."""
        return late_tag(self.name)


@dataclass(frozen=True)
class ProcessNode:
    uid: str
    inlets: tuple[Inlet, ...]
    """The main one first, a broadcast last."""
    function: Function = field(repr=False)
    schema: pa.Schema = field(repr=False)
    sides: tuple[tuple[str, pa.Schema], ...] = field(default=(), repr=False)
    broadcast: Declaration | None = field(default=None, repr=False)
    """The state that broadcast rows are kept in."""
    parallelism: int = 0
    """The largest number of subtasks that get its rows; 0: all that the job has."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """All streams that come in."""
        return tuple(port for inlet in self.inlets for port in inlet.ports)

    @property
    def row_inlets(self) -> tuple[Inlet, ...]:
        """All but a broadcast: their rows have a key and a time of their own."""
        return tuple(inlet for inlet in self.inlets if inlet.way != "broadcast")

    @property
    def row_inputs(self) -> tuple[Port, ...]:
        return tuple(port for inlet in self.row_inlets for port in inlet.ports)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the key columns in the state: those of the main input."""
        return self.inlets[0].keys


@dataclass(frozen=True)
class SelectNode(ProcessNode):
    """A transform that runs in the slots that have its rows: see `plan/selects`."""

    select: SelectPlan = field(kw_only=True, repr=False)


@dataclass(frozen=True)
class SinkNode:
    uid: str
    inputs: tuple[Port, ...]
    sink: Sink = field(repr=False)


Node = SourceNode | TransformNode | TimeNode | LoopNode | ProcessNode | SinkNode
Consumer = ProcessNode | SinkNode
