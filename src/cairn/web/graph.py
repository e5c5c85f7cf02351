"""The graph of a job with a place for everything in it: drawn by a browser, figures and all.

Always true here:
- only places and texts: what is drawn in which colour is the page's business;
- a box has room for two lines of figures, so that nothing moves when they change.
"""

from __future__ import annotations

from typing import Any, Final

from cairn.report.drawing import placed
from cairn.report.layout import Box
from cairn.types.durations import span_text

Facts = dict[str, Any]

TOP: Final = 44.0
BOX_WIDTH_MIN: Final = 150.0
NAME_CHAR: Final = 8.2
TEXT_CHAR: Final = 6.7
TEXT_MAX: Final = 30
_FIGURES: Final = 2
_HEIGHT: Final = 20.0
_LINE: Final = 17.0


def drawn(facts: Facts) -> Facts:
    """Boxes, links and columns of an explained job (see plan.explain), in pixels."""
    nodes = _nodes(facts)
    boxes = {id: _box(id, node) for id, node in nodes.items()}
    columns, _, edges, paths, width, bottom = placed(facts, boxes, top=TOP, is_labelled=False)
    return {
        "width": round(width),
        "height": round(bottom - 4),
        "columns": [
            {"title": _title(column.title), "x": round(column.x), "width": round(column.width)}
            for column in columns
        ],
        "frames": [
            {
                "x": round(block.x),
                "y": round(block.y),
                "width": round(block.width),
                "height": round(block.height),
            }
            for column in columns
            for block in column.blocks
            if block.is_framed
        ],
        "boxes": [
            {
                "id": box.id,
                "x": round(box.x),
                "y": round(box.y),
                "width": round(box.width),
                "height": round(box.height),
                **nodes[box.id],
            }
            for box in boxes.values()
        ],
        "links": [
            {
                "from": edge["from"]["node"],
                "side": edge["from"]["side"],
                "to": edge["to"],
                "way": edge["way"],
                "by": edge["by"],
                "path": path,
            }
            for edge, path in zip(edges, paths, strict=True)
        ],
    }


def _title(title: str) -> str:
    return "Spark" if title == "transform" else title


def _nodes(facts: Facts) -> dict[str, Facts]:
    """What is in the boxes: kind, name, and a line about it."""
    found: dict[str, Facts] = {}
    for source in facts["sources"]:
        mark = source["watermark_ms"]
        # The delay that was declared: how far the watermark is behind is a figure of its own.
        about = "source" if mark is None else f"watermark delay {span_text(mark)}"
        found[source["name"]] = {"kind": "source", "name": source["name"], "about": about}
    for transform in facts["transforms"]:
        about = transform["function"]
        found[transform["name"]] = {"kind": "transform", "name": "Spark SQL", "about": about}
    for operator in facts["operators"]:
        keys = ", ".join(operator["keys"])
        about = operator["function"] + (f" by {keys}" if keys else "")
        found[operator["uid"]] = {"kind": "operator", "name": operator["uid"], "about": about}
    for sink in facts["sinks"]:
        about = f"{sink['sink']} sink"
        found[sink["uid"]] = {"kind": "sink", "name": sink["uid"], "about": about}
    for loop in facts["loops"]:
        for back in loop["into"]:
            node = {"kind": "feedback", "name": loop["uid"], "about": "sent back"}
            found[back["uid"]] = node
    return found


def _box(id: str, node: Facts) -> Box:
    name, about = node["name"][:TEXT_MAX], node["about"][:TEXT_MAX]
    width = max(BOX_WIDTH_MIN, len(name) * NAME_CHAR + 28, len(about) * TEXT_CHAR + 28)
    figures = _FIGURES if node["kind"] == "operator" else 1 if node["kind"] == "source" else 0
    return Box(id, width, _HEIGHT + _LINE * (2 + figures))
