"""What `show` prints: an epoch, its operators, their files, and where the time went.

Always true here:
- it fits into 80 columns; what is cut short is whole in `--json`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cairn.cli.tables import (
    head,
    many,
    passed_s,
    status_text,
    stdout_console,
    table,
    when,
)
from cairn.errors import NoEpochError
from cairn.query.facts import job_now, show_epoch
from cairn.report.text import PART_STYLES, count, duration, millis, size, split_ms
from cairn.storage.log import Log
from cairn.storage.store import Store

Facts = dict[str, Any]

_SCOPES = {
    "subtask": "a list per subtask",
    "shared": "the same in every subtask",
    "feedback": "on the way back in a loop",
}

FILES_SHOWN_MAX = 40
LINEAGE_SHOWN_MAX = 8
_STATE_FILE = re.compile(r"state/0*(\d+)/([0-9a-f]{8})[0-9a-f]*(.*)")


def epoch_facts(store: Store, number: int | None) -> Facts:
    """Return the status of the job and the facts of an epoch, or the status alone before the
    first epoch."""
    log = Log(store)
    now = job_now(store, log)
    try:
        return {**now, **show_epoch(store, number, log)}
    except NoEpochError:
        return {**now, "epoch": None}


def print_epoch(facts: Facts) -> None:
    console = stdout_console()
    console.print(head(facts))
    console.print(status_text(facts["health"]), soft_wrap=True)
    if facts["epoch"] is None:
        console.print("no epoch is committed yet")
        return
    console.print(Text(f"epoch {facts['epoch']}", "bold"))
    console.print(_indented(_about(facts)))
    for uid, operator in facts["operators"].items():
        console.print(_operator(uid, operator))
    if facts["subtasks"]:
        console.print(Text("\ntimes in ms", "dim"))
        console.print(_indented(_subtasks(facts["subtasks"])))


def _about(facts: Facts) -> Table:
    about = Table.grid(padding=(0, 2))
    about.add_column(style="dim", no_wrap=True)
    about.add_column()
    parent = "none" if facts["parent"] is None else facts["parent"]
    about.add_row("parent", f"{parent}, term {facts['term']}")
    about.add_row("lineage", _lineage(facts))
    committed_ms = facts["wall_ms"]
    about.add_row("committed", f"{when(committed_ms)}, {duration(passed_s(committed_ms))} ago")
    about.add_row("now", when(facts["now_ms"]))
    if facts["watermarks"] or facts["watermark_ms"] is not None:
        about.add_row("watermark", _mark(facts["watermark_ms"]))
        for name, own_ms in facts["watermarks"].items():
            about.add_row("", Text(f"{name}: {_mark(own_ms)}", "dim"))
    about.add_row("spark", f"batch {facts['spark']['batch_id']} of {facts['spark']['folder']}")
    for source in facts["sources"]:
        offset = source["offset"]
        text = offset if isinstance(offset, str) else json.dumps(offset)
        about.add_row(f"source {source['name']}", Text(text, overflow="fold"))
    about.add_row("rows", f"{count(facts['rows_in'])} in, {count(facts['rows_out'])} out")
    if facts["late_rows"] or facts["untimed_rows"]:
        late = f"{count(facts['late_rows'])} late, {count(facts['untimed_rows'])} without a time"
        about.add_row("put aside", late)
    if facts["error_rows"]:
        about.add_row("failed", f"{many(facts['error_rows'], 'row')} put aside")
    if facts["in_flight"]:
        about.add_row("in flight", f"{many(facts['in_flight'], 'record')} on the way back in loops")
    if facts["rounds"] > 1:
        about.add_row("rounds", str(facts["rounds"]))
    about.add_row("time", _times(facts))
    waited = {
        uid: operator["alignment_ms"]
        for uid, operator in facts["operators"].items()
        if "alignment_ms" in operator
    }
    if waited:
        texts = [f"{uid} {'?' if ms is None else ms} ms" for uid, ms in waited.items()]
        about.add_row("alignment", ", ".join(texts))
    about.add_row("attempts", f"{facts['attempts']}, {many(facts['restored'], 'slot')} restored")
    for uid, number in facts["committables"].items():
        about.add_row("sink", f"{uid}: {many(number, 'committable')}")
    return about


def _mark(watermark_ms: int | None) -> str:
    return "none yet" if watermark_ms is None else when(watermark_ms)


def _lineage(facts: Facts) -> Text:
    if facts["retired"]:
        text = Text("retired; its files may be gone", "magenta")
    elif not facts["on_lineage"]:
        text = Text("rolled back", "magenta")
    else:
        text = Text("newest" if facts["newest"] == facts["epoch"] else "current")
    if facts["restored_by"] is not None:
        text.append(f", restored by record {facts['restored_by']}", "magenta")
    numbers = facts["lineage"]
    if numbers:
        shown = " ← ".join(map(str, [facts["epoch"], *numbers[:LINEAGE_SHOWN_MAX]]))
        more = len(numbers) - LINEAGE_SHOWN_MAX
        text.append(f": {shown}" + (f" and {more} more" if more > 0 else ""), "dim")
    return text


def _operator(uid: str, facts: Facts) -> Group:
    title = Text.assemble(
        "\n", ("operator ", "dim"), (uid, "bold"),
        (f"  {_scope(facts)}, parallelism {facts['parallelism']}, ", "dim"),
        (f"function {facts['function_version'][:12]}", "dim"),
    )  # fmt: skip
    states = Table.grid(padding=(0, 2))
    for name, decl in facts["states"].items():
        kind = decl["type"]
        if decl["kind"] == "broadcast":
            kind = f"{facts['key_types']['key']} → {kind}"
        elif decl["entry_type"] is not None and decl["kind"] != "operator_list":
            kind = f"{decl['entry_type']} → {kind}"
        states.add_row(name, Text(decl["kind"].replace("_", " "), "dim"), kind)
    ranges = table(
        "subtask", "key groups", "keys", "entries", "state", "bases", "deltas", "in files"
    )
    for part in facts["ranges"]:
        ranges.add_row(
            str(part["subtask"]),
            _groups(part),
            count(part["state_keys"]),
            count(part["state_entries"]),
            size(part["state_bytes"]),
            str(part["bases"]),
            str(part["deltas"]),
            size(part["file_bytes"]),
        )
    return Group(title, _indented(states), _indented(ranges), *_files(facts["ranges"]))


def _scope(facts: Facts) -> str:
    """Whose the state is."""
    if facts["scope"] == "keyed":
        return "keyed by " + ", ".join(
            f"{name} {type}" for name, type in facts["key_types"].items()
        )
    return _SCOPES[facts["scope"]]


def _files(ranges: list[Facts]) -> list[Padding | Text]:
    """The files of each range, oldest first; those of other checkpoints are marked."""
    files = [(part, file) for part in ranges for file in part["files"]]
    if not files:
        return []
    stores = sorted({file["store"] for _, file in files if file["store"]})
    listed = table("subtask", "file", "tier", "bytes", "rows", "epochs")
    listed.add_column("where", no_wrap=True)
    for part, file in files[:FILES_SHOWN_MAX]:
        first, last = file["first_epoch"], file["last_epoch"]
        mark = "" if file["store"] is None else "*" * (1 + stores.index(file["store"]))
        listed.add_row(
            str(part["subtask"]),
            file["kind"],
            str(file["tier"]),
            size(file["bytes"]),
            count(file["rows"]),
            str(first) if first == last else f"{first}–{last}",
            _where(file) + mark,
        )
    notes = [f"{'*' * (1 + index)} in {store}" for index, store in enumerate(stores)]
    if len(files) > FILES_SHOWN_MAX:
        notes.append(f"and {len(files) - FILES_SHOWN_MAX} more files; --json lists them all")
    return [_indented(listed), *(Text(f"  {note}", "dim") for note in notes)]


def _where(file: Facts) -> str:
    """Short: the writer's term, the first digits of the name, where in a pack, what else."""
    match = _STATE_FILE.fullmatch(file["path"])
    name = file["path"] if match is None else f"{match[1]}/{match[2]}{match[3]}"
    if file["offset"]:
        name += f"+{file['offset']}"
    return name if not file["objects"] else f"{name} + {len(file['objects'])} more"


def _subtasks(measured: list[Facts]) -> Table:
    rows = table("level", "subtask", "begin", "process", "snapshot", "base", "restored", "executor")
    for one in sorted(measured, key=lambda m: (m.get("level", 0), m.get("subtask", 0))):
        rows.add_row(
            str(one.get("level", "")),
            str(one.get("subtask", "")),
            *(_ms(one.get(name)) for name in ("begin_ms", "process_ms", "snapshot_ms", "base_ms")),
            "yes" if one.get("restored") else "",
            str(one.get("executor", "")),
        )
    return rows


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:,.1f}"


def _groups(part: Facts) -> str:
    return f"{part['first_group']}–{part['first_group'] + part['group_count'] - 1}"


def _indented(inner: Table) -> Padding:
    return Padding(inner, (0, 0, 0, 2), expand=False)


def _times(facts: Facts) -> Text:
    text = Text(millis(facts["epoch_ms"]))
    for name, ms in split_ms(facts).items():
        if ms >= 0.05:
            text.append("  ").append(name, PART_STYLES[name]).append(f" {ms:.1f}")
    return text
