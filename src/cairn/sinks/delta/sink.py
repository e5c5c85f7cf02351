"""Delta: a Delta Lake table, one commit of its log per epoch.

    <table>/part-<epoch>-<subtask>-<digest>.parquet   data; invisible until the log names it
    <table>/_cairn/<sink>/part-…                      an empty note of each such file; in merge
                                                      mode the rows themselves

Slots write files, the driver commits: with `mode="append"` it names them in the table's log,
with `mode="merge"` it merges their rows by key. Either way the commit carries an application
transaction that names job, sink, epoch and batch. That is the mark.

Always true here:
- rows and mark are one entry of the table's log, so a reader sees a whole epoch or nothing
  of it, and an epoch that is marked is not committed again;
- two drivers that commit at once write the same transaction id: one of them is refused, reads
  the log again and finds the mark;
- an epoch is published as it was prepared, with its mode, key and columns;
- before anything is deleted, the log notes the epoch below which nothing may be committed;
- a data file that the log names, or that a readable older version names, is never deleted here.

If the driver dies during a merge, files under delta-rs' own names stay in the table's folder,
invisible. So does a file that an abandoned slot stored after `recover` had deleted its note. The
table's VACUUM deletes them, as after any failed write.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.crash import crash_point
from cairn.errors import CommitError, PlanError
from cairn.ids import digest
from cairn.logs import logger
from cairn.sinks.base import (
    Committable,
    Execution,
    Sink,
    SinkContext,
    Writer,
    causes,
    without_password,
)
from cairn.sinks.delta.files import AppendWriter, MergeWriter
from cairn.sinks.delta.schema import (
    check_columns,
    check_partitions,
    check_table,
    missing_columns,
)
from cairn.storage.environment import read_setting
from cairn.storage.store import NotFoundError, Store, file_path, is_away, open_store

BATCH_BITS = 20
CONFLICTS_MAX = 10
LOOKS_AT_ONCE = 16
NOTHING_COMMITTED = -1
_AWAY: Final = re.compile(
    r"error sending request|connection|connect error|timed? ?out|dns error|HTTP error|"
    r"server error|service unavailable",
    re.IGNORECASE,
)


class _Prepared(NamedTuple):
    """An epoch as it was prepared, possibly by another program."""

    files: list[dict[str, Any]]
    key: tuple[str, ...]
    """Columns to merge by; empty if files are appended."""
    columns: Sequence[str]


class Delta(Sink):
    """A Delta Lake table, each row exactly once, each epoch one version of the table.

    With `mode="merge"` rows replace those of the same `key`, and the last one of an epoch wins;
    the driver holds an epoch's rows while it merges them. `create` makes a missing table from the
    schema; `merge_schema` adds missing columns. Values of `storage_options` may be "env:NAME".
    """

    def __init__(
        self,
        path: str,
        *,
        mode: Literal["append", "merge"] = "append",
        key: Sequence[str] | str = (),
        partition_by: Sequence[str] | str = (),
        create: bool = True,
        merge_schema: bool = False,
        storage_options: Mapping[str, str] | None = None,
        compression: str = "snappy",
        buffer_bytes_max: int = 64 * 1024 * 1024,
    ) -> None:
        local = file_path(str(path))
        self.path = local if "://" in local else os.path.abspath(local)
        if "%" in self.path:
            raise PlanError(
                f"Delta: the path has a '%', which deltalake reads as an escape: {self.path}\n"
                "  next: rename the table's folder"
            )
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.partition_by = (
            (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        )
        if mode not in ("append", "merge"):
            raise PlanError(f"Delta: unknown mode {mode!r}\n  expected: 'append' or 'merge'")
        if (mode == "merge") != bool(self.key):
            raise PlanError(
                "Delta: mode='merge' and key= go together\n"
                f"  found: mode={mode!r}, key={list(self.key)}\n"
                "  next: name the columns that identify a row, or use mode='append'"
            )
        if compression not in ("snappy", "zstd", "gzip", "lz4", "none"):
            raise PlanError(f"Delta: unknown compression {compression!r}")
        self.mode = mode
        self.create = create
        self.merge_schema = merge_schema
        self.storage_options = dict(storage_options or {})
        self.compression = compression
        self.buffer_bytes_max = buffer_bytes_max

    def __getstate__(self) -> dict[str, Any]:
        opened = ("context", "store", "home", "partitions", "required")
        return {k: v for k, v in vars(self).items() if k not in opened and k[0] != "_"}

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._delta = _library()
        check_columns(context.schema, self)
        self._options = {
            name: read_setting(value, f"storage option {name!r} of sink {context.uid!r}")
            for name, value in self.storage_options.items()
        }
        self.home = digest(context.job_id.encode(), context.uid.encode())[:16]
        self._app = f"cairn/{context.job_id}/{context.uid}"
        self._table: Any = self._open_table()
        is_driver = context.scratch is None
        if is_driver and self.merge_schema:
            self._on_newest(self._add_columns)
        table = self._refresh()
        check_table(table, context.schema, self)
        self.partitions = check_partitions(table, context.schema, self)
        self.required = {f.name for f in table.schema().fields if not f.nullable}
        self.store: Store = open_store(self.path, options=self._options)
        # Slots do not read the log again, and it may be large.
        if not is_driver:
            self._table = None

    @property
    def target(self) -> str:
        return f"the Delta table {without_password(self.store.url)}"

    def is_away(self, error: Exception) -> bool:
        """True if the table's store cannot be reached now, and may be later."""
        # Delta-rs raises plain OSErrors, which differ only in their text.
        return any(
            is_away(each) or (type(each) is OSError and bool(_AWAY.search(str(each))))
            for each in causes(error)
        )

    def close(self) -> None:
        self._table = None

    def staging_path(self, name: str) -> str:
        return f"_cairn/{self.home}/{name}"

    def writer(self, epoch: int, subtask: int, execution: Execution) -> Writer:
        kind = AppendWriter if self.mode == "append" else MergeWriter
        return kind(self, epoch, subtask, execution)

    def commit(self, epoch: int, committables: Sequence[Committable], batch: int = 0) -> None:
        prepared = self._read_prepared(epoch, committables)
        if not prepared.files:
            return
        assert batch < 1 << BATCH_BITS, "an epoch has fewer batches"
        mark = epoch << BATCH_BITS | batch
        if self._on_newest(lambda table: self._publish_once(table, epoch, mark, prepared)):
            self.store.delete(self.staging_path(file["name"]) for file in prepared.files)

    def _read_prepared(self, epoch: int, committables: Sequence[Committable]) -> _Prepared:
        """Return the files of an epoch, with the key and columns they were prepared with."""
        files = [file for committable in committables for file in committable["files"]]
        is_merge = bool(files) and "place" in files[0]
        # Committables of older versions name neither.
        first = committables[0] if committables else {}
        key = first.get("key", self.key) if is_merge else ()
        if is_merge and not key:
            raise self._refusal(
                epoch,
                "it was prepared with mode='merge', by a version that did not record the key\n"
                "  next: start the job with mode='merge' and that key once more, and change it "
                "after this epoch",
            )
        return _Prepared(files, tuple(key), first.get("columns", self.context.schema.names))

    def newest_mark(self) -> int | None:
        committed = self._read_mark(self._refresh())
        return None if committed == NOTHING_COMMITTED else committed >> BATCH_BITS

    def recover(self, before_epoch: int) -> None:
        # Names sort by epoch.
        end = self.staging_path(f"part-{before_epoch:012d}")
        found = self.store.list(f"_cairn/{self.home}/")
        abandoned = [staged for staged in found if staged.path < end]
        if not abandoned:
            return
        self._on_newest(lambda table: self._fence(table, before_epoch))
        # By their content, not by `mode`, which may have changed.
        notes = {staged.path.rsplit("/", 1)[1] for staged in abandoned if not staged.size}
        if notes:
            self.store.delete(notes - self._list_files(self._refresh()))
        self.store.delete(staged.path for staged in abandoned)

    # The table's log

    def _on_newest(self, work: Callable[[Any], Any]) -> Any:
        """Call `work` with the newest table, again if another writer was first."""
        for tries_left in reversed(range(CONFLICTS_MAX)):
            try:
                return work(self._refresh())
            except (self._delta.exceptions.CommitFailedError, NotFoundError):
                # A driver with the same epoch, or another writer.
                if not tries_left:
                    raise

    def _publish_once(self, table: Any, epoch: int, mark: int, prepared: _Prepared) -> bool:
        """Publish an epoch, unless it is published; return False if that is unknown."""
        committed = self._read_mark(table)
        if committed > mark:
            # Published long ago, or abandoned: `recover` decides by the log.
            logger.warning(
                "sink %r: %s already has epoch %d, so epoch %d counts as published",
                self.context.uid, self.path, committed >> BATCH_BITS, epoch,
            )  # fmt: skip
            return False
        if committed == mark:
            return True
        self._check_allowed(table, epoch, prepared)
        rows = self._last_rows(prepared) if prepared.key else None
        crash_point("driver.sink.unmarked")
        self._publish(table, prepared, rows, self._transactions({self._app: mark}))
        if rows is not None and self._read_mark(table) < mark:
            # A merge without changes writes no entry. Not on a refreshed table: the commit must
            # conflict with anything a newer driver has written since.
            self._write_marks(table, {self._app: mark})
        return True

    def _publish(
        self, table: Any, prepared: _Prepared, rows: pa.Table | None, properties: Any
    ) -> None:
        if rows is None:
            now_ms = time.time_ns() // 1_000_000
            actions = [
                self._delta.transaction.AddAction(
                    path=file["name"],
                    size=file["bytes"],
                    partition_values=file["partition"],
                    modification_time=now_ms,
                    data_change=True,
                    stats=file["stats"],
                )
                for file in prepared.files
            ]
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                list(self.partitions),
                commit_properties=properties,
            )
            return
        columns = {_quote(name): f"source.{_quote(name)}" for name in rows.column_names}
        keys = [_quote(name) for name in prepared.key]
        values = {name: value for name, value in columns.items() if name not in keys}
        merge = table.merge(
            rows,
            " and ".join(f"target.{name} = source.{name}" for name in keys),
            source_alias="source",
            target_alias="target",
            # The rows are in memory, so their range of keys limits the files to read.
            streamed_exec=False,
            commit_properties=properties,
        )
        if values:
            merge = merge.when_matched_update(values)
        merge.when_not_matched_insert(columns).execute()

    def _last_rows(self, prepared: _Prepared) -> pa.Table:
        """Return the last row of each key, in order of batch, round, subtask and position."""
        key, in_order = list(prepared.key), sorted(prepared.files, key=lambda file: file["place"])
        contents = [self.store.get(self.staging_path(file["name"])) for file in in_order]
        rows = pa.concat_tables([pq.read_table(pa.BufferReader(data)) for data in contents])
        numbers = pa.array(range(rows.num_rows), pa.int64())
        keys = rows.select(key).append_column("cairn row", numbers)
        last = keys.group_by(key).aggregate([("cairn row", "max")])
        return rows.take(last["cairn row_max"].combine_chunks().sort())

    def _fence(self, table: Any, before_epoch: int) -> None:
        """Note in the log that epochs below this number may not be committed any more."""
        if self._read_fence(table) < before_epoch:
            # With the mark unchanged: a commit in progress has the same transaction id, and fails.
            fence = {self._app: self._read_mark(table), f"{self._app}/fence": before_epoch}
            self._write_marks(table, fence)

    def _write_marks(self, table: Any, versions: Mapping[str, int]) -> None:
        """Write an entry of the log without rows."""
        table.create_write_transaction(
            [],
            "append",
            table.schema(),
            list(table.metadata().partition_columns),
            commit_properties=self._transactions(versions),
        )

    def _list_files(self, table: Any) -> set[str]:
        """Return the files of the table, of older versions too."""
        now = pa.table(table.get_add_actions())["path"].to_pylist()
        then = table.vacuum(0, dry_run=True, enforce_retention_duration=False)
        return {*now, *then}

    def _add_columns(self, table: Any) -> None:
        fields = missing_columns(table, self.context.schema)
        if fields:
            table.alter.add_columns(fields)

    def _read_mark(self, table: Any) -> int:
        version = table.transaction_version(self._app)
        return NOTHING_COMMITTED if version is None else int(version)

    def _read_fence(self, table: Any) -> int:
        return int(table.transaction_version(f"{self._app}/fence") or 0)

    def _check_allowed(self, table: Any, epoch: int, prepared: _Prepared) -> None:
        """Check before a commit that it fits the table and that its files exist and stay."""
        if self._read_fence(table) > epoch:
            raise self._refusal(
                epoch,
                "a newer driver has removed everything prepared before epoch "
                f"{self._read_fence(table)}\n  next: leave the job to that driver",
            )
        self._check_table_again(table, epoch, prepared)
        in_place = self.staging_path if prepared.key else str
        paths = [in_place(file["name"]) for file in prepared.files]
        with ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
            there = list(pool.map(self.store.exists, paths))
        missing = [path for path, is_there in zip(paths, there, strict=True) if not is_there]
        if missing:
            raise self._refusal(
                epoch,
                f"{len(missing)} of {len(paths)} prepared files are missing: {missing[0]}\n"
                "  next: if the sink's path has changed, start the job once more with the old "
                "one; else restore the files, and check what removed them (VACUUM with a short "
                "retention?)",
            )

    def _check_table_again(self, table: Any, epoch: int, prepared: _Prepared) -> None:
        """Check the table again: it may have changed since the files were written."""
        try:
            check_table(table, self.context.schema, self)
            columns = set(check_partitions(table, self.context.schema, self))
        except PlanError as error:
            raise self._refusal(epoch, f"the table was changed: {error}") from error
        known = {field.name for field in table.schema().fields}
        if gone := [name for name in prepared.columns if name not in known]:
            raise self._refusal(
                epoch,
                f"it was prepared with column {gone[0]!r}, which the table no longer has\n"
                "  next: add the column again; it can be dropped after this epoch",
            )
        for file in prepared.files:
            if columns != set(file.get("partition", columns)):
                raise self._refusal(
                    epoch,
                    f"it was prepared in partitions by {', '.join(file['partition']) or 'nothing'},"
                    f" the table has them by {', '.join(sorted(columns)) or 'nothing'}\n"
                    "  next: restore the table's partitions",
                )

    def _refusal(self, epoch: int, found: str) -> CommitError:
        return CommitError(
            f"sink {self.context.uid!r}: epoch {epoch} cannot be committed to {self.path}\n"
            f"  found: {found}",
            epoch=epoch,
        )

    def _transactions(self, versions: Mapping[str, int]) -> Any:
        made = [self._delta.Transaction(app, version) for app, version in versions.items()]
        return self._delta.CommitProperties(app_transactions=made)

    def _refresh(self) -> Any:
        if self._table is None:
            self._table = self._load()
        else:
            self._table.update_incremental()
        return self._table

    def _load(self) -> Any:
        return self._delta.DeltaTable(self.path, storage_options=self._options or None)

    def _open_table(self) -> Any:
        try:
            return self._load()
        except self._delta.exceptions.TableNotFoundError:
            if not self.create:
                raise PlanError(
                    f"sink {self.context.uid!r}: no Delta table at {self.path}\n"
                    "  next: create it, or let the sink do it with create=True"
                ) from None
        self._delta.DeltaTable.create(
            self.path,
            schema=self.context.schema,
            mode="ignore",
            partition_by=list(self.partition_by),
            storage_options=self._options or None,
        )
        return self._load()


def _library() -> Any:
    try:
        import deltalake
        import deltalake.exceptions
        import deltalake.transaction
    except ImportError:
        raise PlanError(
            "sinks.Delta needs the package deltalake, which is not installed\n"
            "  next: pip install 'cairn-state[delta]'"
        ) from None
    return deltalake


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
