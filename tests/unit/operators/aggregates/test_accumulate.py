"""Accumulators against a plain model: values per key, split into batches in any way."""

from __future__ import annotations

import decimal
import math
import statistics
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import FunctionError, PlanError
from cairn.operators.aggregates.accumulate import Accumulators, make_aggregate
from cairn.operators.aggregates.parse import Call, parse_calls

D = decimal.Decimal
DEC = pa.decimal128(12, 2)


def accumulators(
    text: str, argument: pa.DataType, result: pa.DataType, *, is_timed: bool = False
) -> Accumulators:
    (call,) = parse_calls({"x": text}, [])
    return Accumulators([make_aggregate(call, argument, result, is_timed=is_timed)])


def partials(text: str, type_: pa.DataType, values: list[Any], times: list[int]) -> list[pa.Array]:
    """What Spark's projection makes of rows."""
    function = text.split("(")[0]
    ones = pa.array([int(v is not None) for v in values], pa.int64())
    if function == "count":
        return [ones]
    if function == "avg":
        return [pa.array(values, type_), ones]
    if function in ("stddev_pop", "var_samp"):
        return [
            ones,
            pa.array([v or 0.0 for v in values], pa.float64()),
            pa.array([0.0] * len(values)),
        ]
    if function in ("first", "last"):
        return [pa.array(times, pa.int64()), pa.array(values, type_)]
    return [pa.array(values, type_)]


def merged(
    made: Accumulators, text: str, type_: pa.DataType, batches: list[list[tuple[int, Any, int]]]
) -> list[Any]:
    """Rows (group, value, time) by the batch into state of four groups; what it comes to."""
    stored = made.store(made.zeros(4))
    for batch in batches:
        columns = made.load(stored)
        at = np.array([group for group, _, _ in batch], np.int64)
        arrays = partials(text, type_, [v for _, v, _ in batch], [t for _, _, t in batch])
        made.merge(columns, at, made.read(arrays))
        stored = made.store(columns)
    (result,) = made.results(made.load(stored))
    return result.to_pylist()


def rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[tuple[int, Any, int]]]]:
    row = st.tuples(st.integers(0, 3), st.none() | values, st.integers(0, 5))
    return st.lists(st.lists(row, max_size=12), max_size=4)


def by_group(batches: list[list[tuple[int, Any, int]]]) -> list[list[Any]]:
    return [
        [
            value
            for batch in batches
            for group, value, _ in batch
            if group == g and value is not None
        ]
        for g in range(4)
    ]


LONGS = st.integers(-(1 << 40), 1 << 40)
DOUBLES = st.floats(-1e6, 1e6)
DECIMALS = st.decimals(-(10**9), 10**9, places=2)
MODELS: dict[str, tuple[str, pa.DataType, pa.DataType, Any, Any]] = {
    "sum of longs": ("sum(v)", pa.int64(), pa.int64(), LONGS, sum),
    "sum of doubles": ("sum(v)", pa.float64(), pa.float64(), DOUBLES, math.fsum),
    "sum of decimals": ("sum(v)", pa.decimal128(22, 2), pa.decimal128(22, 2), DECIMALS, sum),
    "avg of doubles": ("avg(v)", pa.float64(), pa.float64(), DOUBLES, statistics.fmean),
    "min of longs": ("min(v)", pa.int64(), pa.int64(), LONGS, min),
    "max of longs": ("max(v)", pa.int64(), pa.int64(), LONGS, max),
    "min of bytes": ("min(v)", pa.int8(), pa.int8(), st.integers(-128, 127), min),
    "max of booleans": ("max(v)", pa.bool_(), pa.bool_(), st.booleans(), max),
    "min of dates": ("min(v)", pa.date32(), pa.date32(), st.dates(), min),
    "max of text": ("max(v)", pa.string(), pa.string(), st.text(max_size=3), max),
    "min of decimals": ("min(v)", DEC, DEC, DECIMALS, min),
    "stddev_pop": ("stddev_pop(v)", pa.float64(), pa.float64(), DOUBLES, statistics.pstdev),
}


@pytest.mark.parametrize("name", MODELS)
def test_batches_merge_to_what_the_values_come_to(name: str) -> None:
    text, type_, result, values, model = MODELS[name]

    @given(rows(values))
    def check(batches: list[list[tuple[int, Any, int]]]) -> None:
        found = merged(accumulators(text, type_, result), text, type_, batches)
        for got, held in zip(found, by_group(batches), strict=True):
            expected = model(held) if held else None
            if isinstance(expected, float):
                assert got == pytest.approx(expected, rel=1e-9, abs=1e-6)
            else:
                assert got == expected

    check()


@given(rows(LONGS))
def test_count_counts_values_and_is_never_null(batches: list[list[tuple[int, Any, int]]]) -> None:
    made = accumulators("count(v)", pa.int64(), pa.int64())
    assert merged(made, "count(v)", pa.int64(), batches) == [len(g) for g in by_group(batches)]


@given(rows(DOUBLES))
def test_a_variance_of_a_sample_needs_two_values(batches: list[list[tuple[int, Any, int]]]) -> None:
    made = accumulators("var_samp(v)", pa.float64(), pa.float64())
    found = merged(made, "var_samp(v)", pa.float64(), batches)
    for got, held in zip(found, by_group(batches), strict=True):
        expected = statistics.variance(held) if len(held) > 1 else None
        assert got == (
            expected if expected is None else pytest.approx(expected, rel=1e-6, abs=1e-3)
        )


@pytest.mark.parametrize("text", ["first(v)", "last(v)"])
@given(batches=rows(LONGS))
def test_first_and_last_go_by_time_then_by_value(
    text: str, batches: list[list[tuple[int, Any, int]]]
) -> None:
    made = accumulators(text, pa.int64(), pa.int64(), is_timed=True)
    found = merged(made, text, pa.int64(), batches)
    for group, got in enumerate(found):
        held = [(t, v is not None, v or 0) for batch in batches for g, v, t in batch if g == group]
        choose = min if text == "first(v)" else max
        expected = None
        if held:
            _, is_there, value = choose(held)
            expected = value if is_there else None
        assert got == expected


@pytest.mark.parametrize("text", ["first(v)", "last(v)"])
@given(batches=rows(st.text(max_size=2)))
def test_without_event_time_first_and_last_go_by_arrival(
    text: str, batches: list[list[tuple[int, Any, int]]]
) -> None:
    made = accumulators(text, pa.string(), pa.string())
    found = merged(made, text, pa.string(), batches)
    for group, got in enumerate(found):
        held = [v for batch in batches for g, v, _ in batch if g == group]
        assert got == (held[0 if text == "first(v)" else -1] if held else None)


def test_nan_is_the_greatest_and_never_the_least() -> None:
    nan = float("nan")
    batches = [[(0, nan, 0), (0, 1.0, 0), (1, nan, 0)]]
    for text, expected in (("max(v)", [nan, nan]), ("min(v)", [1.0, nan])):
        made = accumulators(text, pa.float64(), pa.float64())
        assert str(merged(made, text, pa.float64(), batches)[:2]) == str(expected)


def test_a_decimal_average_is_rounded_half_up() -> None:
    made = accumulators("avg(v)", DEC, pa.decimal128(16, 6))
    batches = [[(0, D("0.01"), 0), (0, D("0.01"), 0), (0, D("0.02"), 0)]]
    assert merged(made, "avg(v)", pa.decimal128(22, 2), batches)[0] == D("0.013333")


@pytest.mark.parametrize(
    "batches",
    [
        [[(0, (1 << 63) - 1, 0)], [(0, 1, 0)]],
        [[(0, (1 << 63) - 1, 0), (0, 1, 0)]],
        [[(1, -(1 << 63), 0), (1, -1, 0), (0, 5, 0)]],
    ],
)
def test_a_sum_that_leaves_bigint_raises(batches: list[list[tuple[int, Any, int]]]) -> None:
    made = accumulators("sum(v)", pa.int64(), pa.int64())
    with pytest.raises(FunctionError, match="out of the range of bigint"):
        merged(made, "sum(v)", pa.int64(), batches)


def test_large_values_that_cancel_out_are_no_overflow() -> None:
    made = accumulators("sum(v)", pa.int64(), pa.int64())
    batches = [[(0, (1 << 63) - 1, 0), (0, -(1 << 62), 0), (0, 1 << 61, 0)]]
    assert merged(made, "sum(v)", pa.int64(), batches)[0] == (1 << 63) - 1 - (1 << 61)


def test_a_decimal_sum_that_leaves_its_type_raises() -> None:
    wide = pa.decimal128(38, 0)
    made = accumulators("sum(v)", wide, wide)
    most = D("9" * 38)
    with pytest.raises(FunctionError, match=r"decimal\(38,0\)"):
        merged(made, "sum(v)", wide, [[(0, most, 0), (0, D(1), 0)]])


def test_distinct_hashes_are_counted_across_batches() -> None:
    made = accumulators("approx_count_distinct(v)", pa.string(), pa.int64())
    stored = made.store(made.zeros(2))
    for batch in ([[1], [2], []], [[2], [-3], [1, 2, 3]]):
        columns = made.load(stored)
        lists = pa.array(batch, pa.list_(pa.field("element", pa.int64())))
        made.merge(columns, np.array([0, 0, 1]), made.read([lists]))
        stored = made.store(columns)
    assert made.results(made.load(stored))[0].to_pylist() == [3, 3]


@given(rows(LONGS))
def test_merging_what_is_merged_gives_the_same(batches: list[list[tuple[int, Any, int]]]) -> None:
    """Panes go into windows, and sessions into sessions, as accumulators."""
    made = accumulators("max(v)", pa.int64(), pa.int64())
    columns = made.zeros(4)
    for batch in batches:
        at = np.array([g for g, _, _ in batch], np.int64)
        once = made.merge_rows(at, 4, made.read([pa.array([v for _, v, _ in batch], pa.int64())]))
        made.merge(columns, np.arange(4), once)
    assert made.results(columns)[0].to_pylist() == merged(made, "max(v)", pa.int64(), batches)


def test_the_least_of_a_struct_is_refused() -> None:
    struct = pa.struct([("a", pa.int64())])
    with pytest.raises(PlanError, match=r"min\(v\) is struct"):
        accumulators("min(v)", struct, struct)


def test_function_without_parts_is_not_taken_for_a_variance() -> None:
    with pytest.raises(AssertionError, match="median has no parts"):
        make_aggregate(Call("x", "median", "v"), pa.int64(), pa.int64(), is_timed=False)
