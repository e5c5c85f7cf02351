"""Joins as of a time on a Harness, against a look at all versions for each row."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import PlanError
from cairn.operators.as_of import HOW, AsOfJoin, as_of_plan, check_validity
from cairn.testing import Harness
from cairn.types import parse_schema
from tests.backends import MORE_IN_SOAK
from tests.stored_harness import StoredHarness

TRADES = parse_schema("k int, ts bigint, v int")
RATES = parse_schema("rate string, at bigint, id bigint, ends bigint")
UNTIL: list[Any] = [None, "ends", "4 milliseconds"]

ROWS = st.tuples(
    st.sampled_from(["left", "right"]),
    st.none() | st.integers(0, 2),
    st.integers(0, 40),
    st.sampled_from(["a", "b", "a longer text than sixteen"]),
    st.none() | st.integers(0, 45),
)
"""Side, key, time in milliseconds, a text, and the end of a version."""
EPOCHS = st.lists(st.tuples(st.lists(ROWS, max_size=8), st.integers(0, 10)), max_size=6)
"""Rows, and by how much the watermark goes on before them."""


def harness_of(how: str, valid_until: Any = None, **options: Any) -> Harness:
    plan = as_of_plan(TRADES, RATES, {"k": "id"}, how, "_right")
    return StoredHarness(
        AsOfJoin(plan, check_validity(valid_until, RATES), ("ts", 0)),
        {"left": TRADES, "right": RATES},
        {"left": "k", "right": "id"},
        plan.schema([pa.int64()]),
        event_time={"left": "ts", "right": "at"},
        **options,
    )


def pushed(row: Any) -> dict[str, Any]:
    side, key, time, text, end = row
    return {side: (key, time, len(text))} if side == "left" else {side: (text, time, key, end)}


def by_value(row: Any) -> Any:
    """The columns of a version from left to right; null comes first."""
    _, key, time, text, end = row
    return text, time, key is not None, key or 0, end is not None, end or 0


class Model:
    """All rows that were not late, by epoch; versions of an epoch in the order of their values."""

    def __init__(self, how: str, valid_until: Any) -> None:
        self.how = how
        self.valid_until = valid_until
        self.left: list[Any] = []
        self.right: list[Any] = []

    def add(self, row: Any) -> None:
        side, key, time, text, end = row
        if side == "left":
            self.left.append((key, time, len(text)))
        else:
            self.right.append((key, time, text, end))

    def joined(self, until: float) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for key, time, v in self.left:
            best = None
            for version in self.right:
                if key is not None and version[0] == key and version[1] <= time:
                    if best is None or version[1] >= best[1]:
                        best = version
            if key is None and self.how == "left":
                found[key, time, v, None, None, None] += 1
            elif key is None or time >= until:
                continue
            elif best is not None and time <= self._end(best):
                found[key, time, v, best[2], best[1], best[3]] += 1
            elif self.how == "left":
                found[key, time, v, None, None, None] += 1
        return found

    def _end(self, version: Any) -> float:
        if self.valid_until is None:
            return float("inf")
        if self.valid_until == "ends":
            return float("inf") if version[3] is None else version[3]
        return float(version[1] + 4)


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@given(
    how=st.sampled_from(HOW),
    valid_until=st.sampled_from(UNTIL),
    epochs=EPOCHS,
    data=st.data(),
)
def test_each_row_has_the_version_of_its_time_whatever_the_epochs(
    backend: str, how: str, valid_until: Any, epochs: Any, data: st.DataObject
) -> None:
    model, watermark = Model(how, valid_until), 0
    with harness_of(how, valid_until, backend=backend) as harness:
        for rows, step in epochs:
            watermark += step
            harness.advance_watermark(watermark)
            for attempt in range(data.draw(st.integers(1, 2), label="attempts")):
                if attempt:
                    harness.rollback()
                for row in rows:
                    harness.push(**pushed(row))
            for row in sorted(rows, key=by_value):
                if row[2] >= watermark:
                    model.add(row)
            if data.draw(st.booleans(), label="restores"):
                harness.snapshot_and_restore(base=data.draw(st.booleans(), label="base"))
            harness.tick()
            assert Counter(map(tuple, harness.outputs)) == model.joined(watermark)
            check_held(harness, watermark)
        harness.drain()
        assert Counter(map(tuple, harness.outputs)) == model.joined(float("inf"))
        assert not any(harness.state("left", key) for key in range(3))


def check_held(harness: Harness, watermark: int) -> None:
    """Of the versions that hold already, a key has one at most."""
    for key in range(3):
        times = [time for time, _, _ in harness.state("right", key).values()]
        assert sum(time <= watermark * 1000 for time in times) <= 1
        assert all(time >= watermark * 1000 for time, _, _ in harness.state("left", key).values())


@given(st.permutations(["a", "b", "c", None]), st.integers(0, 3))
def test_of_versions_of_one_time_the_greatest_counts_in_whatever_order_they_come(
    rates: list[Any], cut: int
) -> None:
    versions = [(rate, 1, 1, None) for rate in rates]
    with harness_of("inner") as harness:
        for some in (versions[:cut], versions[cut:]):
            if some:
                harness.push(right=some)
        harness.push(left=(1, 2, 0))
        assert [row.rate for row in harness.drain()] == ["c"]


def test_of_versions_of_one_time_in_two_epochs_the_later_one_counts() -> None:
    with harness_of("inner") as harness:
        harness.push(right=("b", 1, 1, None))
        harness.commit()
        harness.push(right=("a", 1, 1, None), left=(1, 2, 0))
        assert [row.rate for row in harness.drain()] == ["a"]


def test_a_version_ends_with_its_last_moment() -> None:
    with harness_of("left", "ends") as harness:
        harness.push(right=("a", 10, 1, 20))
        harness.push(left=[(1, 9, 1), (1, 10, 2), (1, 20, 3), (1, 21, 4)])
        assert [(row.ts, row.rate) for row in harness.drain()] == [
            (10, "a"),
            (20, "a"),
            (9, None),
            (21, None),
        ]


def test_an_ended_version_is_not_replaced_by_an_older_one() -> None:
    with harness_of("left", "ends") as harness:
        harness.push(right=[("old", 1, 1, None), ("new", 5, 1, 7)], left=[(1, 6, 0), (1, 9, 0)])
        assert [(row.ts, row.rate) for row in harness.drain()] == [(6, "new"), (9, None)]
        harness.advance_watermark(8)
        harness.tick()
        assert harness.state("right", 1) == {}


def test_late_rows_and_versions_go_their_own_way() -> None:
    with harness_of("inner") as harness:
        harness.advance_watermark(10)
        harness.push(left=(1, 9, 1), right=("a", 8, 1, None))
        assert harness.side("late.left") == [(1, 9, 1)]
        assert [row.rate for row in harness.side("late.right")] == ["a"]


def test_times_of_an_end_may_be_a_timestamp_a_date_or_milliseconds() -> None:
    for ddl, end in (
        ("timestamp", dt.datetime(1970, 1, 2, tzinfo=dt.UTC)),
        ("date", dt.date(1970, 1, 2)),
        ("bigint", 86_400_000),
        ("bigint", 2**62),
    ):
        rates = parse_schema(f"rate string, at bigint, k int, ends {ddl}")
        plan = as_of_plan(TRADES, rates, "k", "left", "_right")
        with Harness(
            AsOfJoin(plan, check_validity("ends", rates), ("ts", 0)),
            {"left": TRADES, "right": rates},
            "k",
            plan.schema([pa.int32()]),
            event_time={"left": "ts", "right": "at"},
        ) as harness:
            harness.push(right=("a", 0, 1, end), left=[(1, 86_400_000, 0), (1, 86_400_001, 0)])
            found = [row.rate for row in harness.drain()]
            assert found == (["a", "a"] if end == 2**62 else ["a", None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how": "right"}, "expected: one of inner, left"),
        ({"on": "v"}, "the right stream has no column 'v'"),
        ({"valid_until": "rate"}, "is a column of string"),
        ({"valid_until": "no such"}, "a column of the versions, or a span of time"),
        ({"valid_until": 5}, "a column of the versions, or a span of time"),
    ],
)
def test_what_cannot_be_joined_as_of_a_time_is_refused(options: Any, message: str) -> None:
    asked = {"on": {"k": "id"}, "how": "inner", "valid_until": None} | options
    with pytest.raises(PlanError, match=message):
        as_of_plan(TRADES, RATES, asked["on"], asked["how"], "_right")
        check_validity(asked["valid_until"], RATES)
