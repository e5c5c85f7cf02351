"""Interval joins on a Harness, against a join of all rows with all rows."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import Counter
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.backends.columnar.runs import Rows, Run, search
from cairn.driver.coordinator.resume import check_resume
from cairn.errors import PlanError
from cairn.operators.join_plan import HOW, JoinPlan, join_plan
from cairn.operators.joins import Join
from cairn.protocol.scoped_state import states_by_scope
from cairn.storage.manifest import StateDecl
from cairn.testing import Harness
from cairn.types import parse_schema, schema_ddl
from cairn.types.evolution import IncompatibleError, compare
from tests.backends import MORE_IN_SOAK
from tests.row_join import RowJoin
from tests.stored_harness import StoredHarness

LEFT = parse_schema("k int, ts timestamp, v int")
RIGHT = parse_schema("w int, at timestamp, id bigint")
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

ROWS = st.tuples(
    st.sampled_from(["left", "right"]),
    st.none() | st.integers(0, 2),
    st.integers(0, 200).map(lambda quarter: quarter * 250),
    st.integers(0, 2),
)
"""Side, key, time in microseconds, and a number."""
EPOCHS = st.lists(st.tuples(st.lists(ROWS, max_size=8), st.integers(0, 15)), max_size=6)
"""Rows, and by how much the watermark goes on before them, in milliseconds."""
BOUNDS_MS = st.tuples(st.integers(-12, 12), st.integers(-12, 12)).map(sorted)


def harness_of(
    how: str, low_ms: int, high_ms: int, function: Any = Join, **options: Any
) -> Harness:
    plan = JoinPlan(LEFT, RIGHT, (("k", "id"),), low_ms, high_ms, how)
    return StoredHarness(
        function(plan),
        {"left": LEFT, "right": RIGHT},
        {"left": "k", "right": "id"},
        plan.schema([pa.int64()]),
        event_time={"left": "ts", "right": "at"},
        **options,
    )


def pushed(row: Any) -> dict[str, Any]:
    side, key, time_us, number = row
    at = EPOCH + dt.timedelta(microseconds=time_us)
    return {side: (key, at, number) if side == "left" else (number, at, key)}


class Model:
    """All rows that were not late."""

    def __init__(self, how: str, low_ms: int, high_ms: int) -> None:
        self.keeps = {"inner": "", "left": "left", "right": "right", "full": "left right"}[how]
        self.low_us, self.high_us = low_ms * 1000, high_ms * 1000
        self.rows: dict[str, list[Any]] = {"left": [], "right": []}

    def joined(self, until_us: float) -> Counter[Any]:
        """Pairs, and rows alone for which no other can come at this watermark."""
        found: Counter[Any] = Counter()
        matched = set()
        for i, (k, t, v) in enumerate(self.rows["left"]):
            for j, (other, u, w) in enumerate(self.rows["right"]):
                if k is not None and k == other and self.low_us <= u - t <= self.high_us:
                    found[k, t, v, w, u] += 1
                    matched |= {("left", i), ("right", j)}
        for i, (k, t, v) in enumerate(self.rows["left"]):
            is_over = k is None or t + self.high_us < until_us
            if "left" in self.keeps and ("left", i) not in matched and is_over:
                found[k, t, v, None, None] += 1
        for j, (k, u, w) in enumerate(self.rows["right"]):
            is_over = k is None or u - self.low_us < until_us
            if "right" in self.keeps and ("right", j) not in matched and is_over:
                found[k, None, None, w, u] += 1
        return found


def emitted(harness: Harness) -> Counter[Any]:
    def us(at: dt.datetime | None) -> int | None:
        return None if at is None else (at - EPOCH) // dt.timedelta(microseconds=1)

    return Counter((k, us(t), v, w, us(u)) for k, t, v, w, u in harness.outputs)


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@given(how=st.sampled_from(HOW), epochs=EPOCHS, bounds=BOUNDS_MS, data=st.data())
def test_rows_in_any_order_and_any_epochs_give_the_join_of_all_rows(
    backend: str, how: str, epochs: Any, bounds: Any, data: st.DataObject
) -> None:
    low_ms, high_ms = bounds
    model, watermark = Model(how, low_ms, high_ms), 0
    with harness_of(how, low_ms, high_ms, backend=backend) as harness:
        for rows, step in epochs:
            watermark += step
            harness.advance_watermark(watermark)
            for attempt in range(data.draw(st.integers(1, 2), label="attempts")):
                if attempt:
                    harness.rollback()
                for row in rows:  # One by one: the rows of one push would be put in order.
                    harness.push(**pushed(row))
            for side, key, time_us, number in rows:
                if time_us >= watermark * 1000:
                    model.rows[side].append((key, time_us, number))
            if data.draw(st.booleans(), label="restores"):
                harness.snapshot_and_restore(base=data.draw(st.booleans(), label="base"))
            harness.tick()
            assert emitted(harness) == model.joined(watermark * 1000)
            check_held(harness, watermark * 1000, low_ms * 1000, high_ms * 1000)
        harness.drain()
        assert emitted(harness) == model.joined(float("inf"))
        for key in range(3):
            for name in harness.function.declare_state():
                assert not harness.state(name, key), "what is over is forgotten"
            assert harness.timers(key) == {"event": [], "processing": []}


@given(how=st.sampled_from(HOW), epochs=EPOCHS, bounds=BOUNDS_MS)
def test_rows_of_other_operators_that_are_older_than_the_watermark_are_joined_in_time(
    how: str, epochs: Any, bounds: Any
) -> None:
    low_ms, high_ms = bounds
    model, watermark, passed = Model(how, low_ms, high_ms), 0, 0
    with harness_of(how, low_ms, high_ms) as harness:
        downstream = dataclasses.replace(harness._spec, is_downstream=True)
        harness._spec = harness._operator.spec = downstream
        for rows, step in epochs:
            passed, watermark = watermark, watermark + step
            harness.advance_watermark(watermark)
            sides: dict[str, list[Any]] = {"left": [], "right": []}
            for row in rows:
                ((side, given_row),) = pushed(row).items()
                sides[side].append(given_row)
                if row[2] >= passed * 1000:
                    model.rows[side].append(row[1:])
            harness.push(**sides)
            harness.commit()
            assert emitted(harness) == model.joined(watermark * 1000)
        harness.drain()
        assert emitted(harness) == model.joined(float("inf"))


def check_held(harness: Harness, watermark_us: int, low_us: int, high_us: int) -> None:
    """No row is kept after its time."""
    for side, reach_us in (("left", high_us), ("right", -low_us)):
        for key in range(3):
            for time_us, _, _ in harness.state(side, key).values():
                assert time_us + reach_us >= watermark_us


def test_one_push_of_both_sides_is_in_the_order_of_time() -> None:
    with harness_of("inner", -5, 5) as harness:
        rows = [("right", 1, 2000, 7), ("left", 1, 1000, 8), ("left", 1, 3000, 9)]
        sides: dict[str, list[Any]] = {"left": [], "right": []}
        for row in rows:
            for side, each in pushed(row).items():
                sides[side].append(each)
        assert [row[2:4] for row in harness.push(**sides)] == [(8, 7), (9, 7)]


def test_late_rows_of_each_side_go_their_own_way() -> None:
    with harness_of("full", 0, 0) as harness:
        harness.advance_watermark(100)
        harness.push(**pushed(("left", 1, 99_999, 1)))
        harness.push(**pushed(("right", 1, 99_999, 2)))
        harness.push(right=(3, None, 1))
        assert [row.v for row in harness.side("late.left")] == [1]
        assert [row.w for row in harness.side("late.right")] == [2, 3]
        assert harness.drain() == []


@pytest.mark.parametrize("first", ["left", "right"])
@pytest.mark.parametrize("gap_ms", [-10, 0, 10])
def test_rows_at_the_very_bounds_meet(first: str, gap_ms: int) -> None:
    for left_ms in range(100, 120):
        rows = {"left": left_ms * 1000, "right": (left_ms + gap_ms) * 1000}
        with harness_of("inner", min(gap_ms, 0), max(gap_ms, 0)) as harness:
            for side in sorted(rows, key=lambda side: side != first):
                harness.push(**pushed((side, 1, rows[side], 1)))
            assert len(harness.outputs) == 1


def test_times_to_the_microsecond_decide() -> None:
    with harness_of("left", 0, 1) as harness:
        harness.push(**pushed(("left", 1, 500, 1)))
        harness.push(**pushed(("right", 1, 1501, 2)))
        assert harness.push(**pushed(("right", 1, 1500, 3))) == [
            (
                1,
                EPOCH + dt.timedelta(microseconds=500),
                1,
                3,
                EPOCH + dt.timedelta(microseconds=1500),
            )
        ]


def test_rows_at_the_ends_of_the_calendar_join_and_go() -> None:
    last = dt.datetime.max.replace(tzinfo=dt.UTC)
    first = dt.datetime.min.replace(tzinfo=dt.UTC)
    with harness_of("full", -1000, 1000) as harness:
        for at in (first, last):
            assert harness.push(left=(1, at, 1)) == []
            assert harness.push(right=(2, at, 1)) == [(1, at, 1, 2, at)]
            harness.push(left=(2, at, 3))
        assert [row[1] for row in harness.drain()] == [first, last]
        assert not harness.state("left", 1) and not harness.state("right", 1)


def test_keys_of_several_columns_with_a_null_meet_nothing() -> None:
    schema = parse_schema("a int, b string, ts bigint")
    plan = join_plan(schema, schema, ["a", "b"], "1 hour", "full", "_r")
    with Harness(
        Join(plan),
        {"left": schema, "right": schema},
        {"left": ["a", "b"], "right": ["a", "b"]},
        plan.schema([pa.int32(), pa.string()]),
        event_time="ts",
    ) as harness:
        harness.push(left=[(1, "x", 1), (1, None, 2)], right=[(1, "x", 3), (1, None, 4)])
        harness.drain()
        assert sorted(map(tuple, harness.outputs), key=repr) == [
            (1, "x", 1, 3),
            (1, None, 2, None),
            (1, None, None, 4),
        ]


def test_a_row_of_a_hot_key_finds_its_matches_without_a_look_at_the_others() -> None:
    count = 100_000
    rows = pa.StructArray.from_arrays([pa.array(np.arange(count))], ["n"])
    each = np.arange(count)
    run = Run(
        Rows(np.zeros(count, int), each * 1000, each, np.zeros(count, bool), each, rows),
        is_committed=True,
    )
    (found,) = search([run], np.array([0]), np.array([50_000_000]), np.array([50_020_000]))
    assert found.rows(rows.type).field("n").to_pylist() == list(range(50_000, 50_021))


def test_the_result_has_left_then_right_without_its_keys() -> None:
    left = parse_schema("id int not null, ts timestamp not null, v int not null")
    right = parse_schema("key bigint not null, ts timestamp not null, v string")

    def schema(how: str) -> str:
        plan = join_plan(left, right, {"id": "key"}, "1 minute", how, "_right")
        return schema_ddl(plan.schema([pa.int64()]))

    assert schema("inner") == (
        "id int NOT NULL, ts timestamp NOT NULL, v int NOT NULL, "
        "ts_right timestamp NOT NULL, v_right string"
    )
    assert schema("left") == (
        "id int NOT NULL, ts timestamp NOT NULL, v int NOT NULL, ts_right timestamp, v_right string"
    )
    assert schema("right") == (
        "id bigint NOT NULL, ts timestamp, v int, ts_right timestamp NOT NULL, v_right string"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "outer"}, "expected: one of inner, left, right, full"),
        ({"on": "nothing"}, "the left stream has no column 'nothing'"),
        ({"on": {"k": "nothing"}}, "the right stream has no column 'nothing'"),
        ({"on": []}, "expected: a column, a list of columns"),
        ({"on": 5}, "expected: a column, a list of columns"),
        ({"within": 5}, "expected: a span of time"),
        ({"within": ("5 minutes", "1 minute")}, "give the earlier bound first"),
        ({"within": ("-5 parsecs", "1 minute")}, "must be a span of time"),
    ],
)
def test_what_cannot_be_joined_is_refused(options: Any, message: str) -> None:
    asked = {"on": {"k": "id"}, "within": "1 hour", "how": "inner", "suffix": "_right"} | options
    with pytest.raises(PlanError, match=message):
        join_plan(LEFT, RIGHT, **asked)


def test_within_is_text_or_timedelta_one_of_them_or_a_pair() -> None:
    def bounds_ms(within: Any) -> tuple[int, int]:
        plan = join_plan(LEFT, RIGHT, {"k": "id"}, within, "inner", "_right")
        return plan.low_ms, plan.high_ms

    minute = dt.timedelta(minutes=1)
    assert bounds_ms("1 minute") == bounds_ms(minute) == (-60_000, 60_000)
    assert bounds_ms(("-1 minute", minute)) == bounds_ms((-minute, "1 minute")) == (-60_000, 60_000)
    with pytest.raises(PlanError, match="within of join must not be negative"):
        bounds_ms(-minute)


def test_two_columns_of_one_name_are_refused() -> None:
    left, right = parse_schema("k int, v int, v_right int"), parse_schema("k int, v int")
    with pytest.raises(PlanError, match="two columns 'v_right'"):
        join_plan(left, right, "k", "1 hour", "inner", "_right").schema([pa.int32()])


def test_bounds_are_signed() -> None:
    plan = join_plan(LEFT, RIGHT, {"k": "id"}, ("-5 minutes", "10 seconds"), "inner", "")
    assert (plan.low_ms, plan.high_ms) == (-300_000, 10_000)
    plan = join_plan(LEFT, RIGHT, {"k": "id"}, "10 minutes", "inner", "")
    assert (plan.low_ms, plan.high_ms) == (-600_000, 600_000)


def test_state_of_another_reach_is_refused_and_more_columns_are_not() -> None:
    def states(within: str, left: pa.Schema) -> dict[str, Any]:
        plan = join_plan(left, RIGHT, {"k": "id"}, within, "inner", "_right")
        return Join(plan).declare_state()

    (held,) = (
        StateDecl(kind="map", type=declared.ddl, entry_type=declared.entry_ddl)
        for name, declared in states("1 hour", LEFT).items()
        if name == "left"
    )
    with pytest.raises(IncompatibleError, match="cannot change"):
        compare(held, states("2 hours", LEFT)["left"])
    wider = LEFT.append(pa.field("more", pa.string()))
    assert compare(held, states("1 hour", wider)["left"]) == "migrate"
    assert compare(held, states("1 hour", LEFT)["left"]) == "same"


# State of earlier versions


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@given(how=st.sampled_from(HOW), epochs=EPOCHS, bounds=BOUNDS_MS)
def test_state_of_the_join_row_by_row_is_read_on(
    backend: str, how: str, epochs: Any, bounds: Any
) -> None:
    low_ms, high_ms = bounds
    model, watermark = Model(how, low_ms, high_ms), 0
    with harness_of(how, low_ms, high_ms, backend=backend, function=RowJoin) as harness:
        for index, (rows, step) in enumerate(epochs):
            watermark += step
            harness.advance_watermark(watermark)
            for row in rows:
                harness.push(**pushed(row))
                if row[2] >= watermark * 1000:
                    model.rows[row[0]].append(row[1:])
            if index == len(epochs) // 2:
                harness.commit()
                replace_function(harness, Join(harness.function.plan))
            harness.tick()
            assert emitted(harness) == model.joined(watermark * 1000)
        harness.drain()
        assert emitted(harness) == model.joined(float("inf"))


def replace_function(harness: Harness, function: Join) -> None:
    """Go on with another function, as a job does that is started by a later version."""
    harness._spec = dataclasses.replace(harness._spec, function=cloudpickle.dumps(function))
    (stated,) = states_by_scope(harness._spec)
    harness._checkpoint.states = {stated.uid: stated}
    newest = harness._checkpoint.newest
    assert newest is not None
    check_resume(
        newest, {stated.uid: stated}, job_name="j", url="memory:", allow_dropped_state=False
    )
    harness.snapshot_and_restore()


# Joins without `within`


def equi_harness(how: str, ttl: str | None, **options: Any) -> Harness:
    left, right = parse_schema("k int, v string"), parse_schema("w string, id bigint")
    plan = join_plan(left, right, {"k": "id"}, None, how, "_right", ttl=ttl, has_time=False)
    return StoredHarness(
        Join(plan),
        {"left": left, "right": right},
        {"left": "k", "right": "id"},
        plan.schema([pa.int64()]),
        **options,
    )


EQUI_ROWS = st.tuples(
    st.sampled_from(["left", "right"]), st.none() | st.integers(0, 2), st.sampled_from("abc")
)
EQUI_EPOCHS = st.lists(st.tuples(st.lists(EQUI_ROWS, max_size=6), st.integers(0, 8)), max_size=7)
"""Rows, and by how much the clock goes on before them, in milliseconds."""


class EquiModel:
    """All rows with the time of their epoch."""

    def __init__(self, how: str, ttl_ms: float) -> None:
        self.keeps = {"inner": "", "left": "left", "right": "right", "full": "left right"}[how]
        self.ttl_ms = ttl_ms
        self.rows: dict[str, list[Any]] = {"left": [], "right": []}

    def joined(self, now_ms: float) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for side, other in (("left", "right"), ("right", "left")):
            for key, time, text in self.rows[side]:
                matches = [
                    theirs
                    for their_key, their_time, theirs in self.rows[other]
                    if key is not None
                    and key == their_key
                    and abs(time - their_time) <= self.ttl_ms
                ]
                if side == "left":
                    found.update((key, text, theirs) for theirs in matches)
                is_over = key is None or time + self.ttl_ms < now_ms
                if not matches and side in self.keeps and is_over:
                    found[(key, text, None) if side == "left" else (key, None, text)] += 1
        return found


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@given(how=st.sampled_from(HOW), has_ttl=st.booleans(), epochs=EQUI_EPOCHS, data=st.data())
def test_rows_with_equal_keys_meet_while_both_are_kept(
    backend: str, how: str, has_ttl: bool, epochs: Any, data: st.DataObject
) -> None:
    ttl_ms = 10.0 if has_ttl or how != "inner" else float("inf")
    model, now = EquiModel(how, ttl_ms), 0
    ttl = None if ttl_ms == float("inf") else "10 milliseconds"
    with equi_harness(how, ttl, backend=backend) as harness:
        for rows, step in epochs:
            now += step
            harness.clock.advance_ms(step)
            for attempt in range(data.draw(st.integers(1, 2), label="attempts")):
                if attempt:
                    harness.rollback()
                for side, key, text in rows:
                    harness.push(**{side: (key, text) if side == "left" else (text, key)})
            for side, key, text in rows:
                model.rows[side].append((key, now, text))
            if data.draw(st.booleans(), label="restores"):
                harness.snapshot_and_restore(base=data.draw(st.booleans(), label="base"))
            harness.tick()
            assert Counter(map(tuple, harness.outputs)) == model.joined(now)
        if ttl is not None:
            harness.drain()
            assert Counter(map(tuple, harness.outputs)) == model.joined(float("inf"))


def test_a_row_that_waits_for_a_match_is_emitted_by_the_clock() -> None:
    with equi_harness("left", "10 milliseconds", now_ms=1000) as harness:
        harness.push(left=(1, "a"))
        harness.commit()
        assert harness._operator.earliest_timers() == (None, 1011)
        harness.clock.advance_ms(11)
        assert harness.tick() == [(1, "a", None)]
        assert harness._operator.earliest_timers() == (None, None)


def test_an_outer_join_without_an_end_is_refused() -> None:
    with pytest.raises(PlanError, match="give within=, or ttl= for how long a row waits"):
        join_plan(LEFT, RIGHT, {"k": "id"}, None, "left", "_right")
    with pytest.raises(PlanError, match="within= and ttl= are both given"):
        join_plan(LEFT, RIGHT, {"k": "id"}, "1 hour", "left", "_right", ttl="1 hour")
    with pytest.raises(PlanError, match="ttl of join must be positive"):
        join_plan(LEFT, RIGHT, {"k": "id"}, None, "inner", "_right", ttl="0 seconds")


def test_ttl_with_event_times_is_within() -> None:
    by_ttl = join_plan(LEFT, RIGHT, {"k": "id"}, None, "full", "_right", ttl="1 hour")
    assert by_ttl == join_plan(LEFT, RIGHT, {"k": "id"}, "1 hour", "full", "_right")


class Picky(Join):
    """Fails on the rows with the number 2, after it has joined and kept them."""

    def on_left(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        return self._fail_on(2, batch["v"], super().on_left(batch, ctx))

    def on_right(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        return self._fail_on(2, batch["w"], super().on_right(batch, ctx))

    def _fail_on(self, number: int, numbers: pa.Array, joined: Any) -> Any:
        yield from joined
        if number in numbers.to_pylist():
            raise ValueError(number)


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@given(how=st.sampled_from(HOW), epochs=EPOCHS)
def test_a_row_that_is_put_aside_leaves_nothing_behind(backend: str, how: str, epochs: Any) -> None:
    model, watermark, aside = Model(how, -6, 6), 0, 0
    options = {"backend": backend, "on_error": "dead-letter"}
    with harness_of(how, -6, 6, function=Picky, **options) as harness:
        for rows, step in epochs:
            watermark += step
            harness.advance_watermark(watermark)
            sides: dict[str, list[Any]] = {"left": [], "right": []}
            for row in rows:
                ((side, given_row),) = pushed(row).items()
                sides[side].append(given_row)
                if row[2] >= watermark * 1000 and row[3] != 2:
                    model.rows[side].append(row[1:])
                aside += row[2] >= watermark * 1000 and row[3] == 2
            harness.push(**sides)
            harness.commit()
            assert emitted(harness) == model.joined(watermark * 1000)
        harness.drain()
        assert emitted(harness) == model.joined(float("inf"))
        assert len(harness.side("errors")) == aside
