"""What a function can do with its state, and what it cannot."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from cairn import state
from cairn.types.codec import FrozenMap
from tests.unit.backends.state_of_a_key import Bound

NEW_YEAR = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


class Mean:
    def create(self) -> Any:
        return (0, 0.0)

    def add(self, accumulator: Any, value: float) -> Any:
        return (accumulator[0] + 1, accumulator[1] + value)

    def merge(self, left: Any, right: Any) -> Any:
        return (left[0] + right[0], left[1] + right[1])

    def result(self, accumulator: Any) -> float:
        return float(accumulator[1] / accumulator[0])


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Place:
    x: int
    y: float


# Value


def test_a_value_is_its_default_until_it_is_set_and_after_it_is_cleared() -> None:
    count = Bound(state.Value("long", default=7)).handle
    assert count.get() == 7
    assert count.get(3) == 3
    count.set(0)
    assert count.get() == count.get(3) == 0
    count.clear()
    assert count.get() == 7


def test_setting_none_clears_a_value() -> None:
    bound = Bound(state.Value("string"))
    bound.handle.set("x")
    bound.handle.set(None)
    assert bound.handle.get() is None
    assert bound.commit() is None, "a value set and cleared in one epoch is no change"


def test_keys_do_not_share_a_value() -> None:
    bound = Bound(state.Value("long"))
    bound.at(1).set(10)
    bound.at(2).set(20)
    bound.at(1, group=3).set(30)
    assert [bound.at(1).get(), bound.at(2).get(), bound.at(1, group=3).get()] == [10, 20, 30]


@pytest.mark.parametrize(
    ("declared", "given", "kept"),
    [
        ("boolean", True, True),
        ("tinyint", -128, -128),
        ("bigint", 2**63 - 1, 2**63 - 1),
        ("float", 0.1, 0.10000000149011612),
        ("double", math.inf, math.inf),
        ("decimal(5,2)", decimal.Decimal("1.005"), decimal.Decimal("1.01")),
        ("string", "žluť 𐍈 \0", "žluť 𐍈 \0"),
        ("binary", bytearray(b"\0\xff"), b"\0\xff"),
        ("date", dt.date(1, 1, 1), dt.date(1, 1, 1)),
        ("timestamp", NEW_YEAR.astimezone(dt.timezone(dt.timedelta(hours=5))), NEW_YEAR),
        ("timestamp_ntz", dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1)),
        ("interval day to second", dt.timedelta(microseconds=-1), dt.timedelta(microseconds=-1)),
        ("array<long>", [1, None], (1, None)),
        ("map<string,long>", {"a": None}, FrozenMap(a=None)),
        ("struct<x:long,y:double>", {"x": 1, "y": 2}, (1, 2.0)),
        (Point, Point(1, 2.5), (1, 2.5)),
        (Place, Place(1, 2.5), (1, 2.5)),
        (object, {"any": [1]}, {"any": [1]}),
    ],
)  # fmt: skip
def test_a_value_of_any_type_is_kept_and_survives_storage(
    declared: Any, given: Any, kept: Any
) -> None:
    bound = Bound(state.Value(declared))
    bound.handle.set(given)
    assert bound.handle.get() == kept
    delta = bound.commit()
    assert bound.handle.get() == kept
    assert bound.loaded(delta).handle.get() == kept
    assert bound.loaded(*bound.table.dump()).handle.get() == kept


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        ("long", "1"),
        ("long", 1.0),
        ("long", True),
        ("int", 2**31),
        ("string", b"x"),
        ("timestamp", dt.datetime(2024, 1, 1)),
        ("array<long>", "12"),
        ("struct<x:long>", {"y": 1}),
        ("struct<x:long NOT NULL>", {"x": None}),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_leaves_no_trace(
    declared: str, given: Any
) -> None:
    bound = Bound(state.Value(declared))
    with pytest.raises(TypeError, match=r"state 's'"):
        bound.handle.set(given)
    assert bound.handle.get() is None
    assert bound.commit() is None


def test_the_error_of_a_nested_value_names_the_place_once() -> None:
    handle = Bound(state.Value("struct<a:array<struct<b:long>>>")).handle
    with pytest.raises(TypeError) as caught:
        handle.set({"a": [{"b": 1}, {"b": "x"}]})
    assert str(caught.value) == "state 's'.a[1].b: expected bigint, found str 'x'"


def test_a_value_read_cannot_be_changed_in_place() -> None:
    mapping = Bound(state.Value("map<string,long>")).handle
    mapping.set({"a": 1})
    with pytest.raises(TypeError, match="copy it with dict"):
        mapping.get()["a"] = 2
    array = Bound(state.Value("array<long>")).handle
    array.set([1])
    assert isinstance(array.get(), tuple)


def test_what_was_handed_in_can_change_without_changing_the_state() -> None:
    handle = Bound(state.Value("array<long>")).handle
    given = [1]
    handle.set(given)
    given.append(2)
    assert handle.get() == (1,)


def test_an_object_read_is_a_copy() -> None:
    bound = Bound(state.Value(object))
    given = {"a": [1]}
    bound.handle.set(given)
    given["a"].append(2)
    bound.handle.get()["a"].append(3)
    assert bound.handle.get() == {"a": [1]}


@pytest.mark.parametrize("declared", [object, "array<long>"])
def test_a_default_changed_in_place_by_one_key_is_not_seen_by_another(declared: Any) -> None:
    bound = Bound(state.Value(declared, default=[]))
    held = bound.at(1).get()
    if isinstance(held, list):
        held.append(1)
    assert len(bound.at(2).get()) == 0
    assert bound.at(2).get([5]) == [5]


# Reducing and aggregating


def test_reducing_folds_values_and_starts_with_the_first() -> None:
    bound = Bound(state.Reducing("long", max))
    assert bound.handle.get() is None
    assert bound.handle.get(0) == 0
    for value in (3, 9, 4):
        bound.handle.add(value)
    assert bound.handle.get() == 9
    bound.handle.clear()
    assert bound.handle.get() is None


def test_reducing_refuses_what_its_function_makes_when_it_does_not_fit() -> None:
    bound = Bound(state.Reducing("long", lambda a, b: a / b))
    bound.handle.add(1)
    with pytest.raises(TypeError, match="expected bigint, found float"):
        bound.handle.add(2)
    assert bound.handle.get() == 1


def test_aggregating_stores_the_accumulator_and_gives_the_result() -> None:
    bound = Bound(state.Aggregating("struct<n:long,s:double>", Mean()))
    assert bound.handle.get() is None
    assert bound.handle.get(0.0) == 0.0
    bound.handle.add(1)
    bound.handle.add(4)
    assert bound.handle.get() == 2.5
    again = bound.loaded(bound.commit())
    again.handle.add(1)
    assert again.handle.get() == 2.0
    again.handle.clear()
    assert again.handle.get() is None


def test_reducing_objects_works_on_copies() -> None:
    bound = Bound(state.Reducing(object, operator.add))
    bound.handle.add([1])
    bound.handle.add([2])
    bound.handle.get().append(3)
    assert bound.handle.get() == [1, 2]


# List


def test_a_list_grows_is_replaced_and_is_cleared() -> None:
    items = Bound(state.List("long")).handle
    assert list(items) == [] and len(items) == 0
    items.append(1)
    items.extend(iter([2, 3]))
    items.extend([])
    assert list(items) == [1, 2, 3] and len(items) == 3
    items.set([9])
    assert list(items) == [9]
    items.clear()
    assert list(items) == [] and len(items) == 0


def test_a_list_can_be_set_from_itself_and_changed_while_it_is_read() -> None:
    items = Bound(state.List("long")).handle
    items.extend([3, 1, 2])
    items.set(sorted(items))
    for item in items:
        items.append(item + 10)
    assert list(items) == [1, 2, 3, 11, 12, 13]


def test_a_list_refused_half_way_is_left_as_it_was() -> None:
    bound = Bound(state.List("long"))
    bound.handle.append(1)
    for change in (bound.handle.extend, bound.handle.set):
        with pytest.raises(TypeError, match=r"state 's'"):
            change([2, "3"])
    with pytest.raises(TypeError, match=r"state 's'"):
        bound.handle.append(None)
    assert list(bound.handle) == [1]


def test_objects_in_a_list_are_copies() -> None:
    items = Bound(state.List(object)).handle
    items.append({"a": 1})
    next(iter(items))["a"] = 2
    assert list(items) == [{"a": 1}]


# Map


def test_a_map_is_a_mutable_mapping() -> None:
    seen = Bound(state.Map("string", "long")).handle
    seen["b"] = 2
    seen.update({"a": 1, "c": 3})
    assert dict(seen) == {"a": 1, "b": 2, "c": 3}
    assert list(seen) == ["a", "b", "c"]
    assert seen.pop("b") == 2 and seen.pop("b", None) is None
    assert seen.setdefault("d", 4) == 4
    assert "d" in seen and "b" not in seen and len(seen) == 3
    assert seen.get("x") is None
    del seen["a"]
    assert seen.popitem() == ("c", 3)
    seen.clear()
    assert not seen and list(seen.items()) == []


def test_a_map_raises_key_error_for_what_is_not_there() -> None:
    seen = Bound(state.Map("string", "long")).handle
    with pytest.raises(KeyError, match="a"):
        seen["a"]
    with pytest.raises(KeyError, match="a"):
        del seen["a"]
    seen["a"] = 1
    del seen["a"]
    with pytest.raises(KeyError, match="a"):
        seen["a"]


def test_a_map_holds_none_as_a_value_and_refuses_it_as_a_key() -> None:
    bound = Bound(state.Map("string", "long"))
    bound.handle["a"] = None
    assert bound.handle["a"] is None and "a" in bound.handle
    again = bound.loaded(bound.commit())
    assert dict(again.handle) == {"a": None}
    with pytest.raises(TypeError, match="cannot be None"):
        bound.handle[None] = 1


def test_map_keys_are_equal_when_spark_groups_them_together() -> None:
    seen = Bound(state.Map("double", "long")).handle
    seen[-0.0] = 1
    seen[0.0] = 2
    seen[float("nan")] = 3
    seen[-float("nan")] = 4
    assert len(seen) == 2
    assert seen[0.0] == 2 and seen[math.nan] == 4


@pytest.mark.parametrize(
    ("entry_type", "entries"),
    [
        ("double", [math.nan, -math.inf, 2.0, 1.0, math.inf]),
        ("string", ["b", "", "a", "é", "B"]),
        ("struct<a:string,b:double>", [("x", None), (None, 1.0), ("x", math.nan), ("x", 1.0)]),
        ("array<long>", [(2,), (1, None), (1, 0), ()]),
    ],
)
def test_a_map_iterates_in_one_order_however_it_came_to_be(
    entry_type: str, entries: list[Any]
) -> None:
    orders = []
    for given in (entries, entries[::-1], entries[2:] + entries[:2]):
        seen = Bound(state.Map(entry_type, "long")).handle
        for entry in given:
            seen[entry] = 1
        orders.append(repr(list(seen)))
    assert len(set(orders)) == 1, orders


def test_map_keys_that_do_not_fit_are_refused() -> None:
    seen = Bound(state.Map("long", "long")).handle
    for use in (lambda: seen["a"], lambda: "a" in seen, lambda: seen.__setitem__("a", 1)):
        with pytest.raises(TypeError, match=r"state 's': expected bigint, found str 'a'"):
            use()


def test_objects_in_a_map_are_copies() -> None:
    seen = Bound(state.Map("string", object)).handle
    seen["a"] = [1]
    seen["a"].append(2)
    assert seen["a"] == [1]
