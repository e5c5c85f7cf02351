"""State that a slot holds for an operator: its tables, the key groups it owns, its version.

An operator has one holding of its own (the state of its keys, or of its subtask) and, where
its stream has a broadcast, a second one that is the same in every subtask. What a manifest
calls an entry is what all subtasks hold under one uid.

Always true here:
- state is named by version, a digest of its history, never by an epoch number alone;
- between `bring_to` and the next `bring_to` the way back to the parent stays open;
- what is incomplete has a version that no epoch names;
- rows and version change under the lock. So a lookup, which takes it and names a version, finds
  that version or nothing, on any thread: what the running epoch writes lies above the rows, and
  the overlay is looked at only when the epoch has finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from cairn.backends.contract import Backend
from cairn.backends.overlay import MakeTable, Table, make_table
from cairn.backends.packing import Form, Packing, form_of, pack_held, packing_of
from cairn.backends.timer_table import TimerTable
from cairn.errors import FunctionError
from cairn.functions import EVENT_TIMERS
from cairn.key_groups import groups_of, overlap
from cairn.protocol.lookups import REPLY_BYTES_MAX
from cairn.protocol.messages import Begin, Part, Piece
from cairn.slot.stored_timers import make_index
from cairn.slot.timers import Timers
from cairn.state import Declaration
from cairn.storage.manifest import EMPTY_VERSION, Held, Scope, next_version
from cairn.types.durations import MAX_MS, MIN_MS

INCOMPLETE: Final = ""
"""A version that no epoch names."""
LOOK_UP_S: Final = 0.5
"""A lookup waits this long while rows change; then the checkpoint answers."""
ANSWER_S: Final = 1.0
"""A lookup may take this long; the driver does not wait longer."""
PIECE_KEYS: Final = 512
PIECE_BYTES: Final = 1 << 20
"""The lock is held for about this much at a time."""


class Holding:
    """The tables of one entry in one slot, resident between epochs."""

    def __init__(
        self,
        uid: str,
        key_type: pa.DataType,
        backend: Backend,
        *,
        group_count: int,
        scope: Scope = "keyed",
        delay_ms: int = 0,
        most: int = 0,
    ) -> None:
        """`delay_ms`: how far event time is behind the job's watermark here.

        `most`: the subtasks that own key groups at most; 0: all that the job has.
        """
        self.uid = uid
        self.scope = scope
        self._delay_ms = delay_ms
        self.key_type = key_type
        self.backend = backend
        self.group_count = group_count
        self.most = most
        self.groups = range(0)
        self.version = EMPTY_VERSION
        self.as_of: int | None = None
        """The committed epoch whose state `version` is; None: not known."""
        self.pending: str | None = None
        """The version that the epoch just finished would have, once it is committed."""
        self.is_replaced = False
        """True if the state was replaced since the function last read it."""
        self.tables: dict[str, Table] = {}
        self.timers: Timers | None = None
        """The timers of a function that sets any."""
        self._make_table: MakeTable = make_table
        self.is_adopted = False
        """Another version of the operator has this state now."""
        self.lock = threading.Lock()
        self._asked: dict[str, _Asked] = {}

    def declare(self, states: Mapping[str, Declaration], make: MakeTable = make_table) -> None:
        """Make the tables known, so that state can be restored and handles be made."""
        self._make_table = make
        for name, declaration in states.items():
            table = self.tables.get(name)
            if table is None:
                table = make(declaration, self.key_type, self.backend, self.group_count)
                table.assign(self.groups)
                self.tables[name] = table
            table.declaration = declaration
        if EVENT_TIMERS in self.tables and not (self.timers and self.timers.are_of(self.tables)):
            self.timers = Timers(self.tables, make_index)

    def adopt(self, other: Holding) -> bool:
        """Take over what is held for the same operator with another function, if its form fits."""
        mine = {name: _form(table) for name, table in self.tables.items()}
        theirs = {name: _form(table) for name, table in other.tables.items()}
        if self.key_type != other.key_type or theirs.items() - mine.items():
            return False
        with self.lock, other.lock:
            self.backend.close()
            declared = {name: table.declaration for name, table in self.tables.items()}
            self.backend, self.tables, self.timers = other.backend, other.tables, other.timers
            self.groups, self.version, self.pending = other.groups, other.version, other.pending
            self.as_of = other.as_of if theirs.keys() == mine.keys() else None
            other.is_adopted = True
            self.declare(declared, self._make_table)
        return True

    def own(self, subtask: int, parallelism: int, mine: Part) -> range:
        """The key groups of a subtask; of shared state it has all."""
        if self.scope == "shared":
            return range(self.group_count)
        if self.scope == "subtask":
            return groups_of(subtask, parallelism, self.group_count)
        return mine.own(subtask, parallelism, self.group_count, self.most)

    def is_at(self, version: str, groups: range) -> bool:
        """True if nothing has to be read to reach this version."""
        return groups == self.groups and version in (self.version, self.pending)

    def bring_to(self, version: str, groups: range, pieces: Sequence[Piece]) -> list[range]:
        """Make what is here the state asked for, and say which key groups are missing of it.

        Pending changes are promoted if they belong to it, otherwise undone. `pieces` says, after
        a change of ranges, which versions the groups had in the ranges they come from.
        """
        with self.lock:
            return self._bring_to(version, groups, pieces)

    def _bring_to(self, version: str, groups: range, pieces: Sequence[Piece]) -> list[range]:
        if self.is_at(version, groups):
            self._settle(version)
            return []
        ours = {piece.version for piece in pieces} & {self.version, self.pending}
        kept: list[range] = []
        if groups != self.groups and ours:
            self._settle(ours.pop())
            kept = [
                owned
                for piece in pieces
                if piece.version == self.version and (owned := overlap(piece.groups, self.groups))
            ]
        missing = _without(groups, kept)
        # A restore that fails half way must not leave rows that pass for the version.
        self.version, self.pending = INCOMPLETE, None
        self.is_replaced = True
        for table in self.tables.values():
            for gap in missing:
                table.forget(gap)
            table.assign(groups)
        if self.timers is not None:
            self.timers.forget()
        self.groups = groups
        return missing

    def give_up(self) -> None:
        """The backend has lost rows: no version is here until all are restored."""
        with self.lock:
            self.version, self.pending = INCOMPLETE, None

    def begin_catching_up(self) -> None:
        """Undo the pending epoch. Until the later changes are applied, no version is here."""
        with self.lock:
            self._settle(self.version)
            self.version, self.as_of = INCOMPLETE, None
            self.is_replaced = True

    def _settle(self, version: str) -> None:
        """Promote or undo the pending epoch."""
        is_committed = version == self.pending and version != self.version
        if self.timers is not None:
            if is_committed:
                self.timers.commit()
            else:
                self.timers.undo()
        if self.scope == "subtask" and not is_committed and self.keys_changed():
            self.is_replaced = True
        for table in self.tables.values():
            if is_committed:
                table.promote()
            else:
                table.rollback()
        self.version, self.pending = version, None

    def delta(self, operator: str) -> dict[str, pa.RecordBatch]:
        """Return the rows that the epoch changed, by state."""
        changes = {}
        for name, table in sorted(self.tables.items()):
            if self.scope == "shared":
                # Replicas are compared by their deltas: those of equal content must be equal.
                table.sort_changes()
            try:
                batch = table.delta()
            except FunctionError as error:
                raise FunctionError(
                    f"operator {operator!r}: {error.message}", operator=operator, **error.facts
                ) from error
            if batch is not None:
                changes[name] = batch
        return changes

    def name_pending(self, delta_id: str | None) -> None:
        """Set the version that the epoch produced, so that the next `begin` can name it."""
        self.pending = self.version if delta_id is None else next_version(self.version, delta_id)

    def keys_changed(self) -> int:
        return sum(table.keys_changed() for table in self.tables.values())

    def state_held(self) -> Held:
        """Count the keys and entries of all states.

        Keys are those of the state that has most of them: most functions give every key each
        of their states, and the exact union would cost a look at every key. State without keys
        (lists of a subtask, broadcast state) has entries only.
        """
        held = {table: table.count_held() for table in self.tables.values()}
        # Timers in a database are not counted by key.
        by_key = [h.keys for table, h in held.items() if not isinstance(table, TimerTable)]
        by_timer = [h.keys for h in held.values()]
        keys = max(max(by_key, default=0) or max(by_timer, default=0), 0)
        entries = sum(each.entries for each in held.values())
        return Held(keys if self.scope == "keyed" else 0, entries)

    # State that expires

    def set_floor(self, begin: Begin) -> None:
        """An epoch begins: what has expired before it is seen by nobody."""
        for table in self.tables.values():
            if table.expiry is not None:
                table.expiry.begin(self.floor_ms(table, begin))

    def floor_ms(self, table: Table, begin: Begin) -> int | None:
        """Return the time up to which expired values of a table are invisible to all."""
        ttl = table.declaration.ttl
        if ttl is None:
            return None
        if ttl.clock == "processing":
            return begin.now_ms
        return behind(begin.passed_ms, self._delay_ms)

    def reclaim(self, seconds: float) -> bool:
        """Remove state that has expired, for about so long; True when there is more."""
        more = False
        for table in self.tables.values():
            if table.expiry is not None:
                with self.lock:
                    more = table.expiry.reclaim(seconds) or more
        return more

    def tidy(self) -> bool:
        """After much was removed: pack what is left. True if the backend should compact."""
        emptied = {
            table: table.expiry
            for table in self.tables.values()
            if table.expiry is not None and table.expiry.is_emptied()
        }
        sparse = [table for table, expiry in emptied.items() if expiry.is_sparse()]
        with self.lock:
            try:
                if sparse and not self.backend.repack(sparse):
                    return False
            except BaseException:
                self.version, self.pending = INCOMPLETE, None
                raise
        for table, expiry in emptied.items():
            expiry.note_tidied(is_packed=table in sparse)
        return bool(emptied)

    def close(self) -> None:
        if self.is_adopted:
            return
        with self.lock:
            self.version, self.pending = INCOMPLETE, None
            self.backend.close()

    # Lookups, on other threads

    def look_up(
        self, state: str, version: str, form: Form, places: Sequence[tuple[int, bytes]]
    ) -> tuple[list[bytes | None], int | None] | None:
        """Return the packed values of some keys in a version, and the time of `floor_ms`.

        Each key comes with its key group. Returns None if the version is not here, if the answer
        would be too large, or for timers in a database. Rows may change between one piece and the
        next: a version names its content, so what is found under the same name fits together.
        """
        known = self._codecs_of(state)
        if known is None or known.form != form:
            return None
        if isinstance(known.table, TimerTable):
            # All timers of the key group would be read, and nothing may change meanwhile.
            return None
        table, packing = known.table, known.packing
        expiry = table.expiry
        floor_ms = None if expiry is None else expiry.floor_ms
        told: list[bytes | None] = []
        told_bytes, end_s, step = 0, time.monotonic() + ANSWER_S, 1
        while len(told) < len(places):
            few = places[len(told) : len(told) + step]
            keys = [(group, packing.key_of(key)) for group, key in few]
            if not self.lock.acquire(timeout=LOOK_UP_S):
                return None
            try:
                is_here = version in (self.version, self.pending) and version != INCOMPLETE
                if not is_here or self.is_adopted or self.tables.get(state) is not table:
                    return None
                if any(group not in self.groups for group, _ in keys):
                    return None
                found = table.look_up(keys, finished=version != self.version)
                # It only rises: with the last one, all of the answer is as of one time.
                floor_ms = None if expiry is None else expiry.floor_ms
            finally:
                self.lock.release()
            if found is None:
                if time.monotonic() > end_s:
                    return None
                continue
            packed = [None if held is None else pack_held(packing, held) for held in found]
            piece_bytes = sum(len(raw) for raw in packed if raw is not None)
            told += packed
            told_bytes += piece_bytes
            if told_bytes > REPLY_BYTES_MAX or time.monotonic() > end_s:
                return None
            step = min(2 * step, PIECE_KEYS) if piece_bytes < PIECE_BYTES else max(1, step // 4)
        return told, floor_ms

    def _codecs_of(self, state: str) -> _Asked | None:
        table = self.tables.get(state)
        if table is None:
            return None
        known, declaration = self._asked.get(state), table.declaration
        if known is None or known.table is not table or known.declaration is not declaration:
            known = _Asked(table, declaration, form_of(declaration), packing_of(table))
            self._asked[state] = known
        return known


class _Asked(NamedTuple):
    """A table that was asked for: what need not be made for every lookup."""

    table: Table
    declaration: Declaration
    form: Form
    packing: Packing


def behind(watermark_ms: int | None, delay_ms: int) -> int | None:
    """The watermark of an operator that is so far behind the job's."""
    if watermark_ms is None or watermark_ms == MAX_MS:
        return watermark_ms
    return max(watermark_ms - delay_ms, MIN_MS)


def _form(table: Table) -> tuple[Any, ...]:
    """Return the facts in which two states must agree to be the same state."""
    declaration = table.declaration
    ttl = declaration.ttl
    # With another ttl it is restored: what had expired must not live again.
    lives = None if ttl is None else (ttl.clock, ttl.ms)
    return type(table), declaration.type, declaration.entry_type, lives


def _without(groups: range, kept: Sequence[range]) -> list[range]:
    """Return the key groups that are not kept, as ranges."""
    gaps = []
    start = groups.start
    for owned in sorted((_cut(each, groups) for each in kept), key=lambda owned: owned.start):
        if owned.start > start:
            gaps.append(range(start, owned.start))
        start = max(start, owned.stop)
    if start < groups.stop:
        gaps.append(range(start, groups.stop))
    return gaps


def _cut(owned: range, groups: range) -> range:
    return range(max(owned.start, groups.start), max(owned.start, min(owned.stop, groups.stop)))
