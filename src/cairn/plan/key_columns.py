"""Spark expressions as keys: `key_by(F.lower("email").alias("email_key"))`.

Each expression becomes a column of the stream under its alias, before the shuffle. The key
columns of state, queries, tables and savepoints have that name.

Always true here:
- an expression gives one value per row, the same whenever an epoch runs again;
- nothing runs: Spark plans the expressions on no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import pyarrow as pa

from cairn.errors import PlanError
from cairn.types import schema_ddl

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_CLOCKS: Final = {
    "current_timestamp", "now", "localtimestamp", "current_date", "curdate", "current_time",
}  # fmt: skip
"""Functions that Spark calls deterministic, though an epoch that runs again gets other values."""


class KeyColumns:
    """A transform that adds key columns. `names` are those of all keys, in order."""

    def __init__(
        self, spark: SparkSession, schema: pa.Schema, keys: Sequence[str | Column]
    ) -> None:
        rows = spark.createDataFrame([], schema_ddl(schema))
        self.names: list[str] = []
        self._added: list[Column] = []
        for key in keys:
            if isinstance(key, str):
                self.names.append(key)
            elif (column := _plain_column(key, schema)) is not None:
                self.names.append(column)
            else:
                self.names.append(_check_expression(rows, key))
                self._added.append(key)
        texts = ", ".join(_text(column) for column in self._added)
        self.__name__ = f"key_by({texts})"

    @property
    def is_empty(self) -> bool:
        """True if every key is a column that is there already."""
        return not self._added

    def __call__(self, rows: DataFrame) -> DataFrame:
        return rows.select("*", *self._added)


def has_expressions(keys: Sequence[object]) -> TypeGuard[Sequence[str | Column]]:
    """True if there are Spark columns among keys. Refuses what is neither a name nor a column."""
    if all(isinstance(key, str) for key in keys):
        return False
    from pyspark.sql import Column

    for key in keys:
        if not isinstance(key, str | Column):
            raise PlanError(
                f"key_by: expected names of columns and Spark expressions, found {key!r}"
            )
    return True


def _plain_column(key: Column, schema: pa.Schema) -> str | None:
    """Return the name if the expression is nothing but a column of the stream."""
    return next((name for name in schema.names if _text(key) in (name, f"`{name}`")), None)


def _check_expression(rows: DataFrame, key: Column) -> str:
    """Return the name of an expression's column; refuse one that cannot be a key."""
    text = _text(key)
    try:
        planned = rows.select("*", key)
    except Exception as error:
        # After a semicolon Spark goes on with its plan of it.
        why = str(error).partition(";\n")[0]
        raise PlanError(
            f"key_by({text}) cannot be planned: {why}\n  found: {', '.join(rows.columns)}"
        ) from error.with_traceback(None)
    name: str = planned.columns[-1]
    if not text.endswith((f" AS {name}", f" AS `{name}`")):
        raise PlanError(
            f"key_by({text}): the key column has no name\n"
            "  next: name it with .alias('...'); state, queries and savepoints use the name"
        )
    # Spark takes names that differ in case for one, unless it is told otherwise.
    taken = next((column for column in rows.columns if column.lower() == name.lower()), None)
    if taken is not None:
        raise PlanError(
            f"key_by({text}): the stream has a column {taken!r} already\n"
            "  next: give the key column another alias",
            column=taken,
        )
    plan = planned._jdf.queryExecution().analyzed()
    before = rows._jdf.queryExecution().analyzed()
    if plan.child().getClass() != before.getClass():
        raise PlanError(
            f"key_by({text}): it is not a value of one row\n"
            "  next: compute it with .transform(...) and key by the column"
        )
    expressions = plan.expressions()
    expression = expressions.apply(expressions.size() - 1)
    clock = next((part for part in _parts(expression) if part in _CLOCKS), None)
    if not expression.deterministic() or clock is not None:
        raise PlanError(
            f"key_by({text}): it is not deterministic, and a row would have another key when its "
            "epoch runs again\n  next: key by a value that depends on the row alone"
        )
    return name


def _parts(expression: Any) -> Iterator[str]:
    """Yield the names of the functions in an analysed expression."""
    yield expression.prettyName()
    children = expression.children()
    for index in range(children.size()):
        yield from _parts(children.apply(index))


def _text(key: Column) -> str:
    return str(key).removeprefix("Column<'").removesuffix("'>")
