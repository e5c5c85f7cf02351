"""Checkpoints made of nothing but storage: epochs of any state, written from a dict model.

Deltas and bases are encoded here from the documented layout, not by the code that slots run,
so what is read back is compared with an independent hand.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pyarrow as pa

from cairn.driver.coordinator.ranges import ranges_for
from cairn.key_groups import key_group
from cairn.snapshots.diff import same_value
from cairn.storage.files import encode_segment
from cairn.storage.log import Log, create_or_open_job, new_nonce
from cairn.storage.manifest import (
    Epoch,
    EpochOperator,
    FileRef,
    RangeState,
    SparkPosition,
    StateDecl,
    next_version,
)
from cairn.storage.pack import write_pack
from cairn.storage.published import note_published
from cairn.storage.retention import Collector
from cairn.storage.store import Store, open_store
from cairn.types import parse_type
from cairn.types.codec import codec

GONE: Any = object()
UID = "count"
OFFSETS = 'v1\n{"batchTimestampMs":7}\n{"n":3}'

Model = dict[str, dict[Any, Any]]


def value(type: str) -> StateDecl:
    return StateDecl(kind="value", type=type)


def listed(type: str) -> StateDecl:
    return StateDecl(kind="list", type=type)


def mapped(entry: str, type: str) -> StateDecl:
    return StateDecl(kind="map", type=type, entry_type=entry)


class Checkpoint:
    """A job of one operator. `model` is its state after the newest epoch."""

    def __init__(
        self,
        states: dict[str, StateDecl],
        key_types: dict[str, str] | None = None,
        *,
        store: Store | None = None,
        group_count: int = 8,
        parallelism: int = 2,
        uid: str = UID,
        offsets: str = OFFSETS,
        keep: int = 100,
    ) -> None:
        self.store = store or open_store("memory:")
        self.states = states
        self.key_types = key_types or {"k": "bigint"}
        self.group_count = group_count
        self.parallelism = parallelism
        self.uid = uid
        self.offsets = offsets
        create_or_open_job(self.store, "shop", group_count)
        self.log = Log(self.store)
        self.term = self.log.take_over(host="here", pid=1, wall_ms=0).term
        self.collector = Collector(self.store, self.log, keep, self.term)
        self.model: Model = {name: {} for name in states}
        types = [parse_type(ddl) for ddl in self.key_types.values()]
        self._types = types
        names = self.key_types
        fields = [pa.field(name, type) for name, type in zip(names, types, strict=True)]
        self.key = codec(types[0] if len(types) == 1 else pa.struct(fields))

    @property
    def newest(self) -> Epoch | None:
        return self.log.newest_epoch()

    def group(self, key: Any) -> int:
        parts = [key] if len(self._types) == 1 else list(key)
        return key_group(parts, self._types, self.group_count)

    def commit(self, changes: Model | None = None, *, base: bool = False) -> Epoch:
        """One more epoch, with a base of everything before it if asked."""
        changes = changes or {}
        newest = self.newest
        entry = None if newest is None else newest.operators.get(self.uid)
        ranges = ranges_for(entry, self.parallelism, self.group_count)
        if base:
            ranges = [self._with_base(part) for part in ranges]
        normalised = self._normalised(changes)
        ranges = [self._with_delta(part, normalised) for part in ranges]
        self._apply(normalised)
        return self._publish(ranges)

    def _publish(self, ranges: list[RangeState]) -> Epoch:
        newest = self.newest
        entry = EpochOperator(
            uid=self.uid,
            function_version="f" * 32,
            key_types=self.key_types,
            states=self.states,
            parallelism=self.parallelism,
            ranges=ranges,
        )
        oldest_kept = self.collector.oldest_to_keep()
        epoch = self.log.append(
            lambda number: Epoch(
                number=number,
                parent=None if newest is None else newest.number,
                term=self.term,
                nonce=new_nonce(),
                wall_ms=number,
                now_ms=1000 + number,
                watermarks={"rows": 900 + number},
                watermark_ms=900 + number,
                passed_ms=890 + number,
                seen_ms={"rows": 800 + number},
                timers={UID: (950 + number, None)},
                spark=SparkPosition(
                    folder="spark/000000000001",
                    batch_id=number - 2,
                    offsets=self.offsets,
                    sources=["rows"],
                ),
                operators={self.uid: entry},
                committables={"out": [{"files": []}]},
                oldest_kept=oldest_kept,
            )
        )
        note_published(self.store, epoch.number, epoch.nonce)
        return epoch

    # From values to rows

    def _normalised(self, changes: Model) -> Model:
        found: Model = {}
        for name, rows in changes.items():
            decl = self.states[name]
            values = codec(decl.type)
            for key, new in rows.items():
                stored: Any = GONE
                if new is GONE:
                    pass
                elif decl.kind == "map":
                    entries = codec(decl.entry_type)
                    stored = {
                        entries.normalise_key(entry): GONE if v is GONE else _fit(values, v)
                        for entry, v in new.items()
                    }
                elif decl.kind == "list":
                    stored = [_fit(values, item) for item in new]
                else:
                    stored = _fit(values, new)
                key = None if key is None else self.key.normalise_key(key)
                found.setdefault(name, {})[key] = stored
        return found

    def _apply(self, changes: Model) -> None:
        self.model = copy.deepcopy(self.model)
        for name, rows in changes.items():
            held = self.model[name]
            for key, new in rows.items():
                if self.states[name].kind == "map" and new is not GONE:
                    new = {**held.get(key, {}), **new}
                    new = {entry: v for entry, v in new.items() if v is not GONE} or GONE
                held.pop(key, None)
                if new is not GONE and new != []:
                    held[key] = new

    def _with_delta(self, part: RangeState, changes: Model) -> RangeState:
        parts = self._parts(part, changes, is_delta=True)
        if not parts:
            return part
        ref = self._write("delta", parts, part)
        return msgspec.structs.replace(
            part, files=[*part.files, ref], version=next_version(part.version, ref.id)
        )

    def _with_base(self, part: RangeState) -> RangeState:
        parts = self._parts(part, self.model, is_delta=False)
        if not parts:
            return part
        return msgspec.structs.replace(part, files=[self._write("base", parts, part)])

    def _parts(self, part: RangeState, rows: Model, *, is_delta: bool) -> dict[str, pa.RecordBatch]:
        groups = range(part.first_group, part.first_group + part.group_count)
        found = {}
        for name, by_key in sorted(rows.items()):
            mine = [(self.group(key), key, v) for key, v in by_key.items()]
            mine = sorted((row for row in mine if row[0] in groups), key=lambda row: row[0])
            if mine:
                found[name] = self._batch(name, mine, is_delta=is_delta)
        return found

    def _batch(self, name: str, rows: list[tuple[int, Any, Any]], *, is_delta: bool) -> Any:
        decl = self.states[name]
        values = codec(decl.type)
        if decl.kind == "map":
            return self._map_batch(name, rows)
        groups, keys, held = (list(column) for column in zip(*rows, strict=True))
        live = [v is not GONE for v in held]
        columns: dict[str, Any] = {
            "group": pa.array(groups, pa.int32()),
            "key": self.key.encode(keys),
        }
        if decl.kind == "list":
            columns["start"] = pa.array([0] * len(rows), pa.int64())
            starts, items = [], []
            # What is only appended is written so, as slots do it.
            for at, (key, new) in enumerate(zip(keys, held, strict=True)):
                old = self.model[name].get(key, []) if is_delta else []
                items.append([] if new is GONE else list(new))
                kept = len(old) if old and items[at][: len(old)] == old else 0
                starts.append(kept)
                items[at] = items[at][kept:]
                live[at] = bool(kept or items[at])
            columns["start"] = pa.array(starts, pa.int64())
            offsets = [0]
            for each in items:
                offsets.append(offsets[-1] + len(each))
            flat = values.encode([item for each in items for item in each])
            columns["value"] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)
        else:
            columns["value"] = values.encode([None if v is GONE else v for v in held])
        columns["live"] = pa.array(live, pa.bool_())
        return pa.RecordBatch.from_pydict(columns)

    def _map_batch(self, name: str, rows: list[tuple[int, Any, Any]]) -> Any:
        decl = self.states[name]
        flat = []
        for group, key, new in rows:
            if new is GONE:
                new = dict.fromkeys(self.model[name].get(key, {}), GONE)
            flat += [(group, key, entry, v) for entry, v in new.items()]
        groups, keys, entries, held = (
            [list(column) for column in zip(*flat, strict=True)] if flat else ([], [], [], [])
        )
        return pa.RecordBatch.from_pydict(
            {
                "group": pa.array(groups, pa.int32()),
                "key": self.key.encode(keys),
                "entry": codec(decl.entry_type).encode(entries),
                "value": codec(decl.type).encode([None if v is GONE else v for v in held]),
                "live": pa.array([v is not GONE for v in held], pa.bool_()),
            }
        )

    def _write(self, kind: Any, parts: dict[str, pa.RecordBatch], part: RangeState) -> FileRef:
        number = (self.log.last or 0) + 1
        segment = encode_segment(kind, self.uid, parts, first_epoch=number, last_epoch=number)
        (file,) = write_pack(self.store, [segment], self.term)
        return file.list_for(part.groups, first_epoch=number, last_epoch=number)


def running(store: Store | None = None) -> Checkpoint:
    """A job that keeps one epoch, and that rewrites all its state now and then."""
    made = Checkpoint({"n": value("bigint")}, keep=1, store=store)
    go_on(made, 3)
    return made


def go_on(checkpoint: Checkpoint, epochs: int = 30) -> None:
    for _ in range(epochs):
        number = (checkpoint.log.last or 0) + 1
        checkpoint.commit({"n": dict.fromkeys(range(20), number)}, base=number % 3 == 0)
        checkpoint.collector.after_epoch()


def _fit(values: Any, given: Any) -> Any:
    return None if given is None else values.normalise(given)


def rows_as_model(columns: Any, batches: Any) -> dict[Any, Any]:
    """Rows of a state as the model has them."""
    found: dict[Any, Any] = {}
    for batch in batches:
        for key, entry, held in columns.decode(batch):
            if columns.decl.kind == "map":
                assert entry not in found.setdefault(key, {})
                found[key][entry] = held
            else:
                assert key not in found
                found[key] = list(held) if columns.decl.kind == "list" else held
    return found


def state_of(reader: Any, uid: str = UID) -> Model:
    """Everything that an EpochReader or a Savepoint holds of an operator."""
    return {
        name: rows_as_model(columns, reader.rows(uid, name))
        for name, columns in reader.columns(uid).items()
    }


def same_state(left: Model, right: Model) -> bool:
    """Equality, where NaN equals itself."""
    return same_value(_frozen(left), _frozen(right))


def _frozen(held: Any) -> Any:
    if isinstance(held, dict):
        return {key: _frozen(each) for key, each in held.items()}
    return tuple(held) if isinstance(held, list) else held
