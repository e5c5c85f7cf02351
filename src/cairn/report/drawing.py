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
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from cairn.report.job_graph import GraphEdge, GraphOperator, GraphSource, JobGraph
from cairn.report.layout import PAD, Block, Box, Column, Layout, Link, Tree
from cairn.report.state_text import join_text, state_text
from cairn.types.durations import span_text

Lines = list[tuple[str, str]]

TEXT_MAX = 52
TRANSFORM_MAX = 18
TYPE_MAX = 24
COLUMNS_MAX = 32
SMALL_MAX = 30
FIGURE_CHARS = 20
MARGIN = 20
BAND_TOP = 58
TOP = 92
FEEDBACK_INLET = 1 << 30
TRACK = 22
"""Between the rows of links that go back."""

_PAPER, _BAND, _INK, _DIM, _FRAME = "#ffffff", "#f3f5f8", "#1f2328", "#59636e", "#a9b4c0"
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
# (size, width of a character, weight, colour) of a text
_TEXTS = {
    "name": (13.0, 8.9, "bold", _INK),
    "about": (11.0, 6.3, "normal", _DIM),
    "state": (10.5, 6.45, "normal", _INK),
    "label": (10.5, 6.0, "normal", _INK),
    "figure": (12.0, 7.0, "normal", _INK),
}


class Drawn(NamedTuple):
    """The content of a box, and its place."""

    kind: str
    title: str
    lines: Lines
    box: Box
    href: str | None = None


class Placed(NamedTuple):
    """Boxes, columns and links where they lie; a link, its edge and its path go together."""

    columns: list[Column]
    links: list[Link]
    edges: list[GraphEdge]
    paths: list[str]
    width: float
    bottom: float


def place_boxes(graph: JobGraph, boxes: dict[str, Box], *, is_labelled: bool = True) -> Placed:
    """Find a place for boxes of any size, one for each node of the job."""
    links = _links(graph)
    if not is_labelled:
        for link in links:
            link.start_width = link.end_width = 0.0
    edges = dict(zip(map(id, links), graph.edges, strict=True))
    columns = _columns(graph, boxes, links, edges)
    layout = Layout(columns, links, left=MARGIN + 12, top=TOP)
    back = [link for link in links if link.is_back]
    floor = layout.bottom + 20
    width = columns[-1].right + (30 + 10 * len(back) if back else 12) + MARGIN
    paths = [_path(link, back, floor) for link in links]
    return Placed(columns, links, graph.edges, paths, width, floor + TRACK * len(back) - 4)


def draw_graph(graph: JobGraph) -> str:
    boxes = _boxes(graph)
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
    boxes = _small_boxes(graph)
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


# Boxes


def _boxes(graph: JobGraph) -> dict[str, Drawn]:
    boxes: dict[str, Drawn] = {}

    def add(name: str, kind: str, lines: Lines, whole: Lines | None = None) -> None:
        """`whole`: the lines that are not cut short, where they are."""
        title = "\n".join(text for text, _ in whole or lines)
        boxes[name] = Drawn(kind, title, lines, _box_for(graph, name, lines))

    for source in graph.sources:
        lines, whole = (
            [(source.name, "name"), *_time_lines(source, most)] for most in (COLUMNS_MAX, None)
        )
        add(source.name, "source", lines, whole)
    for transform in graph.transforms:
        add(
            transform.name,
            "transform",
            _transform_lines(transform.function),
            [(transform.function, "name"), _SPARK],
        )
    for operator in graph.operators:
        whole = _operator_lines(operator, None)
        add(operator.uid, "operator", _operator_lines(operator, TYPE_MAX), whole)
    for sink in graph.sinks:
        add(sink.uid, "sink", [(sink.uid, "name"), (f"{sink.sink} sink", "about")])
    rounds = graph.max_rounds_per_epoch
    for loop in graph.loops:
        then = f"up to {rounds} rounds in each" if rounds > 1 else "enters the next one"
        for back in loop.into:
            about = [("sent back, kept with the epoch;", "about"), (then, "about")]
            add(back.uid, "feedback", [(loop.uid, "name"), *about])
    return boxes


def _small_boxes(graph: JobGraph) -> dict[str, Drawn]:
    boxes: dict[str, Drawn] = {}

    def add(node: str, kind: str, name: str, about: str, figures: int = 0) -> None:
        texts = [(name, "name"), (about, "about")]
        lines = [(_short(text, SMALL_MAX), style) for text, style in texts]
        # As wide as most figures: the box does not grow when they come.
        lines += [(" " * FIGURE_CHARS, "figure")] * figures
        href = f"#/operators/{quote(node, safe='')}" if kind == "operator" else None
        title = f"{kind} {name}: {about}"
        boxes[node] = Drawn(kind, title, lines, _box_for(graph, node, lines), href)

    for source in graph.sources:
        mark = source.watermark_ms
        about = "source" if mark is None else f"watermark delay {span_text(mark)}"
        add(source.name, "source", source.name, about, figures=1)
    for transform in graph.transforms:
        add(transform.name, "transform", "Spark SQL", transform.function)
    for operator in graph.operators:
        keys = ", ".join(operator.keys)
        about = operator.function + (f" by {keys}" if keys else "")
        add(operator.uid, "operator", operator.uid, about, figures=2)
    for sink in graph.sinks:
        add(sink.uid, "sink", sink.uid, f"{sink.sink} sink")
    for loop in graph.loops:
        for back in loop.into:
            add(back.uid, "feedback", loop.uid, "sent back")
    return boxes


def _box_for(graph: JobGraph, node: str, lines: Lines) -> Box:
    """Return a box with room for the lines, and for the links that end at it."""
    inlets = {_inlet(edge) for edge in graph.edges if edge.to == node}
    width = max(_width_of(_short(text), style) for text, style in lines) + 24
    height = max(16 + sum(_line_height(style) for _, style in lines), 22 * len(inlets) + 16)
    return Box(node, width, height)


_SPARK = ("Spark SQL, an epoch at a time", "about")


def _transform_lines(function: str) -> Lines:
    """Return narrow lines: there may be a transform before each level."""
    name, _, place = function.partition(" at ")
    lines = [(name, "name"), (place or "Spark SQL", "about")]
    return [(_short(text, TRANSFORM_MAX), style) for text, style in lines]


def _time_lines(source: GraphSource, columns_max: int | None) -> Iterator[tuple[str, str]]:
    yield _short(", ".join(source.columns), columns_max), "about"
    if source.event_time is not None:
        yield f"event time {source.event_time}", "about"
    if source.watermark_ms is not None:
        yield f"watermark {span_text(source.watermark_ms)} behind", "about"


def _operator_lines(operator: GraphOperator, type_max: int | None) -> Lines:
    lines: Lines = [
        (operator.uid, "name"),
        (f"{operator.function}, {operator.kind}", "about"),
    ]
    if operator.keys:
        keys = ", ".join(f"{name} {type_}" for name, type_ in operator.keys.items())
        lines.append((f"key {keys}", "about"))
    if operator.join:
        lines.append((join_text(operator.join), "about"))
    for state in operator.states:
        cut = msgspec.structs.replace(state, type=_short(state.type, type_max))
        lines.append((f"{state.name}  {state_text(cut)}", "state"))
    if operator.timers:
        lines.append(("timers", "state"))
    return lines


def _line_height(style: str) -> float:
    return _TEXTS[style][0] + 5.5


def _width_of(text: str, style: str) -> float:
    return len(text) * _TEXTS[style][1]


def _short(text: str, most: int | None = TEXT_MAX) -> str:
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


# Layout


def _links(graph: JobGraph) -> list[Link]:
    links = []
    for edge in graph.edges:
        start, end = _start_label(edge), _end_label(edge)
        links.append(
            Link(
                source=edge.source.node,
                target=edge.to,
                inlet=_inlet(edge),
                start_width=_width_of(start, "label") + 14 if start else 0.0,
                end_width=_width_of(end, "label") if end else 0.0,
                is_back=edge.way == "feedback",
            )
        )
    return links


def _inlet(edge: GraphEdge) -> int:
    """Return the row of the box that the edge ends at: shuffles in order, then feedback."""
    if edge.shuffle is not None:
        return int(edge.shuffle)
    return FEEDBACK_INLET if edge.way == "feedback" else -1


def _start_label(edge: GraphEdge) -> str:
    return "" if edge.source.side is None else _short(edge.source.side)


def _end_label(edge: GraphEdge) -> str:
    if edge.way == "keyed":
        text = f"by {', '.join(edge.by)}"
    else:
        text = "any subtask" if edge.way == "spread" else edge.way
    text = "" if edge.way in ("chain", "transform") else text
    return _short(f"{edge.input}: {text}" if edge.input else text)


def _columns(
    graph: JobGraph, boxes: dict[str, Box], links: Sequence[Link], edges: dict[int, GraphEdge]
) -> list[Column]:
    """Return columns: sources, then for each level the transforms before it and its chains.

    A chain that unites others of its level is in a later column.
    """
    level_of = {each.uid: each.level for each in graph.operators}
    level_of |= {each.uid: each.level for each in graph.sinks}
    places = _transform_places(graph, level_of)
    firsts = {chain[0] for level in graph.levels for chain in level.chains}

    def tree(name: str, leading: Link | None = None) -> Tree:
        mine = [link for link in links if link.source == name]
        inside = [
            link for link in mine if edges[id(link)].way == "chain" and link.target not in firsts
        ]
        leaving = [link for link in mine if link not in inside]
        # Sinks last, below the nodes that feed others.
        inside.sort(key=lambda link: not any(li.source == link.target for li in links))
        followers = [tree(link.target, link) for link in inside]
        return Tree(boxes[name], followers + [Tree(None, link=li) for li in leaving], leading)

    columns = [Column("sources", [Block(tree(source.name)) for source in graph.sources])]
    for level in graph.levels:
        depths = sorted({depth for gap, depth in places.values() if gap == level.level})
        for depth in depths:
            names = [name for name, place in places.items() if place == (level.level, depth)]
            columns.append(Column("transform", [Block(tree(name)) for name in names]))
        for turn, chains in enumerate(_turns(graph, level.chains)):
            blocks = [Block(tree(c[0]), is_framed=len(c) > 1) for c in chains]
            kept = [Block(tree(uid)) for uid in level.feedback] if turn == 0 else []
            title = f"level {level.level}" + (", united" if turn else "")
            columns.append(Column(title, blocks + kept))
    return columns


def _turns(graph: JobGraph, chains: Sequence[list[str]]) -> list[list[list[str]]]:
    """Group the chains of a level by the number of chains that rows pass before them."""
    turn_of: dict[str, int] = {}
    turns: list[list[list[str]]] = [[]]
    for chain in chains:
        into = [e for e in graph.edges if e.to == chain[0] and e.way == "chain"]
        turn = max((1 + turn_of[edge.source.node] for edge in into), default=0)
        turn_of |= dict.fromkeys(chain, turn)
        if turn == len(turns):
            turns.append([])
        turns[turn].append(chain)
    return turns


def _transform_places(graph: JobGraph, level_of: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return for each transform the level it is drawn before, and its rank among transforms."""
    places: dict[str, tuple[int, int]] = {}
    for transform in graph.transforms:
        name = transform.name
        before = [e.source.node for e in graph.edges if e.to == name]
        places[name] = max(
            (places[node][0], places[node][1] + 1)
            if node in places
            else (level_of.get(node, -1) + 1, 0)
            for node in before
        )
    return places


# SVG


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
    y = box.middle - sum(_line_height(style) for _, style in lines) / 2
    for text, style in lines:
        y += _line_height(style)
        yield _text(box.x + 12, y - 4.5, _short(text).rstrip(), style)
    yield "</g>" if href is None else "</g></a>"


Points = Sequence[tuple[float, float]]


def _path(link: Link, back: Sequence[Link], floor: float) -> str:
    if link.is_back:
        return _back_path(link, back.index(link), floor)
    # Inside a chain what is written on the line is at its end.
    return _smooth(link.points, link.start_width if len(link.points) == 2 else 0.0)


def _smooth(points: Points, level: float = 0.0) -> str:
    """Return a path that is horizontal at every point, and for `level` at the end."""
    (x, y), *rest = points
    path = f"M{x:.1f} {y:.1f}"
    for at, (to_x, to_y) in enumerate(rest):
        if abs(to_y - y) < 2.5:
            path += f"L{to_x:.1f} {to_y:.1f}"
        else:
            # The label is on the last stretch, which is horizontal.
            bend = min(to_x - x - level, 46.0) if at == len(rest) - 1 else to_x - x
            half = x + bend / 2
            path += f"C{half:.1f} {y:.1f} {half:.1f} {to_y:.1f} {x + bend:.1f} {to_y:.1f}"
            path += f"L{to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
    return path


def _back_path(link: Link, index: int, floor: float) -> str:
    """Return a path to the right, down below everything, back, up, and in from the left."""
    *out, (end_x, end_y) = link.points
    x, y = out[-1]
    track = floor + TRACK * index
    away = x + 20 + 10 * index
    home = end_x - PAD - 24 - link.end_width - 10 * index
    r = 8
    return (
        f"{_smooth(out)}L{away - r:.1f} {y:.1f}Q{away:.1f} {y:.1f} {away:.1f} {y + r:.1f}"
        f"L{away:.1f} {track - r:.1f}Q{away:.1f} {track:.1f} {away - r:.1f} {track:.1f}"
        f"L{home + r:.1f} {track:.1f}Q{home:.1f} {track:.1f} {home:.1f} {track - r:.1f}"
        f"L{home:.1f} {end_y + r:.1f}Q{home:.1f} {end_y:.1f} {home + r:.1f} {end_y:.1f}"
        f"L{end_x:.1f} {end_y:.1f}"
    )


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
    end, start = _end_label(edge), _start_label(edge)
    if end:
        # Before the frame and the band.
        yield _text(x - PAD - 18, y - 5, end, "label", anchor="end", colour=colour)
    if start and len(link.points) > 2:
        at_x, at_y = link.points[1]
        yield _text(at_x + 6, at_y - 4, start, "label", colour=_DIM)
    elif start:
        yield _text(x - 11, y - 4, start, "label", anchor="end", colour=_DIM)


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
            x += 42 + _width_of(text, "about") + 26


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
    own_size, _, own_weight, own_colour = _TEXTS[style]
    mono = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if style == "state" else ""
    halo = f' stroke="{_PAPER}" stroke-width="3" paint-order="stroke"' if style == "label" else ""
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" font-size="{size or own_size}" '
        f'font-weight="{weight or own_weight}" fill="{colour or own_colour}" '
        f'text-anchor="{anchor}"{mono}{halo} xml:space="preserve">{escape(text)}</text>'
    )
