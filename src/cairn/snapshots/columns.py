"""The columns of a state, from a manifest alone: in memory, in Parquet, in a base.

A state is a table of rows `group, key, value`; map state also has an `entry`, and the value of
list state is a list. The key of an operator list is the subtask, its entry the place of an item;
the key of broadcast state is its map key. In Parquet the first column is called `key_group`.
State that expires has a last column `at`, the time of the last write in milliseconds (for list
state a list with one time per item).

Always true here:
- `of_stored` leaves out rows that have expired as of `floor_ms`;
- no user code is needed: types come from the DDL in the manifest;
- `from_parquet` reverses `to_parquet`, for every type that can be declared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.state import TTL, Declaration, List, Map, Value
from cairn.storage.manifest import StateDecl
from cairn.types import parse_type
from cairn.types.codec import Codec, codec
from cairn.types.codec.stamped import join_stamps, list_parts, split_stamps, stamp_type

GROUP: Final = "group"
PARQUET_GROUP: Final = "key_group"
# Parquet has no struct without fields, so an empty one gets a field that is always null.
_FILLER: Final = pa.field("_", pa.bool_())


class StateColumns:
    """One state of an operator: its declaration, and its columns with their types."""

    def __init__(
        self,
        name: str,
        decl: StateDecl,
        key_types: dict[str, str],
        floor_ms: Mapping[str, int | None] | None = None,
    ) -> None:
        """`floor_ms`: the current time, by each clock of a ttl."""
        self.name = name
        self.ttl = TTL.of(decl.ttl)
        self.floor_ms = None
        if self.ttl is not None and floor_ms is not None:
            self.floor_ms = floor_ms[self.ttl.clock]
            if self.floor_ms is not None and self.ttl.clock == "event":
                self.floor_ms -= decl.delay_ms
        self.decl = decl
        self.key_names = list(key_types)
        self.key_type = _key_type(key_types)
        self.declaration = _declaration(name, decl)
        self.keys: Codec = codec(self.key_type)
        self.values: Codec = codec(self.declaration.type)
        self.entries: Codec | None = None
        columns = {GROUP: pa.int32(), "key": self.keys.arrow}
        if decl.entry_type is not None:
            self.entries = codec(self.declaration.entry_type)
            columns["entry"] = self.entries.arrow
        value = self.values.arrow
        columns["value"] = pa.list_(pa.field("element", value)) if decl.kind == "list" else value
        self.whole_values = codec(columns["value"]) if decl.kind == "list" else self.values
        if self.ttl is not None:
            columns["at"] = pa.list_(pa.int64()) if decl.kind == "list" else pa.int64()
        self.schema = pa.schema(list(columns.items()))
        self.parquet_schema = pa.schema(
            [
                (PARQUET_GROUP if name == GROUP else name, _parquet_type(type))
                for name, type in columns.items()
            ]
        )
        self.stored_schema = pa.schema(_make_stored_fields(self.schema, decl))

    @property
    def place_names(self) -> list[str]:
        """The columns that identify a row: key, and entry for maps."""
        return [name for name in self.schema.names if name in ("key", "entry")]

    @property
    def is_ordered_by_arrow(self) -> bool:
        """True if Arrow compares keys (and entries) as Python does."""
        return is_plain(self.key_type) and (self.entries is None or is_plain(self.entries.arrow))

    @property
    def is_merged_by_arrow(self) -> bool:
        """True if Arrow alone can find the last row of each place."""
        return all(map(is_plain, self._place_types)) and self.decl.kind != "list"

    def places(self, rows: pa.Table | pa.RecordBatch) -> list[Any]:
        """Return the columns that identify a row; a key of several columns as one each."""
        found: list[Any] = []
        for name in self.place_names:
            column = rows[name]
            is_key = name == "key" and len(self.key_names) > 1
            found += column.flatten() if is_key else [column]
        return found

    @property
    def _place_types(self) -> list[pa.DataType]:
        types = list(self.key_type) if len(self.key_names) > 1 else [self.key_type]
        keys = [each.type if isinstance(each, pa.Field) else each for each in types]
        return keys if self.entries is None else [*keys, self.entries.arrow]

    def of_stored(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a base as plain rows."""
        found = {name: batch[name] for name in batch.schema.names}
        if self.ttl is not None:
            found["at"], found["value"] = split_stamps(batch["value"])
            if self.floor_ms is not None:
                found = _visible(found, self.floor_ms - self.ttl.ms)
        if _has_hidden_nulls(found["value"]):
            found["value"] = self.whole_values.encode(self.whole_values.decode(found["value"]))
        columns = [_cast(found[name], self.schema.field(name).type) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def to_stored(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return plain rows as rows of a base."""
        count = batch.num_rows
        extra = {
            "start": lambda: pa.nulls(count, pa.int64()).fill_null(0),
            "live": lambda: pa.nulls(count, pa.bool_()).fill_null(True),
        }
        found = {name: batch[name] for name in batch.schema.names}
        if self.ttl is not None:
            found["value"] = join_stamps(batch["at"], batch["value"], extra["live"]())
        columns = [
            extra[field.name]() if field.name in extra else _cast(found[field.name], field.type)
            for field in self.stored_schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.stored_schema)

    def to_parquet(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        types = self.parquet_schema.types
        columns = [_cast(c, t) for c, t in zip(batch.columns, types, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.parquet_schema)

    def from_parquet(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [_cast(c, t) for c, t in zip(batch.columns, self.schema.types, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def decode(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, Any, Any]]:
        """Return (key, entry, value) of plain rows; keys and entries can be keys of a dict.

        The entry is None except for map state. Objects stay pickled.
        """
        entries: Any = repeat(None, batch.num_rows)
        if self.entries is not None:
            entries = self.entries.decode_keys(batch["entry"])
        keys = self.keys.decode_keys(batch["key"])
        return zip(keys, entries, self.whole_values.decode(batch["value"]), strict=True)


def _key_type(key_types: dict[str, str]) -> pa.DataType:
    """Return the type of the only key column, or a struct of several."""
    fields = [pa.field(name, parse_type(ddl)) for name, ddl in key_types.items()]
    return fields[0].type if len(fields) == 1 else pa.struct(fields)


def is_plain(type: pa.DataType) -> bool:
    """True if Arrow compares values of a type as Python does."""
    # Not for floats, because of NaN.
    types = pa.types
    return bool(
        types.is_integer(type)
        or types.is_string(type)
        or types.is_binary(type)
        or types.is_date32(type)
        or types.is_timestamp(type)
        or types.is_decimal(type)
    )


def _is_nullable(type: pa.DataType) -> bool:
    """True if no struct anywhere in the type has a NOT NULL field."""
    if pa.types.is_map(type):
        return _is_nullable(type.key_type) and _is_nullable(type.item_type)
    if pa.types.is_list(type):
        return _is_nullable(type.value_type)
    if pa.types.is_struct(type):
        return all(field.nullable and _is_nullable(field.type) for field in type)
    return True


def _has_hidden_nulls(array: pa.Array) -> bool:
    """True if a NOT NULL field has nulls, as it has inside a null struct."""
    type = array.type
    if _is_nullable(type):
        return False
    if pa.types.is_struct(type):
        parts = zip(type, array.flatten(), strict=True)
        return any(
            (part.null_count and not field.nullable) or _has_hidden_nulls(part)
            for field, part in parts
        )
    if pa.types.is_map(type):
        return _has_hidden_nulls(array.keys) or _has_hidden_nulls(array.items)
    return _has_hidden_nulls(array.values) if pa.types.is_list(type) else False


def _declaration(name: str, decl: StateDecl) -> Declaration:
    # Reducing and aggregating state hold a value; the function that folds them is not needed.
    declaration: Declaration
    if decl.entry_type is not None:
        declaration = Map(decl.entry_type, decl.type, ttl=decl.ttl)
    elif decl.kind == "list":
        declaration = List(decl.type, ttl=decl.ttl)
    else:
        declaration = Value(decl.type, ttl=decl.ttl)
    declaration.name = name
    return declaration


def _make_stored_fields(schema: pa.Schema, decl: StateDecl) -> list[Any]:
    head = [field for field in schema if field.name not in ("value", "at")]
    start = [pa.field("start", pa.int64())] if decl.kind == "list" else []
    value = schema.field("value")
    if decl.ttl is not None:
        if decl.kind == "list":
            items = value.type.value_field
            value = value.with_type(pa.list_(items.with_type(stamp_type(items.type))))
        else:
            value = value.with_type(stamp_type(value.type))
    return [*head, *start, value, pa.field("live", pa.bool_())]


def _visible(columns: dict[str, Any], dead_ms: int) -> dict[str, Any]:
    """Return the rows, and items of lists, that were written after `dead_ms`."""
    at = columns["at"]
    if not pa.types.is_list(at.type):
        kept = pc.greater(at, dead_ms)
        return {name: column.filter(kept) for name, column in columns.items()}
    offsets, stamps, _ = list_parts(at)
    _, items, _ = list_parts(columns["value"])
    kept = pc.greater(stamps, dead_ms)
    counts = np.concatenate([[0], np.cumsum(kept.to_numpy(zero_copy_only=False))])
    ends = pa.array(counts[offsets.to_numpy()], pa.int32())
    columns = columns | {
        "at": pa.ListArray.from_arrays(ends, stamps.filter(kept)),
        "value": pa.ListArray.from_arrays(ends, items.filter(kept)),
    }
    some = pa.array(np.diff(ends.to_numpy()) > 0)
    return {name: column.filter(some) for name, column in columns.items()}


def _parquet_type(type: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type):
        fields = [field.with_type(_parquet_type(field.type)) for field in type]
        return pa.struct(fields or [_FILLER])
    if pa.types.is_map(type):
        item = type.item_field
        return pa.map_(_parquet_type(type.key_type), item.with_type(_parquet_type(item.type)))
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_parquet_type(type.value_type)))
    return type


def _cast(column: pa.Array, type: pa.DataType) -> pa.Array:
    return column if column.type == type else column.cast(type)
