"""The plan of a transform that slots can run: Spark's, translated.

Always true here:
- a plan that is not understood completely is Spark's to run;
- so is a transform that reads rows while it plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn.errors import PlanError
from cairn.logs import logger
from cairn.operators.select import (
    CALLS,
    Column,
    Condition,
    Constant,
    Expression,
    Selection,
    Wider,
)
from cairn.types import parse_type
from cairn.user_code import find_definition

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_COMPARED = frozenset((*_INTEGERS, "string", "boolean", "date", "timestamp"))
"""Types whose values Arrow compares as Spark does. To Spark all NaNs are equal, to Arrow none."""
_LOGICAL = ("And", "Or", "Not")


class _UnknownError(Exception):
    """The plan has something that is not translated."""


@dataclass(frozen=True)
class SelectPlan:
    """A transform that can run in slots, as planned when the job was made."""

    selection: Selection
    function: Callable[[Any], Any]
    rows: Any
    """A DataFrame with the columns of its input. To read its rows raises an error."""
    schema: pa.Schema
    planned: Any
    """The DataFrame that the function makes of it."""

    def again(self) -> Selection:
        """Plan the transform again, as for a new epoch. PlanError if slots cannot run that."""
        planned = self.function(self.rows)
        old, new = (each._jdf.queryExecution().analyzed() for each in (self.planned, planned))
        if new.schema().equals(old.schema()) and new.sameResult(old):
            return self.selection
        found = translate(self.rows, planned, self.schema)
        if found is None or found.types != self.selection.types:
            at = find_definition(self.function)
            raise PlanError(
                "a transform of an operator's rows picked columns and compared them with constants "
                "when the job was made, and plans something else now\n"
                f"  at: {at}\n"
                "  next: let it differ between epochs in nothing but constants",
                at=at,
            )
        return found


def plan_select(
    rows: Any, function: Callable[[Any], Any], schema: pa.Schema, result: pa.Schema
) -> SelectPlan | None:
    """Return the plan of a transform if slots can run it; None if only Spark can.

    `rows` have the columns of `schema`, and to read them raises an error. `result` is the schema
    that Spark has found for the result.
    """
    try:
        planned = function(rows)
        selection = translate(rows, planned, schema)
    except Exception as error:
        logger.debug("Spark runs a transform: %s", error)
        return None
    if selection is None or selection.types != list(result.types):
        return None
    return SelectPlan(selection, function, rows, schema, planned)


def translate(rows: Any, planned: Any, schema: pa.Schema) -> Selection | None:
    """Return what a plan over these rows selects; None if only Spark can run it."""
    leaf = rows._jdf.queryExecution().analyzed()
    try:
        columns, conditions = _Translator(leaf, schema).read(
            planned._jdf.queryExecution().analyzed()
        )
    except _UnknownError as error:
        logger.debug("Spark runs a transform, because of %s", error)
        return None
    return Selection(tuple(columns.values()), tuple(conditions))


Columns = Mapping[int, Expression]
"""The columns of a plan's rows in their order, by Spark's number for each."""


class _Translator:
    """Spark's plans and expressions into those of `operators/select`."""

    def __init__(self, leaf: Any, schema: pa.Schema) -> None:
        self._leaf = leaf
        self._schema = schema

    def read(self, plan: Any) -> tuple[Columns, list[Expression]]:
        """Return the columns and the conditions of a plan."""
        if plan.equals(self._leaf):
            attributes = _items(plan.output())
            return {
                _id(attribute): Column((at,), field.type)
                for at, (attribute, field) in enumerate(zip(attributes, self._schema, strict=True))
            }, []
        kind = _kind(plan)
        if kind not in ("Project", "Filter", "SubqueryAlias"):
            raise _UnknownError(kind)
        columns, conditions = self.read(plan.child())
        if kind == "Filter":
            condition = self.expression(plan.condition(), columns)
            if condition.type != pa.bool_():
                raise _UnknownError("a condition that is not one")
            return columns, [*conditions, condition]
        if kind == "Project":
            columns = {
                _id(each): self.expression(each, columns) for each in _items(plan.projectList())
            }
        return columns, conditions

    def expression(self, found: Any, columns: Columns) -> Expression:
        """Return an expression over the columns of a plan's rows."""
        kind = _kind(found)
        if kind == "AttributeReference":
            return columns[_id(found)]
        if kind == "Alias":
            return self.expression(found.child(), columns)
        if kind == "GetStructField":
            return _field_of(self.expression(found.child(), columns), int(found.ordinal()))
        if kind == "Literal":
            return _constant(found)
        if kind == "Cast":
            return self._cast(found, columns)
        if kind == "In":
            value = self.expression(found.value(), columns)
            options = [self.expression(each, columns) for each in _items(found.list())]
            if not options:
                raise _UnknownError("a list without values")
            each, *others = [_compare("EqualTo", value, option) for option in options]
            for other in others:
                each = Condition("Or", (each, other))
            return each
        if kind not in CALLS:
            raise _UnknownError(kind)
        arguments = tuple(self.expression(each, columns) for each in _items(found.children()))
        if kind in ("IsNull", "IsNotNull"):
            return Condition(kind, arguments)
        if kind in _LOGICAL:
            if any(each.type != pa.bool_() for each in arguments):
                raise _UnknownError(kind)
            return Condition(kind, arguments)
        return _compare(kind, *arguments)

    def _cast(self, found: Any, columns: Columns) -> Expression:
        """Return a constant of another type, or an integer in a wider one."""
        child = found.child()
        if _kind(child) == "Literal":
            return _constant(found)
        to = _type_of(found)
        names = _type_of(child), to
        if any(name not in _INTEGERS for name in names):
            raise _UnknownError("a cast")
        if _INTEGERS.index(names[0]) > _INTEGERS.index(to):
            raise _UnknownError("a cast to a narrower type")
        return Wider(self.expression(child, columns), parse_type(to))


def _compare(kind: str, left: Expression, right: Expression) -> Condition:
    if left.type != right.type:
        raise _UnknownError("values of two types compared")
    if isinstance(left, Constant) and isinstance(right, Constant):
        raise _UnknownError("constants compared")
    is_order = kind not in ("EqualTo", "EqualNullSafe")
    if left.type not in [parse_type(name) for name in _COMPARED] or (
        is_order and left.type == pa.bool_()
    ):
        raise _UnknownError("values of a type that Arrow compares in its own way, or not at all")
    return Condition(kind, (left, right))


def _field_of(found: Expression, ordinal: int) -> Column:
    if not isinstance(found, Column):
        raise _UnknownError("a field of something computed")
    return Column((*found.path, ordinal), found.type.field(ordinal).type)


def _constant(found: Any) -> Constant:
    name = _type_of(found)
    value = found.value() if _kind(found) == "Literal" else found.eval(None)
    if name not in _COMPARED or value is None:
        # Null may be what Spark replaces later, as it does the text 'now'.
        raise _UnknownError(f"a constant {name}")
    return Constant(value.toString() if name == "string" else value, parse_type(name))


def _type_of(expression: Any) -> str:
    # With its collation, if a text has one.
    return str(expression.dataType().sql()).lower()


def _id(attribute: Any) -> int:
    return int(attribute.exprId().id())


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _items(sequence: Any) -> list[Any]:
    """Return the elements of a Scala sequence."""
    return [sequence.apply(index) for index in range(sequence.size())]
