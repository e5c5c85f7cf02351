"""Convert rows of a table to stored rows of a state, and back.

Tables have the columns of `shape`, without `key_group`. Each row has a rank: kept rows come
first, then rows that were put, then patches. The highest rank wins a place: an entry of a map,
otherwise a key with all its rows.

Always true here:
- `to_plain` reverses `from_plain`;
- the result has one row per place; two rows of one rank are refused;
- stored rows have the declared types, and keys their canonical form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.errors import StateSchemaError
from cairn.snapshots.columns import GROUP, PARQUET_GROUP, StateColumns
from cairn.snapshots.shape import Shape
from cairn.types import all_nullable, schema_ddl, type_ddl
from cairn.types.codec import ValueTypeError, codec
from cairn.types.durations import MAX_MS
from cairn.types.evolution import is_wider

RANK: Final = "_cairn_rank"
KEPT: Final = 0
PUT: Final = 1
PATCH: Final = 2
"""The rank of the first patch; later ones have higher ranks."""
COPY: Final = "_cairn_copy"
"""The number of an item that every subtask got a copy of: `state.PLACE`."""
_OWN_COPY: Final = -1
_Flags = npt.NDArray[np.bool_]
Piece = tuple[pa.RecordBatch, list[Any]]
"""Rows, and their places."""


class TableRows:
    """The rows of one state, in both forms."""

    def __init__(self, operator: str, columns: StateColumns, stamp_ms: int | None = None) -> None:
        """`stamp_ms`: the write time of rows without `written_at`."""
        self.columns = columns
        self.operator = operator
        self.stamp_ms = stamp_ms
        # Records of loops are a map, so the scope does not matter here.
        self.shape = Shape(columns, "keyed")
        self.kind = self.shape.kind
        self.key_names = self.shape.key_names
        self.schema = self.shape.schema.remove(0)
        """The columns of its tables, without the key group."""
        fields = {field.name: field.type for field in self.schema}
        more = {COPY: pa.int64()} if self.kind == "operator-list" else {}
        self.staged = pa.schema([*fields.items(), *more.items(), (RANK, pa.int32())])
        """The columns of staged rows, without the key group."""

    @property
    def is_whole(self) -> bool:
        """True if all rows of a key come from one table, and are one place together."""
        return self.kind in ("list", "operator-list", "timers")

    @property
    def order(self) -> list[str]:
        """The columns that distinguish the rows of a key."""
        return [name for name in ("entry", "position", "time") if name in self.schema.names]

    # Rows of the user

    def check(self, given: pa.Schema) -> None:
        """Raise if columns or types do not fit."""
        types = {field.name: field.type for field in given}
        known = {field.name: field.type for field in self.schema}
        optional = {
            "written_at",
            PARQUET_GROUP,
            *(["subtask"] if self.kind == "operator-list" else []),
        }
        wrong = [f"no column {name!r}" for name in known if name not in {*types, *optional}]
        wrong += [
            f"an unknown column {name!r}"
            for name in types
            if name not in known and name != PARQUET_GROUP
        ]
        for name, type in types.items():
            if name in known and not _fits(type, known[name]):
                wrong.append(f"{name} {type_ddl(type)}, declared as {type_ddl(known[name])}")
        if wrong:
            raise self.refusal(wrong[0], "select and cast the columns to what is expected")
        needs_stamp = self.columns.ttl is not None and "written_at" not in types
        if needs_stamp and self.stamp_ms is None:
            raise self.refusal(
                "no column 'written_at', and the savepoint has no watermark to use instead",
                "add the time at which values were written: they expire by event time",
            )

    def stage(self, given: pa.RecordBatch, rank: int = PUT) -> pa.RecordBatch:
        """Return rows of a table in the declared types, with `rank` if they have none."""
        count = given.num_rows
        columns = []
        for field in self.staged:
            if field.name in given.schema.names:
                columns.append(self._fit(given[field.name], field))
            elif field.name == RANK:
                columns.append(pa.array(np.full(count, rank, np.int32)))
            elif field.name == "subtask":
                columns.append(pa.array(np.zeros(count, np.int32)))
            elif field.name == COPY:
                columns.append(pa.array(np.full(count, _OWN_COPY, np.int64)))
            else:
                columns.append(pa.nulls(count, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.staged)

    def with_groups(self, groups: pa.Array, staged: pa.RecordBatch) -> pa.RecordBatch:
        """Return staged rows with their key groups as the first column."""
        schema = pa.schema([(PARQUET_GROUP, pa.int32()), *self.staged])
        columns = [groups.cast(pa.int32()), *staged.columns]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _fit(self, column: pa.Array, field: pa.Field) -> pa.Array:
        loose_type = all_nullable(field.type)
        loose = column if column.type == loose_type else column.cast(loose_type)
        if field.type == loose_type:
            return loose
        # Arrow would accept a null in a NOT NULL field, or refuse it inside a null struct.
        values = codec(field.type)
        try:
            some = values.decode(loose)
            return values.encode([None if v is None else values.normalise(v) for v in some])
        except ValueTypeError as error:
            raise self.refusal(str(error), "fill in what is missing") from None

    # From stored rows

    def from_plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.kind == "operator-list":
            ranks = pa.array(np.full(batch.num_rows, KEPT, np.int32))
            # A table has no column for the number of a copy.
            columns = [batch["key"], *batch["entry"].flatten(), batch["value"], ranks]
            names = ["subtask", "position", COPY, "value", RANK]
            return pa.RecordBatch.from_arrays(columns, names).select(self.staged.names)
        rows = next(self.shape.batches([batch]), None)
        if rows is None:
            return pa.RecordBatch.from_pylist([], schema=self.staged)
        ranks = pa.array(np.full(rows.num_rows, KEPT, np.int32))
        return pa.RecordBatch.from_arrays([*rows.columns[1:], ranks], schema=self.staged)

    # To stored rows

    def to_plain(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield plain rows, given staged rows with `key_group` as the first column.

        They must be sorted by key group, then by key and place; within a place by descending
        rank, then by position or time.
        """
        for piece in self._pieces(batches):
            merged = self._merge(*piece)
            if merged.num_rows:
                yield merged

    def _pieces(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Piece]:
        """Yield the rows in pieces, with no place in two pieces."""
        held: list[Piece] = []
        for batch in batches:
            if not batch.num_rows:
                continue
            places = self.places(batch)
            cut = len(places) - 1
            while cut and _same(places[cut - 1], places[-1]):
                cut -= 1
            if held and (cut or not _same(held[-1][1][-1], places[0])):
                held.append((batch.slice(0, cut), places[:cut]))
                yield _join(held)
                held = []
            elif cut:
                yield batch.slice(0, cut), places[:cut]
            held.append((batch.slice(cut), places[cut:]))
        if held:
            yield _join(held)

    def keys(self, batch: pa.RecordBatch) -> pa.Array:
        columns = [batch[name] for name in self.key_names]
        if len(columns) == 1:
            return columns[0]
        return pa.StructArray.from_arrays(columns, fields=list(self.columns.key_type))

    def places(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the place of each row, in a form that can be compared."""
        keys = self.columns.keys.decode_keys(self.keys(batch))
        if self.kind != "map":
            return keys
        assert self.columns.entries is not None
        return list(zip(keys, self.columns.entries.decode_keys(batch["entry"]), strict=True))

    def _merge(self, batch: pa.RecordBatch, places: list[Any]) -> pa.RecordBatch:
        begins = np.ones(len(places), np.bool_)
        begins[1:] = [not _same(a, b) for a, b in pairwise(places)]
        runs = np.cumsum(begins) - 1
        ranks = batch[RANK].to_numpy()
        kept = ranks == ranks[begins][runs]
        content = batch["time" if self.kind == "timers" else "value"]
        is_null = content.is_null().to_numpy(zero_copy_only=False) & (ranks > KEPT)
        self._check(batch, places, runs, kept, is_null)
        kept &= ~is_null
        if self.kind == "timers":
            kept &= ~_again(runs, _ms_up(batch["time"]))  # A timer that is set twice is one timer.
        return self._to_stored(batch, places, runs, kept)

    def _check(
        self,
        batch: pa.RecordBatch,
        places: list[Any],
        runs: npt.NDArray[np.int64],
        kept: _Flags,
        is_null: _Flags,
    ) -> None:
        gone = kept & is_null
        for at in np.flatnonzero(gone & (batch[RANK].to_numpy() == PUT)).tolist():
            raise self.refusal(
                f"no value at {places[at]!r}", "leave such rows out; patch() deletes by them"
            )
        counts = np.bincount(runs[kept])
        if self.is_whole:
            for at in np.flatnonzero(gone & (counts[runs] > 1)).tolist():
                raise self.refusal(
                    f"{places[at]!r} is deleted by a null, and has other rows",
                    "leave out the one or the others",
                )
            if self.kind == "timers":
                self._check_times(batch, kept & ~is_null)
            else:
                self._check_positions(batch["position"], places, runs, kept & ~is_null)
        elif (counts > 1).any():
            at = int(np.flatnonzero(counts[runs] > 1)[0])
            raise self.refusal(f"{places[at]!r} several times", "leave one row of each")
        is_stamped = self.columns.ttl is None or self.stamp_ms is not None
        for name in self._never_null if is_stamped else ["written_at", *self._never_null]:
            if batch[name].null_count:
                raise self.refusal(f"a null in column {name!r}", "leave such rows out")

    @property
    def _never_null(self) -> list[str]:
        if self.kind == "map":
            return ["entry"]
        is_shared = self.kind == "operator-list" or self.columns.decl.kind == "broadcast"
        return self.key_names if is_shared else []

    def _check_times(self, batch: pa.RecordBatch, kept: _Flags) -> None:
        given = kept & (batch[RANK].to_numpy() > KEPT)
        ms = _ms_up(batch["time"])[given]
        for at_ms in ms[(ms < -MAX_MS) | (ms > MAX_MS)].tolist():
            raise self.refusal(
                f"a timer at {at_ms} ms, which is out of range",
                f"set timers up to {MAX_MS} ms, the end of the year 9999",
            )

    def _check_positions(
        self, positions: pa.Array, places: list[Any], runs: npt.NDArray[np.int64], kept: _Flags
    ) -> None:
        at = np.flatnonzero(kept)
        numbers = positions.fill_null(-1).to_numpy()
        wrong = (numbers[at] < 0) | _again(runs[at], numbers[at])
        for row in at[wrong].tolist():
            raise self.refusal(
                f"position {positions[row].as_py()} of {places[row]!r}",
                "number the items of a list from 0 on, each once",
            )

    def _to_stored(
        self, batch: pa.RecordBatch, places: list[Any], runs: npt.NDArray[np.int64], kept: _Flags
    ) -> pa.RecordBatch:
        """Return the rows that were kept, as plain rows."""
        at = np.flatnonzero(kept)
        rows = batch.take(pa.array(at))
        found: dict[str, pa.Array] = {"value": None} if self.kind == "timers" else {}
        found |= {name: rows[name] for name in rows.schema.names}
        found[GROUP] = found[PARQUET_GROUP]
        found["key"] = self.keys(rows)
        if not self.columns.is_ordered_by_arrow:
            # Floats in canonical form, as in slots.
            some = [places[row] for row in at.tolist()]
            if self.kind == "map":
                assert self.columns.entries is not None
                found["entry"] = self.columns.entries.encode([entry for _, entry in some])
                some = [key for key, _ in some]
            found["key"] = self.columns.keys.encode(some)
        if self.columns.ttl is not None:
            stamps = _floor_ms(found["written_at"])
            found["at"] = stamps if self.stamp_ms is None else stamps.fill_null(self.stamp_ms)
        if self.kind == "timers":
            found["entry"] = pa.array(_ms_up(rows["time"]))
            found["value"] = pa.array(np.ones(len(at), np.bool_))
        elif self.kind == "operator-list":
            fields = list(self.columns.schema.field("entry").type)
            places_of = [found["position"], found[COPY]]
            found["entry"] = pa.StructArray.from_arrays(places_of, fields=fields)
        elif self.kind == "list":
            begins = np.flatnonzero(np.diff(runs[at], prepend=-1))
            ends = pa.array([*begins.tolist(), len(at)], pa.int32())
            for name in ("value", "at"):
                if name in found:
                    type = self.columns.schema.field(name).type
                    found[name] = pa.ListArray.from_arrays(ends, found[name], type=type)
            found |= {name: found[name].take(pa.array(begins)) for name in (GROUP, "key")}
        schema = self.columns.schema
        return pa.RecordBatch.from_arrays([found[name] for name in schema.names], schema=schema)

    def refusal(self, found: str, next_step: str) -> StateSchemaError:
        operator, state = self.operator, self.columns.name
        return StateSchemaError(
            f"these rows do not fit state {state!r} of operator {operator!r}\n"
            f"  found: {found}\n  expected: {schema_ddl(self.schema)}\n  next: {next_step}",
            operator=operator,
            state=state,
            found=found,
            expected=schema_ddl(self.schema),
        )


def _fits(given: pa.DataType, declared: pa.DataType) -> bool:
    return type_ddl(all_nullable(given)) == type_ddl(all_nullable(declared)) or is_wider(
        given, declared
    )


def _same(left: Any, right: Any) -> bool:
    return left is right or bool(left == right)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return a table as one batch, or raise: several batches would be sorted separately."""
    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise StateSchemaError(
            f"these rows are too large for one process\n  found: {table.nbytes} bytes\n"
            "  expected: less than 2 GiB of text in a column\n"
            "  next: pass a Spark session to the SavepointWriter, and DataFrames as rows"
        )
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _join(pieces: list[Piece]) -> Piece:
    pieces = [piece for piece in pieces if piece[0].num_rows]
    if len(pieces) == 1:
        return pieces[0]
    whole = one_batch(pa.Table.from_batches([batch for batch, _ in pieces]))
    return whole, [place for _, places in pieces for place in places]


def _again(runs: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> _Flags:
    """Return a mask of rows with the same number as the previous row of their run."""
    found = np.zeros(len(runs), np.bool_)
    found[1:] = (np.diff(runs) == 0) & (np.diff(numbers) == 0)
    return found


def _ms_up(times: pa.Array) -> npt.NDArray[np.int64]:
    """Return times in milliseconds, rounded up; a null is arbitrary."""
    us: npt.NDArray[np.int64] = times.view(pa.int64()).fill_null(0).to_numpy()
    return -(-us // 1000)


def _floor_ms(times: pa.Array) -> pa.Array:
    us = times.view(pa.int64())
    return pa.array(us.fill_null(0).to_numpy() // 1000, mask=us.is_null().to_numpy(False))
