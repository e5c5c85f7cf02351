"""A run that puts failing rows aside equals a run in which those rows do nothing at all.

Rows are little programs: commands to every kind of state, to timers and to the outputs, and
somewhere among them, perhaps, one that fails. The reference knows which rows and timers will
fail and leaves them out. After each step both hold the same, to the last overlay entry.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import BatchProcess, KeyedProcess, state
from cairn.backends.cached.backend import CachedBackend
from cairn.testing import Harness
from tests.backends import WITH_SERVERS
from tests.stored_harness import StoredHarness


@pytest.fixture(scope="module", autouse=True)
def small_tables() -> Any:
    """Let state of batches leave the arrays for the database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedBackend, "table_bytes_max", 100)
        yield


SCHEMA = "k long, at long, program string"
FAILURES = ("raise", "misfit", "side misfit", "bad state", "huge state", "bad tag", "no row")
LIVES = "20 milliseconds"


class Mean:
    def create(self) -> Any:
        return (0, 0)

    def add(self, accumulator: Any, value: int) -> Any:
        return (accumulator[0] + 1, accumulator[1] + value)

    def merge(self, left: Any, right: Any) -> Any:
        return (left[0] + right[0], left[1] + right[1])

    def result(self, accumulator: Any) -> float:
        return float(accumulator[1] / accumulator[0])


def fails(program: list[Any]) -> bool:
    return any(command[0] in FAILURES for command in program)


class Acting(KeyedProcess[Any]):
    """Does what its rows say. `foresees`: leaves out, whole, what would fail."""

    value = state.Value("long", default=7)
    blob = state.Value("object")
    total = state.Reducing("long", operator.add)
    mean = state.Aggregating("struct<n:bigint,s:bigint>", Mean())
    items = state.List("long")
    entries = state.Map("string", "long")
    plan = state.Value("string")
    brief_value = state.Value("long", ttl=state.TTL(LIVES, refresh="read-write"))
    brief_items = state.List("long", ttl=state.TTL(LIVES, "event", "read-write"))
    brief_entries = state.Map("string", "long", ttl=state.TTL(LIVES, "event", "read-write"))

    def __init__(self, *, foresees: bool) -> None:
        self.foresees = foresees

    def process(self, row: Any, ctx: Any) -> Iterator[Any]:
        program = json.loads(row.program)
        if self.foresees and fails(program):
            ctx.output("foreseen", (json.dumps(row._asdict()),))
        else:
            yield from self.act(program, ctx)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        program = json.loads(self.plan.get() or "[]")
        if self.foresees and fails(program):
            timer = {"timer": ctx.timer_kind, "time_ms": time_ms}
            ctx.output("foreseen", (json.dumps(timer),))
            self.on_timer_failed(time_ms, ctx)
        else:
            self.plan.clear()
            yield from self.act([*program, ["emit", time_ms]], ctx)

    def on_timer_failed(self, time_ms: int, ctx: Any) -> None:
        self.items.append(-time_ms)

    def act(self, program: list[Any], ctx: Any) -> Iterator[Any]:
        for name, *args in program:
            yield from getattr(self, "do_" + name.replace(" ", "_"))(ctx, *args) or ()

    def do_value(self, ctx: Any, at: int) -> None:
        for cell in (self.value, self.blob, self.brief_value):
            cell.set(at)

    def do_clear_value(self, ctx: Any, at: int) -> None:
        for cell in (self.value, self.blob, self.brief_value):
            cell.clear()

    def do_read(self, ctx: Any, at: int) -> Iterator[Any]:
        seen = [*self.brief_items, len(self.items), self.brief_value.get(0)]
        seen += [self.brief_entries[name] for name in self.brief_entries]
        yield from ((number,) for number in seen)

    def do_add(self, ctx: Any, at: int) -> None:
        self.total.add(at)
        self.mean.add(at)

    def do_clear_add(self, ctx: Any, at: int) -> None:
        self.total.clear()
        self.mean.clear()

    def do_append(self, ctx: Any, at: int) -> None:
        self.items.append(at)
        self.brief_items.extend([at, at + 1])

    def do_items(self, ctx: Any, at: int) -> None:
        self.items.set(range(at))
        self.brief_items.set([at])

    def do_clear_items(self, ctx: Any, at: int) -> None:
        self.items.clear()
        self.brief_items.clear()

    def do_put(self, ctx: Any, at: int) -> None:
        self.entries[str(at)] = at
        self.brief_entries[str(at)] = at

    def do_drop(self, ctx: Any, at: int) -> None:
        self.entries.pop(str(at), None)
        self.brief_entries.pop(str(at), None)

    def do_clear_entries(self, ctx: Any, at: int) -> None:
        self.entries.clear()
        self.brief_entries.clear()

    def do_timer(self, ctx: Any, at: int) -> None:
        # From on_timer never for the time it is called for: that would have no end.
        if ctx.timer_kind != "event":
            ctx.timers.event(10 * at)
        if ctx.timer_kind != "processing":
            ctx.timers.processing(10 * at)

    def do_delete_timer(self, ctx: Any, at: int) -> None:
        ctx.timers.delete_event(10 * at)
        ctx.timers.delete_processing(10 * at)

    def do_plan(self, ctx: Any, program: Any) -> None:
        self.plan.set(json.dumps(program))

    def do_emit(self, ctx: Any, at: int) -> Any:
        ctx.output("more", (str(at),))
        ctx.count_late(1)
        yield (at,)

    def do_raise(self, ctx: Any, at: int) -> None:
        raise RuntimeError(f"told to, at {at}")

    def do_misfit(self, ctx: Any, at: int) -> Any:
        yield (1 << 80,)

    def do_side_misfit(self, ctx: Any, at: int) -> None:
        ctx.output("more", (b"no text",))

    def do_bad_state(self, ctx: Any, at: int) -> None:
        self.value.set("text")  # type: ignore[arg-type]

    def do_huge_state(self, ctx: Any, at: int) -> None:
        """Writes what fits every type in Python, and no file."""
        writes: list[Any] = [
            lambda: self.value.set(2**63),
            lambda: self.mean.add(2**63),
            lambda: self.items.extend([at, 2**63]),
            lambda: self.entries.update({"a": at, "\ud800": at}),
            lambda: self.brief_items.append(2**63),
            lambda: self.brief_entries.update({"a": 2**63}),
        ]
        writes[at]()

    def do_bad_tag(self, ctx: Any, at: int) -> None:
        ctx.output("unheard of", (1,))

    def do_no_row(self, ctx: Any, at: int) -> Any:
        yield 5


_SMALL = st.integers(0, 5)
_WRITES = (
    "value", "clear value", "read", "add", "clear add", "append", "items", "clear items", "put",
    "drop", "clear entries", "timer", "delete timer", "emit",
)  # fmt: skip


def _programs(*, nested: bool) -> st.SearchStrategy[list[Any]]:
    command = st.tuples(st.sampled_from(_WRITES * 2 + FAILURES), _SMALL).map(list)
    if nested:
        plan = st.tuples(st.just("plan"), _programs(nested=False)).map(list)
        command = command | plan
    return st.lists(command, max_size=6)


_ROW = st.tuples(st.integers(0, 1), st.integers(0, 60), _programs(nested=True))
ROWS = st.lists(_ROW, max_size=6)
STEPS = st.lists(
    st.tuples(ROWS, st.sampled_from(["go on", "commit", "commit", "roll back", "restore"])),
    min_size=1,
    max_size=4,
)


def _harness(function: Any, on_error: Any, backend: str) -> Harness:
    return StoredHarness(
        function, SCHEMA, "k", "x long", sides={"more": "y string", "foreseen": "row string"},
        event_time="at", watermark="15 milliseconds", on_error=on_error,
        backend=backend,
    )  # fmt: skip


def _overlay(harness: Harness) -> Any:
    return {
        name: [changes for changes in table.changes if changes]
        for name, table in harness._operator.tables.items()
    }


def _timers(harness: Harness) -> Any:
    timers = harness._operator.timers
    assert timers is not None
    return [(index._at, index._later, index.first()) for index in (timers.event, timers.processing)]


def _emitted(harness: Harness) -> Any:
    return [list(harness.outputs), harness.side("more"), harness.side("late")]


@pytest.mark.parametrize("backend", WITH_SERVERS)
@settings(suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_rows_that_fail_leave_nothing_but_a_letter(backend: str, steps: Any) -> None:
    with (
        _harness(Acting(foresees=False), "dead-letter", backend) as tried,
        _harness(Acting(foresees=True), "fail", backend) as foreseen,
    ):
        for number, (rows, then) in enumerate(steps):
            pushed = [(k, at, json.dumps(program)) for k, at, program in rows]
            for harness in (tried, foreseen):
                harness.clock.advance_ms(10)
                if pushed:
                    harness.push(pushed)
            assert _overlay(tried) == _overlay(foreseen)
            assert _timers(tried) == _timers(foreseen)
            for harness in (tried, foreseen):
                if then == "commit":
                    harness.commit()
                elif then == "roll back":
                    harness.rollback()
                elif then == "restore":
                    harness.snapshot_and_restore(base=number % 2 == 0)
            assert _emitted(tried) == _emitted(foreseen)
            assert tried._operator.late_rows == foreseen._operator.late_rows
        for harness in (tried, foreseen):
            harness.drain()
        assert _emitted(tried) == _emitted(foreseen)
        assert _overlay(tried) == _overlay(foreseen)
        assert _timers(tried) == _timers(foreseen)
        letters = [letter.row for letter in tried.side("errors")]
        assert letters == [row for (row,) in foreseen.side("foreseen")]


# --- by the batch -----------------------------------------------------------------------------

FINE, RAISES_FIRST, RAISES_LAST, MISFITS, RAISES_WHILE_EMITTING = range(5)


class Tally(BatchProcess):
    """Counts keys, and values of keys; echoes its rows. In every other epoch some are forgotten."""

    count = state.Value("long")
    values = state.Map("long", "long")

    def __init__(self, *, foresees: bool) -> None:
        self.foresees = foresees

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[Any]:
        if self.foresees:
            batch = batch.filter(pc.equal(batch["bad"], FINE))
            if not batch.num_rows:
                return
        bad = set(batch["bad"].to_pylist())
        if RAISES_FIRST in bad:
            raise RuntimeError("first")
        ctx.count_late(batch.num_rows)
        by_key = _counted(batch, ["k"])
        n = pc.add(by_key["n"], pc.fill_null(self.count.get_many(by_key["k"]), 0))
        self.count.put_many(by_key["k"], n)
        by_value = _counted(batch, ["k", "v"])
        names = by_value["k"], by_value["v"]
        n = pc.add(by_value["n"], pc.fill_null(self.values.get_many(*names), 0))
        self.values.put_many(*names, n)
        if ctx.epoch % 2:
            some = by_value.filter(pc.equal(by_value["v"], 1))
            self.values.put_many(some["k"], some["v"], pa.nulls(some.num_rows, pa.int64()))
            one = by_key["k"].filter(pc.equal(by_key["k"], 1))
            self.count.put_many(one, pa.nulls(len(one), pa.int64()))
        ctx.output("more", batch.select(["v"]).rename_columns(["y"]))
        if RAISES_LAST in bad:
            raise RuntimeError("last")
        yield batch.select(["k", "v"])
        if MISFITS in bad:
            yield pa.record_batch({"k": ["text"], "v": [1]})
        if RAISES_WHILE_EMITTING in bad:
            raise RuntimeError("while emitting")

    def end_epoch(self, ctx: Any) -> Any:
        keys, values = self.count.set_in_epoch()
        return pa.record_batch({"k": keys, "v": values})


def _counted(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    table = pa.Table.from_batches([batch]).group_by(names, use_threads=False)
    found = table.aggregate([([], "count_all")]).combine_chunks()
    return pa.record_batch(
        {name: pa.concat_arrays(found[name].chunks) for name in names}
        | {"n": pa.concat_arrays(found["count_all"].chunks)}
    )


BAD = st.sampled_from([FINE] * 8 + list(range(5)))
BATCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), BAD), min_size=1, max_size=12)


def _deltas(harness: Harness) -> Any:
    batches = {name: table.delta() for name, table in harness._operator.tables.items()}
    return {n: b and sorted(map(repr, b.to_pylist())) for n, b in batches.items()}


@pytest.mark.parametrize("backend", WITH_SERVERS)
@settings(suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(BATCHES, st.booleans()), min_size=1, max_size=5))
def test_batches_are_processed_without_the_rows_that_fail(backend: str, steps: Any) -> None:
    made = [
        StoredHarness(
            Tally(foresees=on_error == "fail"), "k long, v long, bad long", "k", "k long, v long",
            sides={"more": "y long"}, on_error=on_error, backend=backend,
        )
        for on_error in ("dead-letter", "fail")
    ]  # fmt: skip
    tried, foreseen = made
    with tried, foreseen:
        for rows, commits in steps:
            for harness in made:
                harness.push(rows)
            assert _deltas(tried) == _deltas(foreseen)
            assert tried._operator.late_rows == foreseen._operator.late_rows
            if commits:
                for harness in made:
                    harness.commit()
            assert tried.outputs == foreseen.outputs
            assert tried.side("more") == foreseen.side("more")
        bad = [
            {"k": k, "v": v, "bad": why} for rows, _ in steps for k, v, why in rows if why != FINE
        ]
        assert [json.loads(letter.row) for letter in tried.side("errors")] == bad
