"""Records on their way back in a loop: gathered, kept as state, given to their operator.

    run      rows of the feedback edge, in a level after those that send them
    finish   all of them as one file of state, which replaces the one before; it is stored
             only if the epoch ends with that
    take     in the next epoch, or the next round: the first rows of their operator

They are stored as a map state called "records": of each key the rows, by sequence number. So
whatever handles state handles them: retention, savepoints, branches, readers, other
parallelisms.

Always true here:
- rows lie in the subtask that is to process them, and never change;
- a version names exactly its rows, whether they are here or in the store;
- the same rows give the same file and the same order, however they came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends.files import open_rows
from cairn.errors import EpochError
from cairn.key_groups import overlap
from cairn.protocol.messages import Begin
from cairn.protocol.scoped_state import ScopedState
from cairn.protocol.spec import FeedbackSpec
from cairn.sinks.base import Execution
from cairn.slot.gather import Rows
from cairn.slot.outlet import fit
from cairn.slot.reader import times_of
from cairn.snapshots.columns import StateColumns
from cairn.state import Map
from cairn.storage.manifest import EMPTY_VERSION, Epoch
from cairn.storage.store import Store
from cairn.types import type_ddl
from cairn.types.evolution import reshape

RECORDS = "records"


def feedback_state(spec: FeedbackSpec) -> ScopedState:
    """Return the state that holds the records of a loop in an epoch."""
    declaration: Map[Any, Any] = Map("bigint", type_ddl(pa.struct(list(spec.inlet.schema))))
    declaration.name = RECORDS
    return ScopedState(
        spec.uid,
        "feedback",
        spec.key_types,
        {RECORDS: declaration},
        spec.operator,
        parallelism=spec.parallelism,
    )


def _columns(state: ScopedState) -> StateColumns:
    return StateColumns(RECORDS, state.decls[RECORDS], state.key_types)


class _Held(NamedTuple):
    rows: Rows
    made_in: tuple[int, Execution]
    """The epoch and the execution in it."""


class InFlight:
    """Records in flight in loops, by version: one level sends them back, another takes them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], _Held] = {}
        self._lock = threading.Lock()

    def put(self, uid: str, version: str, rows: Rows, begin: Begin) -> None:
        with self._lock:
            self._held[uid, version] = _Held(rows, (begin.epoch, begin.execution))

    def get(self, uid: str, version: str, begin: Begin) -> Rows | None:
        """The rows of a version. All others go, but for what this very attempt has sent back."""
        made_in = begin.epoch, begin.execution
        with self._lock:
            for at, held in list(self._held.items()):
                if at[0] == uid and at[1] != version and held.made_in != made_in:
                    del self._held[at]
            found = self._held.get((uid, version))
            return None if found is None else found.rows


class Feedback:
    """Gathers what is sent back to one inlet of one operator, in one subtask."""

    def __init__(self, spec: FeedbackSpec, in_flight: InFlight) -> None:
        self.spec = spec
        self._in_flight = in_flight
        self._columns = _columns(feedback_state(spec))
        self._parts: list[tuple[pa.Array, pa.StructArray]] = []
        self._rows: Rows | None = None
        self._subtask = self._first_group = 0

    def begin(self, subtask: int, groups: range) -> None:
        """An attempt begins: nothing of the one before is left."""
        self._parts.clear()
        self._rows = None
        self._subtask = subtask
        self._first_group = groups.start

    def run(self, groups: pa.Array, rows: pa.StructArray) -> None:
        self._parts.append((groups, rows))

    def finish(self) -> dict[str, pa.RecordBatch]:
        """Return all rows of the attempt in an order that depends on the rows alone, by state."""
        if not self._parts:
            return {}
        groups = pa.concat_arrays([groups for groups, _ in self._parts])
        rows = pa.concat_arrays([rows for _, rows in self._parts])
        self._parts.clear()
        batch = fit(pa.RecordBatch.from_struct_array(rows), self.spec.inlet.schema)
        if not self.spec.inlet.keys:
            groups = pa.array(np.full(len(rows), self._first_group, np.int32))
        times = times_of(batch, self.spec.inlet)
        order = _order(groups, times, batch)
        batch, groups = batch.take(order), groups.take(order).cast(pa.int32())
        self._rows = Rows(groups, None, batch.to_struct_array())
        stored = self._columns.to_stored(
            pa.RecordBatch.from_pydict(
                {
                    "group": groups,
                    "key": self._keys(batch),
                    "entry": pa.array(np.arange(batch.num_rows, dtype=np.int64)),
                    "value": self._rows.rows,
                }
            )
        )
        return {RECORDS: stored}

    def name_version(self, version: str, begin: Begin) -> None:
        """Keep the rows of `finish` under this version."""
        if self._rows is not None:
            rows, self._rows = self._rows, None
            self._in_flight.put(self.spec.uid, version, rows, begin)

    def _keys(self, batch: pa.RecordBatch) -> pa.Array:
        fields = list(self.spec.key_fields)
        keys = self.spec.inlet.keys
        if not keys:
            return pa.array(np.full(batch.num_rows, self._subtask, np.int32))
        columns = [batch[k].cast(f.type) for k, f in zip(keys, fields, strict=True)]
        return columns[0] if len(keys) == 1 else pa.StructArray.from_arrays(columns, fields=fields)


def take(
    spec: FeedbackSpec, in_flight: InFlight, begin: Begin, version: str, groups: range,
    subtask: int, parent: Callable[[], Epoch], store: Store, scratch: str,
) -> Rows | None:  # fmt: skip
    """Return the rows sent back to an operator, in the order in which it processes them."""
    # Called even for an empty version: it drops the rows that were processed last.
    rows = in_flight.get(spec.uid, version, begin)
    if version == EMPTY_VERSION:
        return None
    if rows is None:
        if begin.execution.round:
            raise EpochError(
                f"operator {spec.operator!r}: subtask {subtask} has lost what was sent back to it "
                f"in round {begin.execution.round} of the epoch; the epoch runs again"
            )
        rows = _restore(spec, parent(), groups, store, scratch)
    if rows is None or not len(rows.rows):
        return None
    times = times_of(pa.RecordBatch.from_struct_array(rows.rows), spec.inlet)
    if times is None:
        return rows
    # Timers of the operator come in time order with its rows.
    places = pa.array(np.arange(len(times)))
    order = pc.sort_indices(
        pa.table({"time": times, "place": places}),
        sort_keys=[("time", "ascending"), ("place", "ascending")],
    )
    return Rows(rows.groups.take(order), times.take(order), rows.rows.take(order))


def _restore(
    spec: FeedbackSpec, epoch: Epoch, groups: range, store: Store, scratch: str
) -> Rows | None:
    """Return the rows that an epoch has left for these key groups, in the order of sending."""
    entry = epoch.operators[spec.uid]
    wanted = feedback_state(spec)
    key_type = _columns(wanted).key_type
    batches = []
    for part in entry.ranges:
        for ref in part.files:
            owned = overlap(overlap(groups, part.groups), ref.groups)
            if not owned:
                continue
            with open_rows(store, ref, scratch) as reader:
                batches += [
                    reshape(
                        batch,
                        wanted.states[RECORDS],
                        key_type,
                        operator=spec.uid,
                        held=entry.states[RECORDS],
                    )
                    for batch in reader.read(RECORDS, owned)
                ]
    if not batches:
        return None
    table = pa.Table.from_batches(batches).combine_chunks()
    table = table.sort_by([("group", "ascending"), ("entry", "ascending")]).combine_chunks()
    value = table["value"].chunk(0)
    rows = fit(pa.RecordBatch.from_struct_array(value), spec.inlet.schema)
    return Rows(table["group"].chunk(0), None, rows.to_struct_array())


def _order(groups: pa.Array, times: pa.Array | None, batch: pa.RecordBatch) -> pa.Array:
    """By key group, time, and then by all there is: equal rows are all that is left to chance."""
    columns = {"g": groups}
    if times is not None:
        columns["t"] = times
    for at, column in enumerate(batch.columns):
        if pa.types.is_nested(column.type) or pa.types.is_null(column.type):
            column = pa.array([repr(value) for value in column.to_pylist()], pa.string())
        columns[f"c{at}"] = column
    keys = [(name, "ascending") for name in columns]
    return pc.sort_indices(pa.table(columns), sort_keys=keys)
