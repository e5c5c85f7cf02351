"""The SQL of partials: both plans give the same columns, and clash with no key."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cairn.operators.aggregates.accumulate import Aggregate, make_aggregate, net_rows
from cairn.operators.aggregates.parse import Call, parse_calls
from cairn.operators.aggregates.partial import Partials, make_partials
from cairn.operators.aggregates.parts import Extreme

SCHEMA = pa.schema([("_k", pa.int64()), ("at", pa.int64()), ("v", pa.list_(pa.int64()))])


def made(text: str, type_: pa.DataType, is_timed: bool = False, **more: object) -> Partials:
    calls = parse_calls({"n": "count(*)", "x": text}, ["_k"])
    aggregates = [
        make_aggregate(c, type_, type_, is_timed=is_timed, by_type=pa.int64()) for c in calls
    ]
    return make_partials(SCHEMA, ["_k"], aggregates, order="at", **more)  # type: ignore[arg-type]


def names(columns: tuple[str, ...]) -> list[str]:
    return [column.rsplit(" AS ", 1)[1].strip("`") for column in columns]


def test_both_plans_give_the_same_columns_in_the_same_order() -> None:
    partials = made("avg(v)", pa.float64(), time="at", pane="at - 1")
    assert partials.grouping is not None
    assert names(partials.rows) == names(partials.grouping + partials.grouped)
    assert names(partials.rows) == partials.schema.names


def test_columns_have_names_that_no_key_begins_with() -> None:
    assert made("max(v)", pa.int64()).schema.names == ["_k", "__count", "__p1"]


def test_counting_rows_needs_no_column_of_its_own() -> None:
    layout = made("max(v)", pa.int64()).layout
    assert layout.parts == ("__count", "__p1")


def test_whole_rows_cannot_be_grouped() -> None:
    partials = made("max(v)", pa.int64(), carries_rows=True)
    assert partials.grouping is None
    assert partials.layout.row == "__row"
    assert partials.schema.field("__row").type == pa.struct(list(SCHEMA))


def test_first_of_maps_by_time_is_left_to_the_slot() -> None:
    """Spark has no order of them."""
    maps = pa.struct([("m", pa.map_(pa.string(), pa.int64()))])
    assert made("first(v)", maps, is_timed=True).grouping is None
    assert made("max_by(v, at)", maps).grouping is None
    assert made("first(v)", maps).grouping is not None
    assert made("first(v)", SCHEMA.field("v").type, is_timed=True).grouping is not None


@pytest.mark.parametrize(
    ("text", "type_", "may_group"),
    [
        ("sum(v)", pa.int64(), False),
        ("sum(v)", pa.decimal128(20, 2), False),
        ("avg(v)", pa.decimal128(20, 2), False),
        ("sum(v)", pa.float64(), True),
        ("avg(v)", pa.float64(), True),
        ("max(v)", pa.int64(), True),
    ],
)
def test_sums_that_spark_would_let_overflow_are_left_to_the_slot(
    text: str, type_: pa.DataType, may_group: bool
) -> None:
    assert made(text, type_).grouping is not None
    found = made(text, type_, checks_overflow=False)
    assert (found.grouping is not None) == may_group


def test_distinct_values_are_left_to_the_slot() -> None:
    """Of a group they would be a set of any size, in one row."""
    partials = made("approx_count_distinct(v)", pa.int64())
    assert partials.grouping is None
    assert not any("collect_set" in column for column in partials.grouped)


def test_values_that_are_counted_once_are_grouped_by() -> None:
    partials = made("count(DISTINCT v) FILTER (WHERE at > 1)", pa.int64(), time="at", pane="at - 1")
    assert partials.grouping is not None
    condition, value = "coalesce((at > 1), false) AS `__w2`", "cast((`v`) AS bigint) AS `__v3`"
    assert partials.grouping[-2:] == partials.rows[2:4] == (condition, value)
    assert partials.layout.parts == ("__count", "__v3")
    assert partials.layout.conditions == (None, "__w2")
    assert names(partials.rows) == names(partials.grouping + partials.grouped)


def test_the_column_that_is_counted_is_known_however_it_is_written() -> None:
    plain, quoted = (made(f"count(DISTINCT {v})", pa.int64()) for v in ("v", "`v`"))
    assert plain.rows == quoted.rows
    assert plain.layout.sources == quoted.layout.sources == {"__v1": "v"}
    assert made("count(DISTINCT v + 1)", pa.int64()).layout.sources == {}


def test_expression_of_distinct_values_is_not_evaluated_in_rows_that_do_not_count() -> None:
    partials = made("count(DISTINCT 1 / at) FILTER (WHERE at != 0)", pa.float64())
    value = "cast((CASE WHEN (at != 0) THEN 1 / at END) AS double) AS `__v1`"
    assert partials.rows[1] == value
    assert partials.layout.conditions == (None, None)


def test_distinct_counts_with_filters_share_their_columns() -> None:
    where = "FILTER (WHERE at > 1)"
    asked = {
        "n": f"count(*) {where}",
        "a": "count(DISTINCT at)",
        "b": f"count(DISTINCT at) {where}",
        "c": f"count(DISTINCT _k) {where}",
    }
    aggregates = [
        make_aggregate(c, pa.int64(), pa.int64(), is_timed=False) for c in parse_calls(asked, [])
    ]
    partials = make_partials(SCHEMA, ["_k"], aggregates, order="at")
    assert partials.schema.names == ["_k", "__v1", "__w2", "__v3", "__count"]
    assert partials.layout.parts == ("__count", "__v1", "__v1", "__v3")
    assert partials.layout.conditions == ("__w2", None, "__w2", "__w2")


def test_a_filtered_count_does_not_count_all_rows() -> None:
    partials = made("count(*) FILTER (WHERE at > 1)", pa.int64())
    assert partials.layout.parts[1] != partials.layout.count
    assert "CASE WHEN (at > 1) THEN 1 END" in partials.grouped[-1]


def test_rows_that_are_taken_back_count_and_add_up_with_their_sign() -> None:
    calls = parse_calls({"x": "sum(at)", "y": "count(DISTINCT at)"}, ["_k"])
    aggregates = [
        net_rows(),
        *(
            make_aggregate(c, pa.int64(), pa.int64(), is_timed=False, takes_back=True)
            for c in calls
        ),
    ]
    partials = make_partials(SCHEMA, ["_k"], aggregates, order=None, change="_change")
    weight = "cast(`_change` AS bigint)"
    assert partials.layout.weight == partials.layout.parts[0] == "__p0"
    assert partials.rows[3] == f"cast(if((1) IS NULL, 0L, {weight}) AS bigint) AS `__p0`"
    assert (
        f"sum(if({weight} < 0, -cast((at) AS bigint), cast((at) AS bigint)))" in partials.grouped[2]
    )
    assert partials.grouping is not None and "(`at`)" in partials.grouping[-1]
    assert names(partials.rows) == names(partials.grouping + partials.grouped)


def test_the_sql_of_an_extreme_follows_from_the_part_and_not_from_the_call() -> None:
    parts = (Extreme(pa.int64(), is_max=False), Extreme(pa.int64(), is_max=True))
    both = Aggregate(Call("x", "max_minus_min", "at"), pa.int64(), parts)
    found = make_partials(SCHEMA, ["_k"], [both], order=None).grouped
    assert found[-2:] == ("cast(min(at) AS bigint) AS `__p0`", "cast(max(at) AS bigint) AS `__p1`")
