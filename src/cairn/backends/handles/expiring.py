"""Handles of state that expires: like those in `keyed`, for values with a time.

A value is visible while its time plus the ttl is later than the clock: the epoch's `now`, or the
event time of the current row. A value that expired before the epoch's *floor* (the earliest
reading of the clock in the epoch) may or may not be removed from this slot already.

Always true here:
- an expired value is never visible;
- the changes of an epoch do not depend on which expired rows were removed: for rows that expired
  before the floor the epoch writes neither a deletion nor a place in a list;
- by event time a later write never makes a value expire earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cairn.backends.contract import ABSENT
from cairn.backends.handles.scope import Entries, Scope, name_state
from cairn.backends.overlay import ListTable, MapTable, Table, ValueTable, in_order
from cairn.state import TTL, List, Value
from cairn.types.codec import Datum, Key, ValueTypeError
from cairn.types.codec.core import Values
from cairn.types.durations import MIN_MS

Clock = Callable[[Scope], int]


def processing_ms(scope: Scope) -> int:
    return scope.now_ms


def event_ms(scope: Scope) -> int:
    at, floor = scope.event_time_ms, scope.floor_ms
    return floor if at is None or at < floor else at


def event_stamp_ms(scope: Scope) -> int:
    """Return the time at which a write counts as written."""
    at, floor = scope.event_time_ms, scope.floor_ms
    if at is None and floor == MIN_MS:
        # A processing timer before the first watermark: event time is unknown. With the beginning
        # of time as its stamp the value would be expired for any row; most rows are about now.
        return scope.now_ms
    return floor if at is None or at < floor else at


def event_floor_ms(scope: Scope) -> int:
    return scope.floor_ms


def clocks(ttl: TTL) -> tuple[Clock, Clock, Clock]:
    """Return three functions: the present time, the stamp of a write, the epoch's floor."""
    if ttl.clock == "event":
        return event_ms, event_stamp_ms, event_floor_ms
    return processing_ms, processing_ms, processing_ms


class _Expiring:
    """The table, the clock and the codec of the values that functions see."""

    name: str

    def _bind(self, table: Table, scope: Scope) -> None:
        declaration = table.declaration
        assert declaration.ttl is not None
        self.name = declaration.name
        self._scope = scope
        self._rows: list[Any] = table.rows
        self._changes: list[dict[Key, Any]] = table.changes
        self._ttl_ms = declaration.ttl.ms
        self._clock, self._stamp, self._floor = clocks(declaration.ttl)
        self._is_event = declaration.ttl.clock == "event"
        self._refreshes = declaration.ttl.refresh == "read-write"
        values = table.written
        self._normalise = values.normalise
        self._exact = values.exact
        self._restore = values.restore


class ExpiringValueHandle(_Expiring, Value[Any]):
    def __init__(self, table: ValueTable, scope: Scope) -> None:
        self._bind(table, scope)
        default = getattr(table.declaration, "default", None)
        self._default = None if default is None else self._normalise(default)

    def _pair(self) -> Datum:
        """Return the stored (time, value) of the current key; None for nothing."""
        scope = self._scope
        group = scope.group
        key = scope.key
        changes = self._changes[group]
        return changes[key] if key in changes else self._rows[group][key]

    def get(self, default: Any = None) -> Any:
        held = self._pair()
        if held is not None:
            clock = self._clock(self._scope)
            if held[0] + self._ttl_ms > clock:
                if self._refreshes and held[0] < clock:
                    self._changes[self._scope.group][self._scope.key] = (clock, held[1])
                return self._restore(held[1])
        if default is not None or self._default is None:
            return default
        return self._restore(self._default)

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
        at = self._stamp(scope)
        if self._is_event:
            held = self._pair()
            if held is not None and held[0] > at:
                at = held[0]
        self._changes[scope.group][scope.key] = (at, value)

    def clear(self) -> None:
        scope = self._scope
        held = self._rows[scope.group][scope.key]
        if held is not None and held[0] + self._ttl_ms > self._floor(scope):
            self._changes[scope.group][scope.key] = None
        else:
            self._changes[scope.group].pop(scope.key, None)


class ExpiringMapHandle(_Expiring, Entries):
    def __init__(self, table: MapTable, scope: Scope) -> None:
        self._bind(table, scope)
        self._entries = table.written_entries

    def _visible(self, entry: Key) -> Datum:
        pair = self._get(entry)
        if pair is not ABSENT and pair[0] + self._ttl_ms > self._clock(self._scope):
            return pair
        return ABSENT

    def __getitem__(self, entry: object) -> Any:
        name = self._entry(entry)
        pair = self._visible(name)
        if pair is ABSENT:
            raise KeyError(entry)
        at, value = pair
        if self._refreshes:
            clock = self._clock(self._scope)
            if at < clock:
                self._put(name, (clock, value))
        return None if value is None else self._restore(value)

    def __setitem__(self, entry: object, value: object) -> None:
        entry = self._entry(entry)
        if value is not None:
            try:
                value = self._normalise(value)
            except ValueTypeError as error:
                raise name_state(self, error) from None
        at = self._stamp(self._scope)
        if self._is_event:
            pair = self._get(entry)
            if pair is not ABSENT and pair[0] > at:
                at = pair[0]
        self._put(entry, (at, value))

    def __delitem__(self, entry: object) -> None:
        name = self._entry(entry)
        if self._visible(name) is ABSENT:
            raise KeyError(entry)
        self._put(name, ABSENT)

    def _later_than(self, clock: int) -> list[Key]:
        """Return the entries that had not expired at some time."""
        scope = self._scope
        held = self._rows[scope.group].get(scope.key, {})
        changed = self._changes[scope.group].get(scope.key)
        merged = held.copy() if changed else held
        if changed:
            merged.update(changed)
        dead = clock - self._ttl_ms
        return [e for e, pair in merged.items() if pair is not ABSENT and pair[0] > dead]

    def __iter__(self) -> Iterator[Any]:
        return iter(in_order(self._later_than(self._clock(self._scope))))

    def __len__(self) -> int:
        return len(self._later_than(self._clock(self._scope)))

    def __contains__(self, entry: object) -> bool:
        return self._visible(self._entry(entry)) is not ABSENT

    def clear(self) -> None:
        # Also entries that expired only by this row's time: a later row may have an earlier time.
        # In order of the entries: that of the rows depends on how they were restored.
        for entry in in_order(self._later_than(self._floor(self._scope))):
            self._put(entry, ABSENT)


class ExpiringListHandle(_Expiring, List[Any]):
    """Items expire one by one, but leave the rows only with the whole list, or with a rewrite.

    A change counts the items that stay before it, so these must be the same items in every
    slot. Once the middle item has expired, an append rewrites the list.
    """

    def __init__(self, table: ListTable, scope: Scope) -> None:
        self._bind(table, scope)

    def _items(self) -> Sequence[Datum]:
        scope = self._scope
        held: Sequence[Datum] = self._rows[scope.group].get(scope.key, ())
        changed = self._changes[scope.group].get(scope.key)
        if changed is None:
            return held
        start, added = changed
        return [*held[:start], *added] if start else added

    def _later_than(self, clock: int) -> Values:
        dead = clock - self._ttl_ms
        return [pair for pair in self._items() if pair[0] > dead]

    def __iter__(self) -> Iterator[Any]:
        clock = self._clock(self._scope)
        pairs = self._later_than(clock)
        if self._refreshes and any(at < clock for at, _ in pairs):
            dead = clock - self._ttl_ms
            kept = self._later_than(self._floor(self._scope))
            self._replace([(max(at, clock) if at > dead else at, value) for at, value in kept])
        return map(self._restore, [value for _, value in pairs])

    def __getitem__(self, index: int | slice) -> Any:
        # All of it is looked at: an item's index depends on how many before it have expired.
        return list(self)[index]

    def __len__(self) -> int:
        return len(self._later_than(self._clock(self._scope)))

    def _with_stamp(self, values: Iterable[object]) -> Values:
        at = self._stamp(self._scope)
        try:
            return [(at, self._normalise(value)) for value in values]
        except ValueTypeError as error:
            raise name_state(self, error) from None

    def append(self, value: object) -> None:
        self._add(self._with_stamp((value,)))

    def extend(self, values: Iterable[object]) -> None:
        self._add(self._with_stamp(values))

    def _add(self, added: Values) -> None:
        if not added:
            return
        scope = self._scope
        changed = self._changes[scope.group].get(scope.key)
        if changed is not None:
            changed[1].extend(added)
            return
        held = self._rows[scope.group].get(scope.key, ())
        count = len(held)
        if count:
            dead = self._floor(scope) - self._ttl_ms
            if held[count // 2][0] <= dead:
                self._replace([*(pair for pair in held if pair[0] > dead), *added])
                return
        self._changes[scope.group][scope.key] = (count, added)

    def _replace(self, pairs: Values) -> None:
        scope = self._scope
        self._changes[scope.group][scope.key] = (0, pairs)

    def set(self, values: Iterable[object]) -> None:
        replaced = self._with_stamp(values)
        if replaced:
            self._replace(replaced)
        else:
            self.clear()

    def clear(self) -> None:
        scope = self._scope
        held = self._rows[scope.group].get(scope.key, ())
        dead = self._floor(scope) - self._ttl_ms
        if any(at > dead for at, _ in held):
            self._replace([])
        else:
            self._changes[scope.group].pop(scope.key, None)
