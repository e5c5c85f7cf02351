"""What an aggregate may ask for, and how it is read."""

from __future__ import annotations

import pytest

from cairn.errors import PlanError
from cairn.operators.aggregates.parse import Call, parse_calls


def parsed(text: str) -> Call:
    (call,) = parse_calls({"x": text}, [])
    return call


@pytest.mark.parametrize(
    ("text", "function", "argument"),
    [
        ("count(*)", "count", None),
        (" COUNT ( * ) ", "count", None),
        ("count(v)", "count", "v"),
        ("sum(amount * rate)", "sum", "amount * rate"),
        ("mean(v)", "avg", "v"),
        ("stddev(v)", "stddev_samp", "v"),
        ("variance(v)", "var_samp", "v"),
        ("max(coalesce(a, (b + 1)))", "max", "coalesce(a, (b + 1))"),
        ("max(if(t = 'a)b', 1, 2))", "max", "if(t = 'a)b', 1, 2)"),
        (r"max(concat(t, '\'),('))", "max", r"concat(t, '\'),(')"),
        ("min(`odd ) name`)", "min", "`odd ) name`"),
        ("sum(m[f(1, 2)])", "sum", "m[f(1, 2)]"),
        ("approx_count_distinct(user)", "approx_count_distinct", "user"),
    ],
)
def test_a_call_is_read_with_its_argument(text: str, function: str, argument: str | None) -> None:
    assert parsed(text) == Call("x", function, argument)


@pytest.mark.parametrize(
    "text", ["first(v, true)", "first(v IGNORE NULLS)", "first(v ignore  nulls)"]
)
def test_first_can_be_told_to_skip_nulls(text: str) -> None:
    assert parsed(text) == Call("x", "first", "v", skips_nulls=True)
    assert parsed(text).sql == "first(v, true)"


def test_first_takes_nulls_when_not_told() -> None:
    assert parsed("last(v, false)") == parsed("last(v)") == Call("x", "last", "v")


def test_a_condition_is_read_and_kept_apart_from_the_argument() -> None:
    call = parsed("sum(v) filter (where a > ')' or (b = 1))")
    assert call == Call("x", "sum", "v", where="(a > ')' or (b = 1))")
    assert call.sql == "sum(v) FILTER (WHERE (a > ')' or (b = 1)))"
    assert call.value == "CASE WHEN (a > ')' or (b = 1)) THEN v END"
    assert parsed("count(*) FILTER (WHERE a)").value == "CASE WHEN (a) THEN 1 END"


def test_distinct_values_are_those_of_all_expressions_and_never_null() -> None:
    assert parsed("count(DISTINCT lower(a))") == Call("x", "count_distinct", "lower(a)")
    call = parsed("count(distinct a, b) filter (where c)")
    assert call.argument == (
        "CASE WHEN NOT ((a) IS NULL OR (b) IS NULL) THEN named_struct('c0', a, 'c1', b) END"
    )
    assert call.sql == f"count(DISTINCT {call.argument}) FILTER (WHERE (c))"


def test_max_by_has_a_value_and_what_it_is_compared_by() -> None:
    call = parsed("max_by(struct(a, b), f(c, 1)) filter (where d)")
    assert call == Call("x", "max_by", "struct(a, b)", by="f(c, 1)", where="(d)")
    assert call.sql == "max_by(struct(a, b), f(c, 1)) FILTER (WHERE (d))"
    assert call.by_value == "CASE WHEN (d) THEN f(c, 1) END"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("median(v)", "'median' is not an aggregate"),
        ("v", "not a function call"),
        ("sum(v) + 1", "follows the call"),
        ("sum(v", "not closed"),
        ("sum('v)", "not closed"),
        ("sum()", "one argument"),
        ("count(a, b)", "one argument"),
        ("sum(DISTINCT a)", "only count takes DISTINCT"),
        ("count(DISTINCT)", "one expression or several"),
        ("count(DISTINCT *)", "one expression or several"),
        ("max_by(a)", "two arguments"),
        ("max_by(a, b, c)", "two arguments"),
        ("sum(v) FILTER (v > 1)", r"expected FILTER \(WHERE"),
        ("sum(v) FILTER (WHERE )", r"expected FILTER \(WHERE"),
        ("sum(v) FILTER (WHERE v > (1)", "not closed"),
        ("sum(v) FILTER (WHERE v > 1) + 1", "follows the call"),
        (7, "not a function call"),
    ],
)
def test_what_cannot_be_computed_is_refused(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parsed(text)


def test_no_aggregates_at_all_are_refused() -> None:
    with pytest.raises(PlanError, match="has no aggregates"):
        parse_calls({}, ["k"])


def test_the_name_of_a_key_column_is_refused() -> None:
    with pytest.raises(PlanError, match="name of another column"):
        parse_calls({"k": "sum(v)"}, ["k"])
