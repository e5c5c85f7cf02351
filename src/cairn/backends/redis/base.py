"""Committed changes go to Redis, and from time to time all rows from there to the checkpoint.

    Applying      the changes since the last one, in the background
    RedisBase     the same, then a segment of all rows, as the heap writes it

Always true here:
- nothing is applied while a base reads, so it reads exactly one epoch;
- a base that finds another marker, or rows missing, is not written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from cairn.backends.cached.described import StoredState, describe_state
from cairn.backends.cached.outside import Outgoing
from cairn.backends.cached.rows import scan_rows
from cairn.backends.contract import Base, BaseTarget, Content
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


class Applying(Outgoing):
    """Changes on their way to Redis."""

    def __init__(self, backend: RedisBackend, groups: range) -> None:
        super().__init__(backend, groups)
        self._backend = backend
        self._writer: Writer | None = None

    def apply(self, term: int, epoch: int, nonce: str, pace: Callable[[], None]) -> None:
        """Make the rows in Redis those of an epoch, which is committed."""
        backend = self._backend
        backend.claim(self._groups, term, epoch + 1)
        self.check()
        writer = self._writer = backend.new_writer(
            self._groups, marker_of(epoch, nonce), self.check
        )
        for ops in self.ops():
            while step := list(islice(ops, _STEP_OPS)):
                writer.add(step)
                pace()
                self.check()
        writer.finish(backend.counts_by_group(self.states(), self._groups))
        crash_point("slot.rows.applied")
        self.end()
        backend.note_applied()

    def _show(self) -> None:
        assert self._writer is not None, "it has written"
        self._writer.end(is_written=True)

    def _undo(self) -> None:
        if self._writer is not None:
            self._writer.end(is_written=False)
        super()._undo()


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
