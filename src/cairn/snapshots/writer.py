"""Write a savepoint from another one and from tables.

Unchanged states are copied file by file. For the others, kept and given rows are sorted by key
group and written again, in this process or by a `Rewriter`.

Always true here:
- kept rows are read from files whose bytes were checked;
- a row is in the key group of its key in the new savepoint; lists of subtasks and shared state
  are where a job reads them;
- the earliest timers are stored only if they are known; otherwise the job finds them.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cairn.errors import StateSchemaError
from cairn.key_groups import groups_of, key_groups
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.destination import Destination, Put, StateWriter
from cairn.snapshots.draft import Draft, DraftOperator, DraftState, EditedEpoch
from cairn.snapshots.savepoint import (
    CheckedFiles,
    SavedOperator,
    SavedState,
    SavedStateFile,
    Savepoint,
    SavepointInfo,
    make_saved_state,
    open_savepoint,
)
from cairn.snapshots.saving import note_written, write_savepoint
from cairn.snapshots.table_rows import PATCH, PUT, RANK, TableRows, one_batch
from cairn.state import TTL
from cairn.storage.manifest import StateDecl
from cairn.storage.store import open_store

_EPOCH_FOLDER: Final = "base"
NOTHING_READ: Final = -1
"""Stands for a batch: Spark has read nothing, all sources start at their beginning."""


@dataclass(frozen=True)
class StateTask:
    """One state to be written. It can be pickled for executors, which write it in parts."""

    uid: str
    name: str
    decl: StateDecl
    key_types: dict[str, str]
    by_key: bool
    """Rows are in the groups of their keys; otherwise in those of subtasks, or all in one."""
    parallelism: int
    """The number of subtasks; 1 for state that all share."""
    group_count: int
    stamp_ms: int | None
    dest_url: str
    kept: tuple[str, str, str] | None = None
    """The savepoint, operator and state whose rows it keeps."""
    kept_group_count: int = 0
    """The number of key groups in that savepoint."""
    first_rank: int = PUT
    """The rank of the first table that is given."""

    @property
    def rows(self) -> TableRows:
        columns = StateColumns(self.name, self.decl, self.key_types)
        return TableRows(self.uid, columns, self.stamp_ms)

    def read_kept_rows(self, groups: range | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the kept rows, staged; `groups` are key groups of their own savepoint."""
        if self.kept is None:
            return
        url, uid, name = self.kept
        rows = self.rows
        for batch in open_savepoint(url).rows(uid, name, groups):
            yield rows.from_plain(batch)

    def write(
        self, batches: Iterable[pa.RecordBatch], put: Put, folder: str, part: str = ""
    ) -> list[SavedStateFile]:
        """Write staged rows, in order (see `TableRows.to_plain`), as files of the savepoint."""
        rows = self.rows
        writer = StateWriter(put, self.uid, rows.columns, folder, part=part)
        for batch in rows.to_plain(batches):
            writer.write(batch)
        return writer.finish()


class Rewriter(Protocol):
    """Reads given tables, and may write states elsewhere."""

    def collect(self, given: Any) -> pa.Table:
        """Return a given table, of a small state."""
        ...

    def rewrite(self, task: StateTask, given: Sequence[Any]) -> list[SavedStateFile] | None:
        """Write a keyed state; None leaves it to the caller."""
        ...


class Here:
    """Does all work in this process; tables are Arrow tables."""

    def collect(self, given: Any) -> pa.Table:
        assert isinstance(given, pa.Table), "other tables need another Rewriter"
        return given

    def rewrite(self, task: StateTask, given: Sequence[Any]) -> list[SavedStateFile] | None:
        return None


def write_draft(draft: Draft, dest_url: str, rewriter: Rewriter | None = None) -> SavepointInfo:
    """Write a draft to an empty folder. It can be written again."""
    draft.check_complete()
    savepoint_id = str(uuid.uuid4())
    now_ms = time.time_ns() // 1_000_000
    edited = draft.edited
    checkpoint = edited if isinstance(edited, EditedEpoch) else None
    if checkpoint is not None:
        checkpoint.reading.renew()
    epoch = edited.epoch if isinstance(edited, EditedEpoch) else edited.info.epoch if edited else 0
    dest = Destination(open_store(dest_url), savepoint_id, epoch)
    try:
        with tempfile.TemporaryDirectory(prefix="cairn-savepoint-") as folder:
            if isinstance(edited, EditedEpoch):
                # Inside the unfinished savepoint, so that it is never used as one.
                epoch_url = f"{dest.store.url}/{_EPOCH_FOLDER}"
                write_savepoint(
                    edited.store,
                    edited.epoch,
                    epoch_url,
                    spark_store=edited.spark_store,
                    scratch=folder,
                    note=False,
                )
                edited = open_savepoint(epoch_url)
            info = _info(draft, edited, savepoint_id, now_ms)
            if edited is not None:
                sources = dest.put_sources(edited.source_files())
                info = msgspec.structs.replace(info, source_files=sources)
            writing = _Writing(draft, edited, dest, folder, rewriter or Here(), info)
            info = msgspec.structs.replace(info, operators=writing.operators())
            dest.store.delete_folder(_EPOCH_FOLDER)
        dest.finish(info)
    except BaseException:
        with contextlib.suppress(Exception):
            dest.store.delete_folder(_EPOCH_FOLDER)
        dest.undo()
        raise
    if checkpoint is not None:
        note_written(checkpoint.store, info, dest.store.url)
    return info


def _info(
    draft: Draft, edited: Savepoint | None, savepoint_id: str, created_ms: int
) -> SavepointInfo:
    """Return the facts that are known before the first row."""
    if edited is None:
        return SavepointInfo(
            id=savepoint_id,
            job=draft.job,
            job_id=str(uuid.uuid4()),
            max_parallelism=draft.group_count,
            epoch=0,
            created_ms=created_ms,
            now_ms=created_ms,
            watermarks={},
            operators={},
            batch_id=NOTHING_READ,
            offsets="",
            sources=[],
            source_files=[],
        )
    return msgspec.structs.replace(
        edited.info,
        id=savepoint_id,
        max_parallelism=draft.group_count,
        created_ms=created_ms,
        timers=edited.info.timers if draft.keeps_timers else None,
    )


class _Writing:
    """Writes the states of one draft to a destination."""

    def __init__(
        self,
        draft: Draft,
        edited: Savepoint | None,
        dest: Destination,
        folder: str,
        rewriter: Rewriter,
        info: SavepointInfo,
    ) -> None:
        self._draft = draft
        self._edited = edited
        self._dest = dest
        self._folder = folder
        self._rewriter = rewriter
        self._info = info

    def operators(self) -> dict[str, SavedOperator]:
        return {uid: self._operator(operator) for uid, operator in self._draft.operators.items()}

    def _operator(self, operator: DraftOperator) -> SavedOperator:
        given: dict[str, list[Any]] = {n: s.given for n, s in operator.states.items()}
        parallelism = operator.parallelism
        if operator.scope != "keyed":
            given = {n: [self._rewriter.collect(t) for t in each] for n, each in given.items()}
        if operator.scope == "subtask":
            parallelism = max([parallelism, 1, *(self._subtasks(each) for each in given.values())])
        states = {}
        for name, state in operator.states.items():
            if self._is_as_it_was(operator, state, parallelism):
                states[name] = self._copy_state(operator.uid, name, state)
            else:
                task = self._task(operator, name, state, parallelism)
                files = None
                if operator.scope == "keyed":
                    files = self._rewriter.rewrite(task, given[name])
                if files is None:
                    files = self._rewrite(task, given[name])
                states[name] = make_saved_state(state.decl, self._dest.wrote(files))
        return SavedOperator(
            uid=operator.uid,
            function_version=operator.function_version,
            key_types=operator.key_types,
            states=states,
            scope=operator.scope,
            parallelism=parallelism,
        )

    def _subtasks(self, tables: list[pa.Table]) -> int:
        """Return the number of subtasks in these tables."""
        count = 0
        for table in tables:
            if "subtask" not in table.column_names or not table.num_rows:
                continue
            numbers = table["subtask"].drop_null().to_numpy()
            low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
            if low < 0 or high >= self._draft.group_count:
                raise StateSchemaError(
                    f"subtask {low if low < 0 else high} is out of range\n"
                    f"  expected: 0 to {self._draft.group_count - 1}, as max_parallelism is "
                    f"{self._draft.group_count}\n  next: number the subtasks from 0 on"
                )
            count = max(count, high + 1)
        return count

    def _is_as_it_was(self, operator: DraftOperator, state: DraftState, parallelism: int) -> bool:
        if state.given or state.kept is None:
            return False
        if operator.scope == "shared":
            return True
        is_spread_alike = operator.scope != "subtask" or parallelism == operator.parallelism
        return is_spread_alike and self._draft.group_count == self._draft.edited_group_count

    def _copy_state(self, uid: str, name: str, state: DraftState) -> SavedState:
        assert self._edited is not None and state.kept is not None
        was_uid, was_name = state.kept
        rows = StateColumns(name, state.decl, self._edited.info.operators[was_uid].key_types)
        names = StateWriter(self._dest.put_file, uid, rows, self._folder)
        files = []
        with CheckedFiles(self._edited.store, self._folder) as checked:
            saved = self._edited.info.operators[was_uid].states[was_name]
            for number, file in enumerate(saved.files):
                path = names.path(number)
                self._dest.put_file(path, checked.path(file))
                checked.release(file)
                files.append(msgspec.structs.replace(file, path=path))
        return make_saved_state(state.decl, files)

    def _task(
        self, operator: DraftOperator, name: str, state: DraftState, parallelism: int
    ) -> StateTask:
        kept = None
        if state.kept is not None:
            assert self._edited is not None
            kept = (self._edited.url, *state.kept)
        stamp_ms = self._draft.rows_of(operator, name).stamp_ms
        ttl = TTL.of(state.decl.ttl)
        if ttl is not None and ttl.clock == "processing":
            stamp_ms = self._info.now_ms
        return StateTask(
            uid=operator.uid,
            name=name,
            decl=state.decl,
            key_types=operator.key_types,
            by_key=self._draft.is_by_key(operator),
            parallelism=1 if operator.scope == "shared" else parallelism,
            group_count=self._draft.group_count,
            stamp_ms=stamp_ms,
            dest_url=self._dest.store.url,
            kept=kept,
            kept_group_count=self._draft.edited_group_count,
            first_rank=PUT if state.is_put else PATCH,
        )

    def _rewrite(self, task: StateTask, given: list[pa.Table]) -> list[SavedStateFile]:
        rows = task.rows
        staged = list(task.read_kept_rows())
        for rank, table in enumerate(given, start=task.first_rank):
            staged += [rows.stage(batch, rank) for batch in table.to_batches()]
        whole = one_batch(pa.Table.from_batches(staged, schema=rows.staged))
        batches = [in_order(task, whole)] if whole.num_rows else []
        return task.write(batches, self._dest.put_file, self._folder)


def in_order(task: StateTask, staged: pa.RecordBatch) -> pa.RecordBatch:
    """Return staged rows with their key groups, in the order for `TableRows.to_plain`."""
    rows = task.rows
    keys = rows.keys(staged)
    groups = _groups(task, keys)
    names = rows.columns.keys.decode_keys(keys)
    by = [-staged[RANK].to_numpy(), _number(rows.places(staged)), _number(names), groups]
    for name in rows.order if rows.is_whole else []:
        by.insert(0, staged[name].cast(pa.int64()).fill_null(-1).to_numpy())
    order = pa.array(np.lexsort(by))
    return rows.with_groups(pa.array(groups), staged).take(order)


def _groups(task: StateTask, keys: pa.Array) -> npt.NDArray[np.int64]:
    if task.by_key:
        return key_groups(keys, task.rows.columns.key_type, task.group_count)
    if task.rows.columns.decl.kind == "broadcast":
        return np.zeros(len(keys), np.int64)
    starts = [
        groups_of(i, task.parallelism, task.group_count).start for i in range(task.parallelism)
    ]
    subtasks = keys.fill_null(0).to_numpy()
    found: npt.NDArray[np.int64] = np.array(starts, np.int64)[subtasks]
    return found


def _number(values: list[Any]) -> npt.NDArray[np.int64]:
    """Return a number for each value, equal for equal values."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(v, len(numbers)) for v in values], np.int64)
