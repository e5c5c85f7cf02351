"""The first n rows of each key by some columns, and changes of their ranks.

    best    per key: the number of a row -> the row

Rows that are equal in the columns of `by` come in the order of `row_order`. The rows of an epoch
are compared with each other as they come, and with the state at its end. So the state of a key is
read and written once per epoch, and the ranks before it are at hand.

Always true here:
- a key has at most n rows in state, and a row keeps its number for as long as it is there;
- an epoch emits a row whose rank is another one than before, once, with its new rank, or null if
  it has left the first n;
- the result does not depend on the order of rows, nor on how they are cut into batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import BatchContext
from cairn.operators.aggregates.grouping import Ints, first_rows, number_values
from cairn.operators.aggregates.parts import Bools
from cairn.operators.idle import RowKeeper
from cairn.operators.row_order import count_before, order_codes, pack_codes, row_order
from cairn.state import TTL, Declaration, Map
from cairn.types import type_ddl

if TYPE_CHECKING:
    from cairn.backends.handles.batch import ColumnMapHandle

RANK = "rank"
PART_ROWS_MAX = 512 * 1024
PART_BYTES_TARGET = 256 << 20


class By(NamedTuple):
    """A column that rows are ordered by: nulls are least, as in Spark."""

    column: str
    is_descending: bool


class Waiting(NamedTuple):
    """Rows of the epoch that may be among the first n of their keys."""

    keys: pa.Array
    rows: pa.StructArray


class Top(RowKeeper):
    result_time = ""
    """None: a row comes again, with its old time, whenever its rank changes."""
    best: ColumnMapHandle

    def __init__(self, n: int, by: Sequence[By], schema: pa.Schema, ttl: TTL | None) -> None:
        super().__init__(schema, ttl)
        self.n = n
        self.by = tuple(by)
        self.schema = schema.append(pa.field(RANK, pa.int32()))
        """Schema of the results."""

    def declare_state(self) -> dict[str, Declaration]:
        best: Map[int, Any] = Map("bigint", self.row_type)
        best.name = "best"
        return {"best": best, **super().declare_state()}

    def forget(self, keys: pa.Array) -> None:
        at, numbers, rows = self.best.of_keys(keys)
        self.best.put_many(keys.take(at), numbers, pa.nulls(len(rows), self.row_type))

    def begin_epoch(self, ctx: BatchContext) -> None:
        super().begin_epoch(ctx)
        self._waiting: list[Waiting] = []
        self._waiting_rows = 0
        self._waiting_rows_max = PART_ROWS_MAX

    def process(self, batch: pa.RecordBatch, ctx: BatchContext) -> None:
        at, count = number_values(ctx.keys)
        if self.ttl is not None:
            self.see(ctx.keys.take(pa.array(first_rows(at, count))), at, ctx)
        self._wait(ctx.keys, at, self.rows_of(batch))
        if self._waiting_rows > self._waiting_rows_max:
            parts = list(self._parts())
            self._waiting, self._waiting_rows = [], 0
            for keys, rows in parts:
                self._wait(keys, number_values(keys)[0], rows)
            self._waiting_rows_max = max(PART_ROWS_MAX, 2 * self._waiting_rows)

    def _wait(self, keys: pa.Array, at: Ints, rows: pa.StructArray) -> None:
        """Keep the first n rows of each key for the end of the epoch."""
        order, _ = sort_rows(at, self._codes(rows), rows, self.n)
        kept = pa.array(order)
        self._waiting.append(Waiting(keys.take(kept), rows.take(kept)))
        self._waiting_rows += len(order)

    def _codes(self, rows: pa.StructArray) -> list[Ints]:
        return [
            code
            for by in self.by
            for code in order_codes(rows.field(by.column), is_descending=by.is_descending)
        ]

    def _parts(self) -> Iterator[Waiting]:
        """Yield the waiting rows in parts of bounded size, all rows of a key in one."""
        waiting = self._waiting
        if not waiting:
            return
        byte_count = sum(part.rows.nbytes for part in waiting)
        part_count = max(
            -(-self._waiting_rows // PART_ROWS_MAX), -(-byte_count // PART_BYTES_TARGET)
        )
        if part_count == 1:
            yield _concat(waiting)
            return
        at, count = number_values(pa.concat_arrays([part.keys for part in waiting]))
        part_of_row = at * part_count // count
        ends = np.cumsum([len(part.keys) for part in waiting])[:-1]
        pieces = np.split(part_of_row, ends)
        for number in range(part_count):
            masks = [pa.array(piece == number) for piece in pieces]
            yield _concat(
                [
                    Waiting(keys.filter(mask), rows.filter(mask))
                    for (keys, rows), mask in zip(waiting, masks, strict=True)
                ]
            )

    def end_epoch(self, ctx: BatchContext) -> Iterator[pa.RecordBatch]:
        for keys, rows in self._parts():
            yield self._settle(keys, rows)
        self._waiting, self._waiting_rows = [], 0

    def _settle(self, row_keys: pa.Array, new_rows: pa.StructArray) -> pa.RecordBatch:
        """Merge rows with those in state, and return the rows whose rank has changed."""
        new_at, count = number_values(row_keys)
        keys = row_keys.take(pa.array(first_rows(new_at, count)))
        held_index, numbers, held_rows = self.best.of_keys(keys)
        held_count = len(held_index)
        at = np.concatenate([held_index.to_numpy(), new_at])
        rows = pa.concat_arrays([held_rows, new_rows])
        order, ranks = sort_rows(at, self._codes(rows), rows)
        key_at, is_held = at[order], order < held_count
        is_kept = ranks <= self.n
        ranks_before = count_before(key_at, is_held) + 1
        is_out = is_held & ~is_kept
        is_in = ~is_held & is_kept
        self._store(keys, key_at, numbers.to_numpy(), order, rows, is_out, is_in)
        changed = is_out | is_in | (is_held & (ranks != ranks_before))
        emitted = rows.take(pa.array(order[changed]))
        rank = pa.array(ranks[changed].astype(np.int32), mask=~is_kept[changed])
        return pa.RecordBatch.from_arrays([*emitted.flatten(), rank], schema=self.schema)

    def _store(
        self,
        keys: pa.Array,
        key_at: Ints,
        numbers: Ints,
        order: Ints,
        rows: pa.StructArray,
        is_out: Bools,
        is_in: Bools,
    ) -> None:
        """Write the rows that came in under the numbers of those that went out, then new ones."""
        # The next free number of each key.
        free = np.zeros(len(keys), np.int64)
        is_held = order < len(numbers)
        np.maximum.at(free, key_at[is_held], numbers[order[is_held]] + 1)
        out_at, out_numbers = key_at[is_out], numbers[order[is_out]]
        in_at, in_rows = key_at[is_in], rows.take(pa.array(order[is_in]))
        out_count = np.bincount(out_at, minlength=len(keys))
        out_start = np.cumsum(out_count) - out_count
        place = count_before(in_at, np.ones(len(in_at), np.bool_))
        is_reused = place < out_count[in_at]
        in_numbers = free[in_at] + place - out_count[in_at]
        in_numbers[is_reused] = out_numbers[out_start[in_at[is_reused]] + place[is_reused]]
        if len(in_at):
            self.best.put_many(keys.take(pa.array(in_at)), pa.array(in_numbers), in_rows)
        # Fewer rows came in than went out only where n is less than it was.
        in_count = np.bincount(in_at, minlength=len(keys))
        unused = count_before(out_at, np.ones(len(out_at), np.bool_)) >= in_count[out_at]
        if unused.any():
            gone = pa.nulls(int(unused.sum()), self.row_type)
            self.best.put_many(
                keys.take(pa.array(out_at[unused])), pa.array(out_numbers[unused]), gone
            )


def parse_by(by: str | Sequence[str], schema: pa.Schema) -> list[By]:
    """Return the columns that rows are ordered by: "price desc", or several of them."""
    texts = [by] if isinstance(by, str) else list(by)
    if len(texts) == 1 and texts[0] not in schema.names:
        texts = texts[0].split(",")
    found = [_parse_one(text, schema) for text in texts]
    names = [each.column for each in found]
    if not names or len(set(names)) < len(names):
        raise PlanError(
            f"by of top is {by!r}\n"
            "  expected: one or several columns, each once, as in 'price desc'"
        )
    return found


def _parse_one(text: str, schema: pa.Schema) -> By:
    name, is_descending = text.strip(), False
    if name not in schema.names:
        name, _, word = name.rpartition(" ")
        if word.lower() not in ("asc", "desc"):
            name = text.strip()
        is_descending = word.lower() == "desc"
        name = name.strip()
    if name not in schema.names:
        raise PlanError(
            f"by of top: no column {name!r}\n  found: {', '.join(schema.names)}", column=name
        )
    type_ = schema.field(name).type
    if pa.types.is_nested(type_) or pa.types.is_null(type_):
        raise PlanError(
            f"by of top: column {name!r} is {type_ddl(type_)}\n"
            "  expected: a number, a boolean, a time, text or bytes",
            column=name,
        )
    return By(name, is_descending)


def check_top(n: int, schema: pa.Schema) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise PlanError(f"n of top must be a positive number, found {n!r}")
    if RANK in schema.names:
        raise PlanError(
            f"results of top have a column {RANK!r}, and so has the stream\n"
            "  next: give the column of the stream another name",
            column=RANK,
        )


def sort_rows(
    at: Ints, codes: Sequence[Ints], rows: pa.StructArray, n: int | None = None
) -> tuple[Ints, Ints]:
    """Return the rows by key, then by these codes, then by all columns, and their ranks.

    Only the first n rows of each key are returned, if n is given.
    """
    packed = pack_codes(at, codes)
    order = np.argsort(packed)
    ordered = packed[order]
    is_other = np.zeros(len(order), np.bool_)
    is_other[1:] = ordered[1:] != ordered[:-1]
    run = np.cumsum(is_other)
    places = _places(at[order])
    if n is not None:
        # All rows of a run may be the first ones, so a run is taken whole.
        starts = np.concatenate([[0], np.flatnonzero(is_other)])[: len(order)]
        kept = places[starts][run] < n if len(order) else is_other
        order, run, places = order[kept], run[kept], places[kept]
    is_tied = np.bincount(run, minlength=1)[run] > 1
    if is_tied.any():
        where = np.flatnonzero(is_tied)
        # Equal rows stay in the order in which they are given.
        tied = order[where][np.lexsort((order[where], run[where]))]
        by_value = row_order(rows.take(pa.array(tied)))
        order[where] = tied[by_value][np.argsort(run[where][by_value], kind="stable")]
    if n is not None:
        kept = places < n
        order, places = order[kept], places[kept]
    return order, places + 1


def _places(key_at: Ints) -> Ints:
    return count_before(key_at, np.ones(len(key_at), np.bool_))


def _concat(parts: Sequence[Waiting]) -> Waiting:
    if len(parts) == 1:
        return parts[0]
    return Waiting(*(pa.concat_arrays(list(each)) for each in zip(*parts, strict=True)))
