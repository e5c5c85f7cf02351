"""Run a function without Spark, in milliseconds, on the operator that runs it in production.

    with Harness(Fraud(), schema="account long, amount double", key_by="account",
                 out="account long, amount double") as harness:
        harness.push({"account": 1, "amount": 0.5})
        assert harness.push((1, 700.0)) == [(1, 700.0)]
        harness.snapshot_and_restore()
        assert harness.state("armed", 1) is True

An epoch begins with the first row pushed and ends with `commit`; `tick` runs one without rows.
The watermark moves when an epoch is committed: with `watermark="10 seconds"` to the newest event
time less that, with `advance_watermark` to where it is told. Timers that are due by it,
or by the clock, are called at the beginning of the next epoch. As in production the
function is a copy of the one given, its clock stands still inside an epoch, its output
must fit the declared schema, and what it raises comes out as FunctionError and fails the
epoch: it is rolled back. With `on_error="dead-letter"` rows that it fails on are put aside
instead, and are found in `harness.side("errors")`.

Always true here:
- `rollback` leaves state and outputs as they were at the last commit, and nothing else:
  attributes of the function that are not state keep what the abandoned epoch put there;
- what `snapshot_and_restore` reads back has been through files, in the stored format.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc

from cairn.backends import make_backend
from cairn.backends.handles.broadcast import BroadcastHandle
from cairn.backends.handles.operator_list import OperatorListHandle
from cairn.connected import with_name
from cairn.errors import PlanError, StateNotFoundError
from cairn.functions import ERRORS, BatchProcess, Function, find_states
from cairn.ids import new_id
from cairn.metrics import UserMetrics, add_metrics
from cairn.plan.check import (
    check_broadcast,
    check_broadcast_state,
    check_function,
    check_handlers,
    check_ttl,
)
from cairn.protocol.letters import SCHEMA, OnError, check_on_error
from cairn.protocol.messages import Begin, Part
from cairn.protocol.scoped_state import states_by_scope
from cairn.protocol.spec import InletSpec, OperatorSpec, OutletSpec
from cairn.sinks.base import Execution
from cairn.slot.operator import Operator
from cairn.slot.timers import as_ms
from cairn.state import Broadcast, Declaration, List, Map
from cairn.storage.manifest import RangeState
from cairn.testing.checkpoint import GROUP_COUNT, Checkpoint
from cairn.testing.clock import ManualClock
from cairn.testing.inputs import Input, Inputs
from cairn.types import parse_schema, row_class
from cairn.types.codec import codec
from cairn.types.durations import MAX_MS, Duration, duration_ms

UID = "harness"
DRAIN_EPOCHS_MAX = 100


class Harness:
    """One subtask that owns every key. `clock` moves between epochs, when told to."""

    def __init__(
        self,
        function: Function,
        schema: Any,
        key_by: str | Iterable[str] | Mapping[str, str | Iterable[str]] | None,
        out: Any,
        *,
        sides: Mapping[str, Any] | None = None,
        event_time: str | Mapping[str, str] | None = None,
        watermark: Duration | None = None,
        now_ms: int = 0,
        on_error: OnError = "fail",
        backend: str = "heap",
        broadcast: Any = None,
        broadcast_state: Declaration | None = None,
    ) -> None:
        """`key_by` is None for a function without keys. `broadcast` is the schema of such rows,
        and `broadcast_state` where they are kept, if the function does not declare it.

        Of connected streams `schema`, `key_by` and `event_time` are by their names.
        """
        check_function(function, UID)
        self._inputs = Inputs(schema, key_by, event_time, UID)
        inlets = self._inputs.inlets
        self.schema = inlets[0].schema
        """Schema of the pushed rows; with connected streams, of the first."""
        names = self._inputs.names if self._inputs.is_connected else []
        check_handlers(function, UID, names, has_broadcast=broadcast is not None)
        self._is_timed = inlets[0].event_time is not None
        check_ttl(function, UID, has_event_time=self._is_timed)
        outputs = {None: parse_schema(out)} | {t: parse_schema(s) for t, s in (sides or {}).items()}
        for inlet in inlets if self._is_timed else ():
            late = inlet.late_tag
            if outputs.setdefault(late, inlet.schema) != inlet.schema:
                raise PlanError(f"side output {late!r} has the schema of the rows pushed", tag=late)
        check_on_error(on_error)
        if on_error == "dead-letter" and outputs.setdefault(ERRORS, SCHEMA) != SCHEMA:
            raise PlanError(f"side output {ERRORS!r} has the schema of dead letters", tag=ERRORS)
        if watermark is not None and not self._is_timed:
            raise PlanError("watermark= needs event_time=")
        self._delay_ms = None if watermark is None else duration_ms(watermark, "watermark")
        self.watermark_ms: int | None = None
        """The watermark that the next epoch runs with."""
        self._passed_ms: int | None = None
        self._newest_ms: int | None = None
        self._newest_committed_ms: int | None = None
        self._metrics = UserMetrics()
        self._broadcast: Input | None = None
        if broadcast is not None:
            lane = len(inlets)
            self._broadcast = Input(InletSpec(lane, parse_schema(broadcast), way="broadcast"))
            inlets = (*inlets, self._broadcast.inlet)
        declared = [d for d in find_states(function).values() if isinstance(d, Broadcast)]
        if broadcast_state is None:
            broadcast_state = next(iter(declared), None)
        self._broadcast_state = with_name(broadcast_state)
        check_broadcast(self._broadcast_state)
        check_broadcast_state(function, UID, self._broadcast_state)
        self._spec = OperatorSpec(
            uid=UID,
            inlets=inlets,
            function=cloudpickle.dumps(function),
            outlets=tuple(OutletSpec(tag, schema, (), ()) for tag, schema in outputs.items()),
            on_error=on_error,
            broadcast=self._broadcast_state,
            stored_key_types=self._inputs.key_types,
        )
        states = {state.uid: state for state in states_by_scope(self._spec)}
        self._checkpoint = Checkpoint(states, now_ms)
        self._keys = [codec(type_) for type_ in self._inputs.key_types]
        self.clock = ManualClock(now_ms)
        self._backend = backend
        self._scratch = tempfile.TemporaryDirectory(prefix="cairn-harness-")
        self._emitted: dict[str | None, list[Any]] = {tag: [] for tag in outputs}
        self._committed: dict[str | None, int] = dict.fromkeys(outputs, 0)
        self._running = self._has_rows = False
        self._operator = self._fresh_operator()
        self._operator.open(self._make_begin(), 0)

    # Rows in, rows out

    def push(self, rows: Any = None, **inputs: Any) -> list[Any]:
        """A row (dict, tuple, row object) or a list of rows; gives what the function emits.

        Of connected streams, rows of each by its name: `push(orders=[...], payments=row)`.
        What timers emit that are due when the epoch begins is part of it.
        A BatchProcess gets the rows of one call as one batch.

        With an event time, the rows of one call are processed in its order, as those of an
        epoch are in production.
        """
        arrived = self._inputs.deliver(self._by_input(rows, inputs), GROUP_COUNT)
        before = len(self._emitted[None])
        if not self._running:
            self._begin()
        self._see(arrived.times)
        try:
            self._has_rows = True
            self._operator.run(*arrived)
            self._operator.flush()
        except BaseException:
            self.rollback()
            raise
        return self._emitted[None][before:]

    def push_broadcast(self, rows: Any) -> list[Any]:
        """A broadcast row or a list of them, to `process_broadcast`; gives what it emits.

        In production they come before the other rows of their epoch: so they do here.
        """
        if self._broadcast is None:
            raise PlanError("no broadcast is declared\n  next: give its schema, broadcast=")
        if self._has_rows:
            raise PlanError(
                "broadcast rows come before the other rows of an epoch\n"
                "  next: harness.commit() first, or push them earlier"
            )
        before = len(self._emitted[None])
        if not self._running:
            self._begin()
        try:
            rows = self._broadcast.encode(self._broadcast.fit(rows))
            self._operator.run_broadcast(None, rows)
        except BaseException:
            self.rollback()
            raise
        return self._emitted[None][before:]

    def _by_input(self, rows: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return rows by the name of their input; a single input has no name."""
        if not self._inputs.is_connected:
            if inputs:
                raise PlanError(f"there is one input, found rows of {next(iter(inputs))!r}")
            return {"": rows}
        known = self._inputs.names
        unknown = [name for name in inputs if name not in known]
        if rows is not None or unknown:
            raise PlanError(
                f"rows of connected streams are pushed by name\n  expected: {', '.join(known)}\n"
                f"  found: {unknown[0] if unknown else 'rows without one'}"
            )
        return inputs

    @property
    def outputs(self) -> list[Any]:
        """Everything emitted so far, the running epoch included."""
        return list(self._emitted[None])

    def side(self, tag: str) -> list[Any]:
        """Everything emitted on a side output so far."""
        if tag not in self._emitted:
            known = ", ".join(str(t) for t in self._emitted if t is not None) or "none"
            raise PlanError(f"no side output {tag!r} is declared\n  found: {known}", tag=tag)
        return list(self._emitted[tag])

    # State and time

    def state(self, name: str, key: Any = None) -> Any:
        """Return a state as `process` would see it: the value, the list, or the mapping as a dict.

        The key is a value, or a tuple where several columns make the key. Broadcast state and
        operator lists have none.
        """
        handle = vars(self.function).get(name)
        if self._broadcast_state is not None and name == self._broadcast_state.name:
            handle = self._operator.context.broadcast
        if isinstance(handle, BroadcastHandle | OperatorListHandle):
            handle.forget()
            return dict(handle) if isinstance(handle, Broadcast) else list(handle)
        if not isinstance(handle, Declaration):
            known = ", ".join(n for held in self._operator.holdings for n in held.tables) or "none"
            raise StateNotFoundError(
                f"{type(self.function).__name__} declares no state {name!r}\n  found: {known}",
                state=name,
            )
        group, canonical = self._scope(key)
        if isinstance(self.function, BatchProcess):
            return self._batch_state(handle, canonical)
        context = self._operator.context
        context.group, context.key = group, canonical
        if isinstance(handle, List):
            return list(handle)
        if isinstance(handle, Map):
            return dict(handle)
        return handle.get()  # type: ignore[attr-defined]

    def timers(self, key: Any) -> dict[str, list[int]]:
        """The times for which timers of a key are set: {"event": [...], "processing": [...]}."""
        _, canonical = self._scope(key)
        held = self._operator.timers
        if held is None:
            return {"event": [], "processing": []}
        return {
            "event": held.event.of_key(canonical),
            "processing": held.processing.of_key(canonical),
        }

    def _scope(self, key: Any) -> tuple[int, Any]:
        """Key group and key as the function has them."""
        parts = (key,) if len(self._keys) == 1 else tuple(key)
        if len(parts) != len(self._keys):
            raise TypeError(f"the key has {len(self._keys)} columns, found {key!r}")
        canonical = [
            None if part is None else column.normalise_key(part)
            for column, part in zip(self._keys, parts, strict=True)
        ]
        row = partial(tuple.__new__, row_class(self._spec.keys))
        group = self._inputs.group(canonical, GROUP_COUNT)
        return group, canonical[0] if len(canonical) == 1 else row(canonical)

    @property
    def metrics(self) -> UserMetrics:
        """The metrics of the function: of committed epochs, and so far of the running one."""
        return add_metrics(self._metrics, self._operator.metrics if self._running else None)

    @property
    def now_ms(self) -> int:
        """The value of `ctx.now_ms`, now or for the next row."""
        if self._running:
            return self._operator.context.now_ms
        return max(self.clock(), self._checkpoint.now_ms)

    @property
    def epoch(self) -> int:
        """The number of the running epoch, or of the next."""
        return self._checkpoint.next_number

    @property
    def function(self) -> Any:
        """The copy that runs, as a slot holds it."""
        assert self._operator.function is not None, "the harness is closed"
        return self._operator.function

    def advance_watermark(self, to: int | dt.datetime) -> None:
        """From the next epoch on the watermark is here. It never goes back."""
        if not self._is_timed:
            raise PlanError("a watermark needs event_time=")
        to_ms = as_ms(to)
        if self.watermark_ms is not None and to_ms < self.watermark_ms:
            raise ValueError(f"the watermark is at {self.watermark_ms} and cannot go to {to_ms}")
        self.watermark_ms = to_ms

    # Epochs

    def tick(self) -> list[Any]:
        """An epoch without rows, committed: gives what timers emit. A running one ends first."""
        before = len(self._emitted[None])
        if self._running:
            self.commit()
        self.commit()
        return self._emitted[None][before:]

    def drain(self) -> list[Any]:
        """Epochs as at the end of a bounded run: every timer is called, until none is left."""
        before = len(self._emitted[None])
        if self._running:
            self.commit()
        for _ in range(DRAIN_EPOCHS_MAX):
            if self._operator.earliest_timers() == (None, None):
                break
            self._begin(is_draining=True)
            self.commit()
        return self._emitted[None][before:]

    def commit(self) -> None:
        """End the epoch: its changes are the state now. The next row begins another one."""
        if not self._running:
            self._begin()
        ranges = {}
        try:
            self._operator.finish()
            for held in self._operator.holdings:
                stored = self._checkpoint.write_delta(held, UID)
                held.name_pending(None if stored is None else stored.id)
                ranges[held.uid] = self._checkpoint.advance(held, stored, self._operator.rows_in)
        except BaseException:
            self.rollback()
            raise
        self._append(ranges)
        self._committed = {tag: len(rows) for tag, rows in self._emitted.items()}
        self._metrics = self.metrics
        self._running = self._has_rows = False
        self._settle()
        self._move_watermark()

    def rollback(self) -> None:
        """Abandon the epoch, as when an attempt at it has failed: it never happened."""
        for tag, length in self._committed.items():
            del self._emitted[tag][length:]
        self._newest_ms = self._newest_committed_ms
        self._running = self._has_rows = False
        self._settle()

    def snapshot_and_restore(self, *, base: bool = False) -> None:
        """Commit, then go on in a new slot that has restored the state from its files.

        With `base`, those files are one base instead of the deltas of all epochs.
        """
        self.commit()
        if base and any(self._checkpoint.range_of(h.uid).files for h in self._operator.holdings):
            begin, rows = self._make_begin(), self._operator.rows_in
            rebase = self._checkpoint.rebase
            self._append({h.uid: rebase(h, begin, rows) for h in self._operator.holdings})
        self._operator.close()
        self._operator = self._fresh_operator()
        self._operator.open(self._make_begin(), 0)

    def close(self) -> None:
        """Call the function's `close`, as at the end of a slot."""
        self._operator.close()
        self._scratch.cleanup()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Helpers

    def _batch_state(self, handle: Declaration, key: Any) -> Any:
        keys = codec(self._spec.key_type).encode([key])
        if isinstance(handle, Map):
            _, entries, values = handle.of_keys(keys)
            names = codec(entries.type).decode_keys(entries)
            return dict(zip(names, codec(values.type).decode(values), strict=True))
        values = handle.get_many(keys)  # type: ignore[attr-defined]
        return codec(values.type).decode(values)[0]

    def _see(self, times: pa.Array | None) -> None:
        """Rows with these event times came in."""
        newest = None if times is None else pc.max(times).as_py()
        if newest is not None:
            self._newest_ms = max(newest // 1000, self._newest_ms or newest // 1000)

    def _move_watermark(self) -> None:
        """After an epoch, for the next one."""
        if not self._operator.is_draining:
            self._passed_ms = self._operator.context.watermark_ms
        self._newest_committed_ms = self._newest_ms
        if self._delay_ms is not None and self._newest_ms is not None:
            reached_ms = self._newest_ms - self._delay_ms
            if self.watermark_ms is None or reached_ms > self.watermark_ms:
                self.watermark_ms = reached_ms

    def _fresh_operator(self) -> Operator:
        backend = make_backend(self._backend, f"{self._scratch.name}/{new_id()}")
        operator = Operator(self._spec, backend, group_count=GROUP_COUNT)
        for outlet in operator.outlets:
            outlet.targets.append(partial(self._take, outlet.tag))
        operator.declare()
        for held in operator.holdings:
            self._checkpoint.restore(held)
        return operator

    def _take(self, tag: str | None, batch: pa.RecordBatch) -> None:
        rows = codec(pa.struct(list(batch.schema))).decode(batch.to_struct_array())
        self._emitted[tag] += rows

    def _begin(self, *, is_draining: bool = False) -> None:
        self._running = True
        try:
            self._operator.open(self._make_begin(is_draining=is_draining), 0)
            self._operator.reclaim(seconds=0.005)
            self._operator.begin_rows()
        except BaseException:
            self.rollback()
            raise

    def _make_begin(self, *, is_draining: bool = False) -> Begin:
        return Begin(
            run_id=UID,
            term=self._checkpoint.term,
            epoch=self.epoch,
            execution=Execution(),
            parent=self._checkpoint.parent,
            now_ms=max(self.clock(), self._checkpoint.now_ms),
            watermark_ms=MAX_MS if is_draining else self.watermark_ms,
            passed_ms=self._passed_ms,
            is_draining=is_draining,
            parallelism=1,
            group_count=GROUP_COUNT,
            parts={0: Part(self._checkpoint.versions())},
            inline_bytes_max=0,
        )

    def _settle(self) -> None:
        for held in self._operator.holdings:
            self._checkpoint.settle(held)

    def _append(self, ranges: Mapping[str, RangeState]) -> None:
        self._checkpoint.append(ranges, now_ms=self._operator.context.now_ms, wall_ms=self.clock())
