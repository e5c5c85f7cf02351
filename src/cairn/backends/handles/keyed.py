"""Handles of keyed state: they read and write the state of the current key.

A handle reads the current group and key from the scope (the context object), looks
into the overlay of that group and then into the rows below, and writes only to the
overlay. These few lines run once or more per row, so they are written for speed.

Always true here:
- a value is normalised before anything is changed, so a refused value leaves no trace;
- handles never change committed rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from cairn.backends.columnar.table import ColumnTable
from cairn.backends.contract import ABSENT
from cairn.backends.handles.broadcast import BroadcastHandle
from cairn.backends.handles.expiring import (
    ExpiringListHandle,
    ExpiringMapHandle,
    ExpiringValueHandle,
)
from cairn.backends.handles.framed import FramedValueHandle
from cairn.backends.handles.operator_list import OperatorListHandle
from cairn.backends.handles.scope import Entries, Scope, name_state
from cairn.backends.overlay import ListTable, MapTable, Table, ValueTable, in_order
from cairn.state import (
    Aggregating,
    Broadcast,
    Declaration,
    List,
    OperatorList,
    Reducing,
    Value,
)
from cairn.types import OBJECT
from cairn.types.codec import Key, ValueTypeError
from cairn.types.codec.core import Values


class ValueHandle(Value[Any]):
    def __init__(self, table: ValueTable, scope: Scope) -> None:
        self.name = table.name
        self._scope = scope
        self._rows: list[Any] = table.rows
        self._changes = table.changes
        self._normalise = table.written.normalise
        self._exact = table.written.exact
        # Normalised, so that no function can change it for all keys.
        default = getattr(table.declaration, "default", None)
        self._default = None if default is None else self._normalise(default)

    def get(self, default: Any = None) -> Any:
        scope = self._scope
        group = scope.group
        key = scope.key
        changes = self._changes[group]
        # Not get(): `in` and `[]` are quicker, and rows have None for a missing key.
        value = changes[key] if key in changes else self._rows[group][key]
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
        scope = self._scope
        self._changes[scope.group][scope.key] = value

    def clear(self) -> None:
        scope = self._scope
        group = scope.group
        key = scope.key
        if key in self._rows[group]:
            self._changes[group][key] = None
        else:
            self._changes[group].pop(key, None)


class PickledValueHandle(ValueHandle):
    """Values of type `object`: kept as bytes, so that no function changes them in place."""

    def __init__(self, table: ValueTable, scope: Scope) -> None:
        super().__init__(table, scope)
        self._restore = table.values.restore

    def get(self, default: Any = None) -> Any:
        stored = super().get(ABSENT)
        if stored is ABSENT:
            if default is not None or self._default is None:
                return default
            stored = self._default
        return self._restore(stored)


Cell = ValueHandle | ExpiringValueHandle | FramedValueHandle


class ReducingHandle(Reducing[Any]):
    def __init__(self, declaration: Reducing[Any], cell: Cell) -> None:
        self.name = declaration.name
        self._cell = cell
        self.reduce = declaration.reduce

    def add(self, value: object) -> None:
        held = self._cell.get()
        self._cell.set(value if held is None else self.reduce(held, value))

    def get(self, default: Any = None) -> Any:
        return self._cell.get(default)

    def clear(self) -> None:
        self._cell.clear()


class AggregatingHandle(Aggregating[Any, Any]):
    def __init__(self, declaration: Aggregating[Any, Any], cell: Cell) -> None:
        self.name = declaration.name
        self._cell = cell
        self.aggregate = declaration.aggregate

    def add(self, value: object) -> None:
        held = self._cell.get()
        if held is None:
            held = self.aggregate.create()
        self._cell.set(self.aggregate.add(held, value))

    def get(self, default: Any = None) -> Any:
        held = self._cell.get()
        return default if held is None else self.aggregate.result(held)

    def clear(self) -> None:
        self._cell.clear()


class ListHandle(List[Any]):
    def __init__(self, table: ListTable, scope: Scope) -> None:
        self.name = table.name
        self._scope = scope
        self._rows = table.rows
        self._changes = table.changes
        self._values = table.written

    def __iter__(self) -> Iterator[Any]:
        scope = self._scope
        held = self._rows[scope.group].get(scope.key, ())
        start, added = self._changes[scope.group].get(scope.key, (len(held), ()))
        items = [*held[:start], *added]
        return iter(items) if self._values.type is not OBJECT else map(self._values.restore, items)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        scope = self._scope
        # One item is read by itself: the list may be long, and in a database.
        held = self._rows[scope.group].get(scope.key, ())
        start, added = self._changes[scope.group].get(scope.key, (len(held), ()))
        count = start + len(added)
        at = operator.index(index)
        at = at + count if at < 0 else at
        if not 0 <= at < count:
            raise IndexError(f"state {self.name!r} has {count} items: no index {index}")
        item = held[at] if at < start else added[at - start]
        return item if self._values.type is not OBJECT else self._values.restore(item)

    def __len__(self) -> int:
        scope = self._scope
        changed = self._changes[scope.group].get(scope.key)
        if changed is None:
            return len(self._rows[scope.group].get(scope.key, ()))
        start, added = changed
        return int(start) + len(added)

    def _normalise(self, values: Iterable[object]) -> Values:
        try:
            return [self._values.normalise(value) for value in values]
        except ValueTypeError as error:
            raise name_state(self, error) from None

    def append(self, value: object) -> None:
        self._add(self._normalise((value,)))

    def extend(self, values: Iterable[object]) -> None:
        self._add(self._normalise(values))

    def _add(self, added: Values) -> None:
        if not added:
            return
        scope = self._scope
        changes = self._changes[scope.group]
        changed = changes.get(scope.key)
        if changed is None:
            held = self._rows[scope.group].get(scope.key, ())
            changes[scope.key] = (len(held), added)
        else:
            changed[1].extend(added)

    def set(self, values: Iterable[object]) -> None:
        replaced = self._normalise(values)
        self.clear()
        self._add(replaced)

    def clear(self) -> None:
        scope = self._scope
        if scope.key in self._rows[scope.group]:
            self._changes[scope.group][scope.key] = (0, [])
        else:
            self._changes[scope.group].pop(scope.key, None)


class MapHandle(Entries):
    def __init__(self, table: MapTable, scope: Scope) -> None:
        self.name = table.name
        self._scope = scope
        self._rows = table.rows
        self._changes = table.changes
        self._values = table.written
        self._entries = table.written_entries

    def __getitem__(self, entry: object) -> Any:
        value = self._get(self._entry(entry))
        if value is ABSENT:
            raise KeyError(entry)
        return None if value is None else self._values.restore(value)

    def __setitem__(self, entry: object, value: object) -> None:
        entry = self._entry(entry)
        if value is not None:
            try:
                value = self._values.normalise(value)
            except ValueTypeError as error:
                raise name_state(self, error) from None
        self._put(entry, value)

    def __delitem__(self, entry: object) -> None:
        name = self._entry(entry)
        if self._get(name) is ABSENT:
            raise KeyError(entry)
        self._put(name, ABSENT)

    def _live(self) -> list[Key]:
        scope = self._scope
        held = self._rows[scope.group].get(scope.key, {})
        changed = self._changes[scope.group].get(scope.key)
        if not changed:
            return list(held)
        merged = held.copy()
        merged.update(changed)
        return [entry for entry, value in merged.items() if value is not ABSENT]

    def __iter__(self) -> Iterator[Any]:
        # In order of the keys: insertion order would not survive a restore, and then
        # a function that emits in the order of iteration would differ between attempts.
        return iter(in_order(self._live()))

    def __len__(self) -> int:
        # Without a list of the entries: a function may check `if self.seen` for every row.
        scope = self._scope
        held = self._rows[scope.group].get(scope.key, {})
        changed = self._changes[scope.group].get(scope.key, {})
        return len(held) + sum(
            (value is not ABSENT) - (entry in held) for entry, value in changed.items()
        )

    def __contains__(self, entry: object) -> bool:
        return self._get(self._entry(entry)) is not ABSENT

    def clear(self) -> None:
        for entry in self:
            self._put(entry, ABSENT)


Kinds = Mapping[type[Declaration], type[Any]]
"""Classes to use in place of a handle's class."""


def make_handle(table: Table, scope: Scope, kinds: Kinds = MappingProxyType({})) -> Declaration:
    declaration = table.declaration
    if isinstance(declaration, OperatorList):
        assert isinstance(table, MapTable)
        return OperatorListHandle(declaration, table)
    if isinstance(declaration, Broadcast):
        assert isinstance(table, ValueTable)
        return BroadcastHandle(declaration, table)
    kind = _handle_class(table)
    make: Callable[[Table, Scope], Any] = kinds.get(kind, kind)
    handle = make(table, scope)
    if isinstance(declaration, Reducing):
        return ReducingHandle(declaration, handle)
    if isinstance(declaration, Aggregating):
        return AggregatingHandle(declaration, handle)
    found: Declaration = handle
    return found


def _handle_class(table: Table) -> type[Any]:
    if isinstance(table, ColumnTable):
        return FramedValueHandle
    expires = table.declaration.ttl is not None
    if isinstance(table, ListTable):
        return ExpiringListHandle if expires else ListHandle
    if isinstance(table, MapTable):
        return ExpiringMapHandle if expires else MapHandle
    if expires:
        return ExpiringValueHandle
    return PickledValueHandle if table.declaration.type is OBJECT else ValueHandle
