"""Draw the graph of a job as an SVG.

Always true here:
- it is self-contained: no fonts, scripts or styles from elsewhere, and its own background, so
  that it is readable on a light page and on a dark one;
- long texts are cut; the tooltip of a box has them in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil

from cairn.report.boxes import Drawn, large_boxes, small_boxes
from cairn.report.job_graph import GraphEdge, JobGraph
from cairn.report.layout import PAD, Block, Column, Link
from cairn.report.places import MARGIN, Placed, end_label, place_boxes, start_label
from cairn.report.text_sizes import DIM, STYLES, line_height, short, width_of

BAND_TOP = 58

_PAPER, _BAND, _FRAME = "#ffffff", "#f3f5f8", "#a9b4c0"
# (ground, line) of a box
_PAINTS = {
    "source": ("#fff6dd", "#b58100"),
    "transform": ("#f4efff", "#7b4fd0"),
    "operator": ("#e9f1ff", "#2f66c9"),
    "sink": ("#e8f8ec", "#2b8a4b"),
    "feedback": ("#fdeef6", "#b3186a"),
}
_LINES = {
    "keyed": "#2f3b48",
    "spread": "#2f3b48",
    "broadcast": "#c2410c",
    "feedback": "#b3186a",
    "chain": "#7a8694",
    "transform": "#7a8694",
}


def draw_graph(graph: JobGraph) -> str:
    boxes = large_boxes(graph)
    found = place_boxes(graph, {node: each.box for node, each in boxes.items()})
    width, height = ceil(max(found.width, 560.0)), ceil(found.bottom + 44)
    edges = list(zip(found.edges, found.links, strict=True))
    parts = [
        *_head(graph, 0, width, height),
        *_paper(graph, width, height),
        *_body(boxes, found),
        *(part for edge, link in edges for part in _labels(edge, link)),
        *_legend(graph, found.bottom + 26),
    ]
    return "\n".join([*parts, "</svg>", ""])


def draw_for_dashboard(graph: JobGraph) -> str:
    """Return the picture for the dashboard: small boxes, with empty lines for live figures.

    Boxes have their node in `data-node`, and operators are links to their page. The dashboard's
    stylesheet replaces the colours, which are attributes here.
    """
    boxes = small_boxes(graph)
    found = place_boxes(graph, {node: each.box for node, each in boxes.items()}, is_labelled=False)
    head = _head(graph, BAND_TOP, ceil(found.width), ceil(found.bottom - BAND_TOP))
    return "\n".join([*head, *_body(boxes, found), "</svg>"])


def _body(boxes: dict[str, Drawn], found: Placed) -> Iterator[str]:
    yield from _bands(found.columns, found.bottom)
    for column in found.columns:
        for block in column.blocks:
            yield from _frame(block)
    for edge, path in zip(found.edges, found.paths, strict=True):
        yield from _line(edge.way, path, _line_title(edge))
    for node, each in boxes.items():
        yield from _box(node, each)


def _head(graph: JobGraph, top: float, width: float, height: float) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 {top} {width:.0f} {height:.0f}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    yield f"<title>{escape('job ' + graph.job)}</title>"
    yield "<defs>"
    for way, colour in _LINES.items():
        yield (
            f'<marker id="to-{way}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" '
            f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        )
    yield "</defs>"


def _paper(graph: JobGraph, width: float, height: float) -> Iterator[str]:
    yield (
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="10" '
        f'fill="{_PAPER}" stroke="{_FRAME}"/>'
    )
    yield _text(MARGIN, 30, f"job {graph.job}", "name", size=16)
    levels, operators = len(graph.levels), len(graph.operators)
    rounds = graph.max_rounds_per_epoch
    chained = sum(operator.chained for operator in graph.operators)
    about = (
        f"{levels} level{'s' if levels != 1 else ''}, {operators} "
        f"operator{'s' if operators != 1 else ''}"
        + (f", {chained} of them chained" if chained else "")
        + (f", up to {rounds} rounds an epoch" if rounds > 1 else "")
        + f"; max_parallelism {graph.max_parallelism}"
    )
    yield _text(MARGIN, 48, about, "about")


def _bands(columns: Sequence[Column], bottom: float) -> Iterator[str]:
    for column in columns:
        x, width = column.x - 12, column.width + 24
        is_level = column.title.startswith("level")
        if is_level:
            yield (
                f'<rect class="band" x="{x:.1f}" y="{BAND_TOP}" width="{width:.1f}" '
                f'height="{bottom - BAND_TOP:.1f}" rx="8" fill="{_BAND}"/>'
            )
        yield _text(column.x, 76, column.title, "about", weight="bold")
        if is_level and column.width > 150 and column.title[-1].isdigit():
            yield _text(column.right, 76, "one Spark stage", "about", anchor="end")


def _frame(block: Block) -> Iterator[str]:
    if block.is_framed:
        yield (
            f'<rect class="frame" x="{block.x:.1f}" y="{block.y:.1f}" width="{block.width:.1f}" '
            f'height="{block.height:.1f}" rx="9" fill="{_PAPER}" stroke="{_FRAME}" '
            'stroke-dasharray="2 3"/>'
        )


def _box(node: str, drawn: Drawn) -> Iterator[str]:
    kind, title, lines, box, href = drawn
    ground, line = _PAINTS[kind]
    if href is not None:
        yield f'<a href="{escape(href)}">'
    yield f'<g class="node {kind}" data-node="{escape(node)}"><title>{escape(title)}</title>'
    yield (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="6" fill="{ground}" stroke="{line}" stroke-width="1.3"/>'
    )
    y = box.middle - sum(line_height(style) for _, style in lines) / 2
    for text, style in lines:
        y += line_height(style)
        yield _text(box.x + 12, y - 4.5, short(text).rstrip(), style)
    yield "</g>" if href is None else "</g></a>"


def _line(way: str, path: str, title: str = "") -> Iterator[str]:
    width = 4.4 if way == "broadcast" else 1.3 if way in ("chain", "transform") else 1.8
    dash = ' stroke-dasharray="6 4"' if way == "feedback" else ""
    title = f"<title>{escape(title)}</title>" if title else ""
    common = f'd="{path}" fill="none" marker-end="url(#to-{way})"'
    yield (
        f'<path class="link {way}" {common} stroke="{_LINES[way]}" '
        f'stroke-width="{width}"{dash}>{title}</path>'
    )
    if way == "broadcast":
        yield f'<path class="core" {common} stroke="{_PAPER}" stroke-width="1.8"/>'


def _line_title(edge: GraphEdge) -> str:
    start, by = edge.source, ", ".join(edge.by)
    side = "" if start.side is None else f".{start.side}"
    return f"{start.node}{side} → {edge.to}, {f'by {by}' if by else edge.way}"


def _labels(edge: GraphEdge, link: Link) -> Iterator[str]:
    colour = _LINES[edge.way]
    x, y = link.points[-1]
    end, start = end_label(edge), start_label(edge)
    if end:
        # Before the frame and the band.
        yield _text(x - PAD - 18, y - 5, end, "label", anchor="end", colour=colour)
    if start and len(link.points) > 2:
        at_x, at_y = link.points[1]
        yield _text(at_x + 6, at_y - 4, start, "label", colour=DIM)
    elif start:
        yield _text(x - 11, y - 4, start, "label", anchor="end", colour=DIM)


def _legend(graph: JobGraph, y: float) -> Iterator[str]:
    ways = {edge.way for edge in graph.edges}
    shuffled = {edge.way for edge in graph.edges if edge.shuffled == "always"}
    shown = [
        ("keyed", "shuffle", bool(shuffled & {"keyed", "spread"})),
        ("broadcast", "to every subtask", "broadcast" in ways),
        ("feedback", "into the next epoch or round", "feedback" in ways),
        ("chain", "inside a process", "chain" in ways),
        ("transform", "inside Spark", "transform" in ways),
    ]
    x = float(MARGIN)
    for way, text, is_there in shown:
        if is_there:
            yield from _line(way, f"M{x:.1f} {y - 4:.1f}L{x + 34:.1f} {y - 4:.1f}")
            yield _text(x + 42, y, text, "about")
            x += 42 + width_of(text, "about") + 26


def _text(
    x: float,
    y: float,
    text: str,
    style: str,
    *,
    anchor: str = "start",
    size: float | None = None,
    weight: str | None = None,
    colour: str | None = None,
) -> str:
    own_size, _, own_weight, own_colour = STYLES[style]
    mono = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if style == "state" else ""
    halo = f' stroke="{_PAPER}" stroke-width="3" paint-order="stroke"' if style == "label" else ""
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" font-size="{size or own_size}" '
        f'font-weight="{weight or own_weight}" fill="{colour or own_colour}" '
        f'text-anchor="{anchor}"{mono}{halo} xml:space="preserve">{escape(text)}</text>'
    )
