"""A checkpoint as it lies there, read without Spark: what `ls`, `show` and `verify` tell.

Each function gives plain data, the machine-readable twin of what a person sees. Its
names are stable: fields are added, never renamed.

Always true here:
- looking changes nothing, and does not make a folder where there is none;
- a checkpoint can be looked at while a job writes to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cairn.errors import CairnError, RestoreError, StaleEpochError
from cairn.storage import (
    Epoch,
    JobInfo,
    Log,
    OperatorEntry,
    RangeState,
    Record,
    Restore,
    Store,
    open_store,
    read_job,
    verify,
)
from cairn.storage.log import LOG_FOLDER, record_path
from cairn.storage.store import file_path

Facts = dict[str, Any]


class NoCheckpointError(CairnError):
    """There is no checkpoint where the command was told to look."""


def split_epoch(text: str) -> tuple[str, int | None]:
    """CHECKPOINT or CHECKPOINT@EPOCH: digits after the last '@' are an epoch."""
    match = re.fullmatch(r"(.+)@(\d+)", text, re.DOTALL)
    return (match[1], int(match[2])) if match else (text, None)


def open_checkpoint(url: str) -> Store:
    """The store of a checkpoint that exists."""
    parts = urlsplit(url)
    local = file_path(url) if parts.scheme == "file" else url
    # Asked before the store is opened: opening a local one makes its folder.
    if "://" not in local and not os.path.isdir(os.path.expanduser(local)):
        raise _no_checkpoint(url, "there is no such folder")
    try:
        store = open_store(url)
    except ValueError as error:
        raise NoCheckpointError(str(error)) from None
    if not store.exists("job.json") and not store.list(LOG_FOLDER):
        raise _no_checkpoint(url, "neither job.json nor epochs/ is there")
    return store


def _no_checkpoint(url: str, found: str) -> NoCheckpointError:
    return NoCheckpointError(
        f"there is no checkpoint at {url}\n"
        f"  found: {found}\n"
        "  next: give the checkpoint= that the job was started with",
        url=url,
    )


def list_epochs(store: Store, *, everything: bool = False) -> Facts:
    """The epochs on the current lineage, newest first; or every record of the log."""
    log = Log(store)
    if everything:
        current = {epoch.number for epoch in _lineage(log)}
        records = [
            _record_facts(record, on_lineage=record.number in current)
            for record in reversed(list(log.records()))
        ]
    else:
        records = [_record_facts(epoch, on_lineage=True) for epoch in _lineage(log)]
    return {"checkpoint": store.url, "job": _job_facts(_job(store)), "records": records}


def _lineage(log: Log) -> Iterator[Epoch]:
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


def show_epoch(store: Store, number: int | None) -> Facts:
    """Everything a manifest says, but for the lists of files: those are counted."""
    log = Log(store)
    epoch = log.newest_epoch() if number is None else log.epoch(number)
    if epoch is None:
        raise StaleEpochError(
            f"no epoch is committed yet\n  checkpoint: {store.url}\n"
            "  next: `cairn ls --all` shows who has started the job"
        )
    return {
        "checkpoint": store.url,
        "job": _job_facts(_job(store)),
        **epoch_facts(epoch),
        "now_ms": epoch.now_ms,
        "watermarks": epoch.watermarks,
        "spark": {
            "folder": epoch.spark.folder,
            "batch_id": epoch.spark.batch_id,
            "offsets": _source_offsets(epoch.spark.offsets),
        },
        "operators": {
            uid: {
                **epoch.metrics.get("operators", {}).get(uid, {}),
                **_operator_facts(entry),
            }
            for uid, entry in epoch.operators.items()
        },
        "committables": {uid: len(found) for uid, found in epoch.committables.items()},
    }


def epoch_facts(epoch: Epoch) -> Facts:
    """An epoch in one line. `epoch_ms` is the time until its manifest was written."""
    operators = epoch.metrics.get("operators", {})
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
        "rows_per_s": round(rows_in / run_ms * 1000) if run_ms else 0,
        "state_keys": _total(operators, "state_keys"),
        "state_bytes": sum(
            part.state_bytes for entry in epoch.operators.values() for part in entry.ranges
        ),
        "delta_bytes": _total(operators, "delta_bytes"),
        "epoch_ms": run_ms,
        "attempts": epoch.timings.get("attempts", 1),
        "restored": epoch.metrics.get("restored", 0),
        "timings": epoch.timings,
    }


def verify_facts(store: Store, progress: Callable[[int, int], None] | None = None) -> Facts:
    """What `storage.verify` found."""
    report = verify(store, progress)
    return {
        "checkpoint": store.url,
        "job": _job_facts(report.job),
        "ok": report.ok,
        "records": report.records,
        "epochs": report.epochs,
        "files": report.files,
        "bytes": report.bytes,
        "damage": [{"path": d.path, "what": d.what} for d in report.damage],
        "orphans": [
            {"path": o.path, "bytes": o.size, "modified_ms": round(o.modified_s * 1000)}
            for o in report.orphans
        ],
    }


def _record_facts(record: Record, *, on_lineage: bool) -> Facts:
    if isinstance(record, Epoch):
        return {**epoch_facts(record), "on_lineage": on_lineage}
    common = {"number": record.number, "term": record.term, "wall_ms": record.wall_ms}
    if isinstance(record, Restore):
        return {"kind": "restore", **common, "epoch": record.epoch}
    return {"kind": "takeover", **common, "host": record.host, "pid": record.pid}


def _operator_facts(entry: OperatorEntry) -> Facts:
    return {
        "function_version": entry.function_version,
        "key_types": entry.key_types,
        "states": {name: msgspec.to_builtins(decl) for name, decl in entry.states.items()},
        "parallelism": entry.parallelism,
        "ranges": [_range_facts(part) for part in entry.ranges],
    }


def _range_facts(part: RangeState) -> Facts:
    return {
        "first_group": part.first_group,
        "group_count": part.group_count,
        "version": part.version,
        "state_keys": part.state_keys,
        "state_bytes": part.state_bytes,
        "bases": sum(ref.kind == "base" for ref in part.files),
        "deltas": sum(ref.kind == "delta" for ref in part.files),
        "file_bytes": sum(ref.length for ref in part.files),
    }


def _job(store: Store) -> JobInfo | None:
    try:
        return read_job(store)
    except CairnError:
        return None  # `verify` says what is wrong with it; the epochs can be shown without.


def _job_facts(job: JobInfo | None) -> Facts | None:
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
