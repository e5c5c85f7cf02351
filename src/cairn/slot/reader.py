"""Rows of an operator from Arrow to Python: light named tuples, and the key of each.

Always true here:
- rows and keys come in the order of the Arrow rows, of however many inputs these are;
- equal keys of inputs with key columns of different width are equal in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.protocol.spec import InletSpec, lane_name
from cairn.types import row_class
from cairn.types.codec import codec
from cairn.types.codec.core import Values, cast_to


class RowReader:
    """Rows of one schema."""

    def __init__(self, inlet: InletSpec, key_names: Sequence[str] | None = None) -> None:
        """`key_names`: what the columns of a key of several are called; as the inlet has them."""
        schema = inlet.schema
        self._row = partial(tuple.__new__, row_class(schema))
        self._names = schema.names
        self._columns = [codec(field.type) for field in schema]
        self._key_at = [schema.names.index(name) for name in inlet.keys]
        self._key_codecs = [codec(schema.field(name).type) for name in inlet.keys]
        self._key = partial(tuple.__new__, row_class(tuple(key_names or inlet.keys)))

    def read(self, rows: pa.StructArray) -> tuple[Iterable[Any], Iterable[Any]]:
        """(rows, keys); without key columns every key is None."""
        columns = [
            column.decode(array)
            for column, array in zip(self._columns, rows.flatten(), strict=True)
        ]
        made = map(self._row, zip(*columns, strict=True)) if columns else repeat((), len(rows))
        return made, self._keys(dict(enumerate(columns)), rows)

    def read_columns(
        self, rows: pa.StructArray, names: Sequence[str]
    ) -> tuple[list[Values], Iterable[Any]]:
        """(columns, keys): some columns only."""
        columns: dict[int, Values] = {}
        for name in names:
            at = self._names.index(name)
            columns[at] = self._columns[at].decode(rows.field(at))
        return list(columns.values()), self._keys(columns, rows)

    def key_array(self, rows: pa.StructArray, type: pa.DataType) -> pa.Array:
        """Return the keys as a column of this type: the column, or a struct of several."""
        columns = [rows.field(at) for at in self._key_at]
        if len(columns) == 1:
            return cast_to(type, columns[0])
        cast = [cast_to(f.type, column) for f, column in zip(type, columns, strict=True)]
        return pa.StructArray.from_arrays(cast, fields=list(type))

    def _keys(self, columns: dict[int, Values], rows: pa.StructArray) -> Iterable[Any]:
        """Return the keys; `columns` are those decoded already, by position."""
        parts = [
            columns[at]
            if at in columns and keys.read_keys is keys.read
            else keys.decode_keys(rows.field(at))
            for at, keys in zip(self._key_at, self._key_codecs, strict=True)
        ]
        if not parts:
            return repeat(None, len(rows))
        return parts[0] if len(parts) == 1 else map(self._key, zip(*parts, strict=True))


class ConnectedReader:
    """Rows of several inputs, as structs of a lane and, in the column of that lane, the row."""

    def __init__(self, inlets: Sequence[InletSpec]) -> None:
        self.names = [inlet.name for inlet in inlets]
        self._lanes = [inlet.lane for inlet in inlets]
        self._readers = [RowReader(inlet, inlets[0].keys) for inlet in inlets]
        self.inputs: list[int] = []
        """The input of each of the rows read last, in their order."""

    def read(self, rows: pa.StructArray) -> tuple[Iterable[Any], Iterable[Any]]:
        """(rows, keys)."""
        lanes = rows.field("lane").to_numpy()
        self.inputs = [0] * len(rows)
        made: list[Any] = [None] * len(rows)
        keys: list[Any] = [None] * len(rows)
        for index, (lane, reader) in enumerate(zip(self._lanes, self._readers, strict=True)):
            assert lane is not None, "connected inputs have lanes"
            places = np.flatnonzero(lanes == lane)
            found = reader.read(rows.field(lane_name(lane)).take(pa.array(places)))
            for place, row, key in zip(places.tolist(), *found, strict=True):
                made[place], keys[place], self.inputs[place] = row, key, index
        return made, keys


def mix_lanes(
    lanes: pa.Array, rows: Mapping[int, pa.StructArray], inlets: Sequence[InletSpec] = ()
) -> pa.StructArray:
    """Return rows of several lanes in the form that a ConnectedReader reads.

    `inlets` without a row in `rows`, because they are chained, have a column of nulls.
    """
    columns = dict(rows)
    for inlet in inlets:
        assert inlet.lane is not None, "connected inputs have lanes"
        if inlet.lane not in columns:
            columns[inlet.lane] = pa.nulls(len(lanes), pa.struct(list(inlet.schema)))
    names = ["lane", *map(lane_name, columns)]
    return pa.StructArray.from_arrays([lanes, *columns.values()], names=names)


def split_lanes(
    times: pa.Array | None, rows: pa.StructArray, inlets: Sequence[InletSpec]
) -> list[tuple[pa.Array | None, pa.StructArray] | None]:
    """Return the rows of each input with their times, in order; None for an input without rows."""
    lanes = rows.field("lane").to_numpy()
    found: list[tuple[pa.Array | None, pa.StructArray] | None] = []
    for inlet in inlets:
        assert inlet.lane is not None, "connected inputs have lanes"
        is_mine = lanes == inlet.lane
        count = int(np.count_nonzero(is_mine))
        if not count:
            found.append(None)
            continue
        mine = rows.field(lane_name(inlet.lane))
        if count == len(rows):
            found.append((times, mine))
        else:
            mask = pa.array(is_mine)
            found.append((None if times is None else times.filter(mask), mine.filter(mask)))
    return found


def put_into_lane(rows: pa.StructArray, inlets: Sequence[InletSpec], target: int) -> pa.StructArray:
    """Return rows of one input in the form that a ConnectedReader reads."""
    lane = inlets[target].lane
    columns = [pa.array(np.full(len(rows), lane, np.int32))]
    names = ["lane"]
    for inlet in inlets:
        assert inlet.lane is not None, "connected inputs have lanes"
        struct = pa.struct(list(inlet.schema))
        columns.append(rows if inlet.lane == lane else pa.nulls(len(rows), struct))
        names.append(lane_name(inlet.lane))
    return pa.StructArray.from_arrays(columns, names=names)


def times_of(batch: pa.RecordBatch, inlet: InletSpec) -> pa.Array | None:
    """The event times of rows that come from an operator of the same level, in microseconds."""
    if inlet.event_time is None:
        return None
    column = batch[inlet.event_time]
    type_ = column.type
    if pa.types.is_timestamp(type_):
        times = column.cast(pa.timestamp("us", type_.tz)).cast(pa.int64())
    elif pa.types.is_date(type_):
        times = column.cast(pa.timestamp("us")).cast(pa.int64())
    else:
        # A value out of range gives null, as in Spark's own arithmetic before a shuffle.
        values = column.cast(pa.int64())
        limit = (2**63 - 1) // 1000
        fits = pc.and_(pc.less_equal(values, limit), pc.greater_equal(values, -limit))
        kept = pc.if_else(fits, values, pa.scalar(None, pa.int64()))
        times = pc.multiply(kept, 1000)
    return pc.add(times, inlet.shift_us) if inlet.shift_us else times
