"""A savepoint: one epoch in its own folder, which any Parquet reader can read.

    savepoint.json                          the list of its content; written last
    state/<uid>/<state>/<nnnnn>.parquet     key_group, key, [entry,] value [, at]; by key group
    sources/<index>/…                       files of Spark's sources

It does not depend on backend, parallelism or place: paths are relative, so it can be copied and
moved. `object` state is binary (a pickle); readers without Arrow's types see an interval as a
number of microseconds.

Always true here:
- if savepoint.json exists, the savepoint is complete;
- rows are read only from files whose bytes match their digest.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.errors import CorruptFileError, RestoreError, StateNotFoundError
from cairn.snapshots.columns import GROUP, StateColumns
from cairn.snapshots.reader import uid_with_state
from cairn.storage.manifest import Scope, StateDecl, operator_uids, unseal
from cairn.storage.paths import JOB_PATH, LOG_FOLDER, SAVEPOINT_PATH, UNFINISHED_PATH
from cairn.storage.store import NotFoundError, Store, open_store
from cairn.storage.verify import Damage

_FETCH_BYTES: Final = 8 << 20
_READ_ROWS: Final = 1 << 16

Progress = Callable[[int, int], None]


class SavedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the savepoint. `digest` is BLAKE2b-128 of its bytes."""

    path: str
    bytes: int
    digest: str


class SavedStateFile(SavedFile, frozen=True, kw_only=True):
    rows: int
    first_group: int
    last_group: int


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    type: str
    entry_type: str | None
    rows: int
    files: list[SavedStateFile]
    ttl: str | None = None

    @property
    def decl(self) -> StateDecl:
        return StateDecl(kind=self.kind, type=self.type, entry_type=self.entry_type, ttl=self.ttl)


class SavedOperator(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    function_version: str
    key_types: dict[str, str]
    states: dict[str, SavedState]
    scope: Scope = "keyed"
    parallelism: int = 0
    """Needed to find the lists of subtasks."""


class SavepointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """savepoint.json."""

    id: str
    job: str
    job_id: str
    max_parallelism: int
    epoch: int
    created_ms: int
    now_ms: int
    watermarks: dict[str, int | None]
    operators: dict[str, SavedOperator]
    batch_id: int
    offsets: str
    """The raw text of Spark's offset file."""
    sources: list[str]
    """The names of the sources, in the order of the offsets."""
    source_files: list[SavedFile]
    watermark_ms: int | None = None
    passed_ms: int | None = None
    seen_ms: dict[str, int] = {}
    timers: dict[str, tuple[int | None, int | None]] | None = None
    """As in the epoch's manifest."""

    @property
    def files(self) -> list[SavedFile]:
        states = [s for operator in self.operators.values() for s in operator.states.values()]
        return [*self.source_files, *(file for state in states for file in state.files)]

    @property
    def rows(self) -> int:
        return sum(s.rows for operator in self.operators.values() for s in operator.states.values())

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


_decode_info: Final = msgspec.json.Decoder(SavepointInfo).decode


class Savepoint:
    """A complete savepoint. Its files are checked when they are read."""

    def __init__(self, store: Store, info: SavepointInfo) -> None:
        self.store = store
        self.info = info

    @property
    def url(self) -> str:
        return self.store.url

    def columns(self, uid: str) -> dict[str, StateColumns]:
        """Return the states of an operator, by name."""
        operator = self._operator(uid)
        return {
            name: StateColumns(name, state.decl, operator.key_types)
            for name, state in operator.states.items()
        }

    def rows(self, uid: str, state: str, groups: range | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a state as EpochReader does; of some key groups, if given."""
        with CheckedFiles(self.store) as files:
            yield from self.read(files, uid, state, groups)

    def read(
        self, files: CheckedFiles, uid: str, state: str, groups: range | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Like `rows`, with files that stay open for the next call."""
        operators = self.info.operators
        uids = operator_uids(operators, uid)
        uid = uid_with_state(operators, uid, state)
        operator = self._operator(uid)
        if state not in operator.states:
            known = ", ".join(name for each in uids for name in operators[each].states) or "none"
            raise StateNotFoundError(
                f"operator {uid!r} has no state {state!r} in the savepoint\n"
                f"  savepoint: {self.url}\n  found: {known}",
                operator=uid,
                state=state,
            )
        saved = operator.states[state]
        columns = StateColumns(state, saved.decl, operator.key_types)
        for file in saved.files:
            if groups is None or (
                file.first_group < groups.stop and file.last_group >= groups.start
            ):
                yield from _read_file(files, file, columns, groups)

    def source_files(self) -> dict[str, bytes]:
        """Return the files below `sources/` of a folder from which Spark continues."""
        found = {}
        for file in self.info.source_files:
            data = b"".join(_stream(self.store, file))
            found[file.path.removeprefix("sources/")] = data
        return found

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """Read and check every file; damage is listed, not raised. Counts files."""
        checks: list[tuple[SavedFile, Callable[[], None]]] = [
            (file, partial(self._check_source, file)) for file in self.info.source_files
        ]
        for operator in self.info.operators.values():
            for name, state in operator.states.items():
                checks += [
                    (file, partial(self._check_state, operator, name, file)) for file in state.files
                ]
        damage = []
        for done, (file, check) in enumerate(checks, start=1):
            try:
                check()
            except CorruptFileError as error:
                damage.append(Damage(file.path, error.message))
            if progress is not None:
                progress(done, len(checks))
        return damage

    def _check_source(self, file: SavedFile) -> None:
        for _ in _stream(self.store, file):
            pass

    def _check_state(self, operator: SavedOperator, name: str, file: SavedStateFile) -> None:
        columns = StateColumns(name, operator.states[name].decl, operator.key_types)
        with CheckedFiles(self.store) as files:
            for _ in _read_file(files, file, columns, None):
                pass

    def _operator(self, uid: str) -> SavedOperator:
        operator = self.info.operators.get(uid)
        if operator is None:
            raise StateNotFoundError(
                f"the savepoint has no operator {uid!r}\n"
                f"  savepoint: {self.url}\n  found: {', '.join(self.info.operators) or 'none'}",
                operator=uid,
            )
        return operator


def open_savepoint(url: str) -> Savepoint:
    """Open a complete savepoint; for anything else, RestoreError describes the folder."""
    try:
        store = open_store(url, create=False)
    except NotFoundError:
        next_step = "give the folder it was written to"
        raise _no_savepoint(url, "no such folder", next_step) from None
    except ValueError as error:
        raise RestoreError(str(error), url=url) from None
    name = f"{store.url}/{SAVEPOINT_PATH}"
    try:
        data = store.get(SAVEPOINT_PATH)
    except NotFoundError:
        raise _no_savepoint(url, *_what_is_there(store)) from None
    return Savepoint(store, unseal(data, name, _decode_info, damaged=_damage_error))


def make_saved_state(decl: StateDecl, files: list[SavedStateFile]) -> SavedState:
    return SavedState(
        kind=decl.kind,
        type=decl.type,
        entry_type=decl.entry_type,
        rows=sum(file.rows for file in files),
        files=files,
        ttl=decl.ttl,
    )


def state_folder(uid: str, state: str) -> str:
    return f"state/{_quote(uid)}/{_quote(state)}"


def _quote(name: str) -> str:
    # A leading dot would hide the folder, and ".." would leave it.
    quoted = quote(name, safe="")
    return "%2E" + quoted[1:] if quoted.startswith(".") else quoted


def _what_is_there(store: Store) -> tuple[str, str]:
    if store.exists(JOB_PATH) or store.list(LOG_FOLDER):
        return "a checkpoint", "`cairn savepoint CHECKPOINT DEST` makes a savepoint of it"
    if store.exists(UNFINISHED_PATH) or store.list("state"):
        return (
            "an unfinished savepoint: savepoint.json, which is written last, is missing",
            "remove it and take the savepoint again",
        )
    return f"no {SAVEPOINT_PATH}", "give the folder it was written to"


def _no_savepoint(url: str, found: str, next_step: str) -> RestoreError:
    return RestoreError(f"no savepoint at {url}\n  found: {found}\n  next: {next_step}", url=url)


def _damage_error(name: str, what: str) -> CorruptFileError:
    return CorruptFileError(
        f"a file of the savepoint is damaged: {what}\n"
        f"  file: {name}\n"
        "  next: use another copy of the savepoint, or take it again",
        file=name,
    )


class CheckedFiles:
    """Local copies of a savepoint's files, their bytes checked once.

    Files of a local savepoint are read in place; others are fetched, and kept until they are
    released.
    """

    def __init__(self, store: Store, scratch: str | None = None) -> None:
        self._store = store
        self._folder = tempfile.TemporaryDirectory(prefix="cairn-savepoint-", dir=scratch)
        self._paths: dict[str, str] = {}

    def __enter__(self) -> CheckedFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._folder.cleanup()

    def name(self, file: SavedFile) -> str:
        return f"{self._store.url}/{file.path}"

    def path(self, file: SavedFile) -> str:
        if file.path not in self._paths:
            self._paths[file.path] = self._fetch(file)
        return self._paths[file.path]

    def release(self, file: SavedFile) -> None:
        path = self._paths.pop(file.path, None)
        if path is not None and path.startswith(self._folder.name):
            os.unlink(path)

    def _fetch(self, file: SavedFile) -> str:
        local = self._store.local_path(file.path)
        if local is not None:
            for _ in _stream(self._store, file):
                pass
            return local
        descriptor, path = tempfile.mkstemp(dir=self._folder.name)
        with os.fdopen(descriptor, "wb") as out:
            for data in _stream(self._store, file):
                out.write(data)
        return path


def _stream(store: Store, file: SavedFile) -> Iterator[bytes]:
    """Yield the bytes of a file; raises at the end unless size and digest match."""
    name = f"{store.url}/{file.path}"
    digest = hashlib.blake2b(digest_size=16)
    offset = 0
    try:
        # One byte more is read, to detect a file that is too long.
        while data := store.get_range(
            file.path, offset, min(_FETCH_BYTES, file.bytes + 1 - offset)
        ):
            digest.update(data)
            offset += len(data)
            yield data
            if offset > file.bytes:
                break
    except NotFoundError:
        raise _damage_error(name, "the file is missing") from None
    if offset != file.bytes:
        more = "more than " if offset > file.bytes else ""
        found = min(offset, file.bytes)
        raise _damage_error(name, f"it has {more}{found} bytes, savepoint.json says {file.bytes}")
    if digest.hexdigest() != file.digest:
        raise _damage_error(
            name, f"its digest is {digest.hexdigest()}, savepoint.json says {file.digest}"
        )


def _read_file(
    files: CheckedFiles, file: SavedStateFile, columns: StateColumns, groups: range | None
) -> Iterator[pa.RecordBatch]:
    name = files.name(file)
    path = files.path(file)
    row_count = 0
    try:
        with pq.ParquetFile(path) as parquet:
            if parquet.schema_arrow.names != columns.parquet_schema.names:
                raise _damage_error(
                    name, f"its columns are {', '.join(parquet.schema_arrow.names)}"
                )
            wanted = _row_groups(parquet.metadata, groups)
            for batch in parquet.iter_batches(_READ_ROWS, row_groups=wanted):
                row_count += batch.num_rows
                rows = columns.from_parquet(batch)
                if groups is not None:
                    found = rows[GROUP].to_numpy()
                    low, high = np.searchsorted(found, [groups.start, groups.stop]).tolist()
                    rows = rows.slice(low, high - low)
                if rows.num_rows:
                    yield rows
    except (pa.ArrowException, OSError) as error:
        raise _damage_error(name, str(error)) from error
    if groups is None and row_count != file.rows:
        raise _damage_error(name, f"it has {row_count} rows, savepoint.json says {file.rows}")


def _row_groups(metadata: Any, groups: range | None) -> list[int]:
    """Return the row groups that may hold these key groups, by their statistics."""
    if groups is None:
        return list(range(metadata.num_row_groups))
    found = []
    for index in range(metadata.num_row_groups):
        known = metadata.row_group(index).column(0).statistics
        is_known = known is not None and known.has_min_max
        if not is_known or (known.min < groups.stop and known.max >= groups.start):
            found.append(index)
    return found
