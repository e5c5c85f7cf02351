"""The places of boxes in a job's drawing, and the paths of the links between them.

Always true here:
- sources are in the first column, each level in later ones, and transforms before their level;
- links that go back run below everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cairn.report.job_graph import GraphEdge, JobGraph
from cairn.report.layout import PAD, Block, Box, Column, Layout, Link, Tree
from cairn.report.text_sizes import short, width_of

MARGIN = 20
TOP = 92
FEEDBACK_INLET = 1 << 30
TRACK = 22
"""Between the rows of links that go back."""


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


def _links(graph: JobGraph) -> list[Link]:
    links = []
    for edge in graph.edges:
        start, end = start_label(edge), end_label(edge)
        links.append(
            Link(
                source=edge.source.node,
                target=edge.to,
                inlet=inlet_of(edge),
                start_width=width_of(start, "label") + 14 if start else 0.0,
                end_width=width_of(end, "label") if end else 0.0,
                is_back=edge.way == "feedback",
            )
        )
    return links


def inlet_of(edge: GraphEdge) -> int:
    """Return the row of the box that the edge ends at: shuffles in order, then feedback."""
    if edge.shuffle is not None:
        return int(edge.shuffle)
    return FEEDBACK_INLET if edge.way == "feedback" else -1


def start_label(edge: GraphEdge) -> str:
    return "" if edge.source.side is None else short(edge.source.side)


def end_label(edge: GraphEdge) -> str:
    if edge.way == "keyed":
        text = f"by {', '.join(edge.by)}"
    else:
        text = "any subtask" if edge.way == "spread" else edge.way
    text = "" if edge.way in ("chain", "transform") else text
    return short(f"{edge.input}: {text}" if edge.input else text)


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


__all__ = ["MARGIN", "Placed", "end_label", "inlet_of", "place_boxes", "start_label"]
