"""What a function sees of its state: handles bound to the key at hand.

A handle reads the current group and key from the scope (the context object) and
goes straight to the mapping of that group. These few lines run once or more per
row, so they are written for speed: one attribute chain, one dict operation, and
the undo entry on the first change of a key in an epoch.

Always true here:
- a value is normalised before anything is changed, so a refused value leaves no trace;
- the first change of a key in an epoch records what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from cairn.backends.undo import ABSENT, ListTable, MapTable, Table, ValueTable
from cairn.codec import ValueTypeError
from cairn.state import Aggregating, Declaration, List, Map, Reducing, Value
from cairn.types import OBJECT


class Scope(Protocol):
    """Which key is at hand."""

    key: Any
    group: int


def _name_state(handle: Declaration, error: ValueTypeError) -> TypeError:
    where = f".{error.path}" if error.path else ""
    return TypeError(f"state {handle.name!r}{where}: {error}")


class ValueHandle(Value[Any]):
    def __init__(self, declaration: Value[Any], table: ValueTable, scope: Scope) -> None:
        self.name = declaration.name
        self._scope = scope
        self._rows = table.rows
        self._before = table.before
        self._normalise = table.values.normalise
        self._default = declaration.default

    def get(self, default: Any = None) -> Any:
        scope = self._scope
        value = self._rows[scope.group].get(scope.key)
        if value is None:
            return self._default if default is None else default
        return value

    def set(self, value: Any) -> None:
        if value is None:
            self.clear()
            return
        try:
            value = self._normalise(value)
        except ValueTypeError as error:
            raise _name_state(self, error) from None
        scope = self._scope
        group = scope.group
        key = scope.key
        rows = self._rows[group]
        before = self._before[group]
        if key not in before:
            before[key] = rows.get(key, ABSENT)
        rows[key] = value

    def clear(self) -> None:
        scope = self._scope
        group = scope.group
        key = scope.key
        rows = self._rows[group]
        if key in rows:
            before = self._before[group]
            if key not in before:
                before[key] = rows[key]
            del rows[key]


class PickledValueHandle(ValueHandle):
    """Values of type `object`: kept as bytes, so that nobody can change them in place."""

    def __init__(self, declaration: Value[Any], table: ValueTable, scope: Scope) -> None:
        super().__init__(declaration, table, scope)
        self._restore = table.values.restore

    def get(self, default: Any = None) -> Any:
        scope = self._scope
        stored = self._rows[scope.group].get(scope.key)
        if stored is None:
            return self._default if default is None else default
        return self._restore(stored)


class _Folded:
    """What reducing and aggregating state share: a stored value behind `add`."""

    _cell: ValueHandle

    def clear(self) -> None:
        self._cell.clear()


class ReducingHandle(_Folded, Reducing[Any]):
    def __init__(self, declaration: Reducing[Any], table: ValueTable, scope: Scope) -> None:
        self.name = declaration.name
        self._cell = _value_handle(declaration, table, scope)
        self.reduce = declaration.reduce

    def add(self, value: Any) -> None:
        held = self._cell.get()
        self._cell.set(value if held is None else self.reduce(held, value))

    def get(self, default: Any = None) -> Any:
        return self._cell.get(default)


class AggregatingHandle(_Folded, Aggregating[Any, Any]):
    def __init__(self, declaration: Aggregating[Any, Any], table: ValueTable, scope: Scope) -> None:
        self.name = declaration.name
        self._cell = _value_handle(declaration, table, scope)
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
        self._before = table.before
        self._values = table.values

    def _items(self) -> list[Any]:
        scope = self._scope
        return self._rows[scope.group].get(scope.key) or []

    def __iter__(self) -> Iterator[Any]:
        items = self._items()[:]
        return iter(items) if self._values.type is not OBJECT else map(self._values.restore, items)

    def __len__(self) -> int:
        return len(self._items())

    def _normalised(self, values: Iterable[Any]) -> list[Any]:
        try:
            return [self._values.normalise(value) for value in values]
        except ValueTypeError as error:
            raise _name_state(self, error) from None

    def append(self, value: Any) -> None:
        self._add(self._normalised((value,)))

    def extend(self, values: Iterable[Any]) -> None:
        self._add(self._normalised(values))

    def set(self, values: Iterable[Any]) -> None:
        replaced = self._normalised(values)
        self.clear()
        self._add(replaced)

    def _add(self, added: list[Any]) -> None:
        if not added:
            return
        scope = self._scope
        rows = self._rows[scope.group]
        before = self._before[scope.group]
        key = scope.key
        items = rows.get(key)
        if items is None:
            before.setdefault(key, ABSENT)
            rows[key] = added
        else:
            if key not in before:
                before[key] = (items, len(items))
            items += added

    def clear(self) -> None:
        scope = self._scope
        rows = self._rows[scope.group]
        key = scope.key
        items = rows.get(key)
        if items is not None:
            before = self._before[scope.group]
            if key not in before:
                before[key] = (items, len(items))
            del rows[key]


class MapHandle(Map[Any, Any]):
    def __init__(self, declaration: Map[Any, Any], table: MapTable, scope: Scope) -> None:
        self.name = declaration.name
        self._scope = scope
        self._rows = table.rows
        self._before = table.before
        self._values = table.values
        self._entries = table.entries

    def _held(self) -> Any:
        scope = self._scope
        return self._rows[scope.group].get(scope.key)

    def _entry(self, entry: Any) -> Any:
        if entry is None:
            raise TypeError(f"state {self.name!r}: a map key cannot be None")
        try:
            return self._entries.normalise_key(entry)
        except ValueTypeError as error:
            raise _name_state(self, error) from None

    def __getitem__(self, entry: Any) -> Any:
        held = self._held()
        key = self._entry(entry)
        if held is None or key not in held:
            raise KeyError(entry)
        value = held[key]
        return None if value is None else self._values.restore(value)

    def __setitem__(self, entry: Any, value: Any) -> None:
        entry = self._entry(entry)
        if value is not None:
            try:
                value = self._values.normalise(value)
            except ValueTypeError as error:
                raise _name_state(self, error) from None
        scope = self._scope
        held = self._rows[scope.group].setdefault(scope.key, {})
        before = self._before[scope.group]
        changed = (scope.key, entry)
        if changed not in before:
            before[changed] = held.get(entry, ABSENT)
        held[entry] = value

    def __delitem__(self, entry: Any) -> None:
        held = self._held()
        key = self._entry(entry)
        if held is None or key not in held:
            raise KeyError(entry)
        self._delete(held, key)

    def _delete(self, held: Any, entry: Any) -> None:
        scope = self._scope
        before = self._before[scope.group]
        changed = (scope.key, entry)
        if changed not in before:
            before[changed] = held[entry]
        del held[entry]
        if not held:
            del self._rows[scope.group][scope.key]

    def __iter__(self) -> Iterator[Any]:
        # In order of the keys: insertion order would not survive a restore, and then
        # a function that emits what it iterates over would differ between attempts.
        return iter(sorted(self._held() or (), key=_order))

    def __len__(self) -> int:
        held = self._held()
        return 0 if held is None else len(held)

    def __contains__(self, entry: object) -> bool:
        held = self._held()
        return held is not None and self._entry(entry) in held

    def clear(self) -> None:
        held = self._held()
        for entry in list(held or ()):
            self._delete(held, entry)


def _order(entry: Any) -> Any:
    """A sort key that also orders None inside struct and array keys."""
    if isinstance(entry, tuple):
        return tuple((item is not None, _order(item)) for item in entry)
    return 0 if entry is None else entry


def _value_handle(declaration: Any, table: ValueTable, scope: Scope) -> ValueHandle:
    if not isinstance(declaration, Value):
        value: Value[Any] = Value(declaration.declared)
        value.name = declaration.name
        declaration = value
    kind = PickledValueHandle if declaration.type is OBJECT else ValueHandle
    return kind(declaration, table, scope)


def make_handle(table: Table, scope: Scope) -> Declaration:
    """The handle for a table, of the kind its declaration asks for."""
    declaration = table.declaration
    if isinstance(table, ListTable):
        assert isinstance(declaration, List)
        return ListHandle(declaration, table, scope)
    if isinstance(table, MapTable):
        assert isinstance(declaration, Map)
        return MapHandle(declaration, table, scope)
    assert isinstance(table, ValueTable)
    if isinstance(declaration, Reducing):
        return ReducingHandle(declaration, table, scope)
    if isinstance(declaration, Aggregating):
        return AggregatingHandle(declaration, table, scope)
    return _value_handle(declaration, table, scope)
