"""The output of `ls` and `verify`, and the parts that all tables share; JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from cairn.cli.checkpoint import CheckReport, Finding, SavedJob
from cairn.query.epochs import EpochList, RecordReport, RestoreReport, TakeoverReport
from cairn.report.status import ACTIVE, Health, Restart, Status
from cairn.report.text import age, count, millis, mishaps, size
from cairn.storage.manifest import JobInfo

PIPE_COLUMNS = 200


def print_json(value: object) -> None:
    """Print structs, dicts and lists as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_epochs(found: EpochList, *, everything: bool) -> None:
    console = stdout_console()
    console.print(head(found.checkpoint, found.job))
    console.print(status_text(found.health), soft_wrap=True)
    if not found.records:
        console.print("no epochs yet; `--all` lists the starts of the job")
        return
    names = ("age", "rows in", "keys", "entries", "state", "delta", "time", "parent")
    rows = [_record_cells(record) for record in found.records]
    for line in _lines(["number" if everything else "epoch", *names], rows):
        console.print(line, soft_wrap=True)


def _record_cells(record: RecordReport) -> tuple[list[str], Text]:
    """Return the cells of a record, and a remark."""
    old = age(seconds_since(record.wall_ms))
    if isinstance(record, TakeoverReport):
        text = f"takeover by {record.host}, pid {record.pid}"
        return [str(record.number), old], Text(text, "cyan")
    if isinstance(record, RestoreReport):
        return [str(record.number), old], Text(f"restore of epoch {record.epoch}", "cyan")
    cells = [
        str(record.epoch),
        old,
        count(record.rows_in),
        count(record.state_keys),
        count(record.state_entries),
        size(record.state_bytes),
        size(record.delta_bytes),
        millis(record.epoch_ms),
        "" if record.parent is None else str(record.parent),
    ]
    remarks = [mishaps(record) if record.on_lineage else "rolled back"]
    if record.restored_by is not None:
        remarks.append(f"restored by {record.restored_by}")
    return cells, Text(", ".join(filter(None, remarks)), "magenta")


def _lines(names: list[str], rows: list[tuple[list[str], Text]]) -> Iterator[Text]:
    """Yield right-aligned columns, then the remark.

    A rich table would squeeze every column to make room for a rare remark.
    """
    widths = [len(name) for name in names]
    for cells, _ in rows:
        widths[: len(cells)] = map(max, widths, map(len, cells))
    yield Text("  ".join(map(str.rjust, names, widths)), "dim")
    for cells, remark in rows:
        line = Text("  ".join(map(str.rjust, cells, widths)).rstrip())
        yield line + Text("  ") + remark if remark.plain else line


def print_check(report: CheckReport) -> None:
    """Print the result of `verify`."""
    console = stdout_console()
    console.print(head(report.checkpoint, report.job))
    for damage in report.damage:
        _print_finding("damaged ", "bold red", damage)
    for orphan in report.orphans:
        old = age(seconds_since(orphan.modified_ms))
        text = f"{orphan.path}, {size(orphan.bytes)}, {old} old"
        console.print(Text.assemble(("orphan ", "yellow"), text), soft_wrap=True)
    if report.orphans:
        console.print(Text("orphans are not damage: collection removes them in time", "dim"))
    for hold in report.stale_holds:
        _print_finding("stale hold ", "yellow", hold)
    for note in report.stale_notes:
        _print_finding("stale note ", "yellow", note)
    checked = f"{many(report.files, 'file')}, {size(report.bytes)} checked"
    if report.kind == "savepoint":
        checked = f"savepoint of epoch {report.epoch}, {checked}"
    else:
        records = f"{many(report.records or 0, 'record')}, {many(report.epochs or 0, 'epoch')}"
        checked = f"{records}, {checked}"
    if report.ok:
        console.print(Text.assemble(("whole: ", "bold green"), checked))
    else:
        damaged = f"damage in {many(len(report.damage), 'place')}: "
        console.print(Text.assemble((damaged, "bold red"), checked))


def _print_finding(kind: str, style: str, finding: Finding) -> None:
    first, *rest = finding.what.splitlines()
    text = Text.assemble((kind, style), finding.path, f": {first}")
    more = (Text(f"  {line.strip()}", "dim") for line in rest)
    stdout_console().print(text, *more, sep="\n", soft_wrap=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr until the block ends, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def stdout_console() -> Console:
    console = Console(highlight=False)
    # In a pipe, text beyond 80 columns would be lost.
    return console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def head(checkpoint: str, job: JobInfo | SavedJob | None) -> Text:
    """Return the job, its checkpoint and its origin as text."""
    name = "job.json is missing or damaged" if job is None else job.name
    more = "" if job is None else f"  max_parallelism {job.max_parallelism}"
    style = "bold red" if job is None else "bold cyan"
    text = Text.assemble((name, style), (f"  {checkpoint}{more}", "dim"))
    made_from = job.ancestor if isinstance(job, JobInfo) else None
    if made_from is not None:
        where = f"{made_from.kind} of epoch {made_from.epoch}, {made_from.url}"
        text.append(f"\n  {where}", "magenta")
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
    "standby": "bold",
    "restarting": "bold yellow",
    "unknown": "dim",
}
_ABOUT_FAILURE: Final = ("operator", "key", "row", "timer", "at", "log", "next")


def status_text(health: Health) -> Text:
    """Return the status of a job with its rates and ages; after a failure, with its cause."""
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
    if health.restart is not None:
        text.append(f"\n  {_restart_text(health, health.restart)}", "yellow")
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


def _restart_text(health: Health, restart: Restart) -> str:
    name = f"restart {restart.number} on {restart.host}, pid {restart.pid}"
    pause = f"a pause of {age(restart.pause_ms / 1000)}"
    if health.status != "restarting":
        return f"{name}: {when(restart.wall_ms)}, after {pause}"
    left_s = (restart.until_ms - health.now_ms) / 1000
    return f"{name}: begins {f'in {left_s:.0f} s' if left_s >= 1 else 'now'}, after {pause}"


def printable(text: str) -> str:
    """Return the text with control characters escaped: data must not steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def many(number: int, thing: str) -> str:
    """1 file, 2 files."""
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def seconds_since(wall_ms: int) -> float:
    return time.time() - wall_ms / 1000


def when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
