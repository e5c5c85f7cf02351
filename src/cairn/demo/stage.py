"""The view of the demo: a list of events, and below it the progress of the stream.

If stdout is not a terminal, the progress is a line every few seconds.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cairn.demo.check import LEDGER_NAME, Comparison
from cairn.report.epoch import EpochReport
from cairn.report.text import count, millis, mishaps, size, sparkline, time_bar

PLAIN_EVERY_S = 5.0
STYLES = {"plain": "", "kill": "bold red", "good": "green", "bad": "bold red"}


@dataclass
class Standing:
    """The progress of the stream."""

    payments: int
    arrived: int = 0
    committed: int = 0


class Stage:
    """A context manager: the live part is shown inside the block only."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.console = Console(highlight=False)
        self._started_s = time.monotonic()
        self._newest: EpochReport | None = None
        self._rates: list[float] = []
        self._doing = ""
        self._plain_said = ""
        self._plain_said_s = 0.0
        self._live = Live(
            get_renderable=self._render,
            console=self.console,
            refresh_per_second=5,
            transient=True,
        )

    def __enter__(self) -> Stage:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def title(self, text: str, more: str) -> None:
        title = Text.assemble("\n", (text, "bold cyan"), "\n", (more, "dim"), "\n")
        self.console.print(title, soft_wrap=True)

    def print_event(self, text: str, kind: str = "plain") -> None:
        stamp = f"{self.elapsed_s:6.1f} s  "
        mark = {"kill": "✗ ", "good": "✓ ", "bad": "! "}.get(kind, "  ")
        self.console.print(
            Text.assemble((stamp, "dim"), (mark, STYLES[kind]), (text, STYLES[kind])),
            soft_wrap=True,
        )

    def busy(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner, for steps without a live part."""
        return self.console.status(text) if self.console.is_terminal else nullcontext()

    def set_step(self, text: str) -> None:
        """Name the next step, for the live part."""
        self._doing = text

    def epoch(self, epoch: EpochReport) -> None:
        self._newest = epoch
        self._rates = [*self._rates, epoch.rows_per_s][-32:]

    def tick(self) -> None:
        """Print the progress now and then, without a live part."""
        now_s = self.elapsed_s
        if self.console.is_terminal or now_s - self._plain_said_s < PLAIN_EVERY_S:
            return
        at = self.standing
        said = f"{count(at.arrived)} payments arrived, {count(at.committed)} committed"
        if self._newest:
            said += f", epoch {self._newest.epoch}, {count(self._newest.rows_per_s)} rows/s"
        if said != self._plain_said:
            self.print_event(said)
            self._plain_said, self._plain_said_s = said, now_s

    def _render(self) -> RenderableType:
        at = self.standing
        bars = Table.grid(padding=(0, 2))
        for name, done, style in (
            ("arrived", at.arrived, "blue"),
            ("committed", at.committed, "green"),
        ):
            bar = ProgressBar(at.payments, done, width=40, complete_style=style,
                              finished_style=style)  # fmt: skip
            share = f"{count(done)} of {count(at.payments)}"
            bars.add_row(Text(name, "dim"), bar, Text(share))
        parts: list[RenderableType] = [bars]
        if self._newest:
            epoch = self._newest
            state = f"{count(epoch.state_keys)} keys, {size(epoch.state_bytes)}"
            line = Text.assemble(
                ("epoch ", "dim"), (str(epoch.epoch), "bold"),
                ("   time ", "dim"), (millis(epoch.epoch_ms), "bold"), " ",
                time_bar(epoch.parts, 16),
                ("   state ", "dim"), (state, "bold"),
            )  # fmt: skip
            rate = Text.assemble(
                ("rows/s ", "dim"), (f"{count(epoch.rows_per_s):>8} ", "bold"),
                (sparkline(self._rates), "cyan"), (f"  {mishaps(epoch)}", "magenta"),
            )  # fmt: skip
            parts += [line, rate]
        if self._doing:
            parts.append(Text(f"… {self._doing}", "italic dim"))
        return Padding(Group(*parts), (1, 0, 0, 10))

    def verdict(
        self, comparisons: list[Comparison], kills: dict[str, int], gaps_s: dict[str, float]
    ) -> None:
        """Print the rows expected and found, and the verdict."""
        table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False, header_style="dim")
        table.add_column("", no_wrap=True)
        columns = ("plain Spark", "cairn", "lost", "duplicated", "unknown", "wrong")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for found in comparisons:
            good = Text("✓ ", "bold green") if found.ok else Text("✗ ", "bold red")
            faults = (found.lost, found.duplicated, found.unknown, found.wrong)
            table.add_row(
                good + Text(found.name),
                count(found.expected),
                count(found.found),
                *(Text(count(n), "bold red" if n else "") for n in faults),
            )
        # Rich pads with spaces to the edge, which would be in a file too.
        self.console.print()
        self.console.print(table)
        self.console.print()
        ledger = next(found for found in comparisons if found.name == LEDGER_NAME)
        ok = all(found.ok for found in comparisons)
        killed = ", ".join(f"{number} {what}" for what, number in kills.items())
        self.console.print(
            Text.assemble(
                (f"{count(ledger.expected)} events in, {count(ledger.found)} counted, ", "bold"),
                (
                    f"{count(ledger.lost)} lost, {count(ledger.duplicated)} duplicated\n",
                    "bold green" if ok else "bold red",
                ),
                f"killed in mid-epoch: {killed}",
                *(f"\nwithout an epoch, {what}: {gap_s:.1f} s" for what, gap_s in gaps_s.items()),
            ),
            soft_wrap=True,
        )
