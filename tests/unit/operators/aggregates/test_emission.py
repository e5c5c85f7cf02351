"""Results and changes of results, case by case."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cairn.errors import PlanError
from cairn.operators.aggregates.accumulate import make_aggregate
from cairn.operators.aggregates.emission import has_changes
from cairn.operators.aggregates.parse import parse_calls
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.windows import Session
from tests.aggregates_model import Row, make_aggregation, make_partial_rows

ASKED = {"n": "count(*)", "high": "max(v)"}


class Job:
    """An aggregation that emits changes."""

    def __init__(self, plan: WindowPlan | None = None, **options: Any) -> None:
        function, self.partials = make_aggregation(plan, ASKED, changes=True, **options)
        self.harness = Harness(
            function,
            self.partials.schema,
            "k",
            function.schema,
            event_time=self.partials.layout.time,
        )

    def epoch(self, *rows: tuple[str, int, int], change: int = 1) -> list[tuple[Any, ...]]:
        """An epoch with rows (key, milliseconds, value)."""
        given = [Row(k, at, v, None, None, change) for k, at, v in rows]
        if given:
            self.harness.push(make_partial_rows(self.partials, given, ASKED).to_pylist())
        before = len(self.harness.outputs)
        self.harness.commit()
        found = [tuple(row) for row in self.harness.outputs[before:]]
        # Without the bounds of windows.
        return [(row[0], *row[-3:]) for row in found]


def test_a_change_is_the_result_before_and_the_result_after() -> None:
    job = Job()
    assert job.epoch(("a", 0, 5), ("b", 0, 1)) == [("a", 1, 5, 1), ("b", 1, 1, 1)]
    assert job.epoch(("a", 0, 7)) == [("a", 1, 5, -1), ("a", 2, 7, 1)]
    assert job.epoch() == []


def test_a_result_that_stays_the_same_is_not_a_change() -> None:
    job = Job(takes_back=True)
    job.epoch(("a", 0, 5), ("a", 0, 3))
    assert job.epoch(("a", 0, 5)) == [("a", 2, 5, -1), ("a", 3, 5, 1)]
    job.harness.push(
        make_partial_rows(
            job.partials,
            [Row("a", 0, 3, None, None, -1), Row("a", 0, 4, None, None, 1)],
            ASKED,
        ).to_pylist()
    )
    assert job.epoch() == []


def test_a_key_that_loses_all_rows_is_taken_back() -> None:
    job = Job(takes_back=True)
    job.epoch(("a", 0, 5))
    assert job.epoch(("a", 0, 5), change=-1) == [("a", 1, 5, -1)]
    assert job.harness.state("aggregates", "a") is None
    assert job.epoch(("a", 0, 2)) == [("a", 1, 2, 1)]


def test_a_row_that_is_taken_back_before_it_comes_counts_for_nothing() -> None:
    job = Job(takes_back=True)
    assert job.epoch(("a", 0, 5), change=-1) == []
    assert job.epoch(("a", 0, 5)) == []
    assert job.harness.state("aggregates", "a") is None
    assert job.harness.state("high__counts", "a") == {}


def test_sessions_that_become_one_are_taken_back() -> None:
    job = Job(WindowPlan(Session(5), early_rows=1))
    assert job.epoch(("a", 0, 1), ("a", 10, 2)) == [("a", 1, 1, 1), ("a", 1, 2, 1)]
    assert sorted(job.epoch(("a", 5, 3))) == [("a", 1, 1, -1), ("a", 1, 2, -1), ("a", 3, 3, 1)]


def test_a_stream_is_one_of_changes_if_it_has_the_column() -> None:
    assert has_changes(pa.schema([("n", pa.int64()), ("_change", pa.int8())]))
    assert not has_changes(pa.schema([("n", pa.int64()), ("_change", pa.string())]))
    assert not has_changes(pa.schema([("n", pa.int64())]))


@pytest.mark.parametrize(
    "text", ["first(v)", "max_by(v, v)", "stddev(v)", "approx_count_distinct(v)"]
)
def test_functions_that_cannot_take_rows_back_are_refused(text: str) -> None:
    (call,) = parse_calls({"x": text}, [])
    with pytest.raises(PlanError, match=r"rows cannot be taken back from it\n  expected: count, "):
        make_aggregate(
            call,
            pa.float64(),
            pa.float64(),
            is_timed=True,
            by_type=pa.float64(),
            takes_back=True,
        )
