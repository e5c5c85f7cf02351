"""What a slot is told once about the job: operators, sinks and where their rows go.

A lane is a column of the envelope that rows travel in between levels: one per
edge of the graph, and one per operator output that Spark transforms on the way.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, field, replace
from typing import Literal

import cloudpickle
import pyarrow as pa

from cairn.backends import DEFAULT_MEMORY_BYTES
from cairn.errors import FunctionError
from cairn.functions import Function, late_tag
from cairn.ids import digest
from cairn.logs import Format
from cairn.protocol.letters import OnError
from cairn.protocol.lookups import DoorSpec
from cairn.sinks.base import Sink
from cairn.state import Declaration
from cairn.types import type_ddl

ACK_LANE = -1


@dataclass(frozen=True)
class OutletSpec:
    """An output of an operator: the main one (tag None) or a side output."""

    tag: str | None
    schema: pa.Schema
    sinks: tuple[str, ...]
    lanes: tuple[int, ...]
    operators: tuple[str, ...] = ()
    """Chained: they get the rows in the slot, without a shuffle."""


@dataclass(frozen=True)
class InletSpec:
    """A way into an operator."""

    lane: int | None
    """None when the rows come from an operator of the same level."""
    schema: pa.Schema
    keys: tuple[str, ...] = ()
    event_time: str | None = None
    name: str = ""
    """Of one of several: rows are handled by `on_<name>`."""
    way: Literal["keyed", "spread", "broadcast"] = "keyed"
    shift_us: int = 0
    """Added to the event time; without a lane it is told from the column in the slot."""

    @property
    def late_tag(self) -> str:
        """The side output that its late rows go to."""
        return late_tag(self.name)


@dataclass(frozen=True)
class OperatorSpec:
    uid: str
    inlets: tuple[InletSpec, ...]
    """The main one first, a broadcast last."""
    function: bytes = field(repr=False)
    """Pickled: loaded once per slot, and again only when it changes."""
    outlets: tuple[OutletSpec, ...]
    stored_key_types: tuple[pa.DataType, ...] = ()
    """Of the key columns, as the state has them; empty: as the main input has them."""
    broadcast: Declaration | None = None
    """The state that broadcast rows are kept in."""
    is_downstream: bool = False
    """Rows come (also) from other operators."""
    is_behind_loop: bool = False
    """Rows come (also) from operators that a loop sends rows back to: as old as those may be."""
    has_watermark: bool = True
    """A watermark is declared for what comes here; without one nothing is late."""
    delay_ms: int = 0
    """How far behind the job's watermark that of this operator is."""
    on_error: OnError = "fail"
    """Whether a row that the function fails on fails the epoch, or is put aside."""

    @property
    def function_version(self) -> str:
        return digest(self.function)

    @property
    def lane(self) -> int | None:
        return self.inlets[0].lane

    @property
    def schema(self) -> pa.Schema:
        """Of the rows of the main input."""
        return self.inlets[0].schema

    @property
    def keys(self) -> tuple[str, ...]:
        return self.inlets[0].keys

    @property
    def event_time(self) -> str | None:
        return self.inlets[0].event_time

    @property
    def row_inlets(self) -> tuple[InletSpec, ...]:
        """All but a broadcast."""
        return tuple(inlet for inlet in self.inlets if inlet.way != "broadcast")

    @property
    def broadcast_inlet(self) -> InletSpec | None:
        return next((inlet for inlet in self.inlets if inlet.way == "broadcast"), None)

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns of a stored key. Without keys, state belongs to a subtask."""
        if not self.keys:
            return [pa.field("subtask", pa.int32())]
        fields = [self.schema.field(name) for name in self.keys]
        types = self.stored_key_types or [field.type for field in fields]
        return [field.with_type(type_) for field, type_ in zip(fields, types, strict=True)]

    @property
    def key_type(self) -> pa.DataType:
        """The type of a stored key: the column's, or a struct of the columns."""
        fields = self.key_fields
        return fields[0].type if len(fields) == 1 else pa.struct(fields)

    @property
    def key_types(self) -> dict[str, str]:
        return {field.name: type_ddl(field.type) for field in self.key_fields}

    def load(self) -> Function:
        """The function, as it was given to the job. Its modules must be where the slots are."""
        try:
            return cloudpickle.loads(self.function)  # type: ignore[no-any-return]
        except Exception as error:
            raise FunctionError(
                f"operator {self.uid!r}: its function cannot be loaded in a slot: "
                f"{type(error).__name__}: {error}\n"
                "  next: install what it imports on the executors, or send it along with "
                "spark.sparkContext.addPyFile(...)",
                operator=self.uid,
                cause=repr(error),
            ) from error


@dataclass(frozen=True)
class SinkSpec:
    uid: str
    schema: pa.Schema
    sink: Sink
    lane: int | None
    """None when the rows come from an operator of the same level."""


@dataclass(frozen=True)
class FeedbackSpec:
    """Rows of a loop on their way back to an operator: state, until its next turn."""

    uid: str
    """`<loop>:<operator>`: what they are called in the epoch."""
    operator: str
    inlet: InletSpec
    """As the operator's own, but for the lane: rows come here by that one."""
    target: int = 0
    """Which of the operator's inlets they go into."""
    key_fields: tuple[pa.Field, ...] = ()
    """The columns of a stored key, as the operator has them."""

    @property
    def lane(self) -> int | None:
        return self.inlet.lane

    @property
    def key_types(self) -> dict[str, str]:
        return {field.name: type_ddl(field.type) for field in self.key_fields}


@dataclass(frozen=True)
class LevelSpec:
    index: int
    operators: tuple[OperatorSpec, ...]
    sinks: tuple[SinkSpec, ...]
    lanes: tuple[tuple[int, pa.Schema], ...]
    """What leaves this level for a later one."""
    feedbacks: tuple[FeedbackSpec, ...] = ()
    """What comes here to be kept for the next epoch, or the next round."""

    @property
    def lanes_in(self) -> tuple[int, ...]:
        """Of the rows that are consumed here."""
        lanes = [inlet.lane for op in self.operators for inlet in op.inlets]
        lanes += [sink.lane for sink in self.sinks]
        lanes += [feedback.lane for feedback in self.feedbacks]
        return tuple(lane for lane in lanes if lane is not None)


@dataclass(frozen=True)
class JobSpec:
    job_id: str
    job_name: str
    group_count: int
    checkpoint: str
    backend: str
    levels: tuple[LevelSpec, ...]
    backend_memory_bytes: int = DEFAULT_MEMORY_BYTES
    rounds_max: int = 1
    """How often an epoch goes around while loops send records back."""
    door: DoorSpec | None = field(default=None, repr=False)
    """Whom slots let in who asks for state; None: nobody."""
    log_format: Format = "text"
    """Of the log files of slots."""
    sys_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path), repr=False)
    """The driver's import path: modules beside a program are found in the slots too."""

    @property
    def feedbacks(self) -> tuple[FeedbackSpec, ...]:
        return tuple(feedback for level in self.levels for feedback in level.feedbacks)

    def with_function(self, uid: str, function: bytes) -> JobSpec:
        """The same job with another function of one operator."""
        levels = tuple(
            replace(
                level,
                operators=tuple(
                    replace(op, function=function) if op.uid == uid else op
                    for op in level.operators
                ),
            )
            for level in self.levels
        )
        return replace(self, levels=levels)

    def pickled(self) -> tuple[str, bytes]:
        """(id, bytes)."""
        # The path comes first: what is pickled by reference is only found with it.
        data = pickle.dumps((self.sys_path, cloudpickle.dumps(self)))
        return digest(data), data

    @staticmethod
    def unpickled(data: bytes) -> JobSpec:
        """What `pickled` made, in another process."""
        sys_path, spec = pickle.loads(data)
        sys.path.extend(p for p in sys_path if p not in sys.path and os.path.exists(p))
        return cloudpickle.loads(spec)  # type: ignore[no-any-return]


def lane_name(lane: int) -> str:
    return f"l{lane}"


def envelope_schema(lanes: tuple[tuple[int, pa.Schema], ...]) -> pa.Schema:
    """What a level emits: which lane, a struct per lane (one is set), an acknowledgement."""
    return pa.schema(
        [
            pa.field("lane", pa.int32()),
            *(pa.field(lane_name(lane), pa.struct(list(schema))) for lane, schema in lanes),
            pa.field("ack", pa.binary()),
        ]
    )
