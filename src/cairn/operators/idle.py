"""Operators that keep rows per key, and forget a key that has had no row for some time.

    idle    per key: the time of its last row, in milliseconds -> true; only with a ttl

The time of a row is the epoch's clock, or its event time for a ttl by event time. Keys are
forgotten at the beginning of an epoch.

Always true here:
- a key has one entry in `idle` if it has rows in state;
- which keys an epoch forgets depends on state, its clock and its watermark alone;
- without a ttl, or with one by the clock, no row is too late.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import BatchContext, BatchProcess, Hooks
from cairn.operators.aggregates.grouping import Ints
from cairn.state import TTL, Declaration, Map, TTLLike

if TYPE_CHECKING:
    from cairn.backends.handles.batch import ColumnMapHandle


class RowKeeper(Hooks, BatchProcess):
    """Keeps rows of one schema per key."""

    wants_order = False
    idle: ColumnMapHandle

    def __init__(self, schema: pa.Schema, ttl: TTL | None) -> None:
        self.row_type = pa.struct(list(schema))
        self.ttl = ttl
        self._by_event = self.forgets = ttl is not None and ttl.clock == "event"
        self.handles_late = not self.forgets

    def declare_state(self) -> dict[str, Declaration]:
        if self.ttl is None:
            return {}
        idle: Map[int, bool] = Map("bigint", "boolean")
        idle.name, idle.by_time = "idle", True
        return {"idle": idle}

    @abstractmethod
    def forget(self, keys: pa.Array) -> None:
        """Remove the rows of these keys."""

    def begin_epoch(self, ctx: BatchContext) -> None:
        if self.ttl is None:
            return
        now_ms = ctx.late_ms if self._by_event else ctx.now_ms
        if now_ms is None:
            return
        keys, times, _ = self.idle.between(None, now_ms - self.ttl.ms)
        if len(keys):
            self.forget(keys)
            self.idle.put_many(keys, times, pa.nulls(len(keys), pa.bool_()))

    def rows_of(self, batch: pa.RecordBatch) -> pa.StructArray:
        """Return rows in the type that state has."""
        fields = list(self.row_type)
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(batch.columns, fields, strict=True)
        ]
        return pa.StructArray.from_arrays(columns, fields=fields)

    def see(self, keys: pa.Array, at: Ints, ctx: BatchContext) -> None:
        """Note that rows came: row i of the batch has key at[i]."""
        if self.ttl is None:
            return
        times = np.full(len(keys), ctx.now_ms)
        if self._by_event:
            assert ctx.times_us is not None, "checked when the job was made"
            times[:] = np.iinfo(np.int64).min
            np.maximum.at(times, at, ctx.times_us.to_numpy() // 1000)
        held_at, held, _ = self.idle.of_keys(keys)
        place, before = held_at.to_numpy(), held.to_numpy()
        np.maximum.at(times, place, before)
        is_old = times[place] > before
        if is_old.any():
            old = pa.array(place[is_old])
            gone = pa.nulls(len(old), pa.bool_())
            self.idle.put_many(keys.take(old), pa.array(before[is_old]), gone)
        is_new = np.ones(len(keys), np.bool_)
        is_new[place[~is_old]] = False
        if is_new.any():
            new = pa.array(is_new)
            put = pa.array(times[is_new])
            self.idle.put_many(keys.filter(new), put, pa.repeat(True, len(put)))


def parse_ttl(ttl: TTLLike, what: str, *, is_timed: bool) -> TTL | None:
    """Return the ttl of an operator; refuse one that it cannot follow."""
    parsed = TTL.of(ttl)
    if parsed is None:
        return None
    if parsed.refresh != "write":
        raise PlanError(
            f"ttl of {what}: refresh={parsed.refresh!r}\n"
            "  expected: a ttl without it; every row of a key renews its state"
        )
    if parsed.clock == "event" and not is_timed:
        raise PlanError(
            f"ttl of {what} counts event time, which the rows do not have\n"
            "  next: declare event_time= at the source, or use clock='processing'"
        )
    return parsed
