"""An output whose rows can be taken back until the row that caused them is done.

Always true here:
- what leaves was accepted, and what is accepted was checked: it fits the schema;
- rows that were not accepted are the last ones.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from cairn.slot.outlet import BATCH_ROWS_FIRST, Outlet
from cairn.types.codec import codec

NEVER: Final = 1 << 62


class SiftedOutlet(Outlet):
    """Collects the output of a function, row by row of its input."""

    def __init__(self, operator: str, tag: str | None, schema: pa.Schema) -> None:
        super().__init__(operator, tag, schema)
        self.accepted = 0
        """Number of collected rows whose input row is done."""
        self.batch_rows = BATCH_ROWS_FIRST
        """Send the rows on when this many are collected."""
        # Nothing is sent on in the middle of a row.
        self.rows_max = NEVER
        self.fits = _quick_check(schema)
        """True if a tuple surely fits the schema."""

    def check(self) -> None:
        """Raise if something that the row at hand emitted does not fit the schema."""
        rows, fits = self.rows, self.fits
        for at in range(self.accepted, len(rows)):
            row = rows[at]
            if type(row) is not tuple:
                row = rows[at] = self._as_tuple(row)
            if not fits(row):
                # The quick check may be wrong; encoding decides.
                self._encode([row])

    def accept(self) -> None:
        """Accept the output of the current row: it is checked on all outlets."""
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


def _quick_check(schema: pa.Schema) -> Callable[[tuple[Any, ...]], bool]:
    """A function that says whether a row surely fits; where it says no, it may fit or not.

    It runs for every row that is emitted, so it is written out for the schema: no loop, no call.
    """
    names = [f"v{at}" for at in range(len(schema))]
    tests = [_test(name, field) for name, field in zip(names, schema, strict=True)]
    source = f"""
def fits(row):
    if len(row) != {len(names)}:
        return False
    [{", ".join(names)}] = row
    return {" and ".join(tests) or True}
"""
    scope = {"datetime": dt.datetime, "date": dt.date, "UTC": dt.UTC, "is_text": _is_text}
    exec(source, scope)
    return scope["fits"]  # type: ignore[return-value]


def _test(name: str, field: pa.Field) -> str:
    """An expression that is true only of values that Arrow takes as they are."""
    type_ = field.type
    exact = codec(type_).exact
    found = "False"
    if exact in (bool, bytes, float, dt.date):
        found = f"{name}.__class__ is {exact.__name__}"
    elif pa.types.is_integer(type_):
        limit = 1 << (type_.bit_width - 1)
        found = f"{name}.__class__ is int and {-limit} <= {name} < {limit}"
    elif exact is str:
        found = f"{name}.__class__ is str and ({name}.isascii() or is_text({name}))"
    elif pa.types.is_timestamp(type_):
        zone = None if type_.tz is None else "UTC"
        found = f"{name}.__class__ is datetime and {name}.tzinfo is {zone}"
    return f"({name} is None or {found})" if field.nullable else f"({found})"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
