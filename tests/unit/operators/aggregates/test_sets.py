"""Exact distinct counts: what their states are called, and how a program may change them."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pytest

from cairn.operators.aggregates.sets import ValueSets
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
