"""Exact distinct counts: what their states are called, and how a program may change them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest

from cairn.operators.aggregates.sets import SAMPLED_MIN, ValueSets, _count_groups
from cairn.state import Declaration
from cairn.storage.manifest import StateDecl
from cairn.types.evolution import compare, reshape
from tests.aggregates_model import make_aggregation

FEW = {"few": "count(distinct v) filter (where y > 0)"}
ALL = {"all": "count(distinct v)"}


def states(asked: dict[str, str], *, takes_back: bool = False) -> Mapping[str, Declaration]:
    function, _ = make_aggregation(None, asked, takes_back=takes_back)
    assert isinstance(function.sets, ValueSets)
    return function.sets.declare_state()


def test_counts_of_one_column_share_a_state_whatever_rows_they_count() -> None:
    found = states(FEW | {"other": "count(distinct s)"} | ALL)
    assert list(found) == ["v__seen", "s__seen"]
    assert found["v__seen"].type == pa.struct([("few", pa.bool_()), ("all", pa.bool_())])


@pytest.mark.parametrize(
    ("asked", "takes_back", "name"),
    [
        ({"both": "count(distinct v, s)"}, False, "both__values"),
        (ALL, True, "all__counts"),
    ],
)
def test_others_have_a_state_of_their_own(
    asked: dict[str, str], takes_back: bool, name: str
) -> None:
    assert list(states(asked | {"n": "count(*)"}, takes_back=takes_back)) == [name]


def test_a_count_that_is_added_has_seen_nothing_and_one_that_is_left_out_is_forgotten() -> None:
    before, after = states(FEW)["v__seen"], states({"new": "count(distinct v)"})["v__seen"]
    held = StateDecl(kind="map", type=before.ddl, entry_type=before.entry_ddl)
    assert compare(held, after) == "migrate"
    stored = pa.RecordBatch.from_pydict(
        {
            "group": pa.array([0], pa.int32()),
            "key": pa.array(["k"]),
            "entry": pa.array([7]),
            "value": pa.array([{"few": True}], before.type),
            "live": pa.array([True]),
        }
    )
    read = reshape(stored, after, pa.string(), operator="op", held=held)
    assert read["value"].to_pylist() == [{"new": None}]


def test_groups_of_few_values_are_counted() -> None:
    few = np.array([0, 1, 0, 1, 2, 2, 2, 2, 2, 2])
    assert _count_groups([(few, 3)]) == 3
    assert _count_groups([(few, 3), (np.array([0, 0, 1, 0, 0, 0, 0, 0, 0, 0]), 2)]) == 4
    # Enough to know that grouping leaves most of the rows.
    assert _count_groups([(np.arange(9), 9), (np.arange(9) % 2, 2)]) == 9


def test_groups_of_many_values_are_counted_in_a_sample() -> None:
    count = 3 * SAMPLED_MIN + 1
    many = np.tile(np.arange(count), 4)
    turns = np.repeat(np.arange(4), count)
    assert _count_groups([(many, count), (turns // 2, 2)]) == pytest.approx(2 * count, rel=0.01)
    assert _count_groups([(many, count), (turns == 9, 2)]) == pytest.approx(count, rel=0.01)
    assert _count_groups([(many, count), (turns, 4)]) == pytest.approx(4 * count, rel=0.01)
