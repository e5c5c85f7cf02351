"""The rows of a state as a table has them, and the rows that are stored: from one to the other.

Tables have the columns that `shape` gives them, `key_group` left out. Where rows of several
tables meet, each has a rank: what was kept comes first, then what was put in place of it, then
corrections. The higher one wins its place: an entry of a map, otherwise a key with all it has.

Always true here:
- `to_plain` gives back the rows that `from_plain` took;
- of each place there is one word in what comes out; two of one rank are refused;
- what is stored is in the declared types, keys in the one form in which they are found again.
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
"""And more, for each one after the first."""
COPY: Final = "_cairn_copy"
"""Of an item that every subtask was handed, its number: `state.PLACE`."""
_OWN_COPY: Final = -1
_Flags = npt.NDArray[np.bool_]
Piece = tuple[pa.RecordBatch, list[Any]]
"""Rows, and the place of each."""


class TableRows:
    """One state of an operator, in both forms."""

    def __init__(self, operator: str, columns: StateColumns, stamp_ms: int | None = None) -> None:
        """`stamp_ms`: when rows that do not say it were written."""
        self.columns = columns
        self.operator = operator
        self.stamp_ms = stamp_ms
        # What is said of loops here is never shown: records are a map.
        self.shape = Shape(columns, "keyed")
        self.kind = self.shape.kind
        self.key_names = self.shape.key_names
        self.schema = self.shape.schema.remove(0)
        """What a table of it has, after the key group."""
        fields = {field.name: field.type for field in self.schema}
        more = {COPY: pa.int64()} if self.kind == "operator-list" else {}
        self.staged = pa.schema([*fields.items(), *more.items(), (RANK, pa.int32())])
        """What rows have on the way, in front of it the key group."""

    @property
    def is_whole(self) -> bool:
        """A key has all its rows of one table: they are no places of their own."""
        return self.kind in ("list", "operator-list", "timers")

    @property
    def order(self) -> list[str]:
        """The columns that tell the rows of a key apart."""
        return [name for name in ("entry", "position", "time") if name in self.schema.names]

    # What is given

    def check(self, given: pa.Schema) -> None:
        """Refuse columns and types that do not fit."""
        types = {field.name: field.type for field in given}
        known = {field.name: field.type for field in self.schema}
        optional = {
            "written_at",
            PARQUET_GROUP,
            *(["subtask"] if self.kind == "operator-list" else []),
        }
        wrong = [f"no column {name!r}" for name in known if name not in {*types, *optional}]
        wrong += [
            f"a column {name!r}, which is none of its own"
            for name in types
            if name not in known and name != PARQUET_GROUP
        ]
        for name, type in types.items():
            if name in known and not _fits(type, known[name]):
                wrong.append(f"{name} {type_ddl(type)}, where it is {type_ddl(known[name])}")
        if wrong:
            raise self.refusal(wrong[0], "select and cast the columns to what is expected")
        needs_stamp = self.columns.ttl is not None and "written_at" not in types
        if needs_stamp and self.stamp_ms is None:
            raise self.refusal(
                "no column 'written_at', and the savepoint has no watermark to take in its place",
                "say when the values were written: they expire by event time",
            )

    def stage(self, given: pa.RecordBatch, rank: int = PUT) -> pa.RecordBatch:
        """Rows of a table in the declared types, each with its rank, if it has none yet."""
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
        """Staged rows with their key groups in front."""
        schema = pa.schema([(PARQUET_GROUP, pa.int32()), *self.staged])
        columns = [groups.cast(pa.int32()), *staged.columns]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _fit(self, column: pa.Array, field: pa.Field) -> pa.Array:
        loose_type = all_nullable(field.type)
        loose = column if column.type == loose_type else column.cast(loose_type)
        if field.type == loose_type:
            return loose
        # Arrow would let a null pass where NOT NULL is declared, or refuse it under a null struct.
        values = codec(field.type)
        try:
            some = values.decode(loose)
            return values.encode([None if v is None else values.normalise(v) for v in some])
        except ValueTypeError as error:
            raise self.refusal(str(error), "fill in what is missing") from None

    # From what is stored

    def from_plain(self, batch: pa.RecordBatch, rank: int = KEPT) -> pa.RecordBatch:
        """Plain rows as staged rows of a table."""
        if self.kind == "operator-list":
            ranks = pa.array(np.full(batch.num_rows, rank, np.int32))
            # In a table of it copies cannot be told from others.
            columns = [batch["key"], *batch["entry"].flatten(), batch["value"], ranks]
            names = ["subtask", "position", COPY, "value", RANK]
            return pa.RecordBatch.from_arrays(columns, names).select(self.staged.names)
        rows = next(self.shape.batches([batch]), None)
        if rows is None:
            return pa.RecordBatch.from_pylist([], schema=self.staged)
        ranks = pa.array(np.full(rows.num_rows, rank, np.int32))
        return pa.RecordBatch.from_arrays([*rows.columns[1:], ranks], schema=self.staged)

    # To what is stored

    def to_plain(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Staged rows, with their `key_group` in front, as plain rows.

        They are sorted by key group, and in it so that those of one place, and of one key,
        are side by side: the highest rank first, then by position or time.
        """
        for piece in self._pieces(batches):
            merged = self._merge(*piece)
            if merged.num_rows:
                yield merged

    def _pieces(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Piece]:
        """Cut anew, so that no place is in two pieces."""
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
        """The key column of rows of a table."""
        columns = [batch[name] for name in self.key_names]
        if len(columns) == 1:
            return columns[0]
        return pa.StructArray.from_arrays(columns, fields=list(self.columns.key_type))

    def places(self, batch: pa.RecordBatch) -> list[Any]:
        """Whose each row is, in a form that is equal for equal ones."""
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
        said = batch["time" if self.kind == "timers" else "value"]
        is_null = said.is_null().to_numpy(zero_copy_only=False) & (ranks > KEPT)
        self._check(batch, places, runs, kept, is_null)
        kept &= ~is_null
        if self.kind == "timers":
            kept &= ~_again(runs, _ms_up(batch["time"]))  # Set twice it is one timer.
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
                f"a timer at {at_ms} ms, which is never reached",
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
        """Rows that were kept, as plain ones."""
        at = np.flatnonzero(kept)
        rows = batch.take(pa.array(at))
        found: dict[str, pa.Array] = {"value": None} if self.kind == "timers" else {}
        found |= {name: rows[name] for name in rows.schema.names}
        found[GROUP] = found[PARQUET_GROUP]
        found["key"] = self.keys(rows)
        if not self.columns.is_ordered_by_arrow:
            # Floats in one form, as slots have them.
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
    """All rows in one. What is too much for that would come in parts, each sorted by itself."""
    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise StateSchemaError(
            f"these rows are too much for one process\n  found: {table.nbytes} bytes\n"
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
    """Which rows say the same number as the one before, of the same run."""
    found = np.zeros(len(runs), np.bool_)
    found[1:] = (np.diff(runs) == 0) & (np.diff(numbers) == 0)
    return found


def _ms_up(times: pa.Array) -> npt.NDArray[np.int64]:
    """Whole milliseconds, not earlier; a null as anything."""
    us: npt.NDArray[np.int64] = times.view(pa.int64()).fill_null(0).to_numpy()
    return -(-us // 1000)


def _floor_ms(times: pa.Array) -> pa.Array:
    us = times.view(pa.int64())
    return pa.array(us.fill_null(0).to_numpy() // 1000, mask=us.is_null().to_numpy(False))
