"""A job's graph as text: its sources, and level by level what is fed from where.

Always true here:
- every operator and sink is shown once, in its level; chained ones are below those that feed them;
- texts that are folded are folded at TEXT_WIDTH.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from cairn.report.job_graph import (
    GraphEdge,
    GraphLevel,
    GraphOperator,
    GraphSink,
    GraphSource,
    GraphTime,
    JobGraph,
)
from cairn.report.state_text import join_text, state_text
from cairn.types.durations import span_text

TEXT_WIDTH = 100
_FOLD = "\0"


def graph_text(graph: JobGraph) -> str:
    """Return the levels of a job, with what runs in each."""
    lines = list(_head(graph))
    for level in graph.levels:
        lines += ["", *_level_text(graph, level)]
    return "\n".join(lines)


def _head(graph: JobGraph) -> Iterator[str]:
    levels = graph.levels
    chained = sum(operator.chained for operator in graph.operators)
    shuffles = sum(len(level.shuffles) for level in levels)
    said = [
        _many(len(levels), "level"),
        _many(len(graph.operators), "operator") + (f" ({chained} chained)" if chained else ""),
        _many(len(graph.sinks), "sink"),
        f"{_many(shuffles, 'shuffled stream')}",
        f"max_parallelism {graph.max_parallelism}",
    ]
    yield f"job {graph.job}: {', '.join(said)}"
    rounds = graph.max_rounds_per_epoch
    level = "a level is a stage of it, a Python process per subtask."
    if rounds == 1:
        yield f"An epoch is one Spark action; {level}"
    else:
        yield f"An epoch has up to {rounds} rounds, while loops send rows back."
        yield f"A round is one Spark action; {level}"
    yield ""
    for source in graph.sources:
        yield from _fold(f"source {source.name}", source.schema)
        yield from _time_text(source)
        if source.limits is not None:
            limit = ", ".join(f"{name}={value}" for name, value in source.limits.items())
            yield f"  an epoch gets {limit}" if limit else "  an epoch gets all there is: no limit"
    for transform in graph.transforms:
        into = [e for e in graph.edges if e.to == transform.name]
        of = ", ".join(edge.source.text for edge in into)
        yield f"{transform.name}  {transform.function}, of {of}"
    # Rounds belong to the epoch: all loops have those of the one that asks for most.
    often = f"up to {rounds} rounds an epoch" if rounds > 1 else "for the next epoch"
    for loop in graph.loops:
        back = ", ".join(port.text for port in loop.feedback)
        yield f"loop {loop.uid}  sends back {back}, {often}"
    for declared in graph.event_times:
        yield f"from {', '.join(port.text for port in declared.of)} on"
        yield from _time_text(declared)


def _time_text(declared: GraphSource | GraphTime) -> Iterator[str]:
    if declared.event_time is None:
        return
    text = f"event time {declared.event_time}"
    if declared.watermark_ms is not None:
        text += f", watermark {span_text(declared.watermark_ms)} behind"
        idle_ms = declared.idle_after_ms
        text += f", idle after {span_text(idle_ms)}" if idle_ms else ", never idle"
    yield f"  {text}"


def _level_text(graph: JobGraph, level: GraphLevel) -> Iterator[str]:
    yield f"level {level.level}"
    nodes: list[GraphOperator | GraphSink] = [*graph.operators, *graph.sinks]
    known = {node.uid: node for node in nodes}
    edges = graph.edges
    for chain in level.chains:
        depth: dict[str, int] = {}
        for uid in chain:
            into = [edge for edge in edges if edge.to == uid and edge.way != "feedback"]
            fed = into[0].source
            is_first = uid == chain[0]
            depth[uid] = 0 if is_first else 1 + depth[fed.node]
            indent = "  " + "   " * depth[uid]
            for edge in into if is_first else ():
                yield indent + _fed_text(edge)
            side = "" if fed.side is None else f" of {fed.text}"
            mark = "" if is_first else f"└─ chained{side}: "
            margin = indent if not depth[uid] else indent + "   "
            yield from _consumer_text(known[uid], indent + mark, margin + "  ")
    for uid in level.feedback:
        for edge in edges:
            if edge.to == uid:
                yield f"  {_shuffle_text(edge)}"
        back = next(edge for edge in edges if edge.source.node == uid)
        yield f"  feedback {uid}  kept with the epoch, next it comes to operator {back.to}"
    passing = level.passing
    if passing:
        yield f"  shuffle {', '.join(map(str, passing))} passes by, to a later level"


def _fed_text(edge: GraphEdge) -> str:
    """Describe how rows come to the first of a chain."""
    if edge.way == "chain":
        into = f", into on_{edge.input}" if edge.input else ""
        return f"{edge.source.text} ─ chained{into} ─>"
    return _shuffle_text(edge)


def _shuffle_text(edge: GraphEdge) -> str:
    if edge.shuffled == "never":
        return f"{edge.source.text} ─ counted by Spark ─>"
    if edge.shuffled != "always":
        return f"{edge.source.text} ─ {_way_text(edge)}, shuffled {edge.shuffled} ─>"
    text = f"{edge.source.text} ═ shuffle {edge.shuffle}, {_way_text(edge)}"
    if edge.input:
        text += f", into on_{edge.input}"
    return text + " ═>"


def _way_text(edge: GraphEdge) -> str:
    """Describe how the rows of an edge find their subtask, and their order."""
    if edge.way == "keyed":
        text = f"by {', '.join(edge.by)}"
    else:
        text = "to any subtask" if edge.way == "spread" else edge.way
    return text + (f", in order of {edge.in_order_of}" if edge.in_order_of else "")


def _consumer_text(node: GraphOperator | GraphSink, first: str, margin: str) -> Iterator[str]:
    if isinstance(node, GraphSink):
        seen = "whole epochs" if node.shows == "epochs" else "epochs piece by piece"
        yield f"{first}sink {node.uid}  {node.sink}: {node.promise}, {seen}"
        return
    keys = ", ".join(f"{name} {type_}" for name, type_ in node.keys.items())
    by = f", key {keys}" if keys else ""
    timers = ", timers" if node.timers else ""
    most = "" if node.parallelism is None else f", {_many(node.parallelism, 'subtask')} at most"
    yield f"{first}operator {node.uid}  {node.function} ({node.kind}{by}{timers}{most})"
    if node.join is not None:
        yield f"{margin}{join_text(node.join)}"
    width = max((len(state.name) for state in node.states), default=0)
    for state in node.states:
        yield from _fold(f"{margin}state {state.name:<{width}}", state_text(state))
    yield from _fold(f"{margin}emits", node.schema)
    for side in node.sides:
        yield from _fold(f"{margin}side {side.tag}", side.schema)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _fold(name: str, text: str) -> Iterator[str]:
    """`name  text`, folded to the width under where the text begins."""
    first = f"{name}  "
    # Types have no blanks: they may be folded after a comma.
    foldable = re.sub(r",(?=\S)", f",{_FOLD} ", text)
    for line in textwrap.wrap(
        foldable,
        TEXT_WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield line.replace(f"{_FOLD} ", "").replace(_FOLD, "")


__all__ = ["graph_text"]
