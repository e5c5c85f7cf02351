"""The epochs of a checkpoint as plain data: what people and programs are told of them.

Every function is the machine-readable twin of what a person sees, in a terminal or in a browser.
Its names are stable: fields are added, never renamed.

Always true here:
- looking changes nothing;
- a checkpoint can be looked at while a job writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cairn.driver.coordinator.measured import delta_bytes_of, operators_of, total_keys
from cairn.driver.coordinator.rounds import in_flight
from cairn.errors import CairnError, RestoreError
from cairn.query.health import checkpoint_health
from cairn.snapshots.holds import no_epoch
from cairn.storage.log import Log, read_job, record_path
from cairn.storage.manifest import (
    Epoch,
    EpochOperator,
    FileRef,
    JobInfo,
    RangeState,
    Record,
    Restore,
    keys_in,
)
from cairn.storage.store import Store

Facts = dict[str, Any]


def list_epochs(store: Store, *, everything: bool = False) -> Facts:
    """The epochs on the current lineage, newest first; or every record of the log."""
    log = Log(store)
    lineage = list(lineage_of(log))
    restored_by = restored_by_record(log, lineage)
    if everything:
        current = {epoch.number for epoch in lineage}
        found = reversed(list(log.records()))
    else:
        current, found = {epoch.number for epoch in lineage}, iter(lineage)
    records = [record_facts(record, current, restored_by) for record in found]
    return {**job_now(store, log), "records": records}


def job_now(store: Store, log: Log) -> Facts:
    """Return which job it is, and how it goes."""
    return {
        "checkpoint": store.url,
        "job": job_facts(job_of(store)),
        "health": msgspec.to_builtins(checkpoint_health(log)),
    }


def restored_by_record(log: Log, lineage: list[Epoch]) -> dict[int, int]:
    """The epochs of the lineage that a rollback went back to, and its record.

    It lies right before the epoch that came next, with nothing but takeovers between.
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


def show_epoch(store: Store, number: int | None, log: Log | None = None) -> Facts:
    """Everything a manifest says. `log`: one that has read some of it before.

    NoEpochError before the first epoch.
    """
    log = log or Log(store)
    epoch = log.newest_epoch() if number is None else log.epoch(number)
    if epoch is None:
        raise no_epoch(store)
    lineage = list(lineage_of(log))
    current = [found.number for found in lineage]
    offsets = _source_offsets(epoch.spark.offsets)
    names = epoch.spark.sources or [str(index) for index in range(len(offsets))]
    return {
        "checkpoint": store.url,
        "job": job_facts(job_of(store)),
        **epoch_facts(epoch),
        "on_lineage": epoch.number in current,
        "lineage": _ancestors(log, epoch),
        "newest": current[0] if current else None,
        "restored_by": restored_by_record(log, lineage).get(epoch.number),
        "retired": epoch.number < log.retired_below(),
        "oldest_kept": epoch.oldest_kept,
        "now_ms": epoch.now_ms,
        "watermark_ms": epoch.watermark_ms,
        "passed_ms": epoch.passed_ms,
        "watermarks": epoch.watermarks,
        "timers": epoch.timers,
        "spark": {
            "folder": epoch.spark.folder,
            "batch_id": epoch.spark.batch_id,
            "offsets": offsets,
        },
        "sources": [
            {"name": name, "offset": offset} for name, offset in zip(names, offsets, strict=False)
        ],
        "operators": {
            uid: {
                **epoch.metrics.get("operators", {}).get(uid, {}),
                **_operator_facts(entry),
                "operator": uid.partition(":")[0] if entry.scope == "shared" else uid,
            }
            for uid, entry in epoch.operators.items()
        },
        "subtasks": epoch.timings.get("subtasks", []),
        "committables": {uid: len(found) for uid, found in epoch.committables.items()},
    }


def _ancestors(log: Log, epoch: Epoch) -> list[int]:
    """The epochs it was made from, newest first, as far back as they are kept."""
    found: list[int] = []
    try:
        retired_below = log.retired_below()
        while epoch.parent is not None and epoch.parent >= retired_below:
            epoch = log.epoch(epoch.parent)
            found.append(epoch.number)
    except RestoreError:
        pass  # Retired by a running job while we were walking back to it.
    return found


def epoch_facts(epoch: Epoch) -> Facts:
    """An epoch in one line. `epoch_ms` is the time until its manifest was written."""
    operators = operators_of(epoch)
    run_ms = float(epoch.timings.get("run_ms", 0.0))
    rows_in = _total(operators, "rows_in")
    return {
        "kind": "epoch",
        "epoch": epoch.number,
        "parent": epoch.parent,
        "term": epoch.term,
        "wall_ms": epoch.wall_ms,
        "rows_in": rows_in,
        "rows_out": _total(operators, "rows_out"),
        "late_rows": _total(operators, "late_rows"),
        "untimed_rows": _total(operators, "untimed_rows"),
        "error_rows": _total(operators, "error_rows"),
        "rows_per_s": round(rows_in / run_ms * 1000) if run_ms else 0,
        "state_keys": total_keys(operators),
        "state_entries": _total(operators, "state_entries"),
        "state_bytes": sum(
            part.state_bytes for entry in epoch.operators.values() for part in entry.ranges
        ),
        "delta_bytes": delta_bytes_of(epoch),
        "epoch_ms": run_ms,
        "attempts": epoch.timings.get("attempts", 1),
        "rounds": epoch.timings.get("rounds", 1),
        "in_flight": in_flight(epoch),
        "restored": epoch.metrics.get("restored", 0),
        "timings": epoch.timings,
    }


def record_facts(record: Record, current: set[int], restored_by: dict[int, int]) -> Facts:
    if isinstance(record, Epoch):
        return {
            **epoch_facts(record),
            "on_lineage": record.number in current,
            "restored_by": restored_by.get(record.number),
        }
    common = {"number": record.number, "term": record.term, "wall_ms": record.wall_ms}
    if isinstance(record, Restore):
        return {"kind": "restore", **common, "epoch": record.epoch}
    return {"kind": "takeover", **common, "host": record.host, "pid": record.pid}


def _operator_facts(entry: EpochOperator) -> Facts:
    return {
        "function_version": entry.function_version,
        "key_types": entry.key_types,
        "states": {name: msgspec.to_builtins(decl) for name, decl in entry.states.items()},
        "parallelism": entry.parallelism,
        "scope": entry.scope,
        "state_keys": keys_in(entry.ranges),
        "state_entries": sum(part.state_entries for part in entry.ranges),
        "ranges": [{"subtask": i, **_range_facts(part)} for i, part in enumerate(entry.ranges)],
    }


def _range_facts(part: RangeState) -> Facts:
    return {
        "first_group": part.first_group,
        "group_count": part.group_count,
        "version": part.version,
        "state_keys": part.state_keys,
        "state_entries": part.state_entries,
        "state_bytes": part.state_bytes,
        "bases": sum(ref.kind == "base" for ref in part.files),
        "deltas": sum(ref.kind == "delta" for ref in part.files),
        "file_bytes": sum(ref.size for ref in part.files),
        "files": [_file_facts(ref) for ref in part.files],
    }


def _file_facts(ref: FileRef) -> Facts:
    return {
        "id": ref.id,
        "kind": ref.kind,
        "format": ref.format,
        "tier": ref.tier,
        "bytes": ref.size,
        "rows": ref.rows,
        "first_epoch": ref.first_epoch,
        "last_epoch": ref.last_epoch,
        "first_group": ref.first_group,
        "group_count": ref.group_count,
        "store": ref.store or None,
        "path": ref.path,
        "offset": ref.offset,
        "length": ref.length,
        "objects": ref.objects,
    }


def job_of(store: Store) -> JobInfo | None:
    try:
        return read_job(store)
    except CairnError:
        return None  # `verify` says what is wrong with it; the epochs can be shown without.


def job_facts(job: JobInfo | None) -> Facts | None:
    facts: Facts | None = None if job is None else msgspec.to_builtins(job)
    return facts


def _source_offsets(text: str) -> list[Any]:
    """One per source, in the order the job declares them; JSON where it is JSON."""
    offsets: list[Any] = []
    # Spark's file begins with a version and a line of its own settings.
    for line in text.strip().split("\n")[2:]:
        try:
            offsets.append(msgspec.json.decode(line))
        except msgspec.MsgspecError:
            offsets.append(line)
    return offsets


def _total(operators: dict[str, dict[str, int]], name: str) -> int:
    return sum(metrics.get(name, 0) for metrics in operators.values())
