"""The newest row per key on a Harness, against a few lines that say what it means."""

from __future__ import annotations

import decimal
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import PlanError
from cairn.operators.idle import parse_ttl
from cairn.operators.latest import Latest
from cairn.state import TTL
from cairn.testing import Harness
from cairn.types import parse_schema
from tests.backends import MORE_IN_SOAK
from tests.marks import for_soak
from tests.stored_harness import StoredHarness

DDL = "k string, ts long, s struct<a:decimal(9,2),b:string>, d double, l array<string>"
SCHEMA = parse_schema(DDL)
TEXTS = st.none() | st.sampled_from(["", "é", "z" * 40])
ROWS = st.tuples(
    st.none() | st.sampled_from(["", "key", "a longer key than sixteen"]),
    st.integers(0, 6),
    st.none()
    | st.tuples(st.sampled_from([decimal.Decimal("1.50"), decimal.Decimal("-2.00")]), TEXTS),
    st.none() | st.sampled_from([0.0, 1.5, math.nan]),
    st.none() | st.lists(TEXTS, max_size=2),
)


def harness_of(*, timed: bool = True, ttl: TTL | None = None, **options: Any) -> Harness:
    return StoredHarness(
        Latest(SCHEMA, ttl, is_timed=timed),
        DDL,
        "k",
        DDL,
        event_time="ts" if timed else None,
        **options,
    )


def sortable(value: Any) -> Any:
    """Null first, then by value; NaN last, and -0.0 before 0.0."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value, math.copysign(1, value))
    if isinstance(value, list | tuple):
        return (1, *map(sortable, value))
    return (1, value)


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def shown(rows: list[Any]) -> list[str]:
    return sorted(repr(plain(row)) for row in rows)


class Model:
    """Row by row, as the newest so far."""

    def __init__(self, *, timed: bool) -> None:
        self.timed = timed
        self.newest: dict[Any, Any] = {}

    def run(self, rows: list[Any]) -> list[Any]:
        before = dict(self.newest)
        for row in rows:
            held = self.newest.get(row[0])
            if held is None or not self.timed or self._is_newer(row, held):
                self.newest[row[0]] = row
        if not self.timed:
            return [self.newest[key] for key in {row[0] for row in rows}]
        return [row for key, row in self.newest.items() if before.get(key) is not row]

    def _is_newer(self, row: Any, held: Any) -> bool:
        if row[1] != held[1]:
            return bool(row[1] > held[1])
        return bool(list(map(sortable, row)) > list(map(sortable, held)))


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    ("backend", "examples"),
    [("heap", 30), ("rocksdb", 10), for_soak("postgres", 10), for_soak("redis", 10)],
)
def test_the_newest_row_of_a_key_is_emitted_when_it_changes(
    backend: str, examples: int, timed: bool
) -> None:
    @settings(max_examples=examples)
    @given(st.lists(st.lists(st.lists(ROWS, max_size=6), max_size=3), max_size=5), st.data())
    def check(epochs: list[list[list[Any]]], data: st.DataObject) -> None:
        model = Model(timed=timed)
        with harness_of(timed=timed, backend=backend) as harness:
            for pushes in epochs:
                if data.draw(st.booleans(), label="fails"):
                    for rows in pushes:
                        harness.push(rows)
                    harness.rollback()
                before = len(harness.outputs)
                for rows in pushes:
                    assert harness.push(rows) == [], "at the end of the epoch, not before"
                harness.snapshot_and_restore(base=data.draw(st.booleans(), label="base"))
                emitted = harness.outputs[before:]
                expected = model.run([row for rows in pushes for row in rows])
                assert shown(emitted) == shown(expected)

    check()


STEPS = st.tuples(st.lists(ROWS, max_size=6), st.integers(0, 4))


@pytest.mark.parametrize("clock", ["processing", "event"])
@pytest.mark.parametrize(
    ("backend", "examples"),
    [("heap", 25), ("rocksdb", 8), for_soak("postgres", 8), for_soak("redis", 8)],
)
def test_keys_are_forgotten_when_their_time_is_over_and_then_begin_again(
    backend: str, examples: int, clock: Any
) -> None:
    @settings(max_examples=examples)
    @given(st.lists(STEPS, max_size=6), st.integers(1, 5))
    def check(epochs: list[Any], ttl_ms: int) -> None:
        model, last_ms, now_ms = Model(timed=True), dict[Any, int](), 0
        ttl = TTL(f"{ttl_ms} milliseconds", clock=clock)
        with harness_of(ttl=ttl, backend=backend) as harness:
            for rows, step_ms in epochs:
                now_ms += step_ms
                harness.clock.advance_ms(step_ms)
                harness.advance_watermark(now_ms)
                for key in [key for key, at_ms in last_ms.items() if at_ms + ttl_ms <= now_ms]:
                    del last_ms[key], model.newest[key]
                before = len(harness.outputs)
                harness.push(rows)
                harness.snapshot_and_restore()
                counted = [row for row in rows if clock == "processing" or row[1] >= now_ms]
                assert shown(harness.outputs[before:]) == shown(model.run(counted))
                assert len(harness.side("late")) >= len(rows) - len(counted)
                for row in counted:
                    at_ms = row[1] if clock == "event" else now_ms
                    last_ms[row[0]] = max(at_ms, last_ms.get(row[0], at_ms))
            for key, at_ms in last_ms.items():
                assert harness.state("idle", key) == {at_ms: True}

    check()


ONE_TIME = [("k", 5, (None, "a"), d, [text]) for d in (None, -0.0, 0.0) for text in ("", "x")]


@given(st.permutations(ONE_TIME))
def test_of_rows_with_one_time_the_greatest_counts_in_whatever_order_they_come(
    rows: list[Any],
) -> None:
    with harness_of() as harness:
        harness.push(rows[:2])
        harness.push(rows[2:])
        harness.commit()
        assert shown(harness.outputs) == shown(ONE_TIME[-1:])


def test_the_same_row_again_is_not_newer() -> None:
    row = ("k", 5, (decimal.Decimal("1.50"), "x"), math.nan, [None])
    with harness_of() as harness:
        for _ in range(3):
            harness.push(row)
            harness.commit()
        assert len(harness.outputs) == 1


def test_late_rows_count_unless_the_watermark_removes_keys() -> None:
    row = ("k", 50, None, None, None)
    for ttl, emitted in ((None, 1), (TTL("1 second"), 1), (TTL("1 second", clock="event"), 0)):
        with harness_of(ttl=ttl) as harness:
            harness.advance_watermark(100)
            harness.push(row)
            harness.commit()
            assert len(harness.outputs) == emitted
            assert len(harness.side("late")) == 1 - emitted


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
def test_a_key_without_rows_for_the_ttl_is_forgotten(backend: str) -> None:
    with harness_of(ttl=TTL("1 second"), backend=backend) as harness:
        harness.push([("a", 9, None, None, None), ("b", 9, None, None, None)])
        harness.snapshot_and_restore()
        harness.clock.advance_ms(600)
        harness.push(("a", 1, None, 1.0, None))  # Older, so nothing is emitted; a row all the same.
        harness.commit()
        harness.clock.advance_ms(400)
        harness.snapshot_and_restore()
        assert harness.state("newest", "b") is None
        assert harness.state("newest", "a").time == 9_000
        assert harness.state("idle", "a") == {600: True}
        before = len(harness.outputs)
        harness.push([("a", 2, None, None, None), ("b", 2, None, None, None)])
        harness.commit()
        assert [row[:2] for row in harness.outputs[before:]] == [("b", 2)]


def test_by_event_time_the_watermark_forgets_keys() -> None:
    with harness_of(ttl=TTL("10 milliseconds", clock="event")) as harness:
        harness.push([("a", 5, None, None, None), ("b", 9, None, None, None)])
        harness.commit()
        harness.advance_watermark(15)
        harness.tick()
        assert harness.state("newest", "a") is None
        assert harness.state("newest", "b").time == 9_000
        harness.advance_watermark(19)
        harness.tick()
        assert harness.state("newest", "b") is None
        assert harness.state("idle", "b") == {}


def test_a_ttl_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(PlanError, match="event time, which the rows do not have"):
        parse_ttl(TTL("1 day", clock="event"), "latest 'x'", is_timed=False)
    with pytest.raises(PlanError, match="every row of a key renews"):
        parse_ttl(TTL("1 day", refresh="read-write"), "latest 'x'", is_timed=True)
