"""The job as slots get it, once: operators, sinks and the ways of their rows.

Rows travel between levels in lanes: one per edge of the graph, and one per operator output that
Spark transforms on the way. How lanes become columns is in `envelope`.
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
from cairn.protocol.envelope import Envelope
from cairn.protocol.letters import OnError
from cairn.protocol.lookups import DoorSpec
from cairn.sinks.base import Sink
from cairn.state import Declaration
from cairn.types import type_ddl


@dataclass(frozen=True)
class OutletSpec:
    """An output of an operator: the main one (tag None) or a side output."""

    tag: str | None
    schema: pa.Schema
    sinks: tuple[str, ...]
    lanes: tuple[int, ...]
    operators: tuple[str, ...] = ()
    """Chained operators: they get the rows in the slot, without a shuffle."""


@dataclass(frozen=True)
class InletSpec:
    """An input of an operator."""

    lane: int | None
    """None when the rows come from an operator of the same level."""
    schema: pa.Schema
    keys: tuple[str, ...] = ()
    event_time: str | None = None
    name: str = ""
    """The name, if there are several: `on_<name>` handles the rows."""
    way: Literal["keyed", "spread", "broadcast"] = "keyed"
    shift_us: int = 0
    """Added to the event time. Without a lane, the slot reads event time from the column."""

    @property
    def late_tag(self) -> str:
        """The side output for late rows."""
        return late_tag(self.name)


@dataclass(frozen=True)
class OperatorSpec:
    uid: str
    inlets: tuple[InletSpec, ...]
    """The main one first, a broadcast last."""
    function: bytes = field(repr=False)
    """Pickled; loaded once per slot, and again only when it changes."""
    outlets: tuple[OutletSpec, ...]
    stored_key_types: tuple[pa.DataType, ...] = ()
    """Types of the key columns in the state; empty: the same as in the main input."""
    broadcast: Declaration | None = None
    """The state that holds broadcast rows."""
    is_downstream: bool = False
    """Rows come (also) from other operators."""
    is_behind_loop: bool = False
    """Rows come (also) from operators in a loop, and may be as old as rows in the loop."""
    has_watermark: bool = True
    """A watermark is declared for the input; without one no row is late."""
    delay_ms: int = 0
    """The delay of this operator's watermark behind that of the job."""
    on_error: OnError = "fail"
    """A row that the function fails on fails the epoch, or becomes a dead letter."""
    parallelism: int = 0
    """The largest number of subtasks that get its rows; 0: all that the job has."""

    @property
    def function_version(self) -> str:
        return digest(self.function)

    @property
    def lane(self) -> int | None:
        return self.inlets[0].lane

    @property
    def schema(self) -> pa.Schema:
        """The schema of the main input."""
        return self.inlets[0].schema

    @property
    def keys(self) -> tuple[str, ...]:
        return self.inlets[0].keys

    @property
    def event_time(self) -> str | None:
        return self.inlets[0].event_time

    @property
    def row_inlets(self) -> tuple[InletSpec, ...]:
        """All inlets except a broadcast."""
        return tuple(inlet for inlet in self.inlets if inlet.way != "broadcast")

    @property
    def broadcast_inlet(self) -> InletSpec | None:
        return next((inlet for inlet in self.inlets if inlet.way == "broadcast"), None)

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns of a stored key. Without keys, the key is the subtask."""
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
        """Unpickle the function. Its modules must be installed where the slots run."""
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
    """Rows that a loop sends back to an operator: state, until the next round."""

    uid: str
    """`<loop>:<operator>`, the uid in the epoch."""
    operator: str
    inlet: InletSpec
    """The operator's inlet, with the lane that the loop's rows come by."""
    target: int = 0
    """Index of the operator's inlet that gets the rows."""
    key_fields: tuple[pa.Field, ...] = ()
    """The columns of the operator's stored key."""
    parallelism: int = 0
    """The operator's."""

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
    incoming: Envelope
    """Lanes into this level: its own, and those that pass it on their way to later ones."""
    outgoing: Envelope
    """Lanes from this level to later ones."""
    feedbacks: tuple[FeedbackSpec, ...] = ()
    """Rows that arrive here to be kept for the next epoch or round."""

    @property
    def lanes_in(self) -> tuple[int, ...]:
        """The lanes whose rows are consumed here."""
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
    backend: str = field(repr=False)
    """A name, or the URL of a database, which may hold a password."""
    levels: tuple[LevelSpec, ...]
    backend_memory_bytes: int = DEFAULT_MEMORY_BYTES
    slot_memory_bytes: int = 0
    """The memory that a slot may use; 0: no limit is known."""
    rounds_max: int = 1
    """Limit of the rounds of a batch while loops send records back."""
    door: DoorSpec | None = field(default=None, repr=False)
    """The driver whose lookups slots accept; None: no lookups."""
    log_format: Format = "text"
    """The format of the slots' log files."""
    sys_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path), repr=False)
    """The driver's import path, so that slots find modules beside the program."""

    @property
    def feedbacks(self) -> tuple[FeedbackSpec, ...]:
        return tuple(feedback for level in self.levels for feedback in level.feedbacks)

    def with_function(self, uid: str, function: bytes) -> JobSpec:
        """Return the job with another function in one operator."""
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

    def pickle(self) -> tuple[str, bytes]:
        """Return (id, bytes)."""
        # The path comes first: modules pickled by reference are only found with it.
        data = pickle.dumps((self.sys_path, cloudpickle.dumps(self)))
        return digest(data), data

    @staticmethod
    def unpickle(data: bytes) -> JobSpec:
        """Load the bytes of `pickle` in another process."""
        sys_path, spec = pickle.loads(data)
        sys.path.extend(p for p in sys_path if p not in sys.path and os.path.exists(p))
        return cloudpickle.loads(spec)  # type: ignore[no-any-return]


def lane_name(lane: int) -> str:
    """Return the field of a lane where rows of several lanes are structs in one array."""
    return f"l{lane}"
