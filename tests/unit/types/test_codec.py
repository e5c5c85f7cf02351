"""Codecs: what goes in comes out, and what does not fit is named."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import io
import math
import pickle
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cairn.operators.window_functions import Window
from cairn.storage.files import SegmentReader, encode_segment
from cairn.types import OBJECT, parse_type, row_class
from cairn.types.codec import FrozenMap, ValueTypeError, codec, is_hashable, strict
from cairn.types.codec.leaves import MOVED
from tests.unit.types.typed_values import typed

UTC = dt.UTC
LINES = codec("struct<id:bigint,items:array<struct<price:double,`unit price`:int>>>")


class Pair(NamedTuple):
    b: str
    a: int


@dataclasses.dataclass
class PairClass:
    a: int
    b: str


@st.composite
def columns(draw):
    declared, values = draw(typed)
    return declared, draw(st.lists(st.none() | values, max_size=8))


def same(left, right):
    """Equality of values and of their classes, where NaN is itself and -0.0 is not 0.0.

    Decimals have the same sign and exponent, too.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, Decimal):
        return left.as_tuple() == right.as_tuple()
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(a, b) for a, b in pairs)
    return left == right


@given(columns(), st.data())
def test_decode_gives_back_what_encode_took(column, data):
    declared, raw = column
    c = codec(declared)
    values = [None if v is None else c.normalise(v) for v in raw]
    array = c.encode(values)
    array.validate(full=True)
    assert array.type == c.arrow
    assert same(tuple(c.decode(array)), tuple(values))

    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    assert same(tuple(c.decode(array[start:stop])), tuple(values[start:stop]))
    chunked = pa.chunked_array([array[:start], array[start:]], type=c.arrow)
    assert same(tuple(c.decode(chunked)), tuple(values))


@given(columns())
def test_unpack_gives_back_what_pack_made_for_msgpack(column):
    declared, raw = column
    c = codec(declared)
    for value in (c.normalise(v) for v in raw if v is not None):
        packed = msgspec.msgpack.encode(c.pack(value))
        assert same(c.unpack(msgspec.msgpack.decode(packed)), value)


@given(columns())
def test_equal_keys_pack_to_equal_bytes_and_others_do_not(column):
    declared, raw = column
    c = codec(declared)
    assume(is_hashable(c.type))
    keys = c.decode_keys(c.encode([None if v is None else c.normalise(v) for v in raw]))
    names = {}
    for key in keys:
        names.setdefault(key, set()).add(msgspec.msgpack.encode(c.pack_key(key)))
    assert all(len(packed) == 1 for packed in names.values())
    assert len(set.union(set(), *names.values())) == len(names)


@given(columns())
def test_keys_from_a_column_equal_keys_from_the_user(column):
    declared, raw = column
    c = codec(declared)
    array = c.encode([None if v is None else c.normalise(v) for v in raw])
    keys = c.decode_keys(array)
    # Plain equality on purpose: canonical keys find each other in a dict, NaN included.
    assert keys == [None if v is None else c.normalise_key(v) for v in raw]
    if is_hashable(c.type):
        assert set(keys) == {None if v is None else c.normalise_key(v) for v in raw}


@given(columns())
def test_normalised_values_stay_as_they_are(column):
    declared, raw = column
    c = codec(declared)
    for value in raw:
        if value is not None:
            once = c.normalise(value)
            assert same(c.normalise(once), once)


LOOSE = {
    "bigint": st.integers(-(2**64), 2**64),
    "string": st.text(st.characters(exclude_categories=()), max_size=3),
    "interval day to second": st.timedeltas(),
}


@st.composite
def loose(draw):
    """A type, and values that fit it but for what only storage refuses."""
    name = draw(st.sampled_from(sorted(LOOSE)))
    values = LOOSE[name]
    return draw(
        st.sampled_from(
            [
                (name, values),
                (f"array<{name}>", st.lists(st.none() | values, max_size=2)),
                (f"struct<a:int,b:{name}>", st.tuples(st.none(), st.none() | values)),
                (f"map<string,array<{name}>>", st.dictionaries(st.text(), st.lists(values))),
                (f"map<{name},int>", st.dictionaries(values, st.none(), max_size=2)),
            ]
        )
    )


@given(loose(), st.data())
def test_a_strict_codec_takes_exactly_what_can_be_encoded(kind, data):
    declared, values = kind
    c = codec(declared)
    value = data.draw(values)
    try:
        c.encode([c.normalise(value)])
    except ValueTypeError:
        with pytest.raises(ValueTypeError):
            strict(c).normalise(value)
    else:
        assert same(strict(c).normalise(value), c.normalise(value))


@pytest.mark.parametrize(
    ("declared", "value", "path"),
    [
        ("bigint", 2**63, ""),
        ("struct<a:bigint,`b c`:array<string>>", (1, ["x", "\ud800"]), "['b c'][1]"),
        ("struct<a:map<string,bigint>>", ({"k": 2**63},), "a['k']"),
    ],
)
def test_a_strict_codec_says_where_the_value_is(declared, value, path):
    with pytest.raises(ValueTypeError) as raised:
        strict(codec(declared)).normalise(value)
    assert raised.value.path == path


def test_a_codec_that_lets_nothing_through_is_strict_already():
    for declared in ("int", "double", "binary", "timestamp", "array<struct<a:date>>", "object"):
        assert strict(codec(declared)) is codec(declared)


@given(columns())
def test_columns_survive_parquet(column):
    declared, raw = column
    c = codec(declared)
    assume("struct<>" not in declared)  # Parquet has no struct without fields.
    values = [None if v is None else c.normalise(v) for v in raw]
    file = io.BytesIO()
    pq.write_table(pa.table({"c": c.encode(values)}), file)
    assert same(tuple(c.decode(pq.read_table(file)["c"])), tuple(values))


# --- what is accepted ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        ("bigint", np.int32(7), 7),
        ("int", np.int64(7), 7),
        ("double", 3, 3.0),
        ("double", np.float32(0.5), 0.5),
        ("double", np.float64(0.5), 0.5),
        ("float", 0.1, float(np.float32(0.1))),
        ("boolean", np.bool_(True), True),
        ("string", np.str_("a"), "a"),
        ("binary", bytearray(b"a"), b"a"),
        ("binary", memoryview(b"a"), b"a"),
        ("decimal(4,2)", 7, Decimal("7.00")),
        ("decimal(4,2)", Decimal("1.005"), Decimal("1.01")),
        ("decimal(4,2)", Decimal("-0.00"), Decimal("0.00")),
        ("decimal(4,2)", Decimal("-0.001"), Decimal("0.00")),
        ("decimal(4,2)", Decimal("-0E+9"), Decimal("0.00")),
        ("decimal(4,0)", Decimal("1E+2"), Decimal("100")),
        ("decimal(4,2)", np.int64(-7), Decimal("-7.00")),
        ("date", np.datetime64("2024-02-29"), dt.date(2024, 2, 29)),
        ("timestamp_ntz", np.datetime64("2024-02-29T01"), dt.datetime(2024, 2, 29, 1)),
        ("timestamp", pd.Timestamp(0, tz="UTC"), dt.datetime(1970, 1, 1, tzinfo=UTC)),
        ("interval day to second", np.timedelta64(1, "ms"), dt.timedelta(milliseconds=1)),
        ("array<int>", np.array([1, 2]), (1, 2)),
        ("array<int>", [1, None], (1, None)),
        ("map<string,int>", {"a": 1, "b": None}, FrozenMap(a=1, b=None)),
        ("struct<a:int,b:string>", {"b": "x"}, row_class("ab")(None, "x")),
        ("struct<a:int,b:string>", (1, "x"), row_class("ab")(1, "x")),
        ("struct<a:int,b:string>", Pair("x", 1), row_class("ab")(1, "x")),
        ("struct<a:int,b:string>", PairClass(1, "x"), row_class("ab")(1, "x")),
        ("struct<a:int,b:string>", row_class("ba")("x", 1), row_class("ab")(1, "x")),
    ],
)
def test_users_values_are_converted(declared, value, expected):
    assert same(codec(declared).normalise(value), expected)


def test_aware_datetimes_are_moved_to_utc():
    zone = dt.timezone(dt.timedelta(hours=2))
    value = codec("timestamp").normalise(dt.datetime(2024, 1, 1, 1, tzinfo=zone))
    assert (value, value.tzinfo) == (dt.datetime(2023, 12, 31, 23, tzinfo=UTC), UTC)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "value", "message"),
    [
        ("bigint", "abc", "expected bigint, found str 'abc'"),
        ("bigint", True, "expected bigint, found bool True"),
        ("bigint", 1.0, "expected bigint, found float 1.0"),
        ("bigint", None, "expected bigint, found None"),
        ("bigint", np.bool_(True), "expected bigint"),
        ("tinyint", 128, "expected tinyint, found int 128: out of range"),
        ("smallint", -40000, "out of range"),
        ("int", np.int64(2**31), "out of range"),
        ("double", "1", "expected double, found str '1'"),
        ("double", True, "found bool"),
        ("double", 10**400, "out of range"),
        ("float", 1e300, "out of range"),
        ("boolean", 1, "expected boolean, found int 1"),
        ("string", b"a", "expected string, found bytes"),
        ("binary", "a", "expected binary, found str 'a'"),
        ("decimal(4,2)", Decimal(100), "out of range"),
        ("decimal(4,2)", Decimal("NaN"), "not a number"),
        ("decimal(4,2)", Decimal("Infinity"), "out of range"),
        ("decimal(4,2)", 1.5, "found float 1.5"),
        ("decimal(4,2)", "1.5", "found str '1.5'"),
        ("date", dt.datetime(2024, 1, 1), "expected date, found datetime"),
        ("date", np.datetime64("NaT"), "expected date"),
        ("timestamp", dt.datetime(2024, 1, 1), "it has no time zone"),
        ("timestamp", pd.NaT, "expected timestamp"),
        ("timestamp_ntz", pd.NaT, "expected timestamp_ntz"),
        ("interval day to second", pd.NaT, "expected interval"),
        ("interval day to second", np.timedelta64("NaT"), "expected interval"),
        ("timestamp", dt.date(2024, 1, 1), "expected timestamp, found date"),
        ("timestamp_ntz", dt.datetime(2024, 1, 1, tzinfo=UTC), "it has a time zone"),
        ("array<string>", "abc", "expected array<string>, found str 'abc'"),
        ("map<string,int>", [("a", 1)], "expected map<string,int>, found list"),
        ("struct<a:int,b:string>", {"c": 1}, "no field 'c'"),
        ("struct<a:int,b:string>", (1,), "1 values for 2 fields"),
        ("struct<a:int,b:string>", (1, "x", 2), "3 values for 2 fields"),
        ("struct<a:bigint,b:string>", (1, "x", 2), "3 values for 2 fields"),
        ("struct<a:int,b:string>", 7, "expected struct<a:int,b:string>, found int 7"),
        ("struct<a:int,b:string>", PairClass, "expected struct<a:int,b:string>, found type"),
    ],
)
def test_misfits_are_refused_with_expected_and_found(declared, value, message):
    with pytest.raises(ValueTypeError) as caught:
        codec(declared).normalise(value)
    assert message in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason


@pytest.mark.parametrize(
    ("c", "value", "path"),
    [
        (LINES, {"id": "x"}, "id"),
        (LINES, (1, [(1.0, 1), (2.0, None), ("x", 3)]), "items[2].price"),
        (LINES, (1, [(1.0, "x")]), "items[0]['unit price']"),
        (codec("map<string,array<int>>"), {"a": [1], "b": [1, "x"]}, "['b'][1]"),
        (codec("map<string,int>"), {None: 1}, ""),
        (codec("array<bigint>"), [1, None, 2.0], "[2]"),
        (codec("struct<a:struct<b:int NOT NULL>>"), {"a": {}}, "a.b"),
    ],
)
def test_misfit_inside_a_structure_is_located(c, value, path):
    with pytest.raises(ValueTypeError) as caught:
        c.normalise(value)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("declared", "values", "path", "index"),
    [
        ("bigint", [0, None, 2**63], "[2]", 2),
        ("int", [0, 2**31], "[1]", 1),
        ("string", ["a", "\ud800"], "[1]", 1),
        ("interval day to second", [dt.timedelta.max], "[0]", 0),
        ("struct<a:string,b:bigint>", [("a", 1), None, ("b", 2**63)], "[2].b", 2),
        ("array<bigint>", [(1,), None, (), (2, 2**64), (3,)], "[3][1]", 3),
        ("map<string,bigint>", [{}, {"a": 1}, {"b": 1, "c": -(2**63) - 1}], "[2][1]", 2),
        ("array<struct<a:bigint>>", [((1,),), ((2,), (2**63,))], "[1][1].a", 1),
    ],
)
def test_encode_names_the_first_value_out_of_range(declared, values, path, index):
    with pytest.raises(ValueTypeError) as caught:
        codec(declared).encode(values)
    assert (caught.value.path, caught.value.index) == (path, index)


@pytest.mark.parametrize("type", ["timestamp", "timestamp_ntz", "date"])
@pytest.mark.parametrize("number", [2**31 - 1, -(2**31)])
def test_years_python_does_not_know_are_refused(type, number):
    arrow = parse_type(type)
    wide = pa.int32() if type == "date" else pa.int64()
    number = number if type == "date" else number * 2**31
    array = pa.array([0, None, number], wide).view(arrow)
    with pytest.raises(ValueTypeError, match=r"\[2\]: .* outside the years 1 to 9999"):
        codec(arrow).decode(array)


# --- columns others wrote -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "array", "expected"),
    [
        ("string", pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
        ("string", pa.array(["a", None], pa.large_string()), ["a", None]),
        ("bigint", pa.array([1, None], pa.int32()), [1, None]),
        (
            "timestamp",
            pa.array([0, None], pa.timestamp("ms", "Asia/Tokyo")),
            [dt.datetime(1970, 1, 1, tzinfo=UTC), None],
        ),
        ("array<int>", pa.array([[1], None, []], pa.large_list(pa.int32())), [(1,), None, ()]),
        ("array<int>", pa.array([[1], None], pa.list_(pa.int64())), [(1,), None]),
        ("struct<a:int,b:string>", pa.array([{"b": "x", "a": 1}]), [(1, "x")]),
    ],
)
def test_columns_in_a_near_type_are_read(declared, array, expected):
    assert codec(declared).decode(array) == expected


def test_garbage_under_null_structs_is_never_looked_at():
    far = pa.array([2**62, 0], pa.int64()).view(pa.timestamp("us", "UTC"))
    array = pa.StructArray.from_arrays([far], ["t"], mask=pa.array([True, False]))
    assert codec("struct<t:timestamp>").decode(array) == [
        None,
        (dt.datetime(1970, 1, 1, 0, 0, tzinfo=UTC),),
    ]


# --- keys, maps, objects --------------------------------------------------------------------------


def test_every_nan_is_one_key_and_minus_zero_is_zero():
    c = codec("struct<d:double,a:array<float>>")
    other = float("-nan")
    keys = c.decode_keys(c.encode([c.normalise((other, [other, -0.0])) for _ in range(2)]))
    assert keys[0] == keys[1]
    assert [id(keys[0].d), id(keys[0].a[0])] == [id(math.nan)] * 2
    assert repr(keys[0].a[1]) == "0.0"
    assert {keys[0]: 1}[c.normalise_key((math.nan, (math.nan, 0)))] == 1


def test_types_with_maps_or_objects_cannot_be_keys():
    assert is_hashable(parse_type("struct<a:array<int>>"))
    assert not is_hashable(parse_type("array<struct<a:map<int,int>>>"))
    assert not is_hashable(OBJECT)


def test_maps_from_state_cannot_change_but_travel_and_copy():
    m = codec("map<string,int>").normalise({"a": 1})
    changes = [
        lambda: m.__setitem__("a", 2),
        lambda: m.__delitem__("a"),
        lambda: m.update(a=2),
        lambda: m.pop("a"),
        lambda: m.popitem(),
        lambda: m.clear(),
        lambda: m.setdefault("b", 2),
        lambda: m.__ior__({"b": 2}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="cannot change"):
            change()
    for twin in (pickle.loads(pickle.dumps(m)), copy.deepcopy(m), copy.copy(m)):
        assert same(twin, m)
    assert dict(m) | {"b": 2} == {"a": 1, "b": 2}


def test_objects_are_pickled_once_and_restored():
    c = codec(object)
    stored = c.normalise({1, 2})
    assert c.arrow == pa.binary()
    assert c.restore(c.decode(c.encode([stored]))[0]) == {1, 2}
    assert codec("bigint").restore(7) == 7
    with pytest.raises(ValueTypeError, match="does not pickle"):
        c.normalise(lambda: None)


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (b"\x80\x05ccairn.types\nRow_61\nK\x01\x85\x81.", row_class(["a"])(1)),
        (b"\x80\x05ccairn.codec.base\nFrozenMap\n}\x8c\x01xK\x01s\x85R.", FrozenMap(x=1)),
        (b"\x80\x05ccairn.window_functions\nWindow\nNN\x86\x81.", Window(None, None)),
    ],
)
def test_objects_stored_before_their_classes_moved_are_restored(stored, value):
    assert same(codec(object).restore(stored), value)


def test_classes_in_stored_objects_move_only_with_a_way_to_find_them():
    stored = {row_class(["a"]).__module__, FrozenMap.__module__, Window.__module__}
    assert stored == set(MOVED.values())


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (b"\x80\x05cgone_module\nThing\n.", ModuleNotFoundError),
        (b"\x80\x05cpickle\nThing\n.", AttributeError),
    ],
)
def test_an_object_whose_class_is_missing_is_an_error(stored, error):
    with pytest.raises(error, match=r"gone_module|Thing"):
        codec(object).restore(stored)


def test_codecs_are_shared_and_travel():
    assert codec("long") is codec(pa.int64()) is codec(int)
    assert pickle.loads(pickle.dumps(codec("array<int>"))) is codec("array<int>")


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("map<int,struct<a:int NOT NULL>>", {1: None, 2: (5,)}),
        ("map<int,array<struct<a:int NOT NULL>>>", {1: [None, (5,)], 2: None}),
        ("array<map<int,map<int,struct<a:int NOT NULL>>>>", [{1: {2: None}}, None]),
    ],
)
def test_null_structs_in_maps_survive_a_segment(declared, value):
    """Storing pushes the nulls of a struct down into its fields, NOT NULL or not."""
    c = codec(declared)
    column = c.encode([c.normalise(value), None])
    rows = pa.record_batch({"group": pa.array([0, 0], pa.int32()), "value": column})
    data = encode_segment("delta", "op", {"s": rows}).data
    segment = SegmentReader(lambda offset, length: data[offset : offset + length], len(data), "s")
    (stored,) = segment.read("s")
    assert c.decode(stored["value"]) == [c.normalise(value), None]


@pytest.mark.parametrize("values", [[1.5, None, -0.0], [math.nan, 1.5], [None], [], [math.inf]])
def test_numbers_are_encoded_as_arrow_does_it_with_nulls_and_nan_apart(values: list[Any]) -> None:
    encoded = codec(pa.float64()).encode(values)
    assert encoded.is_valid().to_pylist() == [value is not None for value in values]
    assert list(map(repr, encoded.to_pylist())) == list(map(repr, values))


@pytest.mark.parametrize("values", [[2**63 - 1, -(2**63)], [None, 7], []])
def test_integers_up_to_64_bits_are_encoded(values: list[Any]) -> None:
    assert codec(pa.int64()).encode(values).to_pylist() == values
