"""What `ls`, `show` and `verify` print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from cairn.view import PART_STYLES, age, count, duration, millis, mishaps, size, split_ms

Facts = dict[str, Any]

PIPE_COLUMNS = 200


def print_json(facts: Facts) -> None:
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")


def print_epochs(facts: Facts, *, everything: bool) -> None:
    console = _console()
    console.print(_head(facts))
    records = facts["records"]
    if not records:
        console.print("no epochs yet; `--all` shows who has started the job")
        return
    names = ("age", "rows in", "keys", "state", "delta", "time", "parent")
    rows = [_record_cells(record) for record in records]
    for line in _lines(["number" if everything else "epoch", *names], rows):
        console.print(line, soft_wrap=True)


def _record_cells(record: Facts) -> tuple[list[str], Text]:
    """A record as cells, and what there is to remark."""
    old = age(_passed_s(record["wall_ms"]))
    if record["kind"] == "takeover":
        said = f"takeover by {record['host']}, pid {record['pid']}"
        return [str(record["number"]), old], Text(said, "cyan")
    if record["kind"] == "restore":
        return [str(record["number"]), old], Text(f"restore of epoch {record['epoch']}", "cyan")
    cells = [
        str(record["epoch"]),
        old,
        count(record["rows_in"]),
        count(record["state_keys"]),
        size(record["state_bytes"]),
        size(record["delta_bytes"]),
        millis(record["epoch_ms"]),
        "" if record["parent"] is None else str(record["parent"]),
    ]
    remark = mishaps(record) if record["on_lineage"] else "rolled back"
    return cells, Text(remark, "magenta")


def _lines(names: list[str], rows: list[tuple[list[str], Text]]) -> Iterator[Text]:
    """Right-aligned columns, then the remark.

    Not a rich table: that one would squeeze every column to make room for a rare remark.
    """
    widths = [len(name) for name in names]
    for cells, _ in rows:
        widths[: len(cells)] = map(max, widths, map(len, cells))
    yield Text("  ".join(map(str.rjust, names, widths)), "dim")
    for cells, remark in rows:
        line = Text("  ".join(map(str.rjust, cells, widths)).rstrip())
        yield line + Text("  ") + remark if remark.plain else line


def print_epoch(facts: Facts) -> None:
    console = _console()
    parent = "none" if facts["parent"] is None else facts["parent"]
    console.print(_head(facts))
    console.print(Text(f"epoch {facts['epoch']}", "bold"))
    about = Table.grid(padding=(0, 2))
    about.add_column(style="dim")
    about.add_column()
    about.add_row("parent", f"{parent}, term {facts['term']}")
    about.add_row(
        "committed", f"{_when(facts['wall_ms'])}, {duration(_passed_s(facts['wall_ms']))} ago"
    )
    about.add_row("now", _when(facts["now_ms"]))
    spark = facts["spark"]
    about.add_row("spark", f"batch {spark['batch_id']} of {spark['folder']}")
    for index, offset in enumerate(spark["offsets"]):
        text = offset if isinstance(offset, str) else json.dumps(offset)
        about.add_row(f"source {index}", Text(text, overflow="fold"))
    about.add_row("rows", f"{count(facts['rows_in'])} in, {count(facts['rows_out'])} out")
    about.add_row("time", _times(facts))
    alignment = facts["timings"].get("alignment_ms", {})
    if alignment:
        spread = ", ".join(f"level {level} {ms} ms" for level, ms in alignment.items())
        about.add_row("alignment", spread)
    about.add_row("attempts", f"{facts['attempts']}, {facts['restored']} slots restored")
    for uid, number in facts["committables"].items():
        about.add_row("sink", f"{uid}: {number} committables")
    console.print(_indented(about))
    for uid, operator in facts["operators"].items():
        console.print(_operator(uid, operator))


def print_report(facts: Facts) -> None:
    console = _console()
    console.print(_head(facts))
    for damage in facts["damage"]:
        first, *rest = damage["what"].splitlines()
        text = Text.assemble(("damaged ", "bold red"), damage["path"], f": {first}")
        more = (Text(f"  {line.strip()}", "dim") for line in rest)
        console.print(text, *more, sep="\n", soft_wrap=True)
    for orphan in facts["orphans"]:
        old = age(_passed_s(orphan["modified_ms"]))
        said = f"{orphan['path']}, {size(orphan['bytes'])}, {old} old"
        console.print(Text.assemble(("orphan ", "yellow"), said), soft_wrap=True)
    if facts["orphans"]:
        console.print(Text("orphans are no damage: collection removes them in time", "dim"))
    checked = (
        f"{count(facts['records'])} records, {count(facts['epochs'])} epochs, "
        f"{count(facts['files'])} files, {size(facts['bytes'])} checked"
    )
    if facts["ok"]:
        console.print(Text.assemble(("whole: ", "bold green"), checked))
    else:
        found = f"damage in {len(facts['damage'])} place(s): "
        console.print(Text.assemble((found, "bold red"), checked))


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, gone when done; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _console() -> Console:
    console = Console(highlight=False)
    # Nobody wraps a pipe: what is cut to 80 columns there is lost.
    return console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _head(facts: Facts) -> Text:
    job = facts["job"]
    name = "job.json is missing or damaged" if job is None else job["name"]
    more = "" if job is None else f"  max_parallelism {job['max_parallelism']}"
    style = "bold red" if job is None else "bold cyan"
    return Text.assemble((name, style), (f"  {facts['checkpoint']}{more}", "dim"))


def _operator(uid: str, facts: Facts) -> Group:
    keys = ", ".join(f"{name} {kind}" for name, kind in facts["key_types"].items())
    head = Text.assemble(
        "\n", ("operator ", "dim"), (uid, "bold"),
        (f"  keyed by {keys}, parallelism {facts['parallelism']}, ", "dim"),
        (f"function {facts['function_version'][:12]}", "dim"),
    )  # fmt: skip
    states = Table.grid(padding=(0, 2))
    for name, decl in facts["states"].items():
        kind = decl["type"]
        if decl["entry_type"] is not None:
            kind = f"{decl['entry_type']} → {kind}"
        states.add_row(name, Text(decl["kind"], "dim"), kind)
    ranges = _table("key groups", "keys", "state", "bases", "deltas", "files")
    for part in facts["ranges"]:
        last = part["first_group"] + part["group_count"] - 1
        ranges.add_row(
            f"{part['first_group']}–{last}",
            count(part["state_keys"]),
            size(part["state_bytes"]),
            str(part["bases"]),
            str(part["deltas"]),
            size(part["file_bytes"]),
        )
    return Group(
        head,
        Padding(states, (0, 0, 0, 2), expand=False),
        Padding(ranges, (0, 0, 0, 2), expand=False),
    )


def _indented(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 2), expand=False)


def _times(facts: Facts) -> Text:
    text = Text(millis(facts["epoch_ms"]))
    for name, ms in split_ms(facts).items():
        if ms >= 0.05:
            text.append("  ").append(name, PART_STYLES[name]).append(f" {ms:.1f}")
    return text


def _passed_s(wall_ms: int) -> float:
    return time.time() - wall_ms / 1000


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
