"""Read state from the checkpoint: pages of rows, and single keys.

Scans read the files of one committed epoch, not the slots. They go through the key groups in
order. A cursor names the epoch, the key group and the number of its rows that were returned, so
the pages belong together although the job continues.

Always true here:
- all pages of a scan are of one epoch, or there is an error;
- a page reads only few key groups more than it returns;
- a forged cursor is refused, or returns another page; it gives access to nothing else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cairn.errors import QueryError
from cairn.state import ONE_VALUE_KINDS
from cairn.web.errors import ApiError

if TYPE_CHECKING:
    from cairn.snapshots.tables import StateTable

Key = tuple[Any, ...]

ABSENT: Final = object()
_ONE_ROW: Final = ONE_VALUE_KINDS | {"broadcast"}
_OF_ITEMS: Final = ("list", "operator-list", "feedback")


class Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The position at which a scan continues."""

    epoch: int
    group: int
    seen: int

    def text(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def parse_cursor(text: str) -> Cursor:
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        found = msgspec.msgpack.decode(data, type=Cursor)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        found = None
    if found is None or found.epoch < 1 or found.group < 0 or found.seen < 0:
        raise ApiError(
            400, "bad-request", "after is not a cursor", "pass `after` of the previous page"
        )
    return found


class Page(NamedTuple):
    batches: list[pa.RecordBatch]
    after: Cursor | None


def page(table: StateTable, epoch: int, start: Cursor | None, limit: int) -> Page:
    """Return at most `limit` rows of a scan, and the cursor for the next page."""
    found: list[pa.RecordBatch] = []
    count = 0
    group, seen = (table.groups.start, 0) if start is None else (start.group, start.seen)
    for batch in _rows_from(table, group, seen):
        groups = batch.column("key_group")
        part = batch.slice(0, limit - count)
        found.append(part)
        count += part.num_rows
        last = groups[part.num_rows - 1].as_py()
        in_last = pc.sum(pc.equal(groups.slice(0, part.num_rows), last)).as_py()
        group, seen = (last, seen + in_last) if last == group else (last, in_last)
        if count == limit:
            return Page(found, Cursor(epoch, group, seen))
    return Page(found, None)


def _rows_from(table: StateTable, group: int, seen: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows after those seen. Read more groups each time: many have few rows."""
    stop, step = table.groups.stop, 1
    while group < stop:
        groups = range(group, min(group + step, stop))
        for batch in table.batches(groups):
            rest = batch
            if seen:
                skipped = min(seen, batch.num_rows)
                seen -= skipped
                rest = batch.slice(skipped)
            if rest.num_rows:
                yield rest
        group, seen, step = groups.stop, 0, step * 2


def value_type(table: StateTable) -> pa.DataType:
    """Return the type of the value that a lookup returns."""
    schema = table.schema
    if table.kind == "timers":
        return pa.list_(schema.field("time").type)
    held = schema.field("value").type
    if table.kind == "map":
        return pa.map_(schema.field("entry").type, held)
    return pa.list_(held) if table.kind in _OF_ITEMS else held


def parse_json_key(table: StateTable, given: Any) -> Key:
    """Return a key from JSON: its value, or an array with a value per column."""
    from cairn.types.codec.json_values import python_value

    types = table.key_types
    is_whole = isinstance(given, list) and len(given) == len(types)
    if len(types) > 1 and not is_whole:
        raise QueryError(
            f"a key of this state has {len(types)} columns: {', '.join(table.key_names)}\n"
            "  next: send an array with a value for each"
        )
    parts = given if is_whole else [given]
    return tuple(python_value(part, type) for part, type in zip(parts, types, strict=True))


def look_up(table: StateTable, keys: Sequence[Key]) -> list[Any]:
    """Return the value of each key, or ABSENT."""
    found: dict[Any, Any] = {}
    for batch in table.batches(keys=keys):
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        rows = zip(*(columns[name] for name in table.key_names), strict=True)
        for at, key in enumerate(map(_hashable, rows)):
            if table.kind in _ONE_ROW:
                found[key] = columns["value"][at]
            elif table.kind == "map":
                found.setdefault(key, []).append((columns["entry"][at], columns["value"][at]))
            else:
                held = columns["time" if table.kind == "timers" else "value"][at]
                found.setdefault(key, []).append(held)
    return [found.get(_hashable(key), ABSENT) for key in keys]


def is_live(table: StateTable, keys: Sequence[Key]) -> bool:
    """True if slots can answer.

    They cannot for pickled objects, which only the job's own code may open, nor for timers and
    feedback, which slots store in another form.
    """
    decl = table.columns.decl
    if table.kind in ("timers", "feedback") or "object" in (decl.type, decl.entry_type):
        return False
    return not any(isinstance(part, list | dict) for key in keys for part in key)


def _hashable(value: Any) -> Any:
    """Return one form for keys from rows and keys from requests."""
    if isinstance(value, dict):
        return tuple(_hashable(part) for part in value.values())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    # As a key, NaN equals itself.
    return "NaN" if isinstance(value, float) and value != value else value
