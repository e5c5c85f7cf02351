"""Partials that a slot makes of rows, against those that Spark's grouped plan makes of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.operators.aggregates import assign
from cairn.operators.aggregates.ahead import AggregateAhead, PaneTime, make_ahead
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.windows import Session, Sliding, Tumbling, WindowSpec
from tests.aggregates_model import (
    ASKED,
    SCHEMA,
    SIGNED,
    TIMESTAMP,
    Row,
    group_partials,
    make_aggregates,
    make_aggregation,
    make_partial_rows,
)

IN_SPARK = ("filter", "v, s", "first(", "last(", "approx")
COLUMNS, SIGNED_COLUMNS = (
    {name: sql for name, sql in asked.items() if not any(text in sql for text in IN_SPARK)}
    for asked in (ASKED, SIGNED)
)
"""Aggregates of columns: a slot needs no Spark to compute them."""
ROW = st.builds(
    Row,
    st.none() | st.sampled_from(["", "a", "é"]),
    st.integers(-20, 60),
    st.none() | st.integers(-3, 3),
    st.none() | st.sampled_from(["", "b", "𐍈", "text of more than sixteen bytes"]),
    st.none() | st.sampled_from([-1.5, 0.0, 2.0, math.inf, math.nan]),
    st.just(1),
)
SPECS: list[WindowSpec | None] = [None, Tumbling(10), Sliding(10, 4), Session(6)]


def make_function(plan: WindowPlan | None, asked: dict[str, str], *, takes_back: bool) -> Any:
    _, partials = make_aggregation(plan, asked, takes_back=takes_back)
    schema = SCHEMA.append(pa.field("time", TIMESTAMP)).append(pa.field("_change", pa.int8()))
    time = None
    if plan is not None:
        spec = plan.windows
        length = assign.pane_us(spec) if isinstance(spec, Tumbling | Sliding) else None
        time = PaneTime("time", 0, length, 0)
    aggregates = make_aggregates(asked, takes_back=takes_back)
    change = "_change" if takes_back else None
    return make_ahead(schema, aggregates, partials, time, change), partials


def as_batch(rows: list[Row]) -> pa.RecordBatch:
    columns = {
        name: pa.array([getattr(row, name) for row in rows], SCHEMA.field(name).type)
        for name in SCHEMA.names
    }
    columns["time"] = pa.array([row.at * 1000 for row in rows], TIMESTAMP)
    columns["_change"] = pa.array([row.change for row in rows], pa.int8())
    return pa.RecordBatch.from_pydict(columns)


def as_texts(rows: list[dict[str, Any]]) -> list[str]:
    return [repr(row) for row in rows]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(rows=st.lists(ROW, min_size=1, max_size=12))
def test_slot_groups_rows_as_spark_does(spec: WindowSpec | None, rows: list[Row]) -> None:
    plan = None if spec is None else WindowPlan(spec)
    function, partials = make_function(plan, COLUMNS, takes_back=False)
    assert_groups(function, partials, plan, rows, COLUMNS)


@given(rows=st.lists(ROW, max_size=12))
def test_operator_emits_partials_of_rows_without_a_time(rows: list[Row]) -> None:
    function, partials = make_function(WindowPlan(Tumbling(10)), COLUMNS, takes_back=False)
    schema = as_batch([]).schema
    given = [row | {"time": None} for row in as_batch(rows).to_pylist()]
    with Harness(function, schema, None, function.schema) as harness:
        harness.push(given)
        harness.commit()
        found = [dict(zip(partials.schema.names, row, strict=True)) for row in harness.outputs]
    assert sum(row[partials.layout.count] for row in found) == len(rows)
    assert all(row[partials.layout.time] is None for row in found)


@given(rows=st.lists(st.tuples(ROW, st.sampled_from([1, -1])), min_size=1, max_size=12))
def test_slot_groups_rows_that_are_taken_back(rows: list[tuple[Row, int]]) -> None:
    function, partials = make_function(None, SIGNED_COLUMNS, takes_back=True)
    changes = [row._replace(change=change) for row, change in rows]
    assert_groups(function, partials, None, changes, SIGNED_COLUMNS)


def assert_groups(
    function: AggregateAhead | None,
    partials: Any,
    plan: WindowPlan | None,
    rows: list[Row],
    asked: dict[str, str],
) -> None:
    assert function is not None

    def pane(times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        spec = None if plan is None else plan.windows
        return assign.panes(spec, times) if isinstance(spec, Tumbling | Sliding) else times

    made = function.process(as_batch(rows), None)  # type: ignore[arg-type]
    by_rows = make_partial_rows(partials, rows, asked)
    expected = group_partials(partials, by_rows, pane, asked)
    assert made.schema == partials.schema
    assert as_texts(made.to_pylist()) == as_texts(expected.to_pylist())


@pytest.mark.parametrize("sql", [sql for sql in ASKED.values() if sql not in COLUMNS.values()])
def test_other_expressions_are_left_to_spark(sql: str) -> None:
    function, _ = make_function(None, {"x": sql}, takes_back=False)
    assert function is None
