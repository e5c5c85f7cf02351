"""Interval joins on a Harness, against a join of all rows with all rows."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import PlanError
from cairn.operators.joins import HOW, IntervalJoin, JoinPlan, join_plan
from cairn.storage.manifest import StateDecl
from cairn.testing import Harness
from cairn.types import parse_schema, schema_ddl
from cairn.types.evolution import IncompatibleError, compare

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


def harness_of(how: str, low_ms: int, high_ms: int, **options: Any) -> Harness:
    plan = JoinPlan(LEFT, RIGHT, (("k", "id"),), low_ms, high_ms, how)
    return Harness(
        IntervalJoin(plan),
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


@given(how=st.sampled_from(HOW), epochs=EPOCHS, bounds=BOUNDS_MS, data=st.data())
def test_rows_in_any_order_and_any_epochs_give_the_join_of_all_rows(
    how: str, epochs: Any, bounds: Any, data: st.DataObject
) -> None:
    low_ms, high_ms = bounds
    model, watermark = Model(how, low_ms, high_ms), 0
    with harness_of(how, low_ms, high_ms) as harness:
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
                harness.snapshot_and_restore()
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
    """No row is kept long after its time."""
    pane_us = max(high_us - low_us, 1000)
    for side, reach_us in (("left", high_us), ("right", -low_us)):
        for key in range(3):
            for time_us, _, _ in harness.state(side, key).values():
                assert time_us + reach_us + pane_us >= watermark_us


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
        IntervalJoin(plan),
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


def test_a_hot_key_costs_each_row_what_it_finds_and_no_more() -> None:
    counted = 0

    class Counting(dict[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            nonlocal counted
            counted += 1
            return super().__getitem__(key)

    from cairn.operators.joins import Side

    class Timers:
        def event(self, at: int) -> None:
            pass

    class Ctx:
        timers = Timers()

    side = Side("left", LEFT, -10, 10, is_kept=False)
    side.rows, side.panes = Counting(), {}  # type: ignore[assignment]
    for ms in range(100_000):
        side.keep(ms * 1000, ("row",), Ctx(), is_matched=False)
    assert len(side.match(50_000_000, 50_020_000)) == 21
    assert counted <= 3 * 21


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
        return IntervalJoin(plan).declare_state()

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
