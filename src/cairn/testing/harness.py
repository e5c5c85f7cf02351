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
epoch: it is rolled back.

Always true here:
- `rollback` leaves state and outputs as they were at the last commit, and nothing else:
  attributes of the function that are no state keep what the abandoned epoch put there;
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
from cairn.codec import ValueTypeError, codec
from cairn.coordinator.epoch import state_decls
from cairn.coordinator.ranges import advance, ranges_for, take_in
from cairn.durations import MAX_MS, duration_ms
from cairn.errors import PlanError, StateNotFoundError
from cairn.functions import LATE, BatchProcess, Function
from cairn.ids import new_id
from cairn.plan.check import check_event_time, check_function, check_keys, check_ttl
from cairn.plan.keygroups import key_hasher
from cairn.slot.operator import Operator
from cairn.slot.protocol import Begin, OperatorAck, Stored
from cairn.slot.restore import restore, write_base
from cairn.slot.spec import InletSpec, OperatorSpec, OutletSpec
from cairn.slot.timers import as_ms
from cairn.state import Declaration, List, Map
from cairn.storage.files import encode_segment
from cairn.storage.log import Log
from cairn.storage.manifest import Epoch, OperatorEntry, RangeState, SparkPosition
from cairn.storage.pack import write_segment
from cairn.storage.store import open_store
from cairn.testing.clock import ManualClock
from cairn.types import contains_map, parse_schema, row_class

UID = "harness"
GROUP_COUNT = 128
DRAIN_EPOCHS_MAX = 100
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Harness:
    """One subtask that owns every key. `clock` moves between epochs, when told to."""

    def __init__(
        self,
        function: Function,
        schema: Any,
        key_by: str | Iterable[str],
        out: Any,
        *,
        sides: Mapping[str, Any] | None = None,
        event_time: str | None = None,
        watermark: str | None = None,
        now_ms: int = 0,
    ) -> None:
        self.schema = parse_schema(schema)
        keys = (key_by,) if isinstance(key_by, str) else tuple(key_by)
        check_function(function, UID)
        check_keys(keys, self.schema)
        check_event_time(event_time, self.schema, UID)
        check_ttl(function, UID, has_event_time=event_time is not None)
        outputs = {None: parse_schema(out)} | {t: parse_schema(s) for t, s in (sides or {}).items()}
        if event_time is not None and outputs.setdefault(LATE, self.schema) != self.schema:
            raise PlanError(f"side output {LATE!r} has the schema of the rows pushed", tag=LATE)
        if watermark is not None and event_time is None:
            raise PlanError("watermark= needs event_time=")
        self._delay_ms = None if watermark is None else duration_ms(watermark, "watermark")
        self.watermark_ms: int | None = None
        """The watermark that the next epoch runs with."""
        self._passed_ms: int | None = None
        self._newest_ms: int | None = None
        self._newest_committed_ms: int | None = None
        self._spec = OperatorSpec(
            uid=UID,
            inlets=(InletSpec(0, self.schema, keys, event_time),),
            function=cloudpickle.dumps(function),
            outlets=tuple(OutletSpec(tag, schema, (), ()) for tag, schema in outputs.items()),
        )
        self._input = codec(pa.struct(list(self.schema)))
        self._keys = [codec(self.schema.field(name).type) for name in keys]
        self._group_hash = key_hasher([self.schema.field(name).type for name in keys])
        self.clock = ManualClock(now_ms)
        self._store = open_store("memory:")
        self._log = Log(self._store)
        self._term = self._log.take_over(host="harness", pid=0, wall_ms=now_ms).term
        self._newest: Epoch | None = None
        self._emitted: dict[str | None, list[Any]] = {tag: [] for tag in outputs}
        self._committed: dict[str | None, int] = dict.fromkeys(outputs, 0)
        self._running = False
        self._operator = self._fresh_operator()
        self._operator.open(self._begun(), 0)

    # Rows in, rows out

    def push(self, rows: Any) -> list[Any]:
        """A row (dict, tuple, row object) or a list of rows; gives what the function emits.

        What timers emit that are due when the epoch begins is part of it.
        A BatchProcess gets the rows of one call as one batch.

        With an event time, the rows of one call are processed in its order, as those of an
        epoch are in production.
        """
        given = rows if isinstance(rows, list) else [rows]
        fitted = [self._fit(row) for row in given]
        encoded = self._input.encode(fitted)
        times = self._times(encoded)
        if times is not None:
            order = self._in_time(fitted, times)
            fitted = [fitted[at] for at in order]
            encoded, times = encoded.take(pa.array(order)), times.take(pa.array(order))
        before = len(self._emitted[None])
        if not self._running:
            self._begin()
        groups = [self._group([row[name] for name in self._spec.keys]) for row in fitted]
        self._see(times)
        try:
            self._operator.run(pa.array(groups, pa.int32()), times, encoded)
            self._operator.flush()
        except BaseException:
            self.rollback()
            raise
        return self._emitted[None][before:]

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

    def state(self, name: str, key: Any) -> Any:
        """What `process` would see of a state: its value, or the list, or the mapping as a dict.

        The key is a value, or a tuple where several columns make the key.
        """
        handle = vars(self.function).get(name)
        if not isinstance(handle, Declaration):
            known = ", ".join(self._operator.tables) or "none"
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
        return self._group(canonical), canonical[0] if len(canonical) == 1 else row(canonical)

    @property
    def now_ms(self) -> int:
        """What `ctx.now_ms` is, or would be for the next row."""
        if self._running:
            return self._operator.context.now_ms
        return max(self.clock(), 0 if self._newest is None else self._newest.now_ms)

    @property
    def epoch(self) -> int:
        """The number of the running epoch, or of the next."""
        assert self._log.last is not None, "the harness has taken over"
        return self._log.last + 1

    @property
    def function(self) -> Any:
        """The copy that runs, as a slot holds it."""
        assert self._operator.function is not None, "the harness is closed"
        return self._operator.function

    def advance_watermark(self, to: int | dt.datetime) -> None:
        """From the next epoch on the watermark is here. It never goes back."""
        if self._spec.event_time is None:
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
        operator, part = self._operator, self._range()
        try:
            parts = operator.finish()
        except BaseException:
            self.rollback()
            raise
        stored = None
        if parts:
            segment = encode_segment(
                "delta", UID, parts, first_epoch=self.epoch, last_epoch=self.epoch
            )
            at = write_segment(self._store, segment, self._term)
            stored = Stored(segment.id, at.length, segment.rows, path=at.path)
        operator.finished(None if stored is None else stored.id)
        self._append(self._advance(part, stored))
        self._committed = {tag: len(rows) for tag, rows in self._emitted.items()}
        self._running = False
        self._settle()
        self._move_watermark()

    def rollback(self) -> None:
        """Abandon the epoch, as when an attempt at it has failed: it never happened."""
        for tag, length in self._committed.items():
            del self._emitted[tag][length:]
        self._newest_ms = self._newest_committed_ms
        self._running = False
        self._settle()

    def snapshot_and_restore(self, *, base: bool = False) -> None:
        """Commit, then go on in a new slot that has restored the state from its files.

        With `base`, those files are one base instead of the deltas of all epochs.
        """
        self.commit()
        if base:
            self._write_base()
        self._operator.close()
        self._operator = self._fresh_operator()
        self._operator.open(self._begun(), 0)

    def close(self) -> None:
        """Call the function's `close`, as at the end of a slot."""
        self._operator.close()

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

    def _fit(self, row: Any) -> Any:
        try:
            return self._input.normalise(row)
        except ValueTypeError as error:
            raise TypeError(f"pushed row {row!r} does not fit the schema: {error}") from None

    def _in_time(self, rows: list[Any], times: pa.Array) -> list[int]:
        """Places of the rows in Spark's order: by event time, nulls first, ties by a hash."""
        types = [field.type for field in self.schema]
        hash_row = (lambda row: 0) if any(map(contains_map, types)) else key_hasher(types)
        known = times.to_pylist()
        return sorted(
            range(len(rows)), key=lambda at: (known[at] is not None, known[at], hash_row(rows[at]))
        )

    def _times(self, rows: pa.StructArray) -> pa.Array | None:
        """As Spark reads them, in a session whose time zone is UTC."""
        if self._spec.event_time is None:
            return None
        times = rows.field(self._spec.event_time)
        if pa.types.is_timestamp(times.type) or pa.types.is_date(times.type):
            zone = getattr(times.type, "tz", None)
            return times.cast(pa.timestamp("us", zone)).cast(pa.int64())
        if pa.types.is_integer(times.type):
            return pc.multiply(times.cast(pa.int64()), 1000)
        return pa.array([_parsed_us(text) for text in times.to_pylist()], pa.int64())

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

    def _group(self, key: list[Any]) -> int:
        return self._group_hash(key) % GROUP_COUNT

    def _fresh_operator(self) -> Operator:
        backend = make_backend("heap", "")
        operator = Operator(self._spec, backend, group_count=GROUP_COUNT)
        for outlet in operator.outlets:
            outlet.targets.append(partial(self._take, outlet.tag))
        operator.declare()
        version = self._range().version
        missing = operator.bring_to(version, range(GROUP_COUNT), [])
        if self._newest is not None:
            with tempfile.TemporaryDirectory() as scratch:
                restore(operator, self._log, self._store, self._newest.number, missing, scratch)
        operator.version = version
        return operator

    def _take(self, tag: str | None, batch: pa.RecordBatch) -> None:
        rows = codec(pa.struct(list(batch.schema))).decode(batch.to_struct_array())
        self._emitted[tag] += rows

    def _range(self) -> RangeState:
        entry = None if self._newest is None else self._newest.operators[UID]
        (part,) = ranges_for(entry, 1, GROUP_COUNT)
        return part

    def _parent(self) -> int | None:
        return None if self._newest is None else self._newest.number

    def _begin(self, *, is_draining: bool = False) -> None:
        self._running = True
        try:
            self._operator.open(self._begun(is_draining=is_draining), 0)
            self._operator.reclaim(seconds=0.005)
            self._operator.begin_rows()
        except BaseException:
            self.rollback()
            raise

    def _begun(self, *, is_draining: bool = False) -> Begin:
        return Begin(
            run_id=UID,
            term=self._term,
            epoch=self.epoch,
            attempt=0,
            parent=self._parent(),
            now_ms=max(self.clock(), 0 if self._newest is None else self._newest.now_ms),
            watermark_ms=MAX_MS if is_draining else self.watermark_ms,
            passed_ms=self._passed_ms,
            is_draining=is_draining,
            parallelism=1,
            versions={UID: [self._range().version]},
            compactions={},
            inline_bytes_max=0,
        )

    def _settle(self) -> None:
        """Promote or undo what the operator holds beyond the newest epoch."""
        missing = self._operator.bring_to(self._range().version, range(GROUP_COUNT), [])
        assert not missing, "the harness's operator is at the newest epoch or one ahead of it"

    def _write_base(self) -> None:
        operator, part = self._operator, self._range()
        if not part.files:
            return
        base = operator.backend.begin_base(operator.tables, operator.groups)
        with tempfile.TemporaryDirectory() as scratch:
            written = write_base(
                base, UID, operator.groups, self._store, self._begun(), scratch, lambda: None
            )
        base.close()
        based = take_in(part, written, {})
        assert based is not None, "a base of the newest epoch fits"
        self._append(self._advance(based, None))

    def _advance(self, part: RangeState, delta: Stored | None) -> RangeState:
        operator = self._operator
        event_ms, processing_ms = operator.earliest_timers()
        ack = OperatorAck(
            UID,
            operator.rows_in,
            0,
            operator.keys_changed(),
            delta,
            event_timer_ms=event_ms,
            processing_timer_ms=processing_ms,
        )
        return advance(part, ack, self.epoch, {}, operator.state_keys())

    def _append(self, part: RangeState) -> None:
        now_ms = self._operator.context.now_ms
        entry = OperatorEntry(
            uid=UID,
            function_version="",
            key_types={},
            states=state_decls(self._spec),
            parallelism=1,
            ranges=[part],
        )
        self._newest = self._log.append(
            lambda number: Epoch(
                number=number,
                parent=self._parent(),
                term=self._term,
                nonce=new_id(),
                wall_ms=self.clock(),
                now_ms=now_ms,
                watermarks={},
                spark=SparkPosition(folder="", batch_id=number, offsets=""),
                operators={UID: entry},
            )
        )


def _parsed_us(text: str | None) -> int | None:
    """Microseconds since 1970; None where the text is no time."""
    try:
        time = dt.datetime.fromisoformat((text or "").strip())
    except ValueError:
        return None
    aware = time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)
    return (aware - _EPOCH) // dt.timedelta(microseconds=1)
