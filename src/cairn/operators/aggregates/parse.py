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
    "approx_count_distinct": "approx_count_distinct",
}
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(", re.ASCII)
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

    @property
    def sql(self) -> str:
        """The whole call as Spark SQL, which gives the type of the result."""
        skips = ", true" if self.skips_nulls else ""
        argument = "1" if self.argument is None else self.argument
        return f"{self.function}({argument}{skips})"


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
    if rest.strip():
        raise _refuse(
            name, text, f"{rest.strip()!r} follows the call; compute with results downstream"
        )
    function = FUNCTIONS.get(match[1].lower())
    if function is None:
        raise _refuse(name, text, f"{match[1]!r} is not an aggregate")
    arguments = [part.strip() for part in _split(inner)]
    if re.match(r"distinct\b", arguments[0], re.IGNORECASE):
        raise _refuse(
            name, text, "DISTINCT would have to keep every value; use approx_count_distinct"
        )
    if function == "count" and arguments == ["*"]:
        return Call(name, "count", None)
    skips_nulls = False
    if function in ("first", "last"):
        trailing = re.search(r"\s(ignore|respect)\s+nulls$", arguments[-1], re.IGNORECASE)
        if trailing:
            skips_nulls = trailing[1].lower() == "ignore"
            arguments[-1] = arguments[-1][: trailing.start()]
        elif len(arguments) == 2 and arguments[1].lower() in ("true", "false"):
            skips_nulls = arguments.pop().lower() == "true"
    if len(arguments) != 1 or not arguments[0]:
        raise _refuse(name, text, f"{match[1]} takes one argument")
    return Call(name, function, arguments[0], skips_nulls)


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
