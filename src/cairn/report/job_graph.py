"""The graph of a job as structs: sources, operators, sinks and their connections.

`plan.explain` makes it of a job, every start writes it beside the epochs, and text, picture and
HTTP show it.

Always true here:
- field names are stable: fields are added, never renamed;
- a graph that an older version wrote can be read: fields that it lacks have their defaults.
"""

from __future__ import annotations

import msgspec


class GraphPort(msgspec.Struct, frozen=True):
    """A stream: the output of a node, or one of its side outputs."""

    node: str
    side: str | None = None

    @property
    def text(self) -> str:
        return self.node if self.side is None else f"{self.node}:{self.side}"


class GraphSource(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    columns: list[str] = []
    schema: str = ""
    event_time: str | None = None
    watermark_ms: int | None = None
    """The delay that is declared."""
    idle_after_ms: int | None = None
    limits: dict[str, str] | None = None
    """The options that bound a batch; None: not known."""


class GraphTransform(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    function: str = ""
    schema: str = ""


class GraphTime(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration of event time after the sources."""

    name: str
    of: list[GraphPort] = []
    event_time: str | None = None
    watermark_ms: int | None = None
    idle_after_ms: int | None = None


class GraphJoin(msgspec.Struct, frozen=True, kw_only=True):
    how: str
    from_ms: int | None = None
    to_ms: int | None = None
    """Bounds of the right row's event time minus the left row's."""
    ttl_ms: int | None = None
    """The time that a row waits for matches, by the epoch's clock."""
    is_as_of: bool = False
    """Each left row is joined with the right row that was newest at its time."""


class GraphState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    type: str
    entry_type: str | None = None
    ttl: str | None = None
    redistribute: str | None = None


class GraphSide(msgspec.Struct, frozen=True, kw_only=True):
    """A side output."""

    tag: str
    schema: str


class GraphOperator(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    function: str = ""
    kind: str = ""
    level: int = 0
    chained: bool = False
    parallelism: int | None = None
    """The largest number of subtasks that get its rows; None: all that the job has."""
    keys: dict[str, str] = {}
    """Types by name, as the state has them."""
    inputs: list[str] = []
    join: GraphJoin | None = None
    states: list[GraphState] = []
    timers: bool = False
    schema: str = ""
    sides: list[GraphSide] = []


class GraphSink(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    sink: str = ""
    promise: str = ""
    shows: str = ""
    level: int = 0
    chained: bool = False


class GraphReturn(msgspec.Struct, frozen=True, kw_only=True):
    """The way of records from the end of a loop back to an operator."""

    uid: str
    operator: str = ""


class GraphLoop(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    max_rounds_per_epoch: int = 1
    feedback: list[GraphPort] = []
    into: list[GraphReturn] = []


class GraphEdge(msgspec.Struct, frozen=True, kw_only=True):
    """A stream on its way to a node."""

    source: GraphPort = msgspec.field(name="from")
    to: str
    input: str | None = None
    way: str
    """keyed, spread, broadcast, feedback, chain or transform."""
    shuffle: int | None = None
    """The number of the stream, among those that may be shuffled."""
    shuffled: str = "always"
    """The cases in which it is shuffled, if it has a number: "always", "never", or conditions."""
    by: list[str] = []
    in_order_of: str | None = None


class GraphLevel(msgspec.Struct, frozen=True, kw_only=True):
    level: int
    chains: list[list[str]] = []
    feedback: list[str] = []
    shuffles: list[int] = []
    passing: list[int] = []


class JobGraph(msgspec.Struct, frozen=True, kw_only=True):
    job: str = ""
    max_parallelism: int = 0
    chaining: bool = True
    max_rounds_per_epoch: int = 1
    sources: list[GraphSource] = []
    transforms: list[GraphTransform] = []
    event_times: list[GraphTime] = []
    operators: list[GraphOperator] = []
    sinks: list[GraphSink] = []
    loops: list[GraphLoop] = []
    edges: list[GraphEdge] = []
    levels: list[GraphLevel] = []
    trigger: str | msgspec.UnsetType = msgspec.UNSET
    """The trigger that the job was started with; not set before a start."""
