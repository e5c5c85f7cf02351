"""Parse aggregates: "sum(amount * rate)" is a function and a Spark SQL expression.

Only the outer call is parsed here; Spark parses its argument.

Always true here:
- the function of a call is a value of FUNCTIONS;
- a call that Spark accepts and this parser does not is refused, never computed differently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from cairn.errors import PlanError

FUNCTIONS = {
    "count": "count",
    "sum": "sum",
    "min": "min",
    "max": "max",
    "avg": "avg",
    "mean": "avg",
    "stddev": "stddev_samp",
    "stddev_samp": "stddev_samp",
    "stddev_pop": "stddev_pop",
    "variance": "var_samp",
    "var_samp": "var_samp",
    "var_pop": "var_pop",
    "first": "first",
    "last": "last",
    "max_by": "max_by",
    "min_by": "min_by",
    "approx_count_distinct": "approx_count_distinct",
}
COUNT_DISTINCT = "count_distinct"
"""The function of `count(DISTINCT x)`."""
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(", re.ASCII)
_COLUMN = re.compile(r"`([^`]+)`|([A-Za-z_]\w*)", re.ASCII)
_KNOWN = ", ".join(FUNCTIONS)


@dataclass(frozen=True)
class Call:
    """An aggregate under the name of its column."""

    name: str
    function: str
    argument: str | None
    """Spark SQL over the stream's columns; None: count(*)."""
    skips_nulls: bool = False
    """For first and last: nulls do not count as values."""

    by: str | None = None
    """For max_by and min_by: Spark SQL of the value that is compared."""
    where: str | None = None
    """Spark SQL of the condition in FILTER (WHERE ...)."""

    @property
    def sql(self) -> str:
        """The whole call as Spark SQL, which gives the type of the result."""
        argument = "1" if self.argument is None else self.argument
        if self.function == COUNT_DISTINCT:
            call = f"count(DISTINCT {argument})"
        else:
            by = "" if self.by is None else f", {self.by}"
            call = f"{self.function}({argument}{by}{', true' if self.skips_nulls else ''})"
        return call if self.where is None else f"{call} FILTER (WHERE {self.where})"

    @property
    def value(self) -> str:
        """SQL of the value that a row adds, null if it adds none: not for first and last."""
        argument = "1" if self.argument is None else self.argument
        return _only_where(argument, self.where)

    @property
    def by_value(self) -> str:
        """SQL of `by`, null in rows that do not count."""
        assert self.by is not None
        return _only_where(self.by, self.where)


def find_column(schema: pa.Schema, sql: str | None) -> str | None:
    """Return the column that an expression is; None if it is another expression."""
    match = None if sql is None else _COLUMN.fullmatch(sql.strip())
    if match is None:
        return None
    name = match[1] or match[2]
    is_literal = match[1] is None and name.lower() in ("null", "true", "false")
    return name if not is_literal and schema.names.count(name) == 1 else None


def _only_where(sql: str, where: str | None) -> str:
    return sql if where is None else f"CASE WHEN {where} THEN {sql} END"


def parse_calls(aggregates: Mapping[str, str], taken: Collection[str]) -> list[Call]:
    """Parse aggregates by column name; `taken` are names that the result already has."""
    if not aggregates:
        raise PlanError(
            "aggregate() has no aggregates\n"
            '  next: name columns, as in .aggregate(total="sum(v)", n="count(*)", uid=...)'
        )
    for name in aggregates:
        if name in taken:
            raise PlanError(
                f"aggregate {name!r} has the name of another column of the result\n"
                f"  found: {', '.join(taken)}\n  next: give it a name of its own",
                column=name,
            )
    return [_parse(name, text) for name, text in aggregates.items()]


def _parse(name: str, text: str) -> Call:
    match = _CALL.match(text) if isinstance(text, str) else None
    if match is None:
        raise _refuse(name, text, "it is not a function call")
    inner, rest = _closed(name, text, match.end())
    where, rest = _parse_filter(name, text, rest)
    if rest.strip():
        raise _refuse(
            name, text, f"{rest.strip()!r} follows the call; compute with results downstream"
        )
    function = FUNCTIONS.get(match[1].lower())
    if function is None:
        raise _refuse(name, text, f"{match[1]!r} is not an aggregate")
    arguments = [part.strip() for part in _split(inner)]
    distinct = re.match(r"distinct\b", arguments[0], re.IGNORECASE)
    if distinct:
        arguments[0] = arguments[0][distinct.end() :].strip()
        return _parse_distinct(name, text, function, arguments, where)
    if function == "count" and arguments == ["*"]:
        return Call(name, "count", None, where=where)
    skips_nulls = False
    if function in ("first", "last"):
        trailing = re.search(r"\s(ignore|respect)\s+nulls$", arguments[-1], re.IGNORECASE)
        if trailing:
            skips_nulls = trailing[1].lower() == "ignore"
            arguments[-1] = arguments[-1][: trailing.start()]
        elif len(arguments) == 2 and arguments[1].lower() in ("true", "false"):
            skips_nulls = arguments.pop().lower() == "true"
    count = 2 if function in ("max_by", "min_by") else 1
    if len(arguments) != count or not all(arguments):
        raise _refuse(
            name, text, f"{match[1]} takes {'two arguments' if count == 2 else 'one argument'}"
        )
    by = arguments[1] if count == 2 else None
    return Call(name, function, arguments[0], skips_nulls, by, where)


def _parse_filter(name: str, text: str, rest: str) -> tuple[str | None, str]:
    """Return the condition of a FILTER clause, if there is one, and the text after it."""
    match = re.match(r"\s*filter\s*\(", rest, re.IGNORECASE)
    if match is None:
        return None, rest
    inner, rest = _closed(name, rest, match.end())
    where = re.match(r"\s*where\b(.*\S)\s*$", inner, re.IGNORECASE | re.DOTALL)
    if where is None:
        raise _refuse(name, text, "expected FILTER (WHERE condition)")
    return f"({where[1].strip()})", rest


def _parse_distinct(
    name: str, text: str, function: str, arguments: list[str], where: str | None
) -> Call:
    if function != "count":
        raise _refuse(name, text, "only count takes DISTINCT")
    if not all(arguments) or arguments == ["*"]:
        raise _refuse(name, text, "count(DISTINCT ...) takes one expression or several")
    argument = arguments[0]
    if len(arguments) > 1:
        # As in Spark, rows with a null among them do not count.
        some_null = " OR ".join(f"({each}) IS NULL" for each in arguments)
        fields = ", ".join(f"'c{at}', {each}" for at, each in enumerate(arguments))
        argument = f"CASE WHEN NOT ({some_null}) THEN named_struct({fields}) END"
    return Call(name, COUNT_DISTINCT, argument, where=where)


def _refuse(name: str, text: object, why: str) -> PlanError:
    return PlanError(
        f"aggregate {name!r} is {text!r}: {why}\n"
        f"  expected: one call of {_KNOWN}, on a Spark SQL expression",
        column=name,
    )


def _closed(name: str, text: str, start: int) -> tuple[str, str]:
    """Return the text inside and after the bracket that opens just before `start`."""
    depth = 1
    for at, mark in _marks(text, start):
        depth += {"(": 1, ")": -1}.get(mark, 0)
        if depth == 0:
            return text[start:at], text[at + 1 :]
    raise _refuse(name, text, "a bracket or a quote is not closed")


def _split(inner: str) -> list[str]:
    """Split arguments at commas outside of brackets."""
    parts, start, depth = [], 0, 0
    for at, mark in _marks(inner, 0):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(mark, 0)
        if mark == "," and depth == 0:
            parts.append(inner[start:at])
            start = at + 1
    return [*parts, inner[start:]]


def _marks(text: str, at: int) -> Iterator[tuple[int, str]]:
    """Yield the characters outside of quotes, with their places."""
    while at < len(text):
        mark = text[at]
        if mark in "'\"`":
            at += 1
            while at < len(text) and text[at] != mark:
                at += 2 if text[at] == "\\" and mark != "`" else 1
        else:
            yield at, mark
        at += 1
