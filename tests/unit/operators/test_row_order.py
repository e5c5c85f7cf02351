"""The order of rows by all their columns: whatever the order in which they come."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pyarrow as pa
import pytest

from cairn.operators.latest import Latest
from cairn.operators.row_order import is_greater, row_order
from cairn.operators.top import By, Top
from cairn.types import parse_schema
from tests.backends import MORE_IN_SOAK
from tests.stored_harness import StoredHarness

COLUMNS: dict[str, list[Any]] = {
    "map<string,int>": [None, [], [("a", None)], [("a", 1)], [("a", 1), ("b", 0)], [("b", 0)]],
    "array<double>": [None, [], [None], [-0.0], [0.0], [0.0, 1.0], [math.nan]],
    "array<struct<x:int,m:map<int,string>>>": [
        None,
        [],
        [None],
        [{"m": []}],
        [{"x": 1, "m": [(1, "é")]}],
    ],
    "struct<d:double,l:array<int>>": [
        None,
        {"d": None},
        {"d": -0.0, "l": []},
        {"d": 0.0, "l": []},
        {"d": 0.0, "l": [1]},
    ],
}
"""Values in their order."""


@pytest.mark.parametrize("ddl", COLUMNS)
def test_rows_are_ordered_by_the_values_of_lists_and_maps(ddl: str) -> None:
    type_ = parse_schema(f"v {ddl}")
    values = pa.array([{"v": value} for value in COLUMNS[ddl]], pa.struct(list(type_)))
    count = len(values)
    for start in range(count):
        moved = [*range(start, count), *range(start)]
        order = row_order(values.take(pa.array(moved)))
        assert [moved[at] for at in order] == list(range(count))
    pairs = list(itertools.product(range(count), repeat=2))
    left, right = (values.take(pa.array(side)) for side in zip(*pairs, strict=True))
    assert is_greater(left, right).tolist() == [a > b for a, b in pairs]


@pytest.mark.parametrize("backend", MORE_IN_SOAK)
@pytest.mark.parametrize("is_ranked", [False, True])
def test_rows_that_differ_in_a_map_only_have_one_order(is_ranked: bool, backend: str) -> None:
    ddl = "k string, ts bigint, m map<string,double>"
    schema = parse_schema(ddl)
    rows = [("a", 1, {"x": value}) for value in (-0.0, 0.0, 2.0)]
    outputs = set()
    for moved in itertools.permutations(rows):
        top = Top(1, [By("ts", False)], schema, None)
        function = top if is_ranked else Latest(schema, None, is_timed=True)
        out = top.schema if is_ranked else schema
        time = None if is_ranked else "ts"
        with StoredHarness(function, ddl, "k", out, event_time=time, backend=backend) as harness:
            harness.push(list(moved[:2]))
            harness.commit()
            harness.push(moved[2])
            harness.commit()
            outputs.add(repr(harness.state("best" if is_ranked else "newest", "a")))
    assert len(outputs) == 1
