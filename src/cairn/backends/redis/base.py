"""Committed changes go to Redis, and from time to time all rows from there to the checkpoint.

    Applying      the changes since the last one, in the background
    RedisBase     the same, then a segment of all rows, as the heap writes it

Always true here:
- only the thread that begins them makes frozen changes unwritten again;
- nothing is applied while a base reads, so it reads exactly one epoch;
- a base that finds another marker, or rows missing, is not written.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from cairn.backends.cached.described import StoredState, describe_state
from cairn.backends.cached.rows import scan_rows
from cairn.backends.cached.timer_names import is_index
from cairn.backends.contract import Base, BaseCancelledError, BaseTarget, Content
from cairn.backends.layout import RowsByGroup
from cairn.backends.redis.writer import Counts, Writer
from cairn.crash import crash_point
from cairn.storage.files import SegmentWriter, StateFile
from cairn.storage.pack import write_segment_file
from cairn.types.codec import Key

if TYPE_CHECKING:
    from cairn.backends.overlay import Table
    from cairn.backends.redis.backend import RedisBackend

_STEP_OPS: Final = 4096
_PIECE_ROWS: Final = 8 * 1024


class Applying:
    """Changes on their way to Redis."""

    def __init__(self, backend: RedisBackend, groups: range) -> None:
        self._backend = backend
        self._groups = groups
        self._lock = threading.Lock()
        # Tables in arrays are counted when they are written.
        self._states = backend.describe_states(groups)
        self.frozen = backend.freeze()
        self._tables = [table.hand_over() for table in backend.columns.values()]
        self._writer: Writer | None = None
        self._cancelled = False
        self._is_done = False
        self._is_closed = False

    def apply(self, term: int, epoch: int, nonce: str, pace: Callable[[], None]) -> None:
        """Make the rows in Redis those of an epoch, which is committed."""
        backend = self._backend
        backend.claim(self._groups, term, epoch + 1)
        self._check()
        writer = self._writer = backend.new_writer(
            self._groups, marker_of(epoch, nonce), self._check
        )
        for rows in self.frozen:
            for piece in rows.ops(rows.prefix):
                writer.add(piece)
                pace()
                self._check()
        for table in self._tables:
            for _, ops in table.ops():
                for count, op in enumerate(ops, start=1):
                    writer.add((op,))
                    if count % _STEP_OPS == 0:
                        pace()
                        self._check()
        counted = backend.describe_states(self._groups)
        states = {n: counted[n] if n in backend.columns else s for n, s in self._states.items()}
        writer.finish(backend.counts_by_group(states, self._groups))
        crash_point("slot.rows.applied")
        self._end(writer)

    def _end(self, writer: Writer) -> None:
        with self._lock:
            self._check()
            # In this order: a reader that finds nothing frozen must find the rows in Redis.
            writer.end(is_written=True)
            for rows in self.frozen:
                rows.frozen = {}
            for table in self._tables:
                table.end(is_written=True)
            self._is_done = True
            self._backend.note_applied()

    def cancel(self) -> None:
        """Give up, unless all is written. Called on the thread that begins bases."""
        with self._lock:
            self._cancelled = True
            if not self._is_done:
                self._undo()

    def _undo(self) -> None:
        if self._writer is not None:
            self._writer.end(is_written=False)
        for table in self._tables:
            table.end(is_written=False)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._is_done:
                self._cancelled = True
                self._undo()
        self._backend.end_applying(self, is_written=self._is_done)

    def _check(self) -> None:
        if self._cancelled:
            raise BaseCancelledError

    check = _check


class RedisBase(Base):
    def __init__(self, backend: RedisBackend, tables: Mapping[str, Table], groups: range) -> None:
        self._backend = backend
        self._tables = dict(tables)
        self._groups = groups
        self._packings = dict(backend.packings())
        self._applying = backend.begin_apply(groups)

    def close(self) -> None:
        self._applying.close()

    def write(self, target: BaseTarget, pace: Callable[[], None]) -> StateFile:
        self._applying.apply(target.term, target.epoch, target.epoch_nonce, pace)
        with tempfile.NamedTemporaryFile(dir=target.scratch, prefix="base-") as file:
            writer = SegmentWriter(
                file, "base", target.operator, first_epoch=0, last_epoch=target.epoch
            )
            for name, packing in sorted(self._packings.items()):
                if is_index(name):
                    continue  # A restore makes it from the rows.
                table = self._tables.get(name)
                described: StoredState = describe_state(packing, {})
                pieces = described.layout(name).pieces(self._scan(name), _PIECE_ROWS)
                for number, batch in enumerate(pieces):
                    if table is not None:
                        batch = table.leave_out_expired(batch)
                    if not number:
                        writer.begin_state(name, batch.schema)
                    writer.write(batch)
                    pace()
            # Nothing was lost while it was read, so the base is whole.
            self._backend.database.check()
            written = writer.finish()
            file.flush()
            self._applying.check()
            return write_segment_file(
                target.store,
                written,
                file.name,
                target.term,
                inline_bytes_max=target.inline_bytes_max,
            )

    def _scan(self, name: str) -> RowsByGroup:
        database = self._backend.database
        for group in self._groups:
            some: dict[Key, Content] = {}
            for key, held in self._rows(database.prefix(name, group), name):
                some[key] = held
                if len(some) >= _PIECE_ROWS:
                    yield group, some
                    some = {}
            if some:
                yield group, some

    def _rows(self, prefix: bytes, name: str) -> Iterator[tuple[Key, Content]]:
        for found in scan_rows(self._backend.database, prefix, self._packings[name]):
            self._applying.check()
            yield found


def marker_of(epoch: int, nonce: str) -> str:
    return f"{epoch}:{nonce}"


def counts_of(states: Mapping[str, StoredState], numbers: Mapping[str, int], group: int) -> Counts:
    """Return what the fence of a key group lists."""
    return {numbers[name]: state.counts.get(group, (0, 0)) for name, state in states.items()}
