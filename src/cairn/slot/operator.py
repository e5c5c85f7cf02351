"""An operator in a slot: a user function, its state, and the version that state is at.

    begin    bring the state to the parent's version: keep, promote or undo, say what is missing
    run      rows of the epoch through the function
    finish   the delta: what the epoch changed

Always true here:
- state is named by version, a digest of its history, never by an epoch number alone;
- between `begin` and the next `begin` the way back to the parent stays open;
- the same parent version and the same rows in the same order give the same delta.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice, repeat
from types import GeneratorType
from typing import Any

import pyarrow as pa

from cairn.backends.base import Backend
from cairn.backends.handles import make_handle
from cairn.backends.overlay import Table, make_table
from cairn.codec import codec
from cairn.errors import CairnError, FunctionError
from cairn.functions import KeyedProcess, declared_state
from cairn.plan.keygroups import groups_of
from cairn.slot.context import SlotContext
from cairn.slot.outlet import Outlet, _short
from cairn.slot.protocol import Begin, Piece
from cairn.slot.spec import OperatorSpec
from cairn.storage.files import StatePart
from cairn.storage.manifest import EMPTY_VERSION, next_version
from cairn.types import row_class

MESSAGE_CHARS_MAX = 4000
INCOMPLETE = ""
"""A version that no epoch names."""


class Operator:
    """Subtask i of an operator, resident between epochs."""

    def __init__(self, spec: OperatorSpec, backend: Backend, *, group_count: int) -> None:
        self.spec = spec
        self.group_count = group_count
        self.groups = range(0)
        self.version = EMPTY_VERSION
        self.pending: str | None = None
        """The version that the epoch just finished would have, once it is committed."""
        self.backend = backend
        self.context = SlotContext()
        self.function: KeyedProcess[Any] | None = None
        self.function_version = ""
        self.told_of: int | None = None
        """The last committed epoch that the function was told of."""
        self.tables: dict[str, Table] = {}
        self.is_adopted = False
        """Another version of this operator has its state now."""
        self.outlets = [Outlet(spec.uid, outlet.tag, outlet.schema) for outlet in spec.outlets]
        self.main = next(outlet for outlet in self.outlets if outlet.tag is None)
        self.context.sides = {o.tag: o.emit for o in self.outlets if o.tag is not None}
        self.rows_in = 0
        self._row = partial(tuple.__new__, row_class(spec.schema))
        self._columns = [codec(field.type) for field in spec.schema]
        self._key_at = [spec.schema.names.index(name) for name in spec.keys]
        self._key_codecs = [codec(spec.schema.field(name).type) for name in spec.keys]
        self._key = partial(tuple.__new__, row_class(spec.keys))
        self._prefetches = type(backend).prefetch is not Backend.prefetch
        self._time_at = spec.schema.names.index(spec.event_time) if spec.event_time else None

    def adopt(self, other: Operator) -> bool:
        """Take over the state of the same operator with another function, if its form fits."""
        self.declare()
        mine = {name: _form(table) for name, table in self.tables.items()}
        theirs = {name: _form(table) for name, table in other.tables.items()}
        if self.spec.key_type != other.spec.key_type or theirs.items() - mine.items():
            return False
        self.backend.close()
        self.backend, self.tables = other.backend, other.tables
        self.groups, self.version, self.pending = other.groups, other.version, other.pending
        self.told_of = other.told_of
        self._declare(self.spec.load())
        other.is_adopted = True
        return True

    def bring_to(self, version: str, groups: range, pieces: Sequence[Piece]) -> list[range]:
        """Make what is here the state asked for, and say which key groups are missing of it.

        Pending changes are promoted if they belong to it, otherwise undone. `pieces` says, after
        a change of parallelism, which versions the groups had in the ranges they come from.
        """
        if groups == self.groups and version in (self.version, self.pending):
            self._settle(version)
            return []
        ours = {piece.version for piece in pieces} & {self.version, self.pending}
        kept: list[range] = []
        if groups != self.groups and ours:
            self._settle(ours.pop())
            kept = [
                owned
                for piece in pieces
                if piece.version == self.version and (owned := _overlap(piece, self.groups))
            ]
        missing = _without(groups, kept)
        # What a restore leaves behind that fails half way must not pass for the version.
        self.version, self.pending = INCOMPLETE, None
        for table in self.tables.values():
            for gap in missing:
                table.forget(gap)
            table.assign(groups)
        self.groups = groups
        return missing

    def _settle(self, version: str) -> None:
        """Promote or undo the pending epoch."""
        is_committed = version == self.pending and version != self.version
        for table in self.tables.values():
            if is_committed:
                table.promote()
            else:
                table.rollback()
        self.version, self.pending = version, None

    def open(self, begin: Begin, subtask: int) -> None:
        """Load the function if it is new, and tell it about the epoch."""
        context = self.context
        context.epoch = begin.epoch
        context.now_ms = begin.now_ms
        context.watermark_ms = begin.watermark_ms
        context.subtask = subtask
        context.parallelism = begin.parallelism
        context.event_time_ms = None
        if self.function_version != self.spec.function_version:
            self.close_function()
            function = self.spec.load()
            self._declare(function)
            try:
                function.open(context)
            except Exception as error:
                raise self._failed("open()", error) from error
            self.function = function
            self.function_version = self.spec.function_version
        if begin.parent is not None and begin.parent != self.told_of:
            assert self.function is not None
            try:
                self.function.on_epoch_committed(begin.parent)
            except Exception as error:
                raise self._failed("on_epoch_committed()", error) from error
            self.told_of = begin.parent
        self.rows_in = 0
        for outlet in self.outlets:
            outlet.reset()

    def _declare(self, function: KeyedProcess[Any]) -> None:
        key_type = self.spec.key_type
        for name, declaration in declared_state(function).items():
            table = self.tables.get(name)
            if table is None:
                table = make_table(declaration, key_type, self.backend, self.group_count)
                table.assign(self.groups)
                self.tables[name] = table
            table.declaration = declaration
            setattr(function, name, make_handle(table, self.context))

    def declare(self) -> None:
        """Make the tables known before the function is opened, so that state can be restored."""
        if not self.tables:
            self._declare(self.spec.load())

    def run(self, groups: Sequence[int], rows: pa.StructArray) -> None:
        """The function over each row, in order."""
        columns = [
            column.decode(array)
            for column, array in zip(self._columns, rows.flatten(), strict=True)
        ]
        times: Iterable[int | None] = repeat(None)
        if self._time_at is not None:
            times = [None if t is None else _millis(t) for t in columns[self._time_at]]
        row_tuples = map(self._row, zip(*columns, strict=True))
        keys = self._keys(columns, rows)
        if self._prefetches:
            keys = list(keys)
            self.backend.prefetch(groups, keys)
        scoped = zip(groups, keys, times, row_tuples, strict=False)
        self.rows_in += len(groups)
        context = self.context
        assert self.function is not None
        process = self.function.process
        emit = self.main.rows.append
        row: Any = None
        remaining = len(groups)
        try:
            while remaining > 0:
                rows_max = self.main.rows_max
                # The loop assigns straight to the context: the cheapest way to set the scope.
                for context.group, context.key, context.event_time_ms, row in islice(
                    scoped, rows_max
                ):
                    result = process(row, context)
                    if result is None:
                        continue
                    if type(result) is tuple:
                        emit(result)
                    else:
                        self._emit_all(result)
                remaining -= rows_max
                for outlet in self.outlets:
                    outlet.flush()
        except FunctionError as error:
            raise self._located(error, row) from error
        except Exception as error:
            raise self._failed("process()", error, row) from error

    def _keys(self, columns: list[list[Any]], rows: pa.StructArray) -> Iterable[Any]:
        parts = [
            columns[at] if keys.read_keys is keys.read else keys.decode_keys(rows.field(at))
            for at, keys in zip(self._key_at, self._key_codecs, strict=True)
        ]
        return parts[0] if len(parts) == 1 else map(self._key, zip(*parts, strict=True))

    def _emit_all(self, result: Any) -> None:
        """What a function returned when it is not a plain tuple."""
        out = self.main.rows
        if type(result) is GeneratorType:
            for row in result:
                out.append(row)
                if len(out) >= self.main.rows_max:
                    self.main.flush()
        elif isinstance(result, dict | tuple) or hasattr(result, "__dataclass_fields__"):
            out.append(result)
        elif isinstance(result, str | bytes) or not isinstance(result, Iterable):
            raise TypeError(
                f"process() returned {_short(result)}; expected a row (tuple, dict, row object), "
                "an iterable of rows, or None"
            )
        else:
            for row in result:
                self.main.emit(row)

    def finish(self) -> list[StatePart]:
        """What the epoch changed, by state."""
        for outlet in self.outlets:
            outlet.flush()
        parts = []
        for name, table in sorted(self.tables.items()):
            try:
                batch = table.delta()
            except ValueError as error:
                raise FunctionError(
                    f"operator {self.spec.uid!r}: {error}", operator=self.spec.uid
                ) from error
            if batch is not None:
                parts.append(StatePart(name, batch))
        return parts

    def finished(self, delta_id: str | None) -> None:
        """Name what the epoch made, so that the next `begin` can recognise it."""
        self.pending = self.version if delta_id is None else next_version(self.version, delta_id)

    def keys_changed(self) -> int:
        return sum(table.keys_changed() for table in self.tables.values())

    def state_keys(self) -> int:
        return sum(table.keys_held() for table in self.tables.values())

    def own(self, subtask: int, parallelism: int) -> range:
        return groups_of(subtask, parallelism, self.group_count)

    def close_function(self) -> None:
        if self.function is not None:
            function, self.function = self.function, None
            function.close()

    def close(self) -> None:
        try:
            self.close_function()
        finally:
            if not self.is_adopted:
                self.backend.close()

    def _located(self, error: FunctionError, row: Any) -> FunctionError:
        """An error of ours raised under a row: say which."""
        facts = {"operator": self.spec.uid, "key": _short(self.context.key), "row": _short(row)}
        message = error.message
        if "operator" not in error.facts:
            message = f"operator {self.spec.uid!r}: {message}\n  row: {facts['row']}"
        return FunctionError(message, **{**facts, **error.facts})

    def _failed(self, where: str, error: Exception, row: Any = None) -> CairnError:
        if isinstance(error, CairnError) and not isinstance(error, FunctionError):
            return error
        uid = self.spec.uid
        # Cut: it travels to the driver in the text of other errors, several times over.
        text = str(error)[:MESSAGE_CHARS_MAX]
        lines = [f"{where} of operator {uid!r} raised {type(error).__name__}: {text}"]
        facts: dict[str, Any] = {"operator": uid, "cause": _short(error, MESSAGE_CHARS_MAX)}
        if row is not None:
            facts |= {"key": _short(self.context.key), "row": _short(row)}
            lines += [f"  key: {facts['key']}", f"  row: {facts['row']}"]
        # The user's part of the traceback: what lies above is ours.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        facts["traceback"] = "".join(traceback.format_list(frames))
        if frames:
            lines.append(f"  at: {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
        return FunctionError("\n".join(lines), **facts)


def _form(table: Table) -> tuple[Any, ...]:
    """What state must agree in to be the same state: value, reducing and aggregating do."""
    declaration = table.declaration
    return type(table), declaration.type, declaration.entry_type


def _overlap(piece: Piece, groups: range) -> range:
    return range(
        max(piece.first_group, groups.start),
        min(piece.first_group + piece.group_count, groups.stop),
    )


def _without(groups: range, kept: Sequence[range]) -> list[range]:
    """What is left of a range, as ranges."""
    gaps = []
    start = groups.start
    for part in sorted((_cut(part, groups) for part in kept), key=lambda part: part.start):
        if part.start > start:
            gaps.append(range(start, part.start))
        start = max(start, part.stop)
    if start < groups.stop:
        gaps.append(range(start, groups.stop))
    return gaps


def _cut(part: range, groups: range) -> range:
    return range(max(part.start, groups.start), max(part.start, min(part.stop, groups.stop)))


def _millis(time: Any) -> int:
    """Milliseconds since 1970 of an aware (or naive, taken as UTC) datetime, without floats."""
    days = time.toordinal() - 719163
    if time.tzinfo is not None:
        time = time.replace(tzinfo=None)
    seconds = days * 86400 + time.hour * 3600 + time.minute * 60 + time.second
    return int(seconds * 1000 + time.microsecond // 1000)
