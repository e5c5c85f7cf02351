"""The stored states of an epoch or a savepoint, behind one interface.

Always true here:
- any number of threads may read at once;
- an epoch is held while its states are open, if the checkpoint can be written to; if not, and
  its files are removed, reading raises StaleEpochError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from cairn.backends.files import group_counts
from cairn.errors import CorruptFileError
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.holds import Unheld
from cairn.snapshots.reader import EpochReader
from cairn.snapshots.savepoint import CheckedFiles, Savepoint
from cairn.storage.manifest import Epoch, FileRef, Scope
from cairn.storage.store import NotFoundError, Store


class About(NamedTuple):
    """The facts of a state that are known without reading it."""

    scope: Scope
    parallelism: int
    rows: int
    """Stored rows of all states of the operator in the same files."""
    bytes: int


class EpochStates:
    def __init__(self, store: Store, reading: Unheld) -> None:
        self.store = store
        self._reading = reading
        self.epoch: Epoch = reading.epoch
        self.operators: Mapping[str, Any] = self.epoch.operators
        self._counts: dict[str, dict[str, dict[int, int]]] = {}

    def columns(self, uid: str) -> dict[str, StateColumns]:
        return EpochReader(self.store, self.epoch).columns(uid)

    def about(self, uid: str, state: str) -> About:
        operator = self.epoch.operators[uid]
        refs = self._refs(uid)
        rows, size = sum(ref.rows for ref in refs), sum(ref.size for ref in refs)
        return About(operator.scope, len(operator.ranges), rows, size)

    def read(
        self,
        columns: StateColumns,
        uid: str,
        groups: range,
        keys: pa.Array | None,
        *,
        ordered: bool,
    ) -> Iterator[pa.RecordBatch]:
        """Yield plain rows; with `keys`, at least those of these keys, perhaps a few others."""
        name = columns.name
        try:
            with EpochReader(self.store, self.epoch) as reader:
                only = None if keys is None else {name: keys}
                for chunk in reader.chunks(uid, groups, [name], only, ordered=ordered):
                    self._reading.renew()
                    yield from chunk.rows[name]
        except (CorruptFileError, NotFoundError):
            self._reading.check_kept()
            raise

    def group_rows(self, uid: str, state: str) -> Counter[int]:
        """Return the stored rows per key group, to estimate the cost of reading."""
        found: Counter[int] = Counter()
        try:
            for ref in self._refs(uid):
                counted = ref.groups
                for group, rows in self._count_groups(ref).get(state, {}).items():
                    if group in counted:
                        found[group] += rows
        except (CorruptFileError, NotFoundError):
            self._reading.check_kept()
            raise
        return found

    @property
    def hold_path(self) -> str | None:
        """The path of the hold on the epoch; None without one."""
        return self._reading.hold_path

    def close(self) -> None:
        self._reading.release()

    def _count_groups(self, ref: FileRef) -> dict[str, dict[int, int]]:
        if ref.id not in self._counts:
            self._counts[ref.id] = group_counts(self.store, ref)
        return self._counts[ref.id]

    def _refs(self, uid: str) -> list[FileRef]:
        return [ref for part in self.epoch.operators[uid].ranges for ref in part.files]


class SavepointStates:
    def __init__(self, savepoint: Savepoint) -> None:
        self._savepoint = savepoint
        self._files = CheckedFiles(savepoint.store)
        self.operators: Mapping[str, Any] = savepoint.info.operators

    def columns(self, uid: str) -> dict[str, StateColumns]:
        return self._savepoint.columns(uid)

    def about(self, uid: str, state: str) -> About:
        operator = self._savepoint.info.operators[uid]
        saved = operator.states[state]
        size = sum(file.bytes for file in saved.files)
        return About(operator.scope, operator.parallelism, saved.rows, size)

    def read(
        self,
        columns: StateColumns,
        uid: str,
        groups: range,
        keys: pa.Array | None,
        *,
        ordered: bool,
    ) -> Iterator[pa.RecordBatch]:
        return self._savepoint.read(self._files, uid, columns.name, groups)

    def group_rows(self, uid: str, state: str) -> Counter[int]:
        found: Counter[int] = Counter()
        for file in self._savepoint.info.operators[uid].states[state].files:
            groups = range(file.first_group, file.last_group + 1)
            each, left = divmod(file.rows, len(groups))
            for group in groups:
                found[group] += each + (group - groups.start < left)
        return found

    def close(self) -> None:
        self._files.close()


StoredStates = EpochStates | SavepointStates
