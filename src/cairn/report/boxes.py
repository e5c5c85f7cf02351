"""The boxes of a job's drawing: one per node, with the lines of text in it.

Always true here:
- long texts are cut; the title of a box has them in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from cairn.report.job_graph import GraphOperator, GraphSource, JobGraph
from cairn.report.layout import Box
from cairn.report.places import inlet_of
from cairn.report.state_text import join_text, state_text
from cairn.report.text_sizes import line_height, short, width_of
from cairn.types.durations import span_text

Lines = list[tuple[str, str]]
"""Texts with their styles."""

TRANSFORM_MAX = 18
TYPE_MAX = 24
COLUMNS_MAX = 32
SMALL_MAX = 30
FIGURE_CHARS = 20


class Drawn(NamedTuple):
    """The content of a box, and its place."""

    kind: str
    title: str
    lines: Lines
    box: Box
    href: str | None = None


def large_boxes(graph: JobGraph) -> dict[str, Drawn]:
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


def small_boxes(graph: JobGraph) -> dict[str, Drawn]:
    boxes: dict[str, Drawn] = {}

    def add(node: str, kind: str, name: str, about: str, figures: int = 0) -> None:
        texts = [(name, "name"), (about, "about")]
        lines = [(short(text, SMALL_MAX), style) for text, style in texts]
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
    inlets = {inlet_of(edge) for edge in graph.edges if edge.to == node}
    width = max(width_of(short(text), style) for text, style in lines) + 24
    height = max(16 + sum(line_height(style) for _, style in lines), 22 * len(inlets) + 16)
    return Box(node, width, height)


_SPARK = ("Spark SQL, an epoch at a time", "about")


def _transform_lines(function: str) -> Lines:
    """Return narrow lines: there may be a transform before each level."""
    name, _, place = function.partition(" at ")
    lines = [(name, "name"), (place or "Spark SQL", "about")]
    return [(short(text, TRANSFORM_MAX), style) for text, style in lines]


def _time_lines(source: GraphSource, columns_max: int | None) -> Iterator[tuple[str, str]]:
    yield short(", ".join(source.columns), columns_max), "about"
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
        cut = msgspec.structs.replace(state, type=short(state.type, type_max))
        lines.append((f"{state.name}  {state_text(cut)}", "state"))
    if operator.timers:
        lines.append(("timers", "state"))
    return lines


__all__ = ["Drawn", "large_boxes", "small_boxes"]
