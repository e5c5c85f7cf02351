"""State in Redis: one version per key group, which the checkpoint can replace at any time.

Changes of committed epochs stay in memory, decoded, until they are applied to Redis in the
background (`base`). Contents that were read or changed lately stay in memory too; other keys are
read a batch of rows at a time (see `cached.backend`). The checkpoint has all deltas and a base, as
with state on the heap, so Redis is never the only place of a row.

A restore takes the key groups in Redis as they are if their marker is an epoch from which the
parent descends, not older than the checkpoint's base; deltas that came later are applied in
memory. Otherwise it reads the checkpoint, and the first change replaces what Redis has.

Always true here:
- Redis gets rows of committed epochs only;
- rows in Redis are believed as long as they have the marker that this slot knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from cairn.backends.cached.database import Database
from cairn.backends.cached.described import StoredState, describe_state
from cairn.backends.cached.numbers import state_number
from cairn.backends.cached.ordered import Page
from cairn.backends.cached.outside import OutsideBackend
from cairn.backends.cached.rows import CachedRows
from cairn.backends.contract import Base, Origin
from cairn.backends.redis.base import Applying, RedisBase, counts_of
from cairn.backends.redis.database import RedisDatabase
from cairn.backends.redis.link import Link, address_of
from cairn.backends.redis.writer import Claimed, Counts, Writer, claim
from cairn.errors import EpochError
from cairn.ids import new_id
from cairn.storage.manifest import FileRef
from cairn.storage.store import Store

if TYPE_CHECKING:
    from cairn.backends.overlay import Table

APPLY_EPOCHS: Final = 10
APPLY_BYTES: Final = 4 << 20
"""Changes are applied after this number of epochs, or when they take this much memory."""
CHECK_AGAIN_S: Final = 30
"""A server that did not answer is not asked before this time whether it has lost anything."""


class RedisBackend(OutsideBackend):
    """Rows under the prefix of a job."""

    def __init__(
        self, directory: str, memory_bytes: int, url: str, *, job_id: str, operator: str
    ) -> None:
        super().__init__(directory, memory_bytes)
        self._job_id = job_id
        self._operator = operator
        self._owner = new_id()
        self.address = address_of(url)
        self._reads = Link(self.address, f"cairn:{job_id[:12]}:{operator}:reads")
        self._writes = Link(self.address, f"cairn:{job_id[:12]}:{operator}:writes")
        self.database = RedisDatabase(self._reads, job_id, operator, self._numbers)
        self._origin: Origin | None = None
        self._claimed: set[int] = set()
        self._epochs = 0
        """Since the last time that changes were applied."""
        self._next_check_s = 0.0

    # Databases

    def _release(self, rows: CachedRows) -> None:
        self.database.hidden.setdefault(rows.group, set()).add(self._numbers[rows.name])
        rows.unbind()

    def drop(self, name: str, group_index: int) -> None:
        super().drop(name, group_index)
        has_rows = any(
            (rows := by_group.get(group_index)) is not None and rows.database is not None
            for by_group in self._rows.values()
        )
        if not has_rows:
            # Nothing in Redis counts any more, and the next change replaces all of it.
            self.database.markers.pop(group_index, None)
            self._claimed.discard(group_index)
            self.database.hidden.pop(group_index, None)
            if not self.database.markers and not self._claimed:
                self.database.is_lost = False

    def database_of(self, group: int) -> RedisDatabase:
        self._has_databases = True
        self._number_states()
        return self.database

    def read_pages(
        self, database: Database, starts: Sequence[tuple[bytes, bytes]], count: int
    ) -> list[Page]:
        assert isinstance(database, RedisDatabase)
        return database.read_pages(starts, count)

    def _number_states(self) -> None:
        for name, packing in self._packings.items():
            number = state_number(self._operator, name, describe_state(packing, {}))
            taken = [n for n, other in self._numbers.items() if other == number and n != name]
            if taken and taken[0] in self._packings:
                raise EpochError(
                    f"operator {self._operator!r}: states {name!r} and {taken[0]!r} have the same "
                    f"number, {number}\n  next: rename one of the two states"
                )
            self._numbers[name] = number

    def _bind_all(self, groups: range) -> None:
        """Bind rows that are not in Redis yet."""
        database = self.database_of(0)
        for name in self._packings:
            for group in groups:
                rows = self.rows(name, group)
                if rows.database is None:
                    rows.bind(database)

    # Restoring

    def begin_restore(self, origin: Origin) -> None:
        self.database.is_lost = False
        self._origin = origin

    def is_lost(self) -> bool:
        if self.database.is_lost or time.monotonic() < self._next_check_s:
            return self.database.is_lost
        try:
            self.database.check()
        except EpochError as error:
            if error.facts.get("is_lost"):
                return True
            # A server that is away has lost nothing as far as anyone knows, and one that hangs
            # must not delay each epoch. Every read of rows checks them again.
            self._next_check_s = time.monotonic() + CHECK_AGAIN_S
        return False

    def load(self, store: Store, ref: FileRef, groups: range) -> bool:
        origin = self._origin
        if origin is None or origin.follows or self.run_tables or not self._packings:
            return False
        self.cancel_base()
        self._number_states()
        found = self._claim(groups, origin.term, origin.epoch)
        if not all(self._is_valid(each, ref, origin) for each in found.values()):
            return False
        for group, each in found.items():
            self.database.markers[group] = each.marker
        states: dict[str, StoredState] = {}
        for name, packing in self._packings.items():
            number = self._numbers[name]
            counts = {group: each.counts[number] for group, each in found.items()}
            states[name] = describe_state(packing, counts)
        self._has_databases = True
        self.serve(self.database, states, groups, self._packings)
        for table in self.columns.values():
            table.note_loaded(groups)
        return True

    def _is_valid(self, found: Claimed, ref: FileRef, origin: Origin) -> bool:
        """True if these rows are those of an epoch between the base and the parent."""
        number, _, nonce = found.marker.partition(":")
        return (
            found.is_whole
            and number.isdigit()
            and int(number) >= ref.last_epoch
            and found.counts.keys() == {self._numbers[name] for name in self._packings}
            and origin.descends_from(int(number), nonce)
        )

    def has(self, ref: FileRef, groups: range) -> bool:
        markers = self.database.markers
        return all(
            group in markers and int(markers[group].partition(":")[0]) >= ref.last_epoch
            for group in groups
        )

    def _claim(self, groups: Sequence[int], term: int, epoch: int) -> dict[int, Claimed]:
        found = claim(
            self._writes,
            self._job_id,
            self._operator,
            groups,
            term,
            epoch,
            self._owner,
        )
        self._claimed |= found.keys()
        return found

    def claim(self, groups: range, term: int, epoch: int) -> None:
        """Claim the key groups that this slot has not claimed, to replace their rows."""
        missing = [group for group in groups if group not in self._claimed]
        if missing:
            self._claim(missing, term, epoch)

    # Applying

    def begin_apply(self, groups: range) -> Applying:
        self.prepare_writer()
        self._bind_all(groups)
        applying = self._writer = Applying(self, groups)
        return applying

    def wants_apply(self) -> bool:
        if self.run_tables or not self._packings:
            return False
        self._epochs += 1
        # Frozen changes are those of a writer that gave up; a writer at work is not joined.
        unapplied = self.dirty_bytes + self.frozen_bytes
        return self._epochs >= APPLY_EPOCHS or unapplied >= min(
            APPLY_BYTES, self.unwritten_bytes_max
        )

    def note_applied(self) -> None:
        self._epochs = 0

    def new_writer(self, groups: range, marker: str, check: Callable[[], None]) -> Writer:
        return Writer(self._writes, self.database, self._owner, groups, marker, check)

    def counts_by_group(
        self, states: Mapping[str, StoredState], groups: range
    ) -> dict[int, Counts]:
        return {group: counts_of(states, self._numbers, group) for group in groups}

    def begin_base(self, tables: Mapping[str, Table], groups: range) -> Base:
        if self.run_tables:
            return self.begin_heap_base(tables)
        return RedisBase(self, tables, groups)

    def _close_databases(self) -> None:
        self._reads.close()
        self._writes.close()
        self.database.markers.clear()
        self._claimed.clear()
