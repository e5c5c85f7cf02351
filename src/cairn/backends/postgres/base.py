"""A base in PostgreSQL: the changes since the last one are written, and an index of the rest.

Changes that are unwritten when the base begins are frozen, and written in pieces while later epochs
run. Then the history of the rows is one epoch longer, and an index with it goes to the checkpoint.

Always true here:
- only the thread that begins bases makes frozen changes unwritten again;
- a history is extended when all rows of the epoch and the index are stored, not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from cairn.backends.cached.database import Op
from cairn.backends.cached.timer_names import is_index
from cairn.backends.contract import Base, BaseCancelledError, BaseTarget
from cairn.backends.postgres.database import History, PostgresDatabase, extend
from cairn.backends.postgres.files import PostgresIndex, encode_index
from cairn.backends.postgres.writer import Writer
from cairn.crash import crash_point
from cairn.storage.files import StateFile
from cairn.storage.pack import state_path
from cairn.storage.paths import EXTERNAL_SUFFIX

if TYPE_CHECKING:
    from cairn.backends.postgres.backend import PostgresBackend

_STEP_OPS: Final = 4096


class PostgresBase(Base):
    def __init__(self, backend: PostgresBackend, groups: range) -> None:
        self._backend = backend
        self._groups = groups
        self._lock = threading.Lock()
        # Tables in arrays are counted when they are written.
        self._states = backend.describe_states(groups)
        self.frozen = backend.freeze()
        self._tables = [table.hand_over() for table in backend.columns.values()]
        self._cancelled = False
        self._is_done = False
        self._is_closed = False

    def cancel(self) -> None:
        """Give up, unless all is written. Called on the thread that begins bases."""
        with self._lock:
            if self._is_done or self._cancelled:
                return
            self._cancelled = True
            for table in self._tables:
                table.end(is_written=False)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._is_done:
                self._cancelled = True
                for table in self._tables:
                    table.end(is_written=False)
        self._backend.end_base(self, is_written=self._is_done)

    def write(self, target: BaseTarget, pace: Callable[[], None]) -> StateFile:
        backend = self._backend
        writer = Writer(
            backend.writes,
            backend.schema,
            backend.operator,
            self._groups,
            target.term,
            target.epoch,
        )
        writer.claim(self._states)
        pending: list[Op] = []
        for ops in self._ops():
            for op in ops:
                pending.append(op)
                if len(pending) >= _STEP_OPS:
                    writer.write(pending)
                    pending = []
                    pace()
                    self._check()
        if pending:
            writer.write(pending)
        crash_point("slot.rows.applied")
        self._check()
        counted = backend.describe_states(self._groups)
        states = {n: counted[n] if n in backend.columns else s for n, s in self._states.items()}
        # Not the writer's: epochs that an earlier leader committed later may be rolled back.
        epoch_term = target.term if target.epoch_term is None else target.epoch_term
        histories = {
            database: extend(database.history, backend.schema, epoch_term, target.epoch)
            for database in backend.databases(self._groups)
        }
        parts = backend.list_parts(self._groups, histories)
        visible: dict[int, dict[int, str]] = {}
        for part in parts:
            for name, number in part.states.items():
                if is_index(name):
                    continue  # No reader sees it.
                epochs = part.history[0].visible
                visible.setdefault(number, {}).update(dict.fromkeys(part.groups, epochs))
        writer.finish(visible)
        stored = self._store(
            target,
            PostgresIndex(
                operator=target.operator,
                epoch=target.epoch,
                address=backend.address,
                states=states,
                parts=parts,
            ),
        )
        self._end(histories)
        return stored

    def _ops(self) -> Iterator[Iterator[Op]]:
        for rows in self.frozen:
            for piece in rows.ops(rows.prefix):
                yield iter(piece)
                self._check()
        for table in self._tables:
            for _, ops in table.ops():
                yield ops
                self._check()

    def _store(self, target: BaseTarget, index: PostgresIndex) -> StateFile:
        digest, data = encode_index(index)
        path = state_path(target.term, f"{digest}{EXTERNAL_SUFFIX}")
        target.store.put(path, data)
        return StateFile(
            digest,
            "base",
            len(data),
            index.rows,
            path=path,
            format="postgres",
            uploaded_bytes=len(data),
        )

    def _end(self, histories: dict[PostgresDatabase, History]) -> None:
        with self._lock:
            self._check()
            # In this order: a reader that finds nothing frozen must find the database.
            for database, history in histories.items():
                database.history = history
            for rows in self.frozen:
                rows.frozen = {}
            for table in self._tables:
                table.end(is_written=True)
            self._is_done = True

    def _check(self) -> None:
        if self._cancelled:
            raise BaseCancelledError
