"""A base in a database with versions: changes since the last one are written, and an index of all.

After the changes are written (`cached.outside`), the history of the rows is one epoch longer, and
an index with it goes to the checkpoint.

Always true here:
- a history is extended when all rows of the epoch and the index are stored, not before;
- rows of a base that was given up, by this slot or another one, are in no history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cairn.backends.cached.database import Op
from cairn.backends.cached.outside import Outgoing
from cairn.backends.cached.timer_names import is_index
from cairn.backends.contract import Base, BaseCancelledError, BaseTarget
from cairn.backends.versioned.contract import Layer, Writing
from cairn.backends.versioned.database import History, VersionedDatabase, extend
from cairn.backends.versioned.index import VersionedIndex, encode_index, format_of
from cairn.crash import crash_point
from cairn.storage.files import StateFile
from cairn.storage.pack import state_path
from cairn.storage.paths import EXTERNAL_SUFFIX

if TYPE_CHECKING:
    from cairn.backends.versioned.backend import VersionedBackend

_STEP_OPS: Final = 4096


class VersionedBase(Outgoing, Base):
    def __init__(self, backend: VersionedBackend, groups: range) -> None:
        super().__init__(backend, groups)
        self._backend = backend
        self._histories: dict[VersionedDatabase, History] = {}
        """By database: the history with the epoch of this base."""

    def write(self, target: BaseTarget, pace: Callable[[], None]) -> StateFile:
        backend = self._backend
        versions = backend.versions
        writing = Writing(backend.operator, tuple(self._groups), target.term, target.epoch)
        claimed = versions.claim(writing, self._states)
        if not target.is_awaited and max(claimed.values(), default=-1) >= target.epoch:
            # Another slot has left rows of this epoch. A base of a later one does not see them.
            raise BaseCancelledError
        pending: list[Op] = []
        for ops in self.ops():
            for op in ops:
                pending.append(op)
                if len(pending) >= _STEP_OPS:
                    versions.write(writing, pending)
                    pending = []
                    pace()
                    self.check()
        if pending:
            versions.write(writing, pending)
        crash_point("slot.rows.applied")
        self.check()
        states = self.states()
        # Not the writer's: epochs that an earlier leader committed later may be rolled back.
        epoch_term = target.term if target.epoch_term is None else target.epoch_term
        self._histories = {
            database: extend(
                database.history,
                versions.place,
                epoch_term,
                target.epoch,
                max(claimed.get(group, -1) for group in groups),
            )
            for database, groups in backend.databases(self._groups).items()
        }
        parts = backend.list_parts(self._groups, self._histories)
        visible: dict[int, dict[int, Layer]] = {}
        for part in parts:
            for name, number in part.states.items():
                if is_index(name):
                    continue  # No reader sees it.
                by_group = dict.fromkeys(part.groups, part.history[0])
                visible.setdefault(number, {}).update(by_group)
        versions.finish(writing, visible)
        stored = self._store(
            target,
            VersionedIndex(
                operator=target.operator,
                epoch=target.epoch,
                address=dict(versions.address),
                kind=versions.kind,
                states=states,
                parts=parts,
            ),
        )
        self.end()
        return stored

    def _store(self, target: BaseTarget, index: VersionedIndex) -> StateFile:
        digest, data = encode_index(index)
        path = state_path(target.term, f"{digest}{EXTERNAL_SUFFIX}")
        target.store.put(path, data)
        return StateFile(
            digest,
            "base",
            len(data),
            index.rows,
            path=path,
            format=format_of(index.kind),
            uploaded_bytes=len(data),
        )

    def _show(self) -> None:
        for database, history in self._histories.items():
            database.history = history
