"""Rows pushed into a Harness, in the form in which Spark hands them to an operator.

Always true here:
- rows of one call come in Spark's order: by event time where there is one, then by input, then
  by a hash of the row;
- a key has the key group that Spark would give it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cairn.errors import PlanError
from cairn.key_groups import key_hasher
from cairn.plan.check import check_event_time, check_keys, check_same_keys
from cairn.plan.key_types import common_type
from cairn.protocol.spec import InletSpec
from cairn.slot.reader import mix_lanes
from cairn.types import contains_map, parse_schema
from cairn.types.codec import ValueTypeError, codec

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Arrived(NamedTuple):
    """Rows as an operator gets them."""

    groups: pa.Array
    times: pa.Array | None
    rows: pa.StructArray


class Input:
    """One way into the operator."""

    def __init__(self, inlet: InletSpec) -> None:
        self.inlet = inlet
        self._rows = codec(pa.struct(list(inlet.schema)))
        types = [field.type for field in inlet.schema]
        has_map = any(map(contains_map, types))
        self.hash_row: Any = (lambda row: 0) if has_map else key_hasher(types)

    def fit(self, rows: Any) -> list[Any]:
        """A row or a list of rows, as the function will see them."""
        return [self._fit(row) for row in (rows if isinstance(rows, list) else [rows])]

    def _fit(self, row: Any) -> Any:
        try:
            return self._rows.normalise(row)
        except ValueTypeError as error:
            raise TypeError(f"pushed row {row!r} does not fit the schema: {error}") from None

    def encode(self, fitted: list[Any]) -> pa.StructArray:
        return self._rows.encode(fitted)

    def times(self, rows: pa.StructArray) -> pa.Array | None:
        """As Spark reads them, in a session whose time zone is UTC."""
        if self.inlet.event_time is None:
            return None
        times = rows.field(self.inlet.event_time)
        if pa.types.is_timestamp(times.type) or pa.types.is_date(times.type):
            zone = getattr(times.type, "tz", None)
            return times.cast(pa.timestamp("us", zone)).cast(pa.int64())
        if pa.types.is_integer(times.type):
            return pc.multiply(times.cast(pa.int64()), 1000)
        return pa.array([_parse_us(text) for text in times.to_pylist()], pa.int64())


class Inputs:
    """All ways into the operator but a broadcast."""

    def __init__(self, schema: Any, key_by: Any, event_time: Any, uid: str) -> None:
        """`schema` of one input, or of several by name; the others likewise."""
        self.is_connected = isinstance(schema, Mapping)
        schemas = dict(schema) if self.is_connected else {"": schema}
        keys, times = _by_name(schemas, key_by), _by_name(schemas, event_time)
        way = "spread" if key_by is None else "keyed"
        found = []
        for lane, (name, declared) in enumerate(schemas.items()):
            columns = keys[name] or ()
            columns = (columns,) if isinstance(columns, str) else tuple(columns)
            parsed = parse_schema(declared)
            if key_by is not None:
                check_keys(columns, parsed)
            check_event_time(times[name], parsed, uid)
            inlet = InletSpec(lane, parsed, columns, times[name], name, way)  # type: ignore[arg-type]
            found.append(Input(inlet))
        self._inputs = {each.inlet.name: each for each in found}
        key_types = {
            name: [each.inlet.schema.field(column).type for column in each.inlet.keys]
            for name, each in self._inputs.items()
        }
        if self.is_connected:
            check_same_keys(key_types)
        self.key_types: tuple[pa.DataType, ...] = tuple(
            common_type(types) for types in zip(*key_types.values(), strict=True)
        )
        self._hash_key = key_hasher(list(self.key_types))
        told = [each.inlet.event_time for each in found]
        if any(told) and not all(told):
            raise PlanError("event_time= of connected inputs: all of them tell their time, or none")

    @property
    def inlets(self) -> tuple[InletSpec, ...]:
        return tuple(each.inlet for each in self._inputs.values())

    @property
    def names(self) -> list[str]:
        return list(self._inputs)

    def group(self, key: Iterable[Any], group_count: int) -> int:
        parts = list(key)
        return self._hash_key(parts) % group_count if parts else 0

    def deliver(self, pushed: Mapping[str, Any], group_count: int) -> Arrived:
        """Return the pushed rows of each input as Spark would deliver them."""
        inputs = [self._inputs[name] for name in pushed]
        fitted = [each.fit(rows) for each, rows in zip(inputs, pushed.values(), strict=True)]
        encoded = [each.encode(rows) for each, rows in zip(inputs, fitted, strict=True)]
        times = [each.times(rows) for each, rows in zip(inputs, encoded, strict=True)]
        known = [[] if time is None else time.to_pylist() for time in times]
        is_timed = self.inlets[0].event_time is not None
        places = [(at, row) for at, rows in enumerate(fitted) for row in range(len(rows))]
        if is_timed:
            places.sort(key=lambda place: self._order(inputs, fitted, known, *place))
        groups = [
            self.group([fitted[at][row][name] for name in inputs[at].inlet.keys], group_count)
            for at, row in places
        ]
        return Arrived(
            pa.array(groups, pa.int32()),
            pa.array([known[at][row] for at, row in places], pa.int64()) if is_timed else None,
            self._together(inputs, encoded, places),
        )

    def _order(self, inputs: Any, fitted: Any, known: Any, at: int, row: int) -> Any:
        """Return the place of a row in Spark's order; nulls come first."""
        time, each = known[at][row], inputs[at]
        return time is not None, time, each.inlet.lane, each.hash_row(fitted[at][row])

    def _together(
        self, inputs: list[Input], encoded: list[pa.StructArray], places: list[tuple[int, int]]
    ) -> pa.StructArray:
        if not self.is_connected:
            (rows,) = encoded
            return rows.take(pa.array([row for _, row in places], pa.int64()))
        lanes = {each.inlet.lane: at for at, each in enumerate(inputs)}
        columns = {}
        for inlet in self.inlets:
            lane, at = inlet.lane, lanes.get(inlet.lane)
            assert lane is not None
            rows = Input(inlet).encode([]) if at is None else encoded[at]
            taken = [row if of == at else None for of, row in places]
            columns[lane] = rows.take(pa.array(taken, pa.int64()))
        return mix_lanes(pa.array([inputs[at].inlet.lane for at, _ in places], pa.int32()), columns)


def _by_name(schemas: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """Return the argument for each input: by its name, or one for all."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(schemas, given)
    unknown = [name for name in given if name not in schemas]
    if unknown:
        raise PlanError(f"no input is called {unknown[0]!r}\n  found: {', '.join(schemas)}")
    return {name: given.get(name) for name in schemas}


def _parse_us(text: str | None) -> int | None:
    """Microseconds since 1970; None where the text is not a time."""
    try:
        time = dt.datetime.fromisoformat((text or "").strip())
    except ValueError:
        return None
    aware = time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)
    return (aware - _EPOCH) // dt.timedelta(microseconds=1)
