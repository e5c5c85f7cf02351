"""Epochs in a terminal: live for people, a line each for logs, JSON for programs.

Always true here:
- a view shows the reports it is given, and reads nothing;
- in JSON and in lines, every epoch appears; the live view keeps the last few.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cairn.report.epoch import EpochReport, TimeParts

LIVE_EPOCHS = 8
SPARKLINE_EPOCHS = 40
BAR_CELLS = 24
# Colours of the parts of an epoch's time.
PART_STYLES = {
    "begin": "magenta",
    "process": "green",
    "alignment": "cyan",
    "snapshot": "yellow",
    "commit": "blue",
    "spark": "bright_black",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_HIDDEN_CURSOR_BACK = b"\x1b[?25h\n"


# Words


def count(number: float | None) -> str:
    """Return a whole number as text; a dash for one that is not known."""
    return "–" if number is None else f"{number:,.0f}"


def size(byte_count: float) -> str:
    """Return a size with its unit, like 7.0 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if byte_count < 1000:
            return f"{byte_count:.0f} B" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1024
    return f"{byte_count:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 12 s, 3 min 5 s, 2 h 10 min, 4 d 3 h."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def age(seconds: float) -> str:
    """Return a duration in its largest unit alone."""
    unit = duration(seconds).split()
    return " ".join(unit[:2])


def millis(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 10_000 else f"{ms:,.0f} ms"


def mishaps(epoch: EpochReport) -> str:
    """Return the troubles of an epoch in words; mostly none."""
    found = []
    if epoch.attempts > 1:
        found.append(f"{epoch.attempts} attempts")
    if epoch.restored:
        found.append(f"{epoch.restored} restored")
    return ", ".join(found)


def sparkline(values: Sequence[float]) -> str:
    top = max(values, default=0.0) or 1.0
    return "".join(_BLOCKS[min(7, int(value / top * 7.999))] for value in values)


def time_bar(parts: TimeParts, cells: int = BAR_CELLS) -> Text:
    """Return a bar of coloured cells, each part in proportion."""
    total = sum(ms for _, ms in parts.items()) or 1.0
    bar = Text()
    done, drawn = 0.0, 0
    for name, ms in parts.items():
        done += ms
        upto = round(done / total * cells)
        bar.append("━" * (upto - drawn), PART_STYLES[name])
        drawn = upto
    return bar


# Views of a run


class View(ABC):
    """Shows a run as it goes. A context manager: leaving it gives the terminal back."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @abstractmethod
    def epoch(self, epoch: EpochReport) -> None:
        """Show a committed epoch."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a message."""

    def end(self, status: str) -> None:
        """Show that the run has ended without an error."""

    def abandon(self) -> None:
        """Give the terminal back at once: the process is about to end."""


class JsonView(View):
    """One JSON object per epoch; nothing else."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def epoch(self, epoch: EpochReport) -> None:
        self._out.write(msgspec.json.encode(epoch).decode() + "\n")
        self._out.flush()

    def say(self, text: str) -> None:
        pass


class LineView(View):
    """One line per epoch, for logs and pipes."""

    def __init__(self, out: TextIO, job_name: str, url: str) -> None:
        self._out = out
        self._epochs = self._rows = 0
        self._started_s = time.monotonic()
        self.say(f"{job_name} on {url}")

    def epoch(self, epoch: EpochReport) -> None:
        self._epochs += 1
        self._rows += epoch.rows_in
        rough = mishaps(epoch)
        self.say(
            f"epoch {epoch.epoch}: {count(epoch.rows_in)} rows, "
            f"{count(epoch.rows_per_s)} rows/s, state {count(epoch.state_keys)} keys "
            f"{size(epoch.state_bytes)}, delta {size(epoch.delta_bytes)}, "
            f"{millis(epoch.epoch_ms)} ({_split_words(epoch)})" + (f", {rough}" if rough else "")
        )

    def say(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()

    def end(self, status: str) -> None:
        self.say(_last_words(status, self._epochs, self._rows, self._started_s))


class LiveView(View):
    """A view that redraws itself at the bottom of the terminal; prints scroll past above."""

    def __init__(self, console: Console, job_name: str, url: str, trigger: str) -> None:
        self._console = console
        self._title = job_name
        self._url = url
        self._trigger = trigger
        self._note = "Ctrl-C stops after the epoch under way"
        self._recent: deque[EpochReport] = deque(maxlen=LIVE_EPOCHS)
        self._rates: deque[float] = deque(maxlen=SPARKLINE_EPOCHS)
        self._epochs = self._rows = self._attempts = self._restored = 0
        self._started_s = time.monotonic()
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def epoch(self, epoch: EpochReport) -> None:
        self._epochs += 1
        self._rows += epoch.rows_in
        self._attempts += epoch.attempts - 1
        self._restored += epoch.restored
        self._recent.appendleft(epoch)
        self._rates.append(epoch.rows_per_s)

    def say(self, text: str) -> None:
        self._note = text

    def end(self, status: str) -> None:
        self._live.stop()
        if self._recent:
            self._console.print(self._table())
        self._console.print(
            Text.assemble(
                (f"{self._title} ", "bold cyan"),
                _last_words(status, self._epochs, self._rows, self._started_s),
            )
        )

    def abandon(self) -> None:
        if self._console.is_terminal:
            os.write(1, _HIDDEN_CURSOR_BACK)

    def _render(self) -> RenderableType:
        up = duration(time.monotonic() - self._started_s)
        head = Text.assemble(
            (f"{self._title}", "bold cyan"), (f"  {up}, trigger {self._trigger}\n", "dim"),
            (self._url, "dim"),
        )  # fmt: skip
        if not self._recent:
            body: RenderableType = Text("waiting for the first epoch …", "italic dim")
        else:
            body = Group(self._numbers(), Text(), self._table(), _legend())
        return Padding(Group(head, Text(), body, Text(self._note, "dim")), (1, 1))

    def _numbers(self) -> RenderableType:
        newest = self._recent[0]
        grid = Table.grid(padding=(0, 4))
        cells = {
            "epoch": count(newest.epoch),
            "rows/s": count(newest.rows_per_s),
            "rows": count(self._rows),
            "state": f"{count(newest.state_keys)} keys, {size(newest.state_bytes)}",
        }
        if self._attempts or self._restored:
            cells["recovered"] = f"{self._attempts} retries, {self._restored} restores"
        grid.add_row(*(Text(name, "dim") for name in cells), Text("rows/s by epoch", "dim"))
        grid.add_row(
            *(Text(value, "bold") for value in cells.values()), Text(sparkline(self._rates), "cyan")
        )
        return grid

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("epoch", "rows", "rows/s", "state", "delta", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("of which", no_wrap=True)
        table.add_column("", no_wrap=True)
        for epoch in self._recent:
            table.add_row(
                str(epoch.epoch),
                count(epoch.rows_in),
                count(epoch.rows_per_s),
                size(epoch.state_bytes),
                size(epoch.delta_bytes),
                millis(epoch.epoch_ms),
                time_bar(epoch.parts),
                Text(mishaps(epoch), "magenta"),
            )
        return table


def _legend() -> Text:
    legend = Text()
    for name, style in PART_STYLES.items():
        legend.append("━ ", style).append(f"{name}  ", "dim")
    return legend


def _split_words(epoch: EpochReport) -> str:
    return ", ".join(f"{name} {ms:.0f}" for name, ms in epoch.parts.items() if ms >= 0.5)


def _last_words(status: str, epochs: int, rows: int, started_s: float) -> str:
    took = duration(time.monotonic() - started_s)
    return f"{status}: {count(rows)} rows in {count(epochs)} epochs, {took}"
