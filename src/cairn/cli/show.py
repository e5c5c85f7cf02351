"""The output of `show`: an epoch, its operators, their files, and the split of its time.

Always true here:
- it fits into 80 columns; `--json` has everything in full.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import msgspec
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cairn.cli.tables import (
    head,
    many,
    print_json,
    seconds_since,
    status_text,
    stdout_console,
    table,
    when,
)
from cairn.errors import NoEpochError
from cairn.query.epochs import (
    EntryReport,
    EpochDetail,
    FileReport,
    JobNow,
    RangeReport,
    job_now,
    show_epoch,
)
from cairn.report.epoch import SubtaskTimes
from cairn.report.text import PART_STYLES, count, duration, millis, size
from cairn.storage.log import Log
from cairn.storage.store import Store

_SCOPES = {
    "subtask": "a list per subtask",
    "shared": "the same in every subtask",
    "feedback": "on the way back in a loop",
}

FILES_SHOWN_MAX = 40
LINEAGE_SHOWN_MAX = 8
_STATE_FILE = re.compile(r"state/0*(\d+)/([0-9a-f]{8})[0-9a-f]*(.*)")


class Shown(NamedTuple):
    """The status of a job and an epoch; None before the first."""

    now: JobNow
    epoch: EpochDetail | None


def read_epoch(store: Store, number: int | None) -> Shown:
    """Read the status of the job and an epoch, the newest without a number."""
    log = Log(store)
    now = job_now(store, log)
    try:
        return Shown(now, show_epoch(store, number, log))
    except NoEpochError:
        return Shown(now, None)


def print_epoch_json(shown: Shown) -> None:
    """Print the fields of the job and of the epoch as one JSON object."""
    epoch = {"epoch": None} if shown.epoch is None else msgspec.to_builtins(shown.epoch)
    print_json({**msgspec.to_builtins(shown.now), **epoch})


def print_epoch(shown: Shown) -> None:
    console, now, epoch = stdout_console(), shown.now, shown.epoch
    console.print(head(now.checkpoint, now.job))
    console.print(status_text(now.health), soft_wrap=True)
    if epoch is None:
        console.print("no epoch is committed yet")
        return
    console.print(Text(f"epoch {epoch.epoch}", "bold"))
    console.print(_indent(_about(epoch)))
    for uid, entry in epoch.operators.items():
        console.print(_operator(uid, entry))
    if epoch.subtasks:
        console.print(Text("\ntimes in ms", "dim"))
        console.print(_indent(_subtasks(epoch.subtasks)))


def _about(epoch: EpochDetail) -> Table:
    about = Table.grid(padding=(0, 2))
    about.add_column(style="dim", no_wrap=True)
    about.add_column()
    parent = "none" if epoch.parent is None else epoch.parent
    about.add_row("parent", f"{parent}, term {epoch.term}")
    about.add_row("lineage", _lineage(epoch))
    committed_ms = epoch.wall_ms
    about.add_row("committed", f"{when(committed_ms)}, {duration(seconds_since(committed_ms))} ago")
    about.add_row("now", when(epoch.now_ms))
    if epoch.watermarks or epoch.watermark_ms is not None:
        about.add_row("watermark", _mark(epoch.watermark_ms))
        for name, own_ms in epoch.watermarks.items():
            about.add_row("", Text(f"{name}: {_mark(own_ms)}", "dim"))
    about.add_row("spark", f"batch {epoch.spark.batch_id} of {epoch.spark.folder}")
    for source in epoch.sources:
        offset = source.offset
        text = offset if isinstance(offset, str) else json.dumps(offset)
        about.add_row(f"source {source.name}", Text(text, overflow="fold"))
    about.add_row("rows", f"{count(epoch.rows_in)} in, {count(epoch.rows_out)} out")
    if epoch.late_rows or epoch.untimed_rows:
        late = f"{count(epoch.late_rows)} late, {count(epoch.untimed_rows)} without a time"
        about.add_row("put aside", late)
    if epoch.error_rows:
        about.add_row("failed", f"{many(epoch.error_rows, 'row')} put aside")
    if epoch.in_flight:
        about.add_row("in flight", f"{many(epoch.in_flight, 'record')} on the way back in loops")
    if epoch.rounds > 1:
        about.add_row("rounds", str(epoch.rounds))
    about.add_row("time", _times(epoch))
    waited = {
        uid: entry.alignment_ms for uid, entry in epoch.operators.items() if entry.subtask_rows
    }
    if waited:
        texts = [f"{uid} {'?' if ms is None else millis(ms)}" for uid, ms in waited.items()]
        about.add_row("alignment", ", ".join(texts))
    if epoch.decision is not None:
        about.add_row("scaling", f"the job {epoch.decision.text()}")
    about.add_row("attempts", f"{epoch.attempts}, {many(epoch.restored, 'slot')} restored")
    for uid, number in epoch.committables.items():
        about.add_row("sink", f"{uid}: {many(number, 'committable')}")
    return about


def _mark(watermark_ms: int | None) -> str:
    return "none yet" if watermark_ms is None else when(watermark_ms)


def _lineage(epoch: EpochDetail) -> Text:
    if epoch.retired:
        text = Text("retired; its files may be gone", "magenta")
    elif not epoch.on_lineage:
        text = Text("rolled back", "magenta")
    else:
        text = Text("newest" if epoch.newest == epoch.epoch else "current")
    if epoch.restored_by is not None:
        text.append(f", restored by record {epoch.restored_by}", "magenta")
    numbers = epoch.lineage
    if numbers:
        shown = " ← ".join(map(str, [epoch.epoch, *numbers[:LINEAGE_SHOWN_MAX]]))
        more = len(numbers) - LINEAGE_SHOWN_MAX
        text.append(f": {shown}" + (f" and {more} more" if more > 0 else ""), "dim")
    return text


def _operator(uid: str, entry: EntryReport) -> Group:
    title = Text.assemble(
        "\n", ("operator ", "dim"), (uid, "bold"),
        (f"  {_scope(entry)}, parallelism {entry.parallelism}, ", "dim"),
        (f"function {entry.function_version[:12]}", "dim"),
    )  # fmt: skip
    states = Table.grid(padding=(0, 2))
    for name, decl in entry.states.items():
        kind = decl.type
        if decl.kind == "broadcast":
            kind = f"{entry.key_types['key']} → {kind}"
        elif decl.entry_type is not None and decl.kind != "operator_list":
            kind = f"{decl.entry_type} → {kind}"
        states.add_row(name, Text(decl.kind.replace("_", " "), "dim"), kind)
    ranges = table(
        "subtask", "key groups", "keys", "entries", "state", "bases", "deltas", "in files"
    )
    for part in entry.ranges:
        ranges.add_row(
            str(part.subtask),
            _groups(part),
            count(part.state_keys),
            count(part.state_entries),
            size(part.state_bytes),
            str(part.bases),
            str(part.deltas),
            size(part.file_bytes),
        )
    return Group(title, _indent(states), _indent(ranges), *_files(entry.ranges))


def _scope(entry: EntryReport) -> str:
    """Return the owner of the state in words."""
    if entry.scope == "keyed":
        return "keyed by " + ", ".join(f"{name} {type}" for name, type in entry.key_types.items())
    return _SCOPES[entry.scope]


def _files(ranges: list[RangeReport]) -> list[Padding | Text]:
    """The files of each range, oldest first; those of other checkpoints are marked."""
    files = [(part, file) for part in ranges for file in part.files]
    if not files:
        return []
    stores = sorted({file.store for _, file in files if file.store})
    listed = table("subtask", "file", "tier", "bytes", "rows", "epochs")
    listed.add_column("where", no_wrap=True)
    for part, file in files[:FILES_SHOWN_MAX]:
        first, last = file.first_epoch, file.last_epoch
        mark = "" if file.store is None else "*" * (1 + stores.index(file.store))
        listed.add_row(
            str(part.subtask),
            file.kind,
            str(file.tier),
            size(file.bytes),
            count(file.rows),
            str(first) if first == last else f"{first}–{last}",
            _where(file) + mark,
        )
    notes = [f"{'*' * (1 + index)} in {store}" for index, store in enumerate(stores)]
    if len(files) > FILES_SHOWN_MAX:
        notes.append(f"and {len(files) - FILES_SHOWN_MAX} more files; --json lists them all")
    return [_indent(listed), *(Text(f"  {note}", "dim") for note in notes)]


def _where(file: FileReport) -> str:
    """Short: the writer's term, the first digits of the name, where in a pack, what else."""
    match = _STATE_FILE.fullmatch(file.path)
    name = file.path if match is None else f"{match[1]}/{match[2]}{match[3]}"
    if file.offset:
        name += f"+{file.offset}"
    return name if not file.objects else f"{name} + {len(file.objects)} more"


def _subtasks(measured: list[SubtaskTimes]) -> Table:
    rows = table("level", "subtask", "begin", "process", "snapshot", "base", "restored", "executor")
    for one in sorted(measured, key=lambda m: (m.level, m.subtask)):
        times = (one.begin_ms, one.process_ms, one.snapshot_ms, one.base_ms)
        rows.add_row(
            str(one.level),
            str(one.subtask),
            *(f"{ms:,.1f}" for ms in times),
            "yes" if one.restored else "",
            one.executor,
        )
    return rows


def _groups(part: RangeReport) -> str:
    if not part.group_count:
        return "none"  # The operator has a parallelism of its own.
    return f"{part.first_group}–{part.first_group + part.group_count - 1}"


def _indent(inner: Table) -> Padding:
    return Padding(inner, (0, 0, 0, 2), expand=False)


def _times(epoch: EpochDetail) -> Text:
    text = Text(millis(epoch.epoch_ms))
    for name, ms in epoch.parts.items():
        if ms >= 0.05:
            text.append("  ").append(name, PART_STYLES[name]).append(f" {ms:.1f}")
    return text
