"""The styles of text in a drawing, and the room that a text takes.

Always true here:
- sizes are estimates from the number of characters: no font is read.
"""

from __future__ import annotations

INK, DIM = "#1f2328", "#59636e"
TEXT_MAX = 52
# (size, width of a character, weight, colour) of a text
STYLES = {
    "name": (13.0, 8.9, "bold", INK),
    "about": (11.0, 6.3, "normal", DIM),
    "state": (10.5, 6.45, "normal", INK),
    "label": (10.5, 6.0, "normal", INK),
    "figure": (12.0, 7.0, "normal", INK),
}


def line_height(style: str) -> float:
    """Return the height of a line, with the space above it."""
    return STYLES[style][0] + 5.5


def width_of(text: str, style: str) -> float:
    """Return about the width of a text."""
    return len(text) * STYLES[style][1]


def short(text: str, most: int | None = TEXT_MAX) -> str:
    """Return the text, cut to at most this many characters."""
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


__all__ = ["DIM", "STYLES", "line_height", "short", "width_of"]
