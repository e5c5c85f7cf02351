"""Small line charts for the results: an SVG written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 300, 200, 66, 62, 58, 30
INK, DIM, LINE, RANGE = "#1f2328", "#59636e", "#2f66c9", "#a9c2ec"


@dataclass(frozen=True)
class Panel:
    """One chart: a value for each name along the x axis, with the middle half of what was seen."""

    title: str
    x_title: str
    names: Sequence[str]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def write_chart(path: Path, title: str, y_title: str, note: str, panels: Sequence[Panel]) -> None:
    """Panels side by side, each with its own y axis."""
    step = LEFT + WIDTH + GAP
    width, height = step * len(panels) + 10, TOP + HEIGHT + BOTTOM + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, Helvetica, Arial, sans-serif">',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
        'fill="#ffffff" stroke="#a9b4c0"/>',
        _text(16, 24, title, 14, INK, weight="bold"),
        _text(16, height - 12, note, 11, DIM),
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, step * index + LEFT, y_title if index == 0 else "")
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _panel(panel: Panel, left: int, y_title: str) -> list[str]:
    most = max((*panel.high, *panel.values, 1.0))
    unit = next(u for u in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000) if most / u <= 6)
    ticks = range(0, int(most / unit) * unit + 2 * unit, unit)
    top_value = ticks[-1]
    count = len(panel.names)

    def x(at: int) -> float:
        return left + WIDTH * (at + 0.5) / count

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / top_value)

    parts = [_text(left, TOP - 14, panel.title, 12, INK, weight="bold")]
    for tick in ticks:
        parts.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" '
            f'stroke="{"#8b949e" if tick == 0 else "#e4e8ec"}"/>'
        )
        parts.append(_text(left - 8, y(tick) + 4, str(tick), 11, DIM, anchor="end"))
    for at, name in enumerate(panel.names):
        parts.append(_text(x(at), TOP + HEIGHT + 18, name, 11, DIM, anchor="middle"))
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{y(panel.low[at]):.1f}" '
            f'y2="{y(panel.high[at]):.1f}" stroke="{RANGE}" stroke-width="6"/>'
        )
    points = " ".join(f"{x(at):.1f},{y(v):.1f}" for at, v in enumerate(panel.values))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for at, value in enumerate(panel.values):
        parts.append(f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5" fill="{LINE}"/>')
    parts.append(_text(left + WIDTH / 2, TOP + HEIGHT + 38, panel.x_title, 12, INK, "middle"))
    if y_title:
        middle = TOP + HEIGHT / 2
        turn = f'transform="rotate(-90 {left - 42} {middle})" '
        parts.append(_text(left - 42, middle, y_title, 12, INK, anchor="middle", more=turn))
    return parts


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    colour: str,
    anchor: str = "start",
    weight: str = "normal",
    more: str = "",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {more}font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )
