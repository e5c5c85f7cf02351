"""The epochs of a checkpoint as structs: `cairn ls`, `cairn show` and HTTP encode them as JSON.

Field names are stable: fields are added, never renamed.

Always true here:
- nothing is written;
- a checkpoint can be read while a job writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cairn.driver.coordinator.reports import report_of
from cairn.errors import RestoreError
from cairn.query.health import checkpoint_health
from cairn.report.epoch import NOTHING_MEASURED, EpochReport, OperatorReport, SubtaskTimes
from cairn.report.status import Health
from cairn.snapshots.holds import no_epoch
from cairn.storage.log import Log, job_of, record_path
from cairn.storage.manifest import (
    Epoch,
    EpochOperator,
    FileRef,
    JobInfo,
    RangeState,
    Restore,
    Scope,
    StateDecl,
    Takeover,
    keys_in,
)
from cairn.storage.store import Store

Offset = Any
"""The position of a source: JSON where it is JSON, else text."""


class ListedEpoch(EpochReport, frozen=True, kw_only=True):
    """An epoch in a list of records."""

    on_lineage: bool
    """False: it was rolled back."""
    restored_by: int | None
    """The record of a rollback to it."""


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="restore"):
    """A rollback."""

    number: int
    term: int
    wall_ms: int
    epoch: int


class TakeoverReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="takeover"):
    """The start of a driver."""

    number: int
    term: int
    wall_ms: int
    host: str
    pid: int


RecordReport = ListedEpoch | RestoreReport | TakeoverReport


class JobNow(msgspec.Struct, frozen=True, kw_only=True):
    """A job and its status."""

    checkpoint: str
    job: JobInfo | None
    """None: job.json is missing or damaged."""
    health: Health


class EpochList(JobNow, frozen=True, kw_only=True):
    """A job and its epochs, newest first."""

    records: list[RecordReport]


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """A file of state."""

    id: str
    kind: str
    format: str
    tier: int
    bytes: int
    rows: int
    first_epoch: int
    last_epoch: int
    first_group: int
    group_count: int
    store: str | None
    """The checkpoint that holds it, if that is another one."""
    path: str
    offset: int
    length: int
    objects: list[str]


class RangeReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a range of key groups: one subtask of an operator."""

    subtask: int
    first_group: int
    group_count: int
    version: str
    state_keys: int | None
    state_entries: int
    state_bytes: int
    bases: int
    deltas: int
    file_bytes: int
    files: list[FileReport]


class EntryReport(OperatorReport, frozen=True, kw_only=True, omit_defaults=False):
    """An entry of a manifest, every field of it: state of an operator, or its broadcast state."""

    operator: str
    function_version: str
    key_types: dict[str, str]
    states: dict[str, StateDecl]
    parallelism: int
    scope: Scope
    ranges: list[RangeReport]


class PositionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The position of Spark's query."""

    folder: str
    batch_id: int
    offsets: list[Offset]
    """One per source."""


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    offset: Offset


class EpochDetail(ListedEpoch, frozen=True, kw_only=True):
    """Everything a manifest holds."""

    checkpoint: str
    job: JobInfo | None
    lineage: list[int]
    """The epochs it was made from, newest first, as far back as they are kept."""
    newest: int | None
    retired: bool
    oldest_kept: int
    now_ms: int
    passed_ms: int | None
    watermarks: dict[str, int | None]
    timers: dict[str, tuple[int | None, int | None]] | None
    spark: PositionReport
    sources: list[SourceReport]
    operators: Mapping[str, EntryReport]
    subtasks: list[SubtaskTimes]
    committables: dict[str, int]


def list_epochs(store: Store, *, everything: bool = False) -> EpochList:
    """Return the epochs on the current lineage, newest first; or every record of the log."""
    log = Log(store)
    lineage = list(lineage_of(log))
    restored_by = find_restores(log, lineage)
    current = {epoch.number for epoch in lineage}
    found = reversed(list(log.records())) if everything else iter(lineage)
    records = [report_record(record, current, restored_by) for record in found]
    now = job_now(store, log)
    return EpochList(checkpoint=now.checkpoint, job=now.job, health=now.health, records=records)


def job_now(store: Store, log: Log) -> JobNow:
    """Return the job of a checkpoint and its status."""
    return JobNow(checkpoint=store.url, job=job_of(store), health=checkpoint_health(log))


def find_restores(log: Log, lineage: list[Epoch]) -> dict[int, int]:
    """Return the epochs of the lineage that a rollback went back to, with its record.

    The record lies right before the epoch that came next, with nothing but takeovers between.
    """
    found: dict[int, int] = {}
    newest_number = log.newest_number() or 0
    for after, epoch in zip(
        [newest_number + 1, *(e.number for e in lineage)], lineage, strict=False
    ):
        number = after - 1
        while number > epoch.number and log.store.exists(record_path(number)):
            record = log.read(number)
            if isinstance(record, Epoch):
                break
            if isinstance(record, Restore):
                found[record.epoch] = number
                break
            number -= 1
    return found


def lineage_of(log: Log) -> Iterator[Epoch]:
    """Yield the epochs of the current lineage, newest first, while a job may retire them."""
    epochs = log.lineage()
    while True:
        try:
            epoch = next(epochs, None)
        except RestoreError as error:
            number = error.facts.get("number")
            if number is None or log.store.exists(record_path(number)):
                raise
            return  # Retired by a running job while we were walking back to it.
        if epoch is None:
            return
        yield epoch


def show_epoch(store: Store, number: int | None, log: Log | None = None) -> EpochDetail:
    """Return everything a manifest holds; the newest one's without a number.

    `log` is one that has read some of it before. NoEpochError before the first epoch.
    """
    log = log or Log(store)
    epoch = log.newest_epoch() if number is None else log.epoch(number)
    if epoch is None:
        raise no_epoch(store)
    lineage = list(lineage_of(log))
    current = [found.number for found in lineage]
    offsets = _source_offsets(epoch.spark.offsets)
    names = epoch.spark.sources or [str(index) for index in range(len(offsets))]
    report = msgspec.structs.asdict(report_of(epoch))
    operators = {uid: _entry_report(epoch, uid) for uid in epoch.operators}
    return EpochDetail(
        **{**report, "operators": operators},
        on_lineage=epoch.number in current,
        restored_by=find_restores(log, lineage).get(epoch.number),
        checkpoint=store.url,
        job=job_of(store),
        lineage=_ancestors(log, epoch),
        newest=current[0] if current else None,
        retired=epoch.number < log.oldest_kept(),
        oldest_kept=epoch.oldest_kept,
        now_ms=epoch.now_ms,
        passed_ms=epoch.passed_ms,
        watermarks=epoch.watermarks,
        timers=epoch.timers,
        spark=PositionReport(
            folder=epoch.spark.folder, batch_id=epoch.spark.batch_id, offsets=offsets
        ),
        sources=[
            SourceReport(name=name, offset=offset)
            for name, offset in zip(names, offsets, strict=False)
        ],
        subtasks=epoch.timings.subtasks,
        committables={uid: len(found) for uid, found in epoch.committables.items()},
    )


def _ancestors(log: Log, epoch: Epoch) -> list[int]:
    found: list[int] = []
    try:
        oldest_kept = log.oldest_kept()
        while epoch.parent is not None and epoch.parent >= oldest_kept:
            epoch = log.epoch(epoch.parent)
            found.append(epoch.number)
    except RestoreError:
        pass  # Retired by a running job while we were walking back to it.
    return found


def report_record(
    record: Epoch | Restore | Takeover, current: set[int], restored_by: Mapping[int, int]
) -> RecordReport:
    """Return a record as a list shows it; `current` are the numbers of the lineage."""
    if isinstance(record, Epoch):
        return ListedEpoch(
            **msgspec.structs.asdict(report_of(record).brief()),
            on_lineage=record.number in current,
            restored_by=restored_by.get(record.number),
        )
    if isinstance(record, Restore):
        return RestoreReport(
            number=record.number, term=record.term, wall_ms=record.wall_ms, epoch=record.epoch
        )
    return TakeoverReport(
        number=record.number,
        term=record.term,
        wall_ms=record.wall_ms,
        host=record.host,
        pid=record.pid,
    )


def _entry_report(epoch: Epoch, uid: str) -> EntryReport:
    entry = epoch.operators[uid]
    measured = msgspec.structs.asdict(epoch.metrics.operators.get(uid, NOTHING_MEASURED))
    counted = {
        "state_keys": keys_in(entry.ranges),
        "state_entries": sum(part.state_entries for part in entry.ranges),
        "state_bytes": sum(part.state_bytes for part in entry.ranges),
    }
    return EntryReport(
        **{**measured, **counted},
        operator=_operator_of(entry),
        function_version=entry.function_version,
        key_types=entry.key_types,
        states=entry.states,
        parallelism=entry.parallelism,
        scope=entry.scope,
        ranges=[_range_report(subtask, part) for subtask, part in enumerate(entry.ranges)],
    )


def _operator_of(entry: EpochOperator) -> str:
    return entry.uid.partition(":")[0] if entry.scope == "shared" else entry.uid


def _range_report(subtask: int, part: RangeState) -> RangeReport:
    return RangeReport(
        subtask=subtask,
        first_group=part.first_group,
        group_count=part.group_count,
        version=part.version,
        state_keys=part.state_keys,
        state_entries=part.state_entries,
        state_bytes=part.state_bytes,
        bases=sum(ref.kind == "base" for ref in part.files),
        deltas=sum(ref.kind == "delta" for ref in part.files),
        file_bytes=sum(ref.size for ref in part.files),
        files=[_file_report(ref) for ref in part.files],
    )


def _file_report(ref: FileRef) -> FileReport:
    return FileReport(
        id=ref.id,
        kind=ref.kind,
        format=ref.format,
        tier=ref.tier,
        bytes=ref.size,
        rows=ref.rows,
        first_epoch=ref.first_epoch,
        last_epoch=ref.last_epoch,
        first_group=ref.first_group,
        group_count=ref.group_count,
        store=ref.store or None,
        path=ref.path,
        offset=ref.offset,
        length=ref.length,
        objects=list(ref.objects),
    )


def _source_offsets(text: str) -> list[Offset]:
    """Return an offset per source, in the order the job declares them."""
    offsets: list[Offset] = []
    # Spark's file begins with a version and a line of its own settings.
    for line in text.strip().split("\n")[2:]:
        try:
            offsets.append(msgspec.json.decode(line))
        except msgspec.MsgspecError:
            offsets.append(line)
    return offsets
