"""What `ls` and `verify` print, and what all tables share; JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from cairn.report.status import ACTIVE, Health, Status
from cairn.report.text import age, count, millis, mishaps, size

Facts = dict[str, Any]

PIPE_COLUMNS = 200


def print_json(facts: Facts) -> None:
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")


def print_epochs(facts: Facts, *, everything: bool) -> None:
    console = stdout_console()
    console.print(head(facts))
    console.print(status_text(facts["health"]), soft_wrap=True)
    records = facts["records"]
    if not records:
        console.print("no epochs yet; `--all` shows who has started the job")
        return
    names = ("age", "rows in", "keys", "entries", "state", "delta", "time", "parent")
    rows = [_record_cells(record) for record in records]
    for line in _lines(["number" if everything else "epoch", *names], rows):
        console.print(line, soft_wrap=True)


def _record_cells(record: Facts) -> tuple[list[str], Text]:
    """A record as cells, and what there is to remark."""
    old = age(passed_s(record["wall_ms"]))
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
        count(record["state_entries"]),
        size(record["state_bytes"]),
        size(record["delta_bytes"]),
        millis(record["epoch_ms"]),
        "" if record["parent"] is None else str(record["parent"]),
    ]
    remarks = [mishaps(record) if record["on_lineage"] else "rolled back"]
    if record["restored_by"] is not None:
        remarks.append(f"restored by {record['restored_by']}")
    return cells, Text(", ".join(filter(None, remarks)), "magenta")


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


def print_report(facts: Facts) -> None:
    console = stdout_console()
    console.print(head(facts))
    for damage in facts["damage"]:
        first, *rest = damage["what"].splitlines()
        text = Text.assemble(("damaged ", "bold red"), damage["path"], f": {first}")
        more = (Text(f"  {line.strip()}", "dim") for line in rest)
        console.print(text, *more, sep="\n", soft_wrap=True)
    for orphan in facts["orphans"]:
        old = age(passed_s(orphan["modified_ms"]))
        said = f"{orphan['path']}, {size(orphan['bytes'])}, {old} old"
        console.print(Text.assemble(("orphan ", "yellow"), said), soft_wrap=True)
    if facts["orphans"]:
        console.print(Text("orphans are not damage: collection removes them in time", "dim"))
    stale = [("stale hold ", hold) for hold in facts["stale_holds"]]
    stale += [("stale note ", note) for note in facts["stale_notes"]]
    for kind, found in stale:
        first, *rest = found["what"].splitlines()
        text = Text.assemble((kind, "yellow"), found["path"], f": {first}")
        more = (Text(f"  {line.strip()}", "dim") for line in rest)
        console.print(text, *more, sep="\n", soft_wrap=True)
    checked = f"{many(facts['files'], 'file')}, {size(facts['bytes'])} checked"
    if facts["kind"] == "savepoint":
        checked = f"savepoint of epoch {facts['epoch']}, {checked}"
    else:
        records = f"{many(facts['records'], 'record')}, {many(facts['epochs'], 'epoch')}"
        checked = f"{records}, {checked}"
    if facts["ok"]:
        console.print(Text.assemble(("whole: ", "bold green"), checked))
    else:
        found = f"damage in {many(len(facts['damage']), 'place')}: "
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


def stdout_console() -> Console:
    console = Console(highlight=False)
    # Nobody wraps a pipe: what is cut to 80 columns there is lost.
    return console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def head(facts: Facts) -> Text:
    """The job, where it is kept, and where it came from."""
    job = facts["job"]
    name = "job.json is missing or damaged" if job is None else job["name"]
    more = "" if job is None else f"  max_parallelism {job['max_parallelism']}"
    style = "bold red" if job is None else "bold cyan"
    text = Text.assemble((name, style), (f"  {facts['checkpoint']}{more}", "dim"))
    origin = None if job is None else job.get("origin")
    if origin is not None:
        text.append(f"\n  {origin['kind']} of epoch {origin['epoch']}, {origin['url']}", "magenta")
    return text


_STATUS_STYLES: Final[dict[Status, str]] = {
    "starting": "bold cyan",
    "running": "bold green",
    "idle": "green",
    "behind": "bold yellow",
    "paused": "bold yellow",
    "failing": "bold yellow",
    "failed": "bold red",
    "stopped": "bold",
    "finished": "bold",
    "superseded": "bold",
    "unknown": "dim",
}
_ABOUT_FAILURE: Final = ("operator", "key", "row", "timer", "at", "log", "next")


def status_text(facts: Facts) -> Text:
    """Return the status of a job with its rates and ages; after a failure, with its facts."""
    health = msgspec.convert(facts, Health)
    text = Text.assemble((health.status, _STATUS_STYLES[health.status]))
    figures = []
    if health.status in ACTIVE:
        figures.append(f"{count(health.rates.rows_per_s)} rows/s")
    if health.epoch_age_ms is not None:
        figures.append(f"last epoch {age(health.epoch_age_ms / 1000)} ago")
    if health.lag_ms is not None and health.status in ACTIVE:
        figures.append(f"watermark {age(health.lag_ms / 1000)} behind the clock")
    if figures:
        text.append(f"  {', '.join(figures)}", "dim")
    if health.why is not None:
        text.append(
            f"\n  {printable(health.why)}", "red" if health.status == "failed" else "yellow"
        )
    failure = health.failure
    if failure is not None:
        for name in _ABOUT_FAILURE:
            value = getattr(failure, name)
            if value is not None:
                text.append(f"\n  {name}: ", "dim").append(printable(value))
        often = f"epoch {failure.epoch}, {many(failure.attempts, 'attempt')}"
        if failure.times > 1:
            often += f", seen {failure.times} times"
        text.append(f"\n  when: {when(failure.wall_ms)}, {often}", "dim")
    return text


def printable(text: str) -> str:
    """Return the text with control characters escaped: data must not steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def many(number: int, thing: str) -> str:
    """1 file, 2 files."""
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def passed_s(wall_ms: int) -> float:
    return time.time() - wall_ms / 1000


def when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
