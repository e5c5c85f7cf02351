"""State of an older type is read as the declared one without loss, or refused with the reason."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import itertools
import math
import operator
from typing import Any, NamedTuple

import cloudpickle
import pyarrow as pa
import pytest

from cairn import state
from cairn.backends.heap.backend import HeapBackend
from cairn.backends.overlay import make_table
from cairn.errors import FunctionError, PlanError
from cairn.state import Declaration
from cairn.storage.manifest import StateDecl
from cairn.types import OBJECT, type_ddl
from cairn.types.codec import codec
from cairn.types.evolution import IncompatibleError, compare, reshape

KEY = pa.int64()


def held(declaration: Declaration) -> StateDecl:
    return StateDecl(kind=declaration.kind, type=declaration.ddl, entry_type=declaration.entry_ddl)


def verdict(old: Any, new: Any) -> str:
    return compare(held(state.Value(old)), state.Value(new))


def reason(old: Any, new: Any) -> str:
    with pytest.raises(IncompatibleError) as caught:
        verdict(old, new)
    assert "migrate=" in caught.value.next_step
    return caught.value.reason


def stored(old: Any, *values: Any) -> pa.RecordBatch:
    """Rows of a value state; None deletes. The key is the row's number."""
    values_codec = codec(old)
    column = values_codec.encode([None if v is None else values_codec.normalise(v) for v in values])
    return pa.RecordBatch.from_pydict(
        {
            "group": pa.array([0] * len(values), pa.int32()),
            "key": pa.array(range(len(values)), KEY),
            "value": column,
            "live": column.is_valid(),
        }
    )


def named(declaration: Declaration, name: str = "s") -> Declaration:
    declaration.name = name
    return declaration


def reshaped(batch: pa.RecordBatch, declaration: Declaration, **more: Any) -> pa.RecordBatch:
    found = reshape(batch, named(declaration), KEY, operator="op", **more)
    found.validate(full=True)
    return found


def read(batch: pa.RecordBatch, type: Any) -> list[Any]:
    as_type = codec(type)
    return [None if v is None else as_type.restore(v) for v in as_type.decode(batch["value"])]


def plain(value: Any) -> Any:
    """Rows and maps as bare tuples and dicts, to be compared whatever their class."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def carried(old: Any, new: Any, *values: Any) -> list[Any]:
    """What values of the old type are in the new one, after the rules alone."""
    assert verdict(old, new) == "migrate"
    return [plain(v) for v in read(reshaped(stored(old, *values), state.Value(new)), new)]


# What needs no help


@pytest.mark.parametrize(
    "type", ["bigint", "struct<a:int,b:array<string>>", object, "map<int,int>"]
)
def test_the_same_type_is_the_same(type: Any) -> None:
    assert verdict(type, type) == "same"


def test_rows_of_the_same_type_are_handed_back_as_they_are() -> None:
    batch = stored("struct<a:int NOT NULL>", (1,), None)
    assert reshaped(batch, state.Value("struct<a:int NOT NULL>", migrate=str)) is batch


INTEGERS = {"tinyint": 7, "smallint": 15, "int": 31, "bigint": 63}


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(INTEGERS, 2)))
def test_integers_widen_and_never_narrow(old: str, new: str) -> None:
    ends = (-(2 ** INTEGERS[old]), 0, 2 ** INTEGERS[old] - 1, None)
    if INTEGERS[old] < INTEGERS[new]:
        assert carried(old, new, *ends) == list(ends)
    else:
        assert "values could be lost" in reason(old, new)


@pytest.mark.parametrize("old", ["tinyint", "smallint", "int"])
def test_integers_that_a_double_holds_exactly_become_doubles(old: str) -> None:
    ends = (-(2 ** INTEGERS[old]), 2 ** INTEGERS[old] - 1)
    assert carried(old, "double", *ends) == [float(end) for end in ends]


@pytest.mark.parametrize(
    ("old", "new"), [("bigint", "double"), ("double", "float"), ("double", "bigint")]
)
def test_numbers_that_would_lose_digits_are_refused(old: str, new: str) -> None:
    assert f"it cannot go from {old} to {new} by itself: values could be lost" == reason(old, new)


def test_floats_become_doubles_with_nan_and_infinity() -> None:
    one, nan, inf = carried("float", "double", 1.5, math.nan, -math.inf)
    assert (one, inf) == (1.5, -math.inf) and math.isnan(nan)


def test_decimals_grow_in_digits_and_scale_and_never_lose_any() -> None:
    widest = decimal.Decimal("-99.9")
    assert carried("decimal(3,1)", "decimal(6,3)", widest) == [widest]
    assert carried("decimal(3,1)", "decimal(38,36)", widest) == [widest]
    for new in ("decimal(3,2)", "decimal(4,3)", "decimal(38,37)", "decimal(5,0)"):
        assert "digits would be lost" in reason("decimal(3,1)", new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("string", "bigint"),
        ("bigint", "string"),
        ("date", "timestamp"),
        ("timestamp", "timestamp_ntz"),
        ("boolean", "int"),
        ("string", "binary"),
        ("bigint", "array<bigint>"),
        ("int", "decimal(38,0)"),
        ("array<int>", "map<int,int>"),
        ("struct<a:int>", "int"),
    ],
)
def test_types_that_are_no_wider_form_of_each_other_are_refused(old: str, new: str) -> None:
    assert f"from {old} to {new} by itself" in reason(old, new)


# Structs


def test_fields_are_added_as_null_dropped_and_moved() -> None:
    old, new = "struct<a:int,b:string,c:double>", "struct<c:double,d:array<int>,a:bigint>"
    assert carried(old, new, (1, "x", 2.0), (None, None, None), None) == [
        (2.0, None, 1),
        (None, None, None),
        None,
    ]


def test_a_moved_field_alone_is_a_change() -> None:
    assert carried("struct<a:int,b:int>", "struct<b:int,a:int>", (1, 2)) == [(2, 1)]


def test_all_fields_may_go() -> None:
    assert carried("struct<a:int>", "struct<>", (1,), None) == [(), None]
    assert carried("struct<>", "struct<a:int>", (), None) == [(None,), None]


def test_a_new_field_that_may_not_be_null_is_refused() -> None:
    found = reason("struct<a:struct<b:int>>", "struct<a:struct<b:int,c:int NOT NULL>>")
    assert found.startswith("field 'a.c' is new and NOT NULL")


def test_not_null_may_be_taken_away_and_not_added() -> None:
    strict, loose = "struct<a:int NOT NULL>", "struct<a:int>"
    assert carried(strict, loose, (1,), None) == [(1,), None]
    assert "field 'a' may be null in stored values" in reason(loose, strict)


def test_fields_not_null_widen_though_a_whole_struct_is_null() -> None:
    old = "struct<s:struct<a:int NOT NULL,b:decimal(3,1) NOT NULL>>"
    new = "struct<s:struct<b:decimal(5,2) NOT NULL,a:bigint NOT NULL>>"
    tenth = decimal.Decimal("0.1")
    assert carried(old, new, ((1, tenth),), (None,), None) == [((tenth, 1),), (None,), None]


class PointV1(NamedTuple):
    x: int
    y: int


class PointV2(NamedTuple):
    label: str | None
    y: int
    x: int


class PointV3(NamedTuple):
    x: int
    y: int
    z: int


@dataclasses.dataclass
class Point:
    x: int
    y: int
    label: str | None = None


@pytest.mark.parametrize(("new", "expected"), [(PointV2, (None, 2, 1)), (Point, (1, 2, None))])
def test_classes_gain_fields_that_may_be_none(new: type, expected: tuple[Any, ...]) -> None:
    assert carried(PointV1, new, PointV1(1, 2)) == [expected]


def test_a_class_s_new_field_without_none_says_how_to_write_it() -> None:
    with pytest.raises(IncompatibleError, match="field 'z' is new and NOT NULL") as caught:
        verdict(PointV1, PointV3)
    assert "`| None`" in caught.value.next_step


# Inside lists and maps


def test_rules_hold_inside_lists_maps_and_structs_of_them() -> None:
    old = "struct<l:array<struct<a:int,b:int>>,m:map<string,array<float>>>"
    new = "struct<m:map<string,array<double>>,l:array<struct<b:bigint,c:string>>>"
    values = (
        ([(1, 2), None, (3, 4)], {"x": [0.5, None], "y": None}),
        ([], {}),
        (None, None),
        None,
        ([(5, 6)], {"z": []}),
    )
    assert carried(old, new, *values) == [
        ({"x": (0.5, None), "y": None}, ((2, None), None, (4, None))),
        ({}, ()),
        (None, None),
        None,
        ({"z": ()}, ((6, None),)),
    ]


def test_trouble_inside_is_named_by_its_place() -> None:
    assert reason("array<struct<a:int>>", "array<struct<a:string>>").startswith("field '[].a'")
    assert reason("struct<m:map<int,int>>", "struct<m:map<int,date>>").startswith("field 'm{}'")
    assert "map keys cannot change" in reason("map<int,int>", "map<bigint,int>")


@pytest.mark.parametrize("first", [0, 1, 3, 9])
def test_a_part_of_a_batch_is_carried_like_the_whole(first: int) -> None:
    """Files are read by key group: batches are slices of larger ones."""
    old = "struct<l:array<int>,m:map<int,int>,s:struct<a:int>>"
    new = "struct<s:struct<z:int,a:bigint>,m:map<int,bigint>,l:array<bigint>>"
    values = [
        None if n % 4 == 3 else ([n] * (n % 3), {n: n}, None if n % 2 else (n,)) for n in range(20)
    ]
    whole = reshaped(stored(old, *values), state.Value(new))
    part = reshaped(stored(old, *values).slice(first, 7), state.Value(new))
    assert read(part, new) == read(whole, new)[first : first + 7]
    assert part["live"].to_pylist() == [v is not None for v in values[first : first + 7]]


def test_no_rows_at_all_are_carried() -> None:
    empty = reshaped(stored("struct<l:array<int>>"), state.Value("struct<l:array<bigint>,n:int>"))
    assert len(empty) == 0 and type_ddl(empty["value"].type) == "struct<l:array<bigint>,n:int>"


# Kinds


class Mean:
    def create(self) -> Any:
        return (0, 0)

    def add(self, accumulator: Any, value: Any) -> Any:
        return (accumulator[0] + value, accumulator[1] + 1)

    def merge(self, left: Any, right: Any) -> Any:
        return (left[0] + right[0], left[1] + right[1])

    def result(self, accumulator: Any) -> Any:
        return accumulator[0] / accumulator[1]


SINGLE = {
    "value": lambda type: state.Value(type),
    "reducing": lambda type: state.Reducing(type, operator.add),
    "aggregating": lambda type: state.Aggregating(type, Mean()),
}


@pytest.mark.parametrize("new", SINGLE)
@pytest.mark.parametrize("old", SINGLE)
def test_kinds_stored_alike_become_each_other(old: str, new: str) -> None:
    assert compare(held(SINGLE[old]("int")), SINGLE[new]("int")) == "same"
    assert compare(held(SINGLE[old]("int")), SINGLE[new]("bigint")) == "migrate"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (state.Value("int"), state.List("int", migrate=int)),
        (state.List("int"), state.Value("array<int>", migrate=int)),
        (state.Map("int", "int"), state.Value("map<int,int>", migrate=int)),
        (state.List("int"), state.Map("int", "int", migrate=int)),
    ],
)
def test_lists_and_maps_become_no_other_kind(old: Declaration, new: Declaration) -> None:
    with pytest.raises(IncompatibleError, match=f"a {old.kind} state cannot become a {new.kind}"):
        compare(held(old), new)


def test_map_keys_never_change_though_wider_or_migrated() -> None:
    for new in (state.Map("bigint", "int"), state.Map("bigint", "int", migrate=int)):
        with pytest.raises(IncompatibleError, match="how they hash and sort"):
            compare(held(state.Map("int", "int")), new)
    assert compare(held(state.Map("int", "int")), state.Map("int", "bigint")) == "migrate"


# Through the tables that store them


def table(declaration: Declaration) -> Any:
    made = make_table(named(declaration), KEY, HeapBackend(), 4)
    made.assign(range(4))
    return made


def moved(old: Any, declaration: Declaration, *changes: dict[Any, Any]) -> dict[Any, Any]:
    """{key: what is held} after a base and deltas of an old table were read into a new one."""
    new = table(declaration)
    for change in changes:
        old.changes[1].update(change)
        batch = old.delta()
        old.promote()
        new.apply(reshaped(batch, declaration, held=held(old.declaration)))
    whole = table(declaration)
    for batch in old.dump():
        whole.apply(reshaped(batch, declaration, held=held(old.declaration)))
    assert whole.rows == new.rows, "from a base and from deltas it is the same"
    return dict(new.rows[1])


def test_deleted_values_stay_deleted() -> None:
    old = table(state.Value("int"))
    assert moved(old, state.Value("bigint"), {1: 10, 2: 20}, {1: None, 3: 30}) == {2: 20, 3: 30}


def test_map_entries_are_carried_one_by_one_and_deletions_too() -> None:
    from cairn.backends.contract import ABSENT

    old = table(state.Map("string", "int"))
    held_now = moved(
        old, state.Map("string", "bigint"), {1: {"a": 1, "b": None}}, {1: {"a": ABSENT, "c": 3}}
    )
    assert held_now == {1: {"b": None, "c": 3}}


def test_lists_are_carried_item_by_item_with_cuts_between() -> None:
    old = table(state.List("struct<a:int>"))
    row = codec("struct<a:int>").normalise
    changes: list[dict[Any, Any]] = [
        {1: (0, [row((1,)), row((2,))]), 2: (0, [row((9,))])},
        {1: (1, [row((3,)), row((4,))]), 2: (0, [])},
    ]
    found = moved(old, state.List("struct<b:string,a:bigint>"), *changes)
    assert plain({k: tuple(v) for k, v in found.items()}) == {1: ((None, 1), (None, 3), (None, 4))}


# migrate=


def test_a_function_makes_any_type_of_any_other() -> None:
    text = state.Value("string", migrate=lambda n: f"<{n}>")
    assert compare(held(state.Value("bigint")), text) == "migrate"
    assert read(reshaped(stored("bigint", 1, None, 3), text), "string") == ["<1>", None, "<3>"]


def test_the_function_gets_the_old_value_as_python_has_it() -> None:
    seen: list[Any] = []
    old = "struct<at:timestamp,tags:array<string>,m:map<string,int>>"
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

    def migrate(value: Any) -> str:
        seen.append(value)
        return str(value.tags[0])

    batch = stored(old, (at, ["x"], {"a": 1}))
    assert read(reshaped(batch, state.Value("string", migrate=migrate)), "string") == ["x"]
    assert plain(seen[0]) == (at, ("x",), {"a": 1}) and seen[0].at == at


def test_the_function_is_called_instead_of_the_rules() -> None:
    tenfold = state.Value("bigint", migrate=lambda n: n * 10)
    assert read(reshaped(stored("int", 1), tenfold), "bigint") == [10]


def test_the_function_is_not_called_for_the_declared_type() -> None:
    never = state.Value("int", migrate=lambda n: 1 / 0)
    assert compare(held(state.Value("int")), never) == "same"
    batch = stored("int", 1)
    assert reshaped(batch, never) is batch


def test_what_the_function_answers_with_none_is_dropped() -> None:
    old = table(state.Value("int"))
    odd = state.Value("string", migrate=lambda n: str(n) if n % 2 else None)
    assert moved(old, odd, {1: 1, 2: 2, 3: 3}, {3: 4}) == {1: "1"}


def test_dropped_map_entries_go_and_stored_nones_stay() -> None:
    old = table(state.Map("string", "int"))
    odd = state.Map("string", "string", migrate=lambda n: str(n) if n % 2 else None)
    found = moved(old, odd, {1: {"a": 1, "b": 2, "c": None}, 2: {"d": 4}})
    assert found == {1: {"a": "1", "c": None}}


def test_the_function_is_called_for_each_item_of_a_list() -> None:
    old = table(state.List("int"))
    texts = state.List("string", migrate=str)
    assert moved(old, texts, {1: (0, [1, 2, 3])}, {1: (2, [4])}) == {1: ["1", "2", "4"]}


def test_an_item_of_a_list_cannot_be_dropped() -> None:
    old = table(state.List("int"))
    with pytest.raises(FunctionError, match="an item of a list cannot be dropped"):
        moved(old, state.List("string", migrate=lambda n: None), {7: (0, [1])})


def test_pickled_objects_become_typed_and_back() -> None:
    typed = state.Value("bigint", migrate=len)
    objects = held(state.Value(object))
    assert compare(objects, typed) == "migrate"
    assert read(reshaped(stored(OBJECT, {"a", "b"}), typed, held=objects), "bigint") == [2]
    pickled = state.Value(object, migrate=lambda n: {n})
    binary = held(state.Value("binary"))
    assert compare(binary, pickled) == "migrate"
    assert read(reshaped(stored("binary", b"x"), pickled, held=binary), OBJECT) == [{b"x"}]
    assert "only Python code can turn one into the other" in reason(object, "binary")


def explode(value: int) -> str:
    raise KeyError(f"no name for {value}")


def test_an_error_of_the_function_names_operator_state_key_and_value() -> None:
    with pytest.raises(FunctionError) as caught:
        reshaped(stored("int", None, 42), state.Value("string", migrate=explode))
    error = caught.value
    assert (error.operator, error.state, error.key, error.value) == ("op", "s", "1", "42")
    assert "migrate= of state 's' of operator 'op' failed with KeyError" in str(error)
    assert "test_evolution.py" in str(error) and "in explode" in str(error)


def test_an_answer_that_does_not_fit_is_an_error_of_the_function() -> None:
    with pytest.raises(FunctionError, match="expected bigint, found str '7'") as caught:
        reshaped(stored("string", "7"), state.Value("bigint", migrate=lambda text: text))
    assert caught.value.value == "'7'"


def test_the_owner_of_a_list_s_item_is_named() -> None:
    old = table(state.List("int"))
    with pytest.raises(FunctionError) as caught:
        moved(old, state.List("string", migrate=explode), {5: (0, []), 6: (0, [1])})
    assert (caught.value.key, caught.value.value) == ("6", "1")


def test_every_kind_takes_a_function_and_sends_it_along() -> None:
    for made in (
        state.Value("int", migrate=str),
        state.Value(int, default=1, migrate=str),
        state.List("int", migrate=str),
        state.Map("int", "int", migrate=str),
        state.Reducing("int", operator.add, migrate=str),
        state.Aggregating("struct<a:int,b:int>", Mean(), migrate=str),
    ):
        assert cloudpickle.loads(cloudpickle.dumps(made)).migrate is str
    with pytest.raises(PlanError, match="migrate= needs a function"):
        state.Value("int", migrate=1)  # type: ignore[call-overload]


def test_stored_declarations_in_any_spelling_are_the_same() -> None:
    spelled = StateDecl(kind="value", type="STRUCT<a: LONG>")
    assert compare(spelled, state.Value("struct<a:bigint>")) == "same"


# State that expires


@pytest.mark.parametrize(
    ("held", "declared", "verdict"),
    [
        (None, "1 hour", "migrate"),
        ("1 hour", None, "migrate"),
        ("1 hour", "1 hour", "same"),
        ("1 hour", "5 minutes", "same"),
        ("1 hour", state.TTL("1 hour", refresh="read-write"), "same"),
        ("1 hour", "2 hours", "migrate"),
        ("1 hour", state.TTL("1 hour", clock="event"), "migrate"),
    ],
)
def test_a_ttl_that_would_revive_values_is_a_change_of_form(
    held: Any, declared: Any, verdict: str
) -> None:
    ttl = state.TTL.of(held)
    decl = StateDecl(kind="value", type="bigint", ttl=None if ttl is None else ttl.text)
    assert compare(decl, state.Value("long", ttl=declared)) == verdict


def test_values_get_a_time_and_lose_it_again() -> None:
    batch = stored("long", 5, None, 7)
    plain = StateDecl(kind="value", type="bigint")
    expiring = StateDecl(kind="value", type="bigint", ttl=state.TTL("1 hour").text)
    stamped = reshaped(batch, state.Value("long", ttl="1 hour"), held=plain, stamp_ms=99)
    assert stamped["value"].to_pylist() == [{"at": 99, "value": 5}, None, {"at": 99, "value": 7}]
    assert stamped["live"].to_pylist() == [True, False, True]
    assert reshaped(stamped, state.Value("long"), held=expiring).equals(batch)


@pytest.mark.parametrize("type", ["int", "long"])
@pytest.mark.parametrize("clocks", [("event", "processing"), ("processing", "event")])
def test_by_another_clock_values_count_as_written_now(clocks: tuple[Any, Any], type: str) -> None:
    before, after = (state.TTL("1 hour", clock=clock) for clock in clocks)
    plain = StateDecl(kind="value", type="int")
    stamped = reshaped(
        stored("int", 5, None, 7), state.Value("int", ttl=before), held=plain, stamp_ms=99
    )
    expiring = StateDecl(kind="value", type="int", ttl=before.text)
    moved = reshaped(stamped, state.Value(type, ttl=after), held=expiring, stamp_ms=500)
    assert moved["value"].to_pylist() == [{"at": 500, "value": 5}, None, {"at": 500, "value": 7}]
    assert moved["live"].to_pylist() == [True, False, True]


def test_a_type_and_a_ttl_change_together_and_times_stay() -> None:
    plain = StateDecl(kind="value", type="int")
    expiring = StateDecl(kind="value", type="int", ttl=state.TTL("1 hour").text)
    stamped = reshaped(
        stored("int", 5, None, 7), state.Value("int", ttl="1 hour"), held=plain, stamp_ms=99
    )
    wider = reshaped(stamped, state.Value("long", ttl="1 hour"), held=expiring, stamp_ms=500)
    assert wider["value"].to_pylist() == [{"at": 99, "value": 5}, None, {"at": 99, "value": 7}]
    declaration = state.Value("string", ttl="1 hour", migrate=lambda n: None if n == 5 else str(n))
    migrated = reshaped(stamped, declaration, held=expiring)
    assert migrated["value"].to_pylist() == [None, None, {"at": 99, "value": "7"}]
    assert migrated["live"].to_pylist() == [False, False, True]


def test_every_kind_of_one_value_per_key_is_known_to_readers() -> None:
    declared = [
        each
        for each in vars(state).values()
        if isinstance(each, type) and issubclass(each, Declaration) and each.kind
    ]
    keyed = {each.kind for each in declared if each.layout == "value"} - {state.Broadcast.kind}
    assert keyed == state.ONE_VALUE_KINDS
