"""Aggregates of windows: an accumulator per key and window, merged by the batch.

    windows    per key: the end of a window -> its start, accumulators, and what it has emitted

A window is emitted at the end of the first epoch whose watermark has reached its end, and again
at the end of an epoch that has rows for it within the allowed lateness. Early triggers are checked
at the end of an epoch too.

Always true here:
- a row is judged by its windows: it is late when all of them are gone;
- a window is removed when the watermark has passed its end by the allowed lateness;
- sessions of a key neither overlap nor touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cairn.functions import LATE, BatchContext
from cairn.operators.aggregates import assign
from cairn.operators.aggregates.accumulate import Accumulators
from cairn.operators.aggregates.grouping import first_rows, number_pairs, number_values
from cairn.operators.aggregates.held import META, NEVER, Held
from cairn.operators.aggregates.partial import Layout
from cairn.operators.aggregates.parts import Bools, Ints, plain
from cairn.operators.aggregates.running import Aggregation
from cairn.operators.aggregates.sessions import ParentSessions, Spans, mark_touching, unite
from cairn.operators.aggregates.sets import Bag, join_bags, renumber, spread_bags
from cairn.operators.context import ColumnContext
from cairn.operators.window_process import WindowPlan
from cairn.state import Declaration, Map
from cairn.types.durations import MAX_MS
from cairn.windows import Count, Global, Session, Sliding, complete_ms

if TYPE_CHECKING:
    from cairn.backends.handles.batch import ColumnMapHandle


class WindowAggregate(Aggregation):
    windows: ColumnMapHandle

    def __init__(
        self,
        plan: WindowPlan,
        accumulators: Accumulators,
        layout: Layout,
        schema: pa.Schema,
        *,
        changes: bool = False,
    ) -> None:
        super().__init__(accumulators, layout, schema, changes=changes, in_windows=True)
        self.plan = plan
        self.result_time = None if isinstance(plan.windows, Global) else "window_end"
        assert not isinstance(plan.windows, Count), "these are of CountAggregate"
        self._spec = plan.windows
        self._is_global = isinstance(plan.windows, Global)
        self._by_event = plan.windows.time == "event" and not self._is_global
        self._lateness_us = plan.allowed_lateness_ms * 1000
        # A session includes a row at its very end, so it is complete when its end has passed.
        self._past_us = 1 if isinstance(plan.windows, Session) else 0
        self.result_shift_us = self._past_us - 1
        self._fields = [*META, *accumulators.fields, *self.emitter.fields]

    def declare_state(self) -> dict[str, Declaration]:
        declaration: Map[int, Any] = Map("bigint", pa.struct(self._fields))
        declaration.name = "windows"
        # Early results by the clock look at every open window.
        declaration.by_time = self.plan.early_ms is None
        return {"windows": declaration} | self.sets.declare_state()

    def begin_epoch(self, ctx: BatchContext) -> None:
        super().begin_epoch(ctx)
        self._touched: list[tuple[pa.Array, pa.Array]] = []
        self._withdrawn: list[pa.RecordBatch] = []
        """Results of sessions that are part of other ones now."""
        self._parent_sessions = ParentSessions()

    # Rows

    def process(self, batch: pa.RecordBatch, ctx: ColumnContext) -> None:  # type: ignore[override]
        counts = plain(batch[self.layout.count])
        now_us = ctx.now_ms * 1000
        times = plain(ctx.times_us) if self._by_event else np.full(batch.num_rows, now_us)
        if isinstance(self._spec, Session):
            self._take_sessions(self._spec, batch, ctx, times, counts)
        else:
            self._take(batch, ctx, times, counts)

    def _removal_us(self, ctx: BatchContext) -> int | None:
        """Return the time up to which ended windows are removed."""
        if not self._by_event or ctx.late_ms is None:
            return None
        return int(ctx.late_ms * 1000 - self._lateness_us - self._past_us)

    def _take(self, batch: pa.RecordBatch, ctx: ColumnContext, times: Ints, counts: Ints) -> None:
        assert not isinstance(self._spec, Session)
        keys, panes = ctx.keys, assign.panes(self._spec, times)
        removed_us = self._removal_us(ctx)
        if removed_us is not None:
            is_late = assign.last_ends(self._spec, panes) <= removed_us
            if is_late.any():
                self._drop_late(batch, ctx, is_late, counts)
                in_time = pa.array(~is_late)
                batch, keys = batch.filter(in_time), keys.filter(in_time)
                panes, counts = panes[~is_late], counts[~is_late]
        if not len(panes):
            return
        key_at, key_count = number_values(keys)
        at, count = number_pairs(key_at, key_count, *number_values(pa.array(panes)))
        bags, group_count = self.sets.collect(batch, at, count)
        self.partial_count += group_count
        first = first_rows(at, count)
        columns, starts = self.read(batch), panes[first]
        ends = assign.last_ends(self._spec, starts)
        if isinstance(self._spec, Sliding):
            # A pane is in several windows: it is merged once, then added to each of them.
            columns = self.accumulators.merge_rows(at, count, columns)
            counts = _sum_rows(at, counts, count)
            pane_at, starts, ends = assign.windows(self._spec, starts)
            if removed_us is not None and (ends <= removed_us).any():
                is_open = ends > removed_us
                pane_at, starts, ends = pane_at[is_open], starts[is_open], ends[is_open]
            columns, counts = self.accumulators.take(columns, pane_at), counts[pane_at]
            at, count = number_pairs(
                key_at[first][pane_at], key_count, *number_values(pa.array(ends))
            )
            bags = spread_bags(bags, pane_at, at)
            one = first_rows(at, count)
            first, starts, ends = first[pane_at[one]], starts[one], ends[one]
        window_keys = keys.take(pa.array(first))
        entries = pa.array(ends)
        held = self._load(self.windows.get_many(window_keys, entries))
        self.accumulators.merge(held.columns, at, columns)
        self.sets.add(bags, window_keys, starts, held.columns)
        more = _sum_rows(at, counts, count)
        self._keep(ctx, window_keys, entries, held._replace(starts=starts), more)

    def _take_sessions(
        self,
        spec: Session,
        batch: pa.RecordBatch,
        ctx: ColumnContext,
        times: Ints,
        counts: Ints,
    ) -> None:
        gap_us = spec.gap_ms * 1000
        key_at, key_count = number_values(ctx.keys)
        keys = ctx.keys.take(pa.array(first_rows(key_at, key_count)))
        indices, entries, values = self.windows.of_keys(keys)
        known = Spans(plain(indices), plain(values.field("start")), plain(entries))
        self._parent_sessions.add(keys, known)
        is_late = self._find_late(ctx, Spans(key_at, times, times + gap_us))
        if is_late.any():
            self._drop_late(batch, ctx, is_late, counts)
            batch = batch.filter(pa.array(~is_late))
            key_at, times, counts = key_at[~is_late], times[~is_late], counts[~is_late]
        if not len(times):
            return
        at, sessions = unite(Spans(key_at, times, times + gap_us))
        bags, group_count = self.sets.collect(batch, at, len(sessions.keys))
        self.partial_count += group_count
        columns = self.accumulators.merge_rows(at, len(sessions.keys), self.read(batch))
        rows = _sum_rows(at, counts, len(sessions.keys))
        # Known and new sessions, united.
        held = self._load(values)
        both = Spans(*(np.concatenate(pair) for pair in zip(known, sessions, strict=True)))
        number, unions = unite(both)
        count = len(unions.keys)
        is_changed = np.zeros(count, np.bool_)
        is_changed[number[len(known.keys) :]] = True
        replaced = np.flatnonzero(is_changed[number[: len(known.keys)]])
        if self.sets:
            bags = self._unite_sets(keys, known, held, unions, number, bags)
        merged = self.accumulators.merge_rows(
            number, count, self.accumulators.concat(held.columns, columns)
        )
        self.sets.add(bags, keys.take(pa.array(unions.keys)), unions.starts, merged)
        early_at = np.full(count, NEVER)
        np.minimum.at(early_at, number[: len(known.keys)], held.early_at)
        before = _sum_rows(number[: len(known.keys)], held.rows, count)
        more = _sum_rows(number[len(known.keys) :], rows, count)
        changed = np.flatnonzero(is_changed)
        at_replaced = pa.array(replaced)
        shown = self._replace_shown(keys, known, held, unions, number, replaced, changed)
        self._remove(keys.take(indices.take(at_replaced)), entries.take(at_replaced))
        taken = Held(
            unions.starts[changed],
            before[changed],
            np.zeros(len(changed), np.bool_),
            early_at[changed],
            self.accumulators.take(merged, changed),
            shown,
        )
        session_keys = keys.take(pa.array(unions.keys[changed]))
        self._keep(ctx, session_keys, pa.array(unions.ends[changed]), taken, more[changed])

    def _find_late(self, ctx: ColumnContext, rows: Spans) -> Bools:
        """Mark rows whose session alone would be gone, and that touch none of the parent's."""
        removed_us = self._removal_us(ctx)
        if removed_us is None:
            return np.zeros(len(rows.keys), np.bool_)
        is_late: Bools = rows.ends <= removed_us
        if is_late.any():
            # Not those of this epoch: it would depend on the calls that rows are cut into.
            numbers, known = self._parent_sessions.find()
            alone = Spans(numbers[rows.keys[is_late]], rows.starts[is_late], rows.ends[is_late])
            is_open = known.ends > removed_us
            is_late[is_late] = ~mark_touching(alone, Spans(*(c[is_open] for c in known)))
        return is_late

    def _replace_shown(
        self,
        keys: pa.Array,
        known: Spans,
        held: Held,
        unions: Spans,
        number: Ints,
        replaced: Ints,
        changed: Ints,
    ) -> list[pa.Array]:
        """Return what is kept of the results of changed sessions; take the others' back.

        A session with other bounds than before has another result, not a changed one.
        """
        if not held.shown:
            return []
        at = number[replaced]
        stays = (known.starts[replaced] == unions.starts[at]) & (
            known.ends[replaced] == unions.ends[at]
        )
        if self.emitter.changes:
            gone = replaced[~stays]
            rows = pa.array(gone)
            bounds = [pa.array(known.starts[gone]), pa.array(known.ends[gone])]
            prefix = [*self.key_columns(keys.take(pa.array(known.keys[gone]))), *bounds]
            withdrawn = self.emitter.withdraw(prefix, held.shown[0].take(rows))
            self._withdrawn.append(self.result(withdrawn))
        kept = np.full(len(unions.keys), -1, np.int64)
        kept[at[stays]] = replaced[stays]
        kept = kept[changed]
        return held.take_shown(pa.array(kept, mask=kept < 0))

    def _unite_sets(
        self,
        keys: pa.Array,
        known: Spans,
        held: Held,
        unions: Spans,
        number: Ints,
        bags: Sequence[Bag],
    ) -> list[Bag]:
        """Return the values to add to united sessions; values are kept under a session's start.

        A session that begins earlier now, or is one with another, gives its values away.
        """
        known_number, fresh_number = number[: len(known.keys)], number[len(known.keys) :]
        moved = np.flatnonzero(known.starts != unions.starts[known_number])
        given = self.sets.remove(keys.take(pa.array(known.keys[moved])), known.starts[moved])
        self.sets.forget(held.columns, moved)
        joined = join_bags(given, bags)
        numbers = [
            np.concatenate([known_number[moved[old.at]], fresh_number[new.at]])
            for old, new in zip(given, bags, strict=True)
        ]
        return renumber(joined, None, numbers)

    def _drop_late(
        self, batch: pa.RecordBatch, ctx: ColumnContext, is_late: Bools, counts: Ints
    ) -> None:
        """Count late rows, and emit them on the side output if it is read."""
        ctx.count_late(int(counts[is_late].sum()))
        if self.layout.row is not None and LATE in ctx.sides:
            rows = batch[self.layout.row].filter(pa.array(is_late))
            ctx.output(LATE, pa.RecordBatch.from_struct_array(rows))

    # State

    def _load(self, values: pa.Array) -> Held:
        starts, rows, fired, early_at, *columns = values.flatten()
        count = len(self.accumulators.fields)
        return Held(
            plain(starts),
            plain(rows),
            plain(fired.fill_null(False)),
            plain(early_at.fill_null(NEVER)),
            self.accumulators.load(columns[:count]),
            columns[count:],
        )

    # Keys and entries are the same array objects as in the read: state has cached their positions.

    def _keep(
        self, ctx: BatchContext, keys: pa.Array, entries: pa.Array, held: Held, more: Ints
    ) -> None:
        """Store windows that have got `more` rows."""
        early_at = held.early_at
        if self.plan.early_ms is not None:
            early_at = np.minimum(early_at, ctx.now_ms + self.plan.early_ms)
        fired = np.zeros(len(entries), np.bool_)
        rows = held.rows + more
        self._put(keys, entries, held._replace(rows=rows, fired=fired, early_at=early_at))
        if self.plan.early_rows is not None:
            self._touched.append((keys, entries))

    def _put(self, keys: pa.Array, entries: pa.Array, held: Held) -> None:
        arrays = [
            pa.array(held.starts),
            pa.array(held.rows),
            pa.array(held.fired),
            pa.array(held.early_at, mask=held.early_at == NEVER),
            *self.accumulators.store(held.columns),
            *held.shown,
        ]
        struct = pa.StructArray.from_arrays(arrays, fields=self._fields)
        self.windows.put_many(keys, entries, struct)

    def _remove(self, keys: pa.Array, entries: pa.Array) -> None:
        if len(entries):
            nulls = pa.nulls(len(entries), pa.struct(self._fields))
            self.windows.put_many(keys, entries, nulls)

    # Results

    def end_epoch(self, ctx: BatchContext) -> list[pa.RecordBatch]:
        results: list[pa.RecordBatch | None] = [*self._withdrawn, self._complete(ctx)]
        if self.plan.early_rows is not None or self.plan.early_ms is not None:
            results.append(self._early(ctx))
        return [batch for batch in results if batch is not None]

    def _due_us(self, ctx: BatchContext) -> int | None:
        """Return the time up to which ended windows are complete."""
        if ctx.watermark_ms == MAX_MS:
            # The job is drained: time has ended.
            return NEVER
        if self._is_global:
            return None
        if self._by_event:
            return None if ctx.watermark_ms is None else ctx.watermark_ms * 1000 - self._past_us
        return int(ctx.now_ms * 1000 - self._past_us)

    def _complete(self, ctx: BatchContext) -> pa.RecordBatch | None:
        due_us = self._due_us(ctx)
        if due_us is None:
            return None
        keys, entries, values = self.windows.between(None, due_us)
        if not len(entries):
            return None
        ends, held = plain(entries), self._load(values)
        # The global window stays: rows may come after a drain.
        is_new = held.rows > 0 if self._is_global else ~held.fired
        is_gone = np.zeros(len(ends), np.bool_)
        if not self._is_global:
            is_gone = ends <= due_us - self._lateness_us
        if self.sets:
            gone = np.flatnonzero(is_gone)
            self.sets.remove(keys.take(pa.array(gone)), held.starts[gone])
        if is_gone.all():
            self._remove(keys, entries)
        else:
            gone = pa.array(is_gone)
            self._remove(keys.filter(gone), entries.filter(gone))
        return self._results(
            keys, entries, held, np.flatnonzero(is_new), fired=not self._is_global, is_gone=is_gone
        )

    def _early(self, ctx: BatchContext) -> pa.RecordBatch | None:
        due_us = self._due_us(ctx)
        if self.plan.early_ms is not None:
            # By the clock any window may be due, not only those with new rows.
            keys, entries, values = self.windows.between(due_us, None)
        elif self._touched:
            keys = pa.concat_arrays([keys for keys, _ in self._touched])
            entries = pa.concat_arrays([entries for _, entries in self._touched])
            once = pa.array(
                first_rows(*number_pairs(*number_values(keys), *number_values(entries)))
            )
            keys, entries = keys.take(once), entries.take(once)
            values = self.windows.get_many(keys, entries)
        else:
            return None
        if not len(entries):
            return None
        held = self._load(values)
        is_due = held.early_at <= ctx.now_ms
        if self.plan.early_rows is not None:
            is_due |= held.rows >= self.plan.early_rows
        # Complete windows have been emitted, and merged sessions no longer exist.
        is_due &= (held.rows > 0) & ~held.fired
        is_gone = np.zeros(len(entries), np.bool_)
        return self._results(
            keys, entries, held, np.flatnonzero(is_due), fired=False, is_gone=is_gone
        )

    def _results(
        self,
        keys: pa.Array,
        entries: pa.Array,
        held: Held,
        rows: Ints,
        *,
        fired: bool,
        is_gone: Bools,
    ) -> pa.RecordBatch | None:
        """Return the results of some of these windows; store that those still there are emitted."""
        if not len(rows):
            return None
        if len(rows) < len(entries):
            taken = pa.array(rows)
            keys, entries = keys.take(taken), entries.take(taken)
            held = held.take(self.accumulators, rows)
        bounds = [pa.array(held.starts), entries]
        if self._is_global:
            bounds = [pa.nulls(len(rows), pa.int64())] * 2
        result, shown = self.emit([*self.key_columns(keys), *bounds], held.columns, held.shown)
        stays = np.flatnonzero(~is_gone[rows])
        if len(stays):
            emitted = held._replace(
                rows=np.zeros(len(rows), np.int64),
                fired=np.full(len(rows), fired),
                early_at=np.full(len(rows), NEVER),
                shown=shown,
            )
            if len(stays) < len(rows):
                taken = pa.array(stays)
                keys, entries = keys.take(taken), entries.take(taken)
                emitted = emitted.take(self.accumulators, stays)
            self._put(keys, entries, emitted)
        return result

    def next_timer(self, ctx: BatchContext) -> tuple[int | None, int | None]:
        """Return the next times, by event time and by the clock, of a result without a row."""
        event_ms: int | None = None
        clock_ms: int | None = None
        if self._is_global:
            # Only draining completes it, and leaves nothing to emit. Before that, any window may
            # have something to emit: reading all of them in every epoch would cost too much.
            if ctx.watermark_ms != MAX_MS and self.windows.entry_above(None) is not None:
                clock_ms = MAX_MS
        elif (end_us := self.windows.entry_above(self._due_us(ctx))) is not None:
            at_ms = complete_ms(self._spec, end_us)
            event_ms, clock_ms = (at_ms, None) if self._by_event else (None, at_ms)
        if self.plan.early_ms is not None:
            _, _, values = self.windows.between(self._due_us(ctx), None)
            early = plain(values.field("early_at").fill_null(NEVER))
            early_ms = int(early.min()) if len(early) else NEVER
            if early_ms != NEVER:
                clock_ms = early_ms if clock_ms is None else min(clock_ms, early_ms)
        return event_ms, clock_ms


def _sum_rows(at: Ints, values: Ints, count: int) -> Ints:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, at, values)
    return sums
