"""The condition of a join, and the columns of its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from cairn.errors import PlanError
from cairn.types.durations import Duration, duration_ms

HOW = ("inner", "left", "right", "full")
Clock = Literal["event", "processing"]


@dataclass(frozen=True)
class JoinPlan:
    """The condition of a join, and its result."""

    left: pa.Schema
    right: pa.Schema
    on: tuple[tuple[str, str], ...]
    """Pairs of equal columns, left and right."""
    low_ms: int | None
    high_ms: int | None
    """Bounds of the right row's time minus the left row's; None without any."""
    how: str
    suffix: str = "_right"
    clock: Clock = "event"
    """The time that the bounds are about: of the rows, or of their arrival."""

    @property
    def left_keys(self) -> tuple[str, ...]:
        return tuple(left for left, _ in self.on)

    @property
    def right_keys(self) -> tuple[str, ...]:
        return tuple(right for _, right in self.on)

    @property
    def keeps_left(self) -> bool:
        return self.how in ("left", "full")

    @property
    def keeps_right(self) -> bool:
        return self.how in ("right", "full")

    @property
    def right_rest(self) -> list[str]:
        """The columns of the right stream that are in the result."""
        return [name for name in self.right.names if name not in self.right_keys]

    def right_name(self, column: str) -> str:
        return f"{column}{self.suffix}" if column in self.left.names else column

    def schema(self, key_types: Sequence[pa.DataType]) -> pa.Schema:
        """Return the schema of the result: all of left, then right without its key columns.

        `key_types` are wide enough for the keys of both. A right row without a match has its
        key in the columns of left.
        """
        fields = []
        keys = dict(zip(self.left_keys, zip(self.right_keys, key_types, strict=True), strict=True))
        for field in self.left:
            if self.keeps_right and field.name in keys:
                other, type_ = keys[field.name]
                nullable = field.nullable or self.right.field(other).nullable
                fields.append(pa.field(field.name, type_, nullable))
            else:
                fields.append(field.with_nullable(field.nullable or self.keeps_right))
        for name in self.right_rest:
            field, called = self.right.field(name), self.right_name(name)
            if called in (other.name for other in fields):
                raise PlanError(
                    f"join: the result would have two columns {called!r}\n"
                    "  next: give suffix= another value, or rename a column before the join",
                    column=called,
                )
            nullable = field.nullable or self.keeps_left
            fields.append(field.with_name(called).with_nullable(nullable))
        return pa.schema(fields)


JoinColumns = str | Sequence[str] | Mapping[str, str]
"""The key of a join: a column, several, or {left column: right column}."""


Within = Duration | tuple[Duration, Duration] | None


def join_plan(
    left: pa.Schema,
    right: pa.Schema,
    on: JoinColumns,
    within: Within,
    how: str,
    suffix: str,
    *,
    ttl: Duration | None = None,
    has_time: bool = True,
) -> JoinPlan:
    """Check the arguments of a join and return its plan. `has_time`: both streams have one."""
    check_how(how, HOW)
    pairs = check_on(on, left, right)
    if within is not None:
        if ttl is not None:
            raise PlanError(
                "join: within= and ttl= are both given\n"
                "  next: leave ttl= out; state of a join with within= is cleared by the watermark"
            )
        return JoinPlan(left, right, pairs, *_bounds_ms(within), how, suffix)
    clock: Clock = "event" if has_time and ttl is not None else "processing"
    if ttl is not None:
        ttl_ms = duration_ms(ttl, "ttl of join", positive=True)
        return JoinPlan(left, right, pairs, -ttl_ms, ttl_ms, how, suffix, clock)
    if how != "inner":
        raise PlanError(
            f"join: how={how!r} without within= and ttl=\n"
            "  a row without a match is emitted when none can come any more: here that is never\n"
            "  next: give within=, or ttl= for how long a row waits"
        )
    return JoinPlan(left, right, pairs, None, None, how, suffix, clock)


def check_how(how: str, known: Sequence[str]) -> None:
    if how not in known:
        raise PlanError(f"join: how={how!r}\n  expected: one of {', '.join(known)}")


def check_on(on: JoinColumns, left: pa.Schema, right: pa.Schema) -> tuple[tuple[str, str], ...]:
    """Return the pairs of key columns, left and right."""
    pairs = _pairs(on)
    for column, schema, side in (
        *((column, left, "left") for column, _ in pairs),
        *((column, right, "right") for _, column in pairs),
    ):
        if column not in schema.names:
            raise PlanError(
                f"join: the {side} stream has no column {column!r}\n"
                f"  found: {', '.join(schema.names)}",
                column=column,
            )
    return pairs


def _pairs(on: JoinColumns) -> tuple[tuple[str, str], ...]:
    if isinstance(on, str):
        on = [on]
    pairs = list(on.items()) if isinstance(on, Mapping) else [(c, c) for c in _list(on)]
    if not pairs or not all(isinstance(column, str) for pair in pairs for column in pair):
        raise PlanError(
            f"join: on={on!r}\n"
            "  expected: a column, a list of columns, or {left column: right column}"
        )
    return tuple(pairs)


def _list(on: object) -> list[Any]:
    return list(on) if isinstance(on, Iterable) else [on]


def _bounds_ms(within: Duration | tuple[Duration, Duration]) -> tuple[int, int]:
    """Return the earliest and the latest time of the right row, relative to the left row's."""
    if isinstance(within, Duration):
        span_ms = duration_ms(within, "within of join")
        return -span_ms, span_ms
    if not isinstance(within, Sequence) or len(within) != 2:
        raise PlanError(
            f"join: within={within!r}\n"
            "  expected: a span of time such as '10 minutes', or a pair of them such as "
            "('-5 minutes', '10 minutes'): how much later the right row may be"
        )
    low_ms, high_ms = (duration_ms(bound, "within of join", signed=True) for bound in within)
    if low_ms > high_ms:
        raise PlanError(
            f"join: within={within!r} is empty\n"
            "  next: give the earlier bound first; the right row's time minus the left row's is "
            "between them"
        )
    return low_ms, high_ms
