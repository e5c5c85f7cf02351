"""A job, a stream and a run in a notebook, as HTML and SVG.

Always true here:
- text from outside (names, types, errors) is escaped: none of it is markup;
- a picture is self-contained: no fonts, scripts or styles from elsewhere, and its own background,
  so that it is readable on a light page and on a dark one;
- nothing is read here; of many epochs the last ones are shown.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from html import escape
from itertools import islice
from math import ceil, log10
from typing import NamedTuple, Protocol

from cairn.errors import CairnError
from cairn.report.epoch import EpochReport
from cairn.report.status import Status
from cairn.report.text import count, millis, mishaps, size

TABLE_EPOCHS = 8
PLOT_EPOCHS = 60

_PAPER, _INK, _DIM, _FRAME = "#ffffff", "#1f2328", "#59636e", "#d0d7de"
# The parts of an epoch's time, in the order in which they are stacked.
PART_COLOURS = {
    "begin": "#b35bb0",
    "process": "#2b8a4b",
    "alignment": "#c9821a",
    "snapshot": "#2f66c9",
    "commit": "#c0392b",
    "spark": "#a9b4c0",
}
PART_MEANINGS = {
    "begin": "until the parent's state is at hand, restores included",
    "process": "functions and their output, in the slowest subtask",
    "alignment": "waiting for the slowest of the subtasks that feed an operator",
    "snapshot": "what the epoch changed, written in the slowest subtask",
    "commit": "the sinks publish",
    "spark": "planning, scheduling and shuffling",
}
_STATUS_COLOURS: dict[Status, str] = {
    "starting": "#2f66c9",
    "running": "#2b8a4b",
    "idle": "#2b8a4b",
    "behind": "#c9821a",
    "paused": "#c9821a",
    "failing": "#c9821a",
    "failed": "#c0392b",
    "stopped": "#59636e",
    "finished": "#2f66c9",
    "superseded": "#59636e",
    "standby": "#59636e",
    "restarting": "#9a6700",
    "unknown": "#59636e",
}
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_CELL = "padding:2px 10px;text-align:right;white-space:nowrap"
_LEFT = "padding:2px 10px;text-align:left"
_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"
_WIDTH, _HEIGHT, _LEFT_EDGE, _TOP, _BOTTOM = 720, 260, 64, 44, 34


class RunFacts(NamedTuple):
    """A run, as a notebook shows it."""

    name: str
    status: Status
    why: str | None
    """Why it is paused, or what failed."""
    checkpoint: str
    epochs: Sequence[EpochReport]
    """Newest first."""


class Running(Protocol):
    """A run, as far as it is shown."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> Status: ...
    @property
    def paused(self) -> str | None: ...
    @property
    def error(self) -> BaseException | None: ...


def run_facts(
    run: Running, checkpoint: str, epochs: Iterable[EpochReport], last_commit_ms: float
) -> RunFacts:
    """Return a run with as many of its epochs as are shown; `epochs` are newest first.

    `last_commit_ms` is how long the sinks took to publish the newest of them.
    """
    shown: list[EpochReport] = []
    # Showing a run must not fail: the checkpoint of a run that has ended may be gone.
    with suppress(CairnError):
        shown.extend(islice(epochs, PLOT_EPOCHS))
    why = run.paused if run.error is None else str(run.error)
    return RunFacts(run.name, run.status, why, checkpoint, with_commits(shown, last_commit_ms))


def with_commits(epochs: Sequence[EpochReport], last_commit_ms: float) -> list[EpochReport]:
    """Return epochs, newest first, with the times of their commits: each is noted by the next."""
    found = []
    commit_ms: float | None = last_commit_ms
    for epoch in epochs:
        found.append(epoch if commit_ms is None else epoch.with_commit(commit_ms))
        commit_ms = epoch.timings.last_commit_ms
    return found


# Pictures


class Plot:
    """A picture that a notebook shows. `svg` is its text, to be written to a file."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return _make_scrollable(self.svg)

    def __repr__(self) -> str:
        return f"<plot: {len(self.svg)} characters of SVG>"


def timeline(facts: RunFacts) -> Plot:
    """Return the timeline of a run's epochs."""
    return Plot(timeline_svg(facts.name, facts.epochs))


def timeline_svg(name: str, epochs: Sequence[EpochReport]) -> str:
    """Return a bar for each epoch, newest last, of the parts of its time; `epochs` newest first."""
    bars = epochs[:PLOT_EPOCHS][::-1]
    top_ms = max((sum(ms for _, ms in each.parts.items()) for each in bars), default=0.0)
    steps = _steps(top_ms)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="{_FONT}" font-size="11">',
            f"<title>{escape(f'job {name}: where the time of its epochs went')}</title>",
            f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="8" '
            f'fill="{_PAPER}" stroke="{_FRAME}"/>',
            *_plot_legend(),
            *_grid(steps),
            *(_bars(bars, steps[-1]) if bars else [_note("no epoch yet")]),
            "</svg>",
        ]
    )


def _steps(top_ms: float) -> list[float]:
    """Round figures from 0 to at least the top, five of them or fewer."""
    if top_ms <= 0:
        return [0.0, 100.0]
    rough = top_ms / 4
    unit = 10.0 ** int(log10(rough)) if rough >= 1 else 1.0
    step = next(unit * n for n in (1, 2, 2.5, 5, 10, 20) if unit * n >= rough)
    return [step * n for n in range(ceil(top_ms / step) + 1)]


def _y(ms: float, top_ms: float) -> float:
    return _HEIGHT - _BOTTOM - ms / top_ms * (_HEIGHT - _BOTTOM - _TOP)


def _grid(steps: Sequence[float]) -> Iterator[str]:
    for ms in steps:
        y = _y(ms, steps[-1])
        yield (
            f'<line x1="{_LEFT_EDGE}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{_FRAME}"/>'
        )
        yield (
            f'<text x="{_LEFT_EDGE - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{_DIM}">'
            f"{millis(ms)}</text>"
        )


def _bars(bars: Sequence[EpochReport], top_ms: float) -> Iterator[str]:
    room = _WIDTH - 16 - _LEFT_EDGE
    pitch = min(48.0, room / len(bars))
    width = pitch * 0.74
    every = max(1, ceil(34 / pitch))
    for index, epoch in enumerate(bars):
        x = _LEFT_EDGE + index * pitch + (pitch - width) / 2
        times = ", ".join(f"{name} {millis(ms)}" for name, ms in epoch.parts.items() if ms >= 0.5)
        rough = mishaps(epoch)
        text = f"epoch {epoch.epoch}: {count(epoch.rows_in)} rows, {times}"
        text += f"; {rough}" if rough else ""
        yield f"<g><title>{escape(text)}</title>"
        done = 0.0
        for name, ms in epoch.parts.items():
            if ms > 0:
                y = _y(done + ms, top_ms)
                yield (
                    f'<rect x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" '
                    f'height="{_y(done, top_ms) - y:.2f}" fill="{PART_COLOURS[name]}"/>'
                )
                done += ms
        yield "</g>"
        if (len(bars) - 1 - index) % every == 0:
            yield (
                f'<text x="{x + width / 2:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle" '
                f'fill="{_INK}">{epoch.epoch}</text>'
            )
        if rough:
            yield (
                f'<text x="{x + width / 2:.1f}" y="{_y(done, top_ms) - 4:.1f}" '
                f'text-anchor="middle" fill="{_INK}">!</text>'
            )


def _plot_legend() -> Iterator[str]:
    x = float(_LEFT_EDGE)
    for name, colour in PART_COLOURS.items():
        yield f"<g><title>{escape(PART_MEANINGS[name])}</title>"
        yield f'<rect x="{x:.0f}" y="16" width="10" height="10" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 15:.0f}" y="25" fill="{_INK}">{name}</text></g>'
        x += 15 + 6.4 * len(name) + 20


def _note(text: str) -> str:
    return (
        f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT / 2:.0f}" text-anchor="middle" fill="{_DIM}">'
        f"{escape(text)}</text>"
    )


# Pages


def run_html(facts: RunFacts) -> str:
    """Status, the last epochs in figures, and their timeline."""
    colour = _STATUS_COLOURS.get(facts.status, _DIM)
    newest = facts.epochs[0] if facts.epochs else None
    at = "no epoch yet" if newest is None else f"epoch {newest.epoch}"
    parts = [
        f'<div style="font-family:{_FONT}">',
        f'<div style="margin:4px 0"><b>{escape(facts.name)}</b> '
        f'<span style="color:#fff;background:{colour};border-radius:8px;padding:1px 8px">'
        f"{escape(facts.status)}</span> {escape(at)}</div>",
        f'<div style="opacity:.7;margin:4px 0">{escape(_progress(newest, facts.checkpoint))}</div>',
    ]
    if facts.why:
        parts.append(f'<pre style="white-space:pre-wrap;margin:4px 0">{escape(facts.why)}</pre>')
    if facts.epochs:
        parts.append(_epoch_table(facts.epochs[:TABLE_EPOCHS]))
        parts.append(_make_scrollable(timeline_svg(facts.name, facts.epochs)))
    return "\n".join([*parts, "</div>"])


def _progress(newest: EpochReport | None, checkpoint: str) -> str:
    if newest is None:
        return checkpoint
    parts = [checkpoint, f"{count(newest.state_keys)} keys with state"]
    if newest.watermark_ms is not None:
        parts.append(f"watermark {_instant(newest.watermark_ms)}")
    if newest.in_flight:
        parts.append(f"{count(newest.in_flight)} records in loops")
    return ", ".join(parts)


def _instant(ms: int) -> str:
    try:
        return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


def _epoch_table(epochs: Sequence[EpochReport]) -> str:
    names = ("epoch", "rows", "rows/s", "keys", "state", "delta", "time", "")
    rows = [
        (
            str(epoch.epoch),
            count(epoch.rows_in),
            count(epoch.rows_per_s),
            count(epoch.state_keys),
            size(epoch.state_bytes),
            size(epoch.delta_bytes),
            millis(epoch.epoch_ms),
            mishaps(epoch),
        )
        for epoch in epochs
    ]
    return _table(names, rows, _CELL)


def graph_html(title: str, svg: str | None, schema: Iterable[tuple[str, str]], note: str) -> str:
    """A job or a stream: its columns, if it has any, and the graph as far as it is built."""
    columns = list(schema)
    parts = [f'<div style="font-family:{_FONT}">', f"<div><b>{escape(title)}</b></div>"]
    if columns:
        parts.append(_table(("column", "type"), columns, _LEFT))
    if note:
        parts.append(f'<pre style="opacity:.7;margin:4px 0">{escape(note)}</pre>')
    if svg is not None:
        parts.append(_make_scrollable(svg))
    return "\n".join([*parts, "</div>"])


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], style: str) -> str:
    head = "".join(f'<th style="{style};{_LINE}">{escape(name)}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f'<td style="{style}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        '<table style="border-collapse:collapse;margin:4px 0;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _make_scrollable(svg: str) -> str:
    return f'<div style="overflow-x:auto">{svg}</div>'
