"""Declared types: however a type is written, cairn holds it as one Arrow type.

A type may be declared as Spark DDL, as a pyspark DataType, as an Arrow type or
as a Python type. All of them become the same canonical Arrow type, which can be
written back as DDL that Spark accepts. `object` has no Arrow type: it becomes
OBJECT, and its values are pickled.

Always true here:
- equal types have one canonical form: timestamps count microseconds, list and
  map children are nullable and carry Spark's field names;
- parse_type(type_ddl(t)) == t for every canonical t;
- a class field without None in its annotation is NOT NULL;
- a type that cannot be stored without loss is refused with PlanError, never changed.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import pyarrow as pa

from cairn.errors import PlanError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType as SparkType
    from pyspark.sql.types import StructType as SparkStruct

TypeLike: TypeAlias = "str | pa.DataType | SparkType | type[Any] | types.UnionType"
"""A type as users declare it: Spark DDL, a pyspark, Arrow or Python type."""
SchemaLike: TypeAlias = "str | pa.Schema | pa.StructType | SparkStruct | type[Any]"
"""Columns as users declare them: Spark DDL ("a bigint, b string"), a pyspark StructType, an Arrow
schema or struct type, a NamedTuple or a dataclass."""


class ObjectType:
    """The type of values that Arrow cannot describe; there is one instance, OBJECT."""

    def __repr__(self) -> str:
        return "OBJECT"

    def __reduce__(self) -> str:
        return "OBJECT"


OBJECT: Final = ObjectType()

_TIMESTAMP = pa.timestamp("us", "UTC")
_NAMES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": _TIMESTAMP,
    "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
}
_DDL = {arrow: name for name, arrow in _NAMES.items()}
_ALIASES = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
}
_PYTHON: dict[object, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    decimal.Decimal: pa.decimal128(38, 18),
    dt.date: pa.date32(),
    dt.datetime: _TIMESTAMP,
    dt.timedelta: pa.duration("us"),
}
_ACCEPTED = (
    "Spark DDL such as 'bigint' or 'struct<a:int,b:string>', a pyspark DataType, an Arrow type, "
    "or a Python type: bool, int, float, str, bytes, Decimal, date, datetime, timedelta, "
    "list[T], dict[K, V], T | None, a NamedTuple, a dataclass, object"
)


def parse_type(declared: TypeLike) -> pa.DataType:
    """Return the canonical Arrow type of a declaration, or OBJECT."""
    try:
        return _parse(declared)
    except RecursionError:
        raise _refuse(declared, "it contains itself") from None


def parse_schema(declared: SchemaLike) -> pa.Schema:
    """Return the canonical Arrow schema of declared columns."""
    if isinstance(declared, pa.Schema):
        struct = _struct((f.name, f.type, f.nullable) for f in declared)
    elif isinstance(declared, str) and not re.match(r"\s*struct\s*<", declared, re.IGNORECASE):
        struct = _Ddl(declared).columns()
    else:
        struct = parse_type(declared)
    if struct is OBJECT or not pa.types.is_struct(struct):
        raise PlanError(
            f"a schema must name its columns, found {declared!r}\n"
            "  next: write 'a bigint, b string', or pass a StructType, a pa.Schema, "
            "a NamedTuple or a dataclass",
            declared=declared,
        )
    return pa.schema(list(struct))


def type_ddl(type: pa.DataType) -> str:
    """Return the type as Spark DDL; OBJECT is 'object'."""
    if type is OBJECT:
        return "object"
    if pa.types.is_decimal128(type):
        return f"decimal({type.precision},{type.scale})"
    if pa.types.is_list(type):
        return f"array<{type_ddl(type.value_type)}>"
    if pa.types.is_map(type):
        return f"map<{type_ddl(type.key_type)},{type_ddl(type.item_type)}>"
    if pa.types.is_struct(type):
        return "struct<" + ",".join(_field_ddl(f, ":") for f in type) + ">"
    try:
        return _DDL[type]
    except KeyError:
        raise _refuse(type, "it is not a canonical type") from None


def format_type(type: pa.DataType) -> str:
    """Return the type as Spark DDL, or Arrow's name for it if Spark has no such type."""
    try:
        return type_ddl(type)
    except PlanError:
        return str(type)


def schema_ddl(schema: pa.Schema) -> str:
    """Return the schema as Spark DDL: 'a bigint, b string NOT NULL'."""
    return ", ".join(_field_ddl(field, " ") for field in schema)


def _field_ddl(field: pa.Field, separator: str) -> str:
    name = field.name
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        name = "`" + name.replace("`", "``") + "`"
    return f"{name}{separator}{type_ddl(field.type)}{'' if field.nullable else ' NOT NULL'}"


# --- from declarations to Arrow ---------------------------------------------------------------


def _refuse(declared: object, why: str) -> PlanError:
    return PlanError(
        f"{declared!r} is not a type cairn can store: {why}\n  accepted: {_ACCEPTED}",
        declared=declared,
    )


def _parse(declared: TypeLike) -> pa.DataType:
    if isinstance(declared, str):
        return _Ddl(declared).whole_type()
    if isinstance(declared, pa.DataType):
        return _from_arrow(declared)
    if declared is OBJECT or declared is object:
        return OBJECT
    if hasattr(declared, "jsonValue") and not isinstance(declared, type):
        return _from_spark(declared.jsonValue())
    return _from_python(declared)


def _inner(declared: TypeLike) -> pa.DataType:
    parsed = _parse(declared)
    if parsed is OBJECT:
        raise _refuse(declared, "object stands alone, not inside another type")
    return parsed


def _list(element: TypeLike) -> pa.DataType:
    return pa.list_(pa.field("element", _inner(element)))


def _map(key: TypeLike, value: TypeLike) -> pa.DataType:
    key_type = _inner(key)
    if contains_map(key_type):
        raise _refuse(key, "a map cannot be a map's key")
    return pa.map_(key_type, pa.field("value", _inner(value)))


def _struct(fields: Iterable[tuple[str, TypeLike, bool]]) -> pa.DataType:
    built = [pa.field(name, _inner(type), nullable) for name, type, nullable in fields]
    counts = collections.Counter(field.name for field in built)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise PlanError(f"field {twice[0]!r} is declared {counts[twice[0]]} times", field=twice[0])
    return pa.struct(built)


def _decimal(precision: int, scale: int) -> pa.DataType:
    if not (1 <= precision <= 38 and 0 <= scale <= precision):
        raise _refuse(f"decimal({precision},{scale})", "Spark has 1 <= precision <= 38, scale <= p")
    return pa.decimal128(precision, scale)


def all_nullable(type: pa.DataType) -> pa.DataType:
    """Return the type without any NOT NULL in it."""
    if pa.types.is_struct(type):
        return pa.struct([pa.field(field.name, all_nullable(field.type)) for field in type])
    if pa.types.is_map(type):
        return pa.map_(type.key_type, type.item_field.with_type(all_nullable(type.item_type)))
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(all_nullable(type.value_type)))
    return type


def contains_map(type: pa.DataType) -> bool:
    """True if there is a map anywhere in the type: such values have no hash and no order."""
    if pa.types.is_map(type):
        return True
    return any(contains_map(type.field(i).type) for i in range(type.num_fields))


def _from_arrow(type: pa.DataType) -> pa.DataType:
    is_ = pa.types
    if type in _DDL:
        return type
    if is_.is_timestamp(type) and type.unit != "ns":
        return pa.timestamp("us") if type.tz is None else _TIMESTAMP
    if is_.is_duration(type) and type.unit != "ns":
        return pa.duration("us")
    if is_.is_decimal(type):
        return _decimal(type.precision, type.scale)
    if is_.is_large_string(type) or is_.is_string_view(type):
        return pa.string()
    if is_.is_large_binary(type) or is_.is_binary_view(type):
        return pa.binary()
    if is_.is_list(type) or is_.is_large_list(type):
        return _list(type.value_type)
    if is_.is_map(type):
        return _map(type.key_type, type.item_type)
    if is_.is_struct(type):
        return _struct((f.name, f.type, f.nullable) for f in type)
    raise _refuse(type, "Spark has no such type")


def _from_spark(value: Any) -> pa.DataType:
    """Return the type of a `jsonValue()`: a name for atomic types, else a tree of dicts."""
    if isinstance(value, str):
        return _Ddl(value).whole_type()
    kind = value.get("type")
    if kind == "array":
        return _list(_from_spark(value["elementType"]))
    if kind == "map":
        return _map(_from_spark(value["keyType"]), _from_spark(value["valueType"]))
    if kind == "struct":
        for field in value["fields"]:
            if "__COLLATIONS" in (field.get("metadata") or {}):
                raise _refuse(field["name"], "collated strings compare unlike their bytes")
        return _struct((f["name"], _from_spark(f["type"]), f["nullable"]) for f in value["fields"])
    raise _refuse(kind, "it is a user-defined Spark type")


def _from_python(declared: TypeLike) -> pa.DataType:
    try:
        if declared in _PYTHON:
            return _PYTHON[declared]
    except TypeError:
        raise _refuse(declared, f"found a {type(declared).__name__}") from None
    generic, args = typing.get_origin(declared), typing.get_args(declared)
    if generic in (typing.Union, types.UnionType):
        some = [arg for arg in args if arg is not type(None)]
        if len(some) == 1:
            return _inner(some[0])
        raise _refuse(declared, "a value has one type")
    if generic is list or (generic is tuple and len(args) == 2 and args[1] is Ellipsis):
        return _list(args[0])
    if generic is dict:
        return _map(*args)
    if isinstance(declared, type):
        if dataclasses.is_dataclass(declared):
            return _from_class(declared, [f.name for f in dataclasses.fields(declared)])
        if issubclass(declared, tuple) and hasattr(declared, "_fields"):
            return _from_class(declared, list(declared._fields))
    raise _refuse(declared, f"found {getattr(declared, '__qualname__', type(declared).__name__)}")


def _from_class(declared: type, names: list[str]) -> pa.DataType:
    try:
        hints = typing.get_type_hints(declared)
    except NameError as error:
        raise _refuse(declared, f"its annotations do not resolve: {error}") from error
    bare = [name for name in names if name not in hints]
    if bare:
        raise _refuse(declared, f"field {bare[0]!r} has no annotation")
    optional = (type(None) in typing.get_args(hints[name]) for name in names)
    return _struct((n, hints[n], none) for n, none in zip(names, optional, strict=True))


_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|(\S))")
_END = ("", "")


class _Ddl:
    """A recursive-descent parser of the part of Spark's DDL that describes data."""

    def __init__(self, text: str) -> None:
        self.text = text
        kinds = ("name", "text", "word", "mark")
        self.tokens = [
            next((kind, part) for kind, part in zip(kinds, match.groups(), strict=True) if part)
            for match in _TOKEN.finditer(text)
        ]
        self.at = 0

    def whole_type(self) -> pa.DataType:
        parsed = OBJECT if self.text.strip().lower() == "object" else self.type()
        return parsed if self.at == len(self.tokens) or parsed is OBJECT else self.fail("the end")

    def columns(self) -> pa.DataType:
        fields = [self.field()]
        while self.take(","):
            fields.append(self.field())
        return _struct(fields) if self.at == len(self.tokens) else self.fail("','")

    def type(self) -> pa.DataType:
        word = self.word("a type")
        name = _ALIASES.get(word, word)
        if name == "array":
            return self.in_brackets(lambda: _list(self.type()))
        if name == "map":
            return self.in_brackets(lambda: _map(*self.pair()))
        if name == "struct":
            return self.in_brackets(self.struct_fields)
        if name == "interval":
            return self.interval()
        if name in ("decimal", "dec", "numeric"):
            numbers = self.numbers()
            return _decimal(*(numbers + [10, 0][len(numbers) :])[:2])
        if name in ("char", "character", "varchar"):
            self.numbers()
            return pa.string()
        if name in _NAMES:
            return _NAMES[name]
        self.at -= 1
        return self.fail("a type")

    def pair(self) -> tuple[pa.DataType, pa.DataType]:
        key = self.type()
        self.need(",")
        return key, self.type()

    def struct_fields(self) -> pa.DataType:
        fields: list[tuple[str, pa.DataType, bool]] = []
        while self.peek() != ("mark", ">"):
            if fields:
                self.need(",")
            fields.append(self.field())
        return _struct(fields)

    def field(self) -> tuple[str, pa.DataType, bool]:
        kind, name = self.peek()
        if kind not in ("name", "word"):
            self.fail("a field name")
        self.at += 1
        self.take(":")
        field_type, nullable = self.type(), True
        if self.take("not"):
            self.need("null")
            nullable = False
        if self.take("comment"):
            if self.peek()[0] != "text":
                self.fail("a quoted comment")
            self.at += 1
        return (name[1:-1].replace("``", "`") if kind == "name" else name), field_type, nullable

    def interval(self) -> pa.DataType:
        units = ("day", "hour", "minute", "second")
        if self.word("a unit") not in units or (self.take("to") and self.word("") not in units):
            self.at -= 1
            self.fail("a unit from day to second")
        return pa.duration("us")

    def numbers(self) -> list[int]:
        found: list[int] = []
        if self.take("("):
            while not found or self.take(","):
                digits = self.word("a number")
                if not digits.isdecimal():
                    self.at -= 1
                    self.fail("a number")
                found.append(int(digits))
            self.need(")")
        return found

    def in_brackets(self, inside: Callable[[], pa.DataType]) -> pa.DataType:
        self.need("<")
        parsed = inside()
        self.need(">")
        return parsed

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else _END

    def take(self, expected: str) -> bool:
        kind, part = self.peek()
        if kind in ("word", "mark") and part.lower() == expected:
            self.at += 1
            return True
        return False

    def need(self, expected: str) -> None:
        if not self.take(expected):
            self.fail(repr(expected))

    def word(self, expected: str) -> str:
        kind, part = self.peek()
        if kind != "word":
            self.fail(expected)
        self.at += 1
        return part.lower()

    def fail(self, expected: str) -> NoReturn:
        found = self.peek()[1] or "the end"
        raise _refuse(self.text, f"expected {expected}, found {found!r}")


# --- rows -------------------------------------------------------------------------------------

_ROW_PREFIX = "Row_"
Row = tuple[Any, ...]
"""A row: an instance of a `row_class`, or a plain tuple of its columns."""
_KEPT = {"_fields", "_make", "_replace", "_asdict", "_field_defaults"}


def row_class(fields: pa.Schema | pa.StructType | Sequence[str]) -> type[Row]:
    """Return the named-tuple class of a schema, a struct type or a sequence of field names.

    Columns are attributes, `row["order id"]` works for every name, and a column
    called `count` or `asdict` wins over the method. Equal names share one class.
    """
    if isinstance(fields, pa.Schema | pa.StructType):
        return _row_class(tuple(field.name for field in fields))
    return _row_class(tuple(fields))


@functools.cache
def _row_class(names: tuple[str, ...]) -> type[Row]:
    namedtuple: Any = collections.namedtuple  # untyped: mypy wants the names as a literal
    parent = namedtuple("Row", names, rename=True)
    positions = {name: position for position, name in enumerate(names)}
    tuple_item = tuple.__getitem__

    def __getitem__(self: Any, key: Any) -> Any:
        if type(key) is not str:
            return tuple_item(self, key)
        try:
            return tuple_item(self, positions[key])
        except KeyError:
            raise KeyError(f"no column {key!r}; the columns are {', '.join(names)}") from None

    def __repr__(self: Any) -> str:
        shown = (name if name.isidentifier() else repr(name) for name in names)
        return f"Row({', '.join(f'{n}={value!r}' for n, value in zip(shown, self, strict=True))})"

    def asdict(self: Any) -> dict[str, Any]:
        return dict(zip(names, self, strict=True))

    def _replace(self: Any, /, **changes: Any) -> Any:
        values = asdict(self) | changes
        if len(values) > len(names):
            unknown = [name for name in changes if name not in positions]
            raise ValueError(f"no column {unknown[0]!r}; the columns are {', '.join(names)}")
        return self._make(values.values())

    namespace: dict[str, Any] = {
        "__slots__": (),
        "__doc__": f"Row({', '.join(names)})",
        "__module__": __name__,
        # pickle and cloudpickle look a class up by module and qualified name; this one is
        # found again by the module's __getattr__, so rows travel as a reference and values.
        "__qualname__": _ROW_PREFIX + "\0".join(names).encode().hex(),
        "__getitem__": __getitem__,
        "__repr__": __repr__,
        "asdict": asdict,
        "_asdict": asdict,
        "_replace": _replace,
        "_fields": names,
    }
    # namedtuple's own C getters, also under names that it would not accept.
    for name, position in positions.items():
        if name not in _KEPT and not (name.startswith("__") and name.endswith("__")):
            namespace[name] = parent.__dict__[parent._fields[position]]
    return type("Row", (parent,), namespace)


if not TYPE_CHECKING:  # hidden from mypy, which would take every name for present

    def __getattr__(name: str) -> Any:
        encoded = name.removeprefix(_ROW_PREFIX)
        if encoded == name:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            text = bytes.fromhex(encoded).decode()
        except ValueError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        return _row_class(tuple(text.split("\0")) if text else ())
