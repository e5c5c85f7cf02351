"""What a function sees of its state: handles bound to the key at hand.

A handle reads the current group and key from the scope (the context object), looks
into the overlay of that group and then into the rows below, and writes to the overlay
only. These few lines run once or more per row, so they are written for speed.

Always true here:
- a value is normalised before anything is changed, so a refused value leaves no trace;
- committed rows are never changed from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from cairn.backends.handles.broadcast import BroadcastHandle
from cairn.backends.handles.entries import Entries
from cairn.backends.handles.expiring import (
    ExpiringListHandle,
    ExpiringMapHandle,
    ExpiringValueHandle,
)
from cairn.backends.handles.operator_list import OperatorListHandle
from cairn.backends.handles.scope import Scope as Scope
from cairn.backends.handles.scope import name_state as _name_state
from cairn.backends.overlay import ABSENT, ListTable, MapTable, Table, ValueTable, in_order
from cairn.state import (
    Aggregating,
    Broadcast,
    Declaration,
    List,
    Map,
    OperatorList,
    Reducing,
    Value,
)
from cairn.types import OBJECT
from cairn.types.codec import ValueTypeError


class ValueHandle(Value[Any]):
    def __init__(self, declaration: Value[Any], table: ValueTable, scope: Scope) -> None:
        self.name = declaration.name
        self._scope = scope
        self._rows: list[Any] = table.rows
        self._changes = table.changes
        self._normalise = table.written.normalise
        self._exact = table.written.exact
        # In the form of a stored value, so that nobody can change it for all keys.
        default = declaration.default
        self._default = None if default is None else self._normalise(default)

    def get(self, default: Any = None) -> Any:
        scope = self._scope
        group = scope.group
        key = scope.key
        changes = self._changes[group]
        # Not get(): `in` and `[]` are quicker, and rows give None for what they do not have.
        value = changes[key] if key in changes else self._rows[group][key]
        if value is None:
            return self._default if default is None else default
        return value

    def set(self, value: Any) -> None:
        if type(value) is not self._exact:
            if value is None:
                self.clear()
                return
            try:
                value = self._normalise(value)
            except ValueTypeError as error:
                raise _name_state(self, error) from None
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
    """Values of type `object`: kept as bytes, so that nobody can change them in place."""

    def __init__(self, declaration: Value[Any], table: ValueTable, scope: Scope) -> None:
        super().__init__(declaration, table, scope)
        self._restore = table.values.restore

    def get(self, default: Any = None) -> Any:
        stored = super().get(ABSENT)
        if stored is ABSENT:
            if default is not None or self._default is None:
                return default
            stored = self._default
        return self._restore(stored)


Cell = ValueHandle | ExpiringValueHandle


class _Folded:
    """What reducing and aggregating state share: a stored value behind `add`."""

    _cell: Cell

    def clear(self) -> None:
        self._cell.clear()


class ReducingHandle(_Folded, Reducing[Any]):
    def __init__(self, declaration: Reducing[Any], cell: Cell) -> None:
        self.name = declaration.name
        self._cell = cell
        self.reduce = declaration.reduce

    def add(self, value: Any) -> None:
        held = self._cell.get()
        self._cell.set(value if held is None else self.reduce(held, value))

    def get(self, default: Any = None) -> Any:
        return self._cell.get(default)


class AggregatingHandle(_Folded, Aggregating[Any, Any]):
    def __init__(self, declaration: Aggregating[Any, Any], cell: Cell) -> None:
        self.name = declaration.name
        self._cell = cell
        self.aggregate = declaration.aggregate

    def add(self, value: Any) -> None:
        held = self._cell.get()
        if held is None:
            held = self.aggregate.create()
        self._cell.set(self.aggregate.add(held, value))

    def get(self, default: Any = None) -> Any:
        held = self._cell.get()
        return default if held is None else self.aggregate.result(held)


class ListHandle(List[Any]):
    def __init__(self, declaration: List[Any], table: ListTable, scope: Scope) -> None:
        self.name = declaration.name
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
        at = index + count if index < 0 else index
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

    def _normalised(self, values: Iterable[Any]) -> list[Any]:
        try:
            return [self._values.normalise(value) for value in values]
        except ValueTypeError as error:
            raise _name_state(self, error) from None

    def append(self, value: Any) -> None:
        self._add(self._normalised((value,)))

    def extend(self, values: Iterable[Any]) -> None:
        self._add(self._normalised(values))

    def _add(self, added: list[Any]) -> None:
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

    def set(self, values: Iterable[Any]) -> None:
        replaced = self._normalised(values)
        self.clear()
        self._add(replaced)

    def clear(self) -> None:
        scope = self._scope
        if scope.key in self._rows[scope.group]:
            self._changes[scope.group][scope.key] = (0, [])
        else:
            self._changes[scope.group].pop(scope.key, None)


class MapHandle(Entries):
    def __init__(self, declaration: Map[Any, Any], table: MapTable, scope: Scope) -> None:
        self.name = declaration.name
        self._scope = scope
        self._rows = table.rows
        self._changes = table.changes
        self._values = table.written
        self._entries = table.written_entries

    def __getitem__(self, entry: Any) -> Any:
        value = self._stored(self._entry(entry))
        if value is ABSENT:
            raise KeyError(entry)
        return None if value is None else self._values.restore(value)

    def __setitem__(self, entry: Any, value: Any) -> None:
        entry = self._entry(entry)
        if value is not None:
            try:
                value = self._values.normalise(value)
            except ValueTypeError as error:
                raise _name_state(self, error) from None
        self._put(entry, value)

    def __delitem__(self, entry: Any) -> None:
        name = self._entry(entry)
        if self._stored(name) is ABSENT:
            raise KeyError(entry)
        self._put(name, ABSENT)

    def _live(self) -> list[Any]:
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
        # a function that emits what it iterates over would differ between attempts.
        return iter(in_order(self._live()))

    def __len__(self) -> int:
        # Not by listing the entries: `if self.seen` may stand in front of every row.
        scope = self._scope
        held = self._rows[scope.group].get(scope.key, {})
        changed = self._changes[scope.group].get(scope.key, {})
        return len(held) + sum(
            (value is not ABSENT) - (entry in held) for entry, value in changed.items()
        )

    def __contains__(self, entry: object) -> bool:
        return self._stored(self._entry(entry)) is not ABSENT

    def clear(self) -> None:
        for entry in self:
            self._put(entry, ABSENT)


Kinds = Mapping[type[Any], type[Any]]
"""Which class stands in for a handle's class."""


def _cell(declaration: Any, table: ValueTable, scope: Scope, kinds: Kinds) -> Cell:
    if declaration.ttl is not None:
        made: Cell = kinds.get(ExpiringValueHandle, ExpiringValueHandle)(table, scope)
        return made
    if not isinstance(declaration, Value):
        value: Value[Any] = Value(declaration.declared)
        value.name = declaration.name
        declaration = value
    kind = PickledValueHandle if declaration.type is OBJECT else ValueHandle
    made = kinds.get(kind, kind)(declaration, table, scope)
    return made


def make_handle(table: Table, scope: Scope, kinds: Kinds = MappingProxyType({})) -> Declaration:
    """The handle for a table, of the kind its declaration asks for."""
    declaration = table.declaration
    expires = declaration.ttl is not None
    made: Declaration
    if isinstance(table, ListTable):
        assert isinstance(declaration, List)
        if expires:
            made = kinds.get(ExpiringListHandle, ExpiringListHandle)(table, scope)
        else:
            made = kinds.get(ListHandle, ListHandle)(declaration, table, scope)
        return made
    if isinstance(table, MapTable):
        if isinstance(declaration, OperatorList):
            return OperatorListHandle(declaration, table)
        assert isinstance(declaration, Map)
        if expires:
            made = kinds.get(ExpiringMapHandle, ExpiringMapHandle)(table, scope)
        else:
            made = kinds.get(MapHandle, MapHandle)(declaration, table, scope)
        return made
    assert isinstance(table, ValueTable)
    if isinstance(declaration, Broadcast):
        return BroadcastHandle(declaration, table)
    cell = _cell(declaration, table, scope, kinds)
    if isinstance(declaration, Reducing):
        return ReducingHandle(declaration, cell)
    if isinstance(declaration, Aggregating):
        return AggregatingHandle(declaration, cell)
    return cell
