"""Value state in arrays, for functions that are called row by row.

In a dict, a look-up of one key among a million waits for memory three or four times, and the next
look-up waits for it. Arrays are read for thousands of keys at once, and then memory is read in
parallel. So rows come in *frames*: the first read of a state reads it for all rows of the frame,
and the function goes on with a list. Its writes go into the arrays when the frame is closed.

Always true here:
- rows of the same key have the same place in their frame, so a row sees what was written before;
- the changes of an epoch, and their order, do not depend on where frames begin and end;
- while no frame is open, state is read and written one key at a time: right, and slow.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from cairn.backends.columnar.name_parts import Ints
from cairn.backends.columnar.spread import is_fixed
from cairn.backends.columnar.table import ColumnTable
from cairn.backends.contract import Backend
from cairn.backends.handles.scope import Scope, name_state
from cairn.backends.overlay import Table, make_table
from cairn.state import Declaration, Value
from cairn.types import OBJECT
from cairn.types.codec import Datum, ValueTypeError
from cairn.types.codec.core import Values

FRAME_ROWS: Final = 16 * 1024


class Frame:
    """Rows whose state is read together."""

    def __init__(self) -> None:
        self.handles: list[FramedValueHandle] = []
        self.names: list[pa.Array] = []
        """The distinct keys of the rows, by place."""
        self.groups: Ints = np.empty(0, np.int64)
        self.positions: Ints = self.groups
        """The positions of these keys in the table of the first handle."""
        self.is_open = False

    def add(self, handle: Any) -> None:
        """Let a handle read by frames, if it can."""
        cell = getattr(handle, "_cell", handle)
        if isinstance(cell, FramedValueHandle):
            cell.frame = self
            self.handles.append(cell)

    def open(self, keys: pa.Array, groups: Ints) -> list[int]:
        """Begin with rows of these keys; return the place of each row."""
        table = self.handles[0].table
        places, distinct = table.number([keys])
        self.names, self.groups = table.select([keys], distinct), groups[distinct]
        self.positions = table.find(self.names)
        self.is_open = True
        for handle in self.handles:
            handle.begin_frame(len(distinct))
        return places

    def close(self) -> None:
        """Write what the rows have written."""
        try:
            for handle in self.handles:
                handle.write_frame()
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget what the rows have written: the epoch has failed."""
        self.is_open = False
        for handle in self.handles:
            handle.end_frame()


class _OneKey:
    """In place of the lists of a frame while none is open: the state of the current key."""

    def __init__(self, handle: FramedValueHandle) -> None:
        self._handle = handle

    def __getitem__(self, place: int) -> Datum:
        return self._handle.read_key()

    def __setitem__(self, place: int, value: Datum) -> None:
        self._handle.write_key(value)


class _Unused:
    """The same where writes go elsewhere."""

    def __getitem__(self, place: int) -> None:
        return None

    def __setitem__(self, place: int, value: Datum) -> None:
        pass


class FramedValueHandle(Value[Any]):
    frame = Frame()

    def __init__(self, table: ColumnTable, scope: Scope) -> None:
        self.name = table.name
        self.table = table
        self._scope = scope
        self._normalise = table.written.normalise
        self._exact = table.written.exact
        default = getattr(table.declaration, "default", None)
        self._default = None if default is None else self._normalise(default)
        self._values: Any
        """By place: the value of the key; None also where it was not read yet."""
        self._written: Any
        """By place: the values that were written, in the order of the first write; None deletes."""
        self._undone: dict[int, Datum] = {}
        """By place: a value that was written in this frame and then deleted."""
        self._is_read = False
        self.end_frame()

    def get(self, default: Any = None) -> Any:
        value = self._values[self._scope.at]
        if value is None:
            if not self._is_read:
                value = self._read()
            if value is None:
                return self._default if default is None else default
        return value

    def set(self, value: object) -> None:
        if type(value) is not self._exact:
            if value is None:
                self.clear()
                return
            try:
                value = self._normalise(value)
            except ValueTypeError as error:
                raise name_state(self, error) from None
        at = self._scope.at
        self._values[at] = self._written[at] = value

    def clear(self) -> None:
        at = self._scope.at
        if self._values[at] is None and (self._is_read or self._read() is None):
            # Nothing to delete, and nothing that the order of changes may depend on.
            return
        if self.frame.is_open and self._written.get(at) is not None:
            self._undone[at] = self._written[at]
        self._values[at] = self._written[at] = None

    # Frames

    def begin_frame(self, count: int) -> None:
        self._values, self._written, self._is_read = [None] * count, {}, False

    def end_frame(self) -> None:
        self._values, self._written, self._is_read = _Unused(), _OneKey(self), False
        self._undone = {}

    def _read(self) -> Datum:
        """Read the frame, or one key without one; return the value of the current key."""
        if not self.frame.is_open:
            return self._written[0]
        table = self.table
        values = table.values.decode(table.read(self._find()))
        for at, value in self._written.items():
            values[at] = value
        self._values, self._is_read = values, True
        return values[self._scope.at]

    def _find(self) -> Ints:
        """Return the positions of the keys of the frame."""
        # States that are written together have the same positions.
        return self.table.find(self.frame.names, self.frame.positions)

    def write_frame(self) -> None:
        """Write the values of the frame into the arrays."""
        written = self._written
        if not written:
            return
        table, frame = self.table, self.frame
        self._find()  # For the table, which keeps them.
        places: Ints = np.fromiter(written, np.int64, len(written))
        values: Values = list(written.values())
        if self._undone:
            # Written and then deleted leaves the same in one frame and in two.
            twice = np.isin(places, list(self._undone))
            places = np.repeat(places, 1 + twice)
            values = [
                value
                for at, last in written.items()
                for value in ((self._undone[at], last) if at in self._undone else (last,))
            ]
        names, groups = frame.names, frame.groups
        if not np.array_equal(places, np.arange(len(groups))):
            names, groups = table.select(names, places), groups[places]
        encoded = table.layout.encode_values(names[0], values)
        is_live = None
        if encoded.null_count:
            is_live = encoded.is_valid().to_numpy(zero_copy_only=False)
        table.write(names, encoded, is_live, groups=groups)

    # One key

    def read_key(self) -> Datum:
        scope = self._scope
        found = self.table.look_up([(operator.index(scope.group), scope.key)], finished=True)
        assert found is not None, "a value needs no preparation"
        return found[0]

    def write_key(self, value: Datum) -> None:
        scope, table = self._scope, self.table
        groups = np.array([operator.index(scope.group)])
        keys = table.keys.encode([scope.key])
        encoded = table.layout.encode_values(keys, [value])
        is_live = None if value is not None else np.zeros(1, np.bool_)
        table.write([keys], encoded, is_live, groups=groups)


def make_row_table(
    declaration: Declaration, key_type: pa.DataType, backend: Backend, group_count: int
) -> Table:
    """Return the table of a state of a function without timers: in arrays, if that pays."""
    in_arrays = (
        backend.takes_columns
        and declaration.layout == "value"
        and declaration.ttl is None
        and declaration.type is not OBJECT
        and _is_bounded(declaration.type)
    )
    make = ColumnTable if in_arrays else make_table
    return make(declaration, key_type, backend, group_count)


def _is_bounded(type: pa.DataType) -> bool:
    """True if no value is large: a frame holds the values of thousands of keys in memory."""
    if pa.types.is_struct(type) and type.num_fields:
        return all(_is_bounded(field.type) for field in type)
    return is_fixed(type)
