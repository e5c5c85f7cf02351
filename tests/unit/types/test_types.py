"""Types: every way of declaring one leads to the same Arrow type, and back to DDL."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import pickle
from typing import NamedTuple, Optional

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import PlanError
from cairn.types import OBJECT, parse_schema, parse_type, row_class, schema_ddl, type_ddl


class Payment(NamedTuple):
    account: int
    amount: float | None


@dataclasses.dataclass
class Order:
    id: int
    payments: list[Payment]
    note: Optional[str] = None  # noqa: UP045 (the old spelling is accepted too)


@dataclasses.dataclass
class Node:
    value: int
    next: Node | None


def list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element))


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("long", pa.int64()),
        (" BIGINT ", pa.int64()),
        ("Integer", pa.int32()),
        ("short", pa.int16()),
        ("byte", pa.int8()),
        ("boolean", pa.bool_()),
        ("real", pa.float32()),
        ("double", pa.float64()),
        ("varchar(10)", pa.string()),
        ("char(3)", pa.string()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamp_ltz", pa.timestamp("us", "UTC")),
        ("timestamp_ntz", pa.timestamp("us")),
        ("decimal", pa.decimal128(10, 0)),
        ("numeric(5)", pa.decimal128(5, 0)),
        ("DECIMAL( 12 , 2 )", pa.decimal128(12, 2)),
        ("interval day to second", pa.duration("us")),
        ("INTERVAL HOUR", pa.duration("us")),
        ("array<map<string,int>>", list_of(pa.map_(pa.string(), pa.int32()))),
        ("struct<>", pa.struct([])),
        (
            "STRUCT<a: int, `b ``c``, d` string NOT NULL COMMENT 'it\\'s > odd', struct:date>",
            pa.struct(
                [
                    pa.field("a", pa.int32()),
                    pa.field("b `c`, d", pa.string(), nullable=False),
                    pa.field("struct", pa.date32()),
                ]
            ),
        ),
    ],
)
def test_ddl_is_read_as_spark_reads_it(declared, expected):
    assert parse_type(declared) == expected


def test_fields_are_written_with_a_colon_or_without():
    assert parse_schema("a: int, b: struct<c: long>") == parse_schema("a int, b struct<c long>")
    assert parse_type("struct<a int, b: string>") == parse_type("struct<a: int, b string>")


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (bool, "boolean"),
        (int, "bigint"),
        (float, "double"),
        (str, "string"),
        (bytes, "binary"),
        (decimal.Decimal, "decimal(38,18)"),
        (dt.date, "date"),
        (dt.datetime, "timestamp"),
        (dt.timedelta, "interval day to second"),
        (list[int], "array<bigint>"),
        (tuple[str, ...], "array<string>"),
        (dict[str, float | None], "map<string,double>"),
        (Optional[int], "bigint"),  # noqa: UP045
        (Payment, "struct<account:bigint NOT NULL,amount:double>"),
        (
            Order,
            (
                "struct<id:bigint NOT NULL,payments:array<struct<account:bigint NOT NULL,"
                "amount:double>> NOT NULL,note:string>"
            ),
        ),
        (pa.large_string(), "string"),
        (pa.timestamp("ms", "Europe/Zurich"), "timestamp"),
        (pa.list_(pa.field("item", pa.int64(), nullable=False)), "array<bigint>"),
        (object, "object"),
        ("object", "object"),
    ],
)
def test_python_and_arrow_types_have_a_ddl(declared, expected):
    assert type_ddl(parse_type(declared)) == expected


@pytest.mark.parametrize(
    "declared",
    [
        "lnog",
        "",
        "array<int",
        "array<int>>",
        "map<map<int,int>,int>",
        "decimal(39,0)",
        "decimal(2,3)",
        "decimal(a)",
        "interval year to month",
        "string collate UTF8_LCASE",
        "struct<a:int,a:string>",
        "array<object>",
        "void",
        pa.timestamp("ns"),
        pa.uint8(),
        pa.null(),
        list,
        set[int],
        int | str,
        list[object],
        collections.namedtuple("Bare", "a"),
        Node,
        complex,
        17,
        None,
        [int],
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_runs(declared):
    with pytest.raises(PlanError):
        parse_type(declared)


def test_refusal_says_what_was_found_and_what_is_accepted():
    with pytest.raises(PlanError, match=r"expected a type, found 'lnog'(.|\n)*accepted: Spark DDL"):
        parse_type("array<lnog>")


class FakeSparkType:
    def __init__(self, value):
        self.value = value

    def jsonValue(self):
        return self.value


def test_spark_types_are_known_by_their_json():
    array = {"type": "array", "elementType": "integer", "containsNull": False}
    field = {"name": "a b", "type": array, "nullable": False, "metadata": {}}
    schema = parse_schema(FakeSparkType({"type": "struct", "fields": [field]}))
    assert schema_ddl(schema) == "`a b` array<int> NOT NULL"
    with pytest.raises(PlanError, match="user-defined"):
        parse_type(FakeSparkType({"type": "udt"}))


@pytest.mark.parametrize(
    "declared",
    [
        "a long, b string not null",
        "a: bigint, b: string NOT NULL",
        "struct<a:long,b:string not null>",
        pa.schema([pa.field("a", pa.int64()), pa.field("b", pa.large_string(), nullable=False)]),
    ],
)
def test_schemas_in_any_spelling_are_equal(declared):
    assert schema_ddl(parse_schema(declared)) == "a bigint, b string NOT NULL"


def test_schema_may_be_a_class():
    assert schema_ddl(parse_schema(Payment)) == "account bigint NOT NULL, amount double"


@pytest.mark.parametrize("declared", ["", "a", "a long,", "a long a long", "a long, a int", int])
def test_what_is_no_schema_is_refused(declared):
    with pytest.raises(PlanError):
        parse_schema(declared)


names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=8)
LEAVES = (
    "boolean, tinyint, smallint, int, bigint, float, double, string, binary, date, timestamp, "
    "timestamp_ntz, interval day to second"
)
leaves = st.sampled_from([*LEAVES.split(", "), "decimal(38,18)", "decimal(5,0)"]).map(parse_type)


def _structs(types):
    field = st.tuples(names, types, st.booleans())
    unique = st.lists(field, max_size=4, unique_by=lambda f: f[0])
    return unique.map(lambda fields: pa.struct([pa.field(*f) for f in fields]))


arrow_types = st.recursive(
    leaves,
    lambda t: st.one_of(
        t.map(list_of),
        st.tuples(leaves, t).map(lambda kv: pa.map_(kv[0], kv[1])),
        _structs(t),
    ),
    max_leaves=6,
)


@given(arrow_types)
def test_ddl_of_a_type_is_read_back_as_the_type(type):
    assert parse_type(type) == type
    assert parse_type(type_ddl(type)) == type


def test_object_is_one_thing_everywhere():
    assert pickle.loads(pickle.dumps(OBJECT)) is OBJECT
    assert parse_type(OBJECT) is OBJECT


Odd = row_class(["order id", "count", "_id", "class", "asdict", "_1"])


def test_columns_are_attributes_even_when_tuple_has_a_method_of_the_name():
    row = Odd(1, 2, 3, 4, 5, 6)
    assert (row.count, row._id, getattr(row, "class"), row.asdict, row._1) == (2, 3, 4, 5, 6)


def test_rows_are_indexed_by_original_name_position_and_slice():
    row = Odd(1, 2, 3, 4, 5, 6)
    assert (row["order id"], row["count"], row[0], row[-1], row[1:3]) == (1, 2, 1, 6, (2, 3))
    with pytest.raises(KeyError, match=r"no column 'orderid'; the columns are order id, count"):
        row["orderid"]


def test_rows_show_replace_and_convert_with_original_names():
    row = row_class(parse_schema("`order id` long, v string"))(1, "x")
    assert repr(row) == "Row('order id'=1, v='x')"
    assert row.asdict() == {"order id": 1, "v": "x"}
    assert row._fields == ("order id", "v")
    assert row._replace(v="y") == (1, "y")
    assert type(row._replace(v="y")) is type(row)
    with pytest.raises(ValueError, match="no column 'w'"):
        row._replace(w=1)


def test_equal_names_share_one_class():
    assert row_class(pa.schema([("a", pa.int64())])) is row_class(["a"])
    assert row_class(pa.struct([("a", pa.string())])) is row_class(("a",))
    assert row_class(["a"]) is not row_class(["b"])


@pytest.mark.parametrize("fields", [["a", "b"], [], ["order id", "é", "count", "__class__"]])
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_rows_and_their_classes_travel_by_reference(fields, dumps):
    cls = row_class(fields)
    row = cls(*range(len(fields)))
    assert pickle.loads(dumps(cls)) is cls
    copy = pickle.loads(dumps(row))
    assert copy == row
    assert type(copy) is cls


def test_row_equals_and_hashes_as_the_plain_tuple():
    assert row_class(["a", "b"])(1, "x") == (1, "x")
    assert hash(row_class(["a", "b"])(1, "x")) == hash((1, "x"))
