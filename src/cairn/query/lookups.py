"""Lookups of one state of one epoch: which key is where, and what users see of what is held.

All of it is known from the manifest, but for the function of an aggregate.

Always true here:
- a key is found exactly where rows with that key have gone;
- what had expired by `floor_ms` is not seen, whether it is still stored or not.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from cairn.backends.contract import ABSENT
from cairn.backends.overlay import in_order
from cairn.backends.packing import Form, Packing
from cairn.errors import QueryError, StateNotFoundError
from cairn.key_groups import groups_of, key_hasher
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.reader import uid_with_state
from cairn.storage.manifest import Epoch, EpochOperator, operator_uids
from cairn.types import parse_type, type_ddl
from cairn.types.codec import ValueTypeError
from cairn.types.codec.stamped import stamp_codec

Key = Any
"""A key of a state, as users give it or as it is stored."""
Value = Any
"""A value of a state, of the type that the state declares."""
Held = dict[Key, Value]
Folds = Callable[[Value], Value]
"""Turns the stored value of an aggregate into its result."""

# Errors of codecs, hashes and formats for a value of another type or beyond its range.
_MISFITS: Final = (ValueTypeError, TypeError, ValueError, OverflowError, struct.error)


class Place(NamedTuple):
    """The subtask, version and key group that hold the state of a key."""

    subtask: int
    version: str
    group: int
    key: Key
    """Normalised, so that it can be found in a dict."""
    packed: bytes

    @property
    def at(self) -> tuple[int, Key]:
        return self.group, self.key


class Lookup:
    """One state as of one epoch."""

    def __init__(self, epoch: Epoch, operator: str, state: str, group_count: int) -> None:
        self.epoch = epoch
        self.uid, self.entry = _entry(epoch, operator, state)
        self.state = state
        self.operator = operator
        self.decl = self.entry.states[state]
        floors = {"processing": epoch.now_ms, "event": epoch.passed_ms}
        self.columns = StateColumns(state, self.decl, self.entry.key_types, floors)
        self.floor_ms = self.columns.floor_ms
        self.ttl = self.columns.ttl
        declared = self.columns.declaration
        values = self.columns.values if self.ttl is None else stamp_codec(declared.type)
        self.packing = Packing(declared.layout, self.columns.keys, values, self.columns.entries)
        decl = self.decl
        self.form: Form = (decl.kind, decl.type, decl.entry_type or "", decl.ttl or "")
        self.result: Folds | None = None
        """For aggregating state."""
        self._group_count = group_count
        types = [parse_type(ddl) for ddl in self.entry.key_types.values()]
        self._hash = key_hasher(types) if self.entry.scope == "keyed" else None
        self._is_wrapped = len(types) == 1 and not pa.types.is_struct(types[0])
        self._is_array = len(types) == 1 and pa.types.is_list(types[0])
        ranges = sorted(enumerate(self.entry.ranges), key=lambda part: part[1].first_group)
        self._firsts = [part.first_group for _, part in ranges]
        self._ranges = ranges

    def place(self, key: Key) -> Place | None:
        """Return the place of a user's key; None if the state cannot have it."""
        try:
            stored = self._normalise(key)
            group = self._group(stored)
            packed = self.packing.key(stored)
        except _MISFITS as error:
            raise self.misfit(key, error) from None
        at = -1 if group is None else bisect_right(self._firsts, group) - 1
        if group is None or at < 0:
            return None
        subtask, part = self._ranges[at]
        if group >= part.first_group + part.group_count:
            return None
        return Place(subtask, part.version, group, stored, packed)

    def misfit(self, key: Key, error: BaseException) -> QueryError:
        """Return the error for a key that does not fit this state."""
        names = ", ".join(self.columns.key_names)
        return QueryError(
            f"operator {self.operator!r}: {key!r} is not a key of it: {error}\n"
            f"  expected: {names} of type {type_ddl(self.columns.key_type)}"
            + ("; a tuple for several columns" if len(self.columns.key_names) > 1 else ""),
            operator=self.operator,
            state=self.state,
        )

    def hashable(self, key: Key) -> Key:
        """Return a key to index by: itself if it can be hashed."""
        try:
            hash(key)
        except TypeError:
            return self._normalise(key)
        return key

    def _normalise(self, key: Key) -> Key:
        if self._is_wrapped and isinstance(key, tuple) and len(key) == 1:
            inner = key[0]
            # For a key of array type, a tuple of one element is the array itself.
            if not self._is_array or inner is None or isinstance(inner, list | tuple | np.ndarray):
                key = inner
        return None if key is None else self.columns.keys.normalise_key(key)

    def _group(self, stored: Key) -> int | None:
        if self._hash is not None:
            several = len(self.columns.key_names) > 1
            values = tuple(stored) if several else (stored,)
            return self._hash(values) % self._group_count
        if self.entry.scope == "shared":
            return 0
        # The list of a subtask is in its first key group.
        count = len(self.entry.ranges)
        if stored is None or not 0 <= stored < count:
            return None
        return groups_of(stored, count, self._group_count).start

    def visible(self, key: Key, held: Value, floor_ms: int | None) -> Value:
        """Return the value of a key as users see it, without expired parts; ABSENT if none."""
        if held is not None and self.ttl is not None:
            held = _later_than(held, None if floor_ms is None else floor_ms - self.ttl.ms)
        if held is None:
            return ABSENT
        restore = self.columns.values.restore
        if self.decl.kind == "operator_list":
            return [restore(value) for _, value in sorted(held.items(), key=itemgetter(0))]
        if isinstance(held, dict) and self.columns.entries is not None:
            return {
                entry: None if held[entry] is None else restore(held[entry])
                for entry in in_order(held)
            }
        if self.decl.kind == "list":
            return [restore(item) for item in held]
        if self.result is None:
            return restore(held)
        try:
            return self.result(restore(held))
        except Exception as error:
            raise QueryError(
                f"operator {self.operator!r}, state {self.state!r}: the aggregate's result() of "
                f"key {key!r} failed: {type(error).__name__}: {error}\n"
                "  next: make result() accept every value that create() and add() return",
                operator=self.operator,
                state=self.state,
                key=key,
            ) from error

    def collect_rows(self, batches: Sequence[pa.RecordBatch]) -> Held:
        """Return the stored values by key from rows of a checkpoint, in the form of the slots."""
        found: Held = {}
        for batch in batches:
            stamps = [None] * batch.num_rows if self.ttl is None else batch["at"].to_pylist()
            decoded = zip(self.columns.decode(batch), stamps, strict=True)
            for (key, entry, value), at in decoded:
                if self.ttl is not None:
                    value = list(zip(at, value, strict=True)) if _is_list(at) else (at, value)
                if self.columns.entries is None:
                    found[key] = value
                else:
                    found.setdefault(key, {})[entry] = value
        return found


def _is_list(at: object) -> bool:
    return isinstance(at, list)


def _later_than(held: Value, dead_ms: int | None) -> Value:
    """The values of stamped ones that were written later than that."""
    if isinstance(held, dict):
        kept = {e: value for e, (at, value) in held.items() if dead_ms is None or at > dead_ms}
        return kept or None
    if isinstance(held, list):
        return [value for at, value in held if dead_ms is None or at > dead_ms] or None
    at, value = held
    return value if dead_ms is None or at > dead_ms else None


def _entry(epoch: Epoch, operator: str, state: str) -> tuple[str, EpochOperator]:
    operators: Mapping[str, EpochOperator] = epoch.operators
    uids = operator_uids(operators, operator)
    if not uids:
        raise StateNotFoundError(
            f"epoch {epoch.number} has no operator {operator!r}\n"
            f"  found: {', '.join(operators) or 'none'}",
            operator=operator,
            state=state,
        )
    uid = uid_with_state(operators, operator, state)
    entry = operators.get(uid)
    if entry is None or state not in entry.states:
        known = ", ".join(name for each in uids for name in operators[each].states) or "none"
        raise StateNotFoundError(
            f"operator {operator!r} has no state {state!r} in epoch {epoch.number}\n"
            f"  found: {known}",
            operator=operator,
            state=state,
        )
    if entry.scope == "feedback":
        raise QueryError(
            f"{uid!r} holds records on their way back in a loop; they are found by no key\n"
            "  next: read them as a table, with cairn.read_state(...)",
            operator=operator,
            state=state,
        )
    return uid, entry
