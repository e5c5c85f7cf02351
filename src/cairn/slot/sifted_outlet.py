"""An output whose rows can be taken back until the row that caused them is done.

Always true here:
- what leaves was accepted, and what is accepted was checked: it fits the schema;
- rows that were not accepted are the last ones.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from types import NoneType
from typing import Any, Final

import pyarrow as pa

from cairn.codec import Codec, ValueTypeError, codec
from cairn.slot.outlet import BATCH_ROWS_FIRST, Outlet

NEVER: Final = 1 << 62
SHAPES_MAX: Final = 1000

Fits = Callable[[Any], bool]
Checks = tuple[tuple[int | slice, Fits], ...]

_UNSURE: Final[Checks] = ((slice(None), lambda row: False),)
"""Of rows that only encoding them can tell about."""


class SiftedOutlet(Outlet):
    """Collects what a function emits, row by row of its input."""

    def __init__(self, operator: str, tag: str | None, schema: pa.Schema) -> None:
        super().__init__(operator, tag, schema)
        self.accepted = 0
        """So many of the rows are of input that is done."""
        self.batch_rows = BATCH_ROWS_FIRST
        """When there are so many, they should leave."""
        # In the middle of a row nothing leaves.
        self.rows_max = NEVER
        self._quick = [_quick_check(field) for field in schema]
        self._shapes: dict[tuple[type, ...], Checks] = {}
        """By the classes of a row's values: which of them need a look."""

    def check(self) -> None:
        """Raise if something that the row at hand emitted does not fit the schema."""
        rows, shapes = self.rows, self._shapes
        for at in range(self.accepted, len(rows)):
            row = rows[at]
            if type(row) is not tuple:
                row = rows[at] = self._as_tuple(row)
            shape = tuple(map(type, row))
            checks = shapes[shape] if shape in shapes else self._checks(shape)
            for part, fits in checks:
                if not fits(row[part]):
                    # It may fit all the same: encoding it will tell.
                    self._encode([row])
                    break

    def accept(self) -> None:
        """The row at hand is done, and what it emitted was checked, on all outlets."""
        self.accepted = len(self.rows)
        if self.accepted >= self.batch_rows:
            self.flush()

    def withdraw(self) -> None:
        """The row at hand has emitted nothing."""
        del self.rows[self.accepted :]

    def flush(self) -> None:
        super().flush()
        self.accepted = 0
        if self.rows_max != NEVER:
            self.batch_rows, self.rows_max = self.rows_max, NEVER

    def reset(self) -> None:
        super().reset()
        self.accepted = 0
        self.batch_rows, self.rows_max = BATCH_ROWS_FIRST, NEVER

    def _checks(self, shape: tuple[type, ...]) -> Checks:
        checks = self._checks_of(shape)
        if len(self._shapes) < SHAPES_MAX:
            self._shapes[shape] = checks
        return checks

    def _checks_of(self, shape: tuple[type, ...]) -> Checks:
        if len(shape) != len(self._quick):
            return _UNSURE
        found: list[tuple[int | slice, Fits]] = []
        for at, kind in enumerate(shape):
            quick = self._quick[at]
            if kind is NoneType:
                if not self.schema.field(at).nullable:
                    return _UNSURE
            elif kind not in quick:
                return _UNSURE
            elif (fits := quick[kind]) is not None:
                found.append((at, fits))
        return tuple(found)


def _quick_check(field: pa.Field) -> dict[type, Fits | None]:
    """Classes of which values surely fit, if they pass the check; None: all of them do."""
    type_ = field.type
    column = codec(type_)
    if column.exact in (bool, bytes, dt.date):
        return {column.exact: None}
    if column.exact is float:
        return {float: None, int: lambda value: -(1 << 53) <= value <= 1 << 53}
    if pa.types.is_integer(type_):
        limit = 1 << (type_.bit_width - 1)
        return {int: lambda value: -limit <= value < limit}
    if column.exact is str:
        return {str: _is_text}
    if pa.types.is_timestamp(type_):
        zone = None if type_.tz is None else dt.UTC
        return {dt.datetime: lambda value: value.tzinfo is zone}
    if pa.types.is_decimal(type_):
        return {Decimal: _normalises(column)}
    return {}


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _normalises(column: Codec) -> Fits:
    def fits(value: Any) -> bool:
        try:
            column.normalise(value)
        except ValueTypeError:
            return False
        return True

    return fits
