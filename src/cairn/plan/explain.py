"""A job explained: what runs in which stage, what is shuffled and what is chained, which state.

`explained` gives the facts under stable names, `explained_text` the same for people;
`report/drawing` makes a picture of them.

Always true here:
- nothing runs: a job is explained before it starts, and needs no checkpoint;
- every edge of the graph is there once for each stream that comes along it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cairn.functions import (
    EVENT_TIMERS,
    PROCESSING_TIMERS,
    BatchProcess,
    Function,
    KeyedProcess,
    Process,
    find_states,
    has_timers,
)
from cairn.operators.joins import IntervalJoin, readable
from cairn.operators.rows import RowFunction
from cairn.plan.graph import (
    Consumer,
    Edge,
    Graph,
    Inlet,
    Level,
    LoopNode,
    PartialNode,
    Port,
    ProcessNode,
    Return,
    SinkNode,
    SourceNode,
    TimeNode,
    TransformNode,
    Watermark,
    key_types,
)
from cairn.plan.sources import limits
from cairn.report.state_text import join_text, state_text
from cairn.state import Broadcast, Declaration, OperatorList
from cairn.types import schema_ddl, type_ddl
from cairn.types.durations import span_text

Facts = dict[str, Any]

TEXT_WIDTH = 100
_FOLD = "\0"


def explained(graph: Graph) -> Facts:
    """The facts, in the order of the program."""
    nodes = graph.nodes.values()
    return {
        "job": graph.name,
        "max_parallelism": graph.group_count,
        "chaining": graph.chaining,
        "max_rounds_per_epoch": max((loop.rounds_max for loop in graph.loops), default=1),
        "sources": [_source(node) for node in graph.sources],
        "transforms": [_transform(node) for node in nodes if isinstance(node, TransformNode)],
        "event_times": [_event_time(graph, node) for node in nodes if isinstance(node, TimeNode)],
        "operators": [_operator(graph, op) for op in graph.operators],
        "sinks": [_sink(graph, sink) for sink in graph.sinks],
        "loops": [_loop(graph, loop) for loop in graph.loops],
        "edges": [
            *(edge for node in nodes for edge in _edges(graph, node)),
            *(edge for back in graph.returns for edge in _edges_back(graph, back)),
        ],
        "levels": [
            {
                "level": level.index,
                "chains": _chains(graph, [*level.operators, *level.sinks]),
                "feedback": [
                    back.uid for back in graph.returns if _level_back(graph, back) == level
                ],
                "shuffles": [edge.index for edge in level.edges],
                "passing": [edge.index for edge in level.passing],
            }
            for level in graph.levels
        ],
    }


def _source(node: SourceNode) -> Facts:
    return {
        "name": node.name,
        "columns": node.schema.names,
        "schema": schema_ddl(node.schema),
        "event_time": node.event_time,
        **_mark(node.watermark),
        "limits": limits(node.dataframe),
    }


def _mark(mark: Watermark | None) -> Facts:
    return {
        "watermark_ms": None if mark is None else mark.delay_ms,
        "idle_after_ms": None if mark is None else mark.idle_ms,
    }


def _transform(node: TransformNode) -> Facts:
    is_partial = isinstance(node, PartialNode)
    return {
        "name": node.name,
        "function": "partial aggregates" if is_partial else _describe(node.function),
        "schema": schema_ddl(node.schema),
    }


def _event_time(graph: Graph, node: TimeNode) -> Facts:
    return {
        "name": node.name,
        "of": [_port(port) for port in graph.bare(node.inputs)],
        "event_time": node.event_time,
        **_mark(node.watermark),
    }


def _operator(graph: Graph, node: ProcessNode) -> Facts:
    function = node.function
    states = find_states(function)
    if node.broadcast is not None:
        states = {**states, node.broadcast.name: node.broadcast}
    timers = (EVENT_TIMERS, PROCESSING_TIMERS)
    told = [_state(name, d) for name, d in states.items() if name not in timers]
    join = None
    if isinstance(function, IntervalJoin):
        plan = function.plan
        join = {"how": plan.how, "from_ms": plan.low_ms, "to_ms": plan.high_ms}
        for state in told:
            state["type"] = readable(state["type"])
            state["entry_type"] = readable(state["entry_type"])
    return {
        "uid": node.uid,
        "function": _describe(function),
        "kind": _kind(function),
        "level": graph.level_of(node.uid),
        "chained": node.uid in graph.chained,
        "keys": _keys(graph, node),
        "inputs": [inlet.name for inlet in node.row_inlets if inlet.name],
        "join": join,
        "states": told,
        "timers": has_timers(function) or _has_own_timers(function),
        "schema": schema_ddl(node.schema),
        "sides": [{"tag": tag, "schema": schema_ddl(schema)} for tag, schema in node.sides],
    }


def _kind(function: Function) -> str:
    kinds = (KeyedProcess, BatchProcess, Process)
    return next((kind.__name__ for kind in kinds if isinstance(function, kind)), "Function")


def _has_own_timers(function: Function) -> bool:
    """By the batch, a function says itself when it has something to do."""
    return isinstance(function, BatchProcess) and (
        type(function).next_timer is not BatchProcess.next_timer
    )


def _keys(graph: Graph, node: ProcessNode) -> Facts:
    """As the state has them."""
    types = key_types(graph, node.inlets) if node.keys else ()
    return {name: type_ddl(type_) for name, type_ in zip(node.keys, types, strict=True)}


def _state(name: str, declaration: Declaration) -> Facts:
    ttl = declaration.ttl
    entry = declaration.entry_ddl
    redistribute = None
    if isinstance(declaration, Broadcast):
        entry = declaration.key_ddl
    elif isinstance(declaration, OperatorList):
        # What its items are stored under is nobody's business.
        entry, redistribute = None, declaration.redistribute
    return {
        "name": name,
        "kind": declaration.kind,
        "type": declaration.ddl,
        "entry_type": entry,
        "ttl": None if ttl is None else ttl.text,
        "redistribute": redistribute,
    }


def _sink(graph: Graph, node: SinkNode) -> Facts:
    return {
        "uid": node.uid,
        "sink": type(node.sink).__name__,
        "promise": node.sink.promise,
        "shows": node.sink.shows,
        "level": graph.level_of(node.uid),
        "chained": node.uid in graph.chained,
    }


def _loop(graph: Graph, node: LoopNode) -> Facts:
    return {
        "uid": node.uid,
        "max_rounds_per_epoch": node.rounds_max,
        "feedback": [_port(port) for port in graph.bare(node.feedback)],
        "into": [
            {"uid": back.uid, "operator": back.operator}
            for back in graph.returns
            if back.loop == node.uid
        ],
    }


def _level_back(graph: Graph, back: Return) -> Level:
    """Where what is sent back is kept."""
    return next(level for level in graph.levels for e in level.edges if e.consumer == back.uid)


def _edges_back(graph: Graph, back: Return) -> Iterator[Facts]:
    """To where it is kept, and from there to the operator."""
    edge = next(edge for edge in graph.edges if edge.consumer == back.uid)
    for port in edge.inputs:
        yield _edge(port, back.uid, edge.way, edge)
    node = graph.nodes[back.operator]
    assert isinstance(node, ProcessNode), "rows go back to operators"
    name = node.inlets[back.inlet].name or None
    yield _edge(Port(back.uid), back.operator, "feedback", input=name)


def _edges(graph: Graph, node: Any) -> Iterator[Facts]:
    """What comes into a node, one for each stream."""
    if isinstance(node, TransformNode):
        for port in graph.read(node):
            yield _edge(port, node.name, "transform")
    elif isinstance(node, SinkNode | ProcessNode):
        by_inlet = {e.inlet: e for e in graph.edges if e.consumer == node.uid}
        for index, inlet in enumerate(_inlets(node)):
            edge = by_inlet.get(index)
            for port in graph.bare(inlet.ports):
                way = "chain" if edge is None else edge.way
                yield _edge(port, node.uid, way, edge, inlet.name or None)


def _inlets(node: Consumer) -> Sequence[Inlet]:
    if isinstance(node, ProcessNode):
        return node.inlets
    return (Inlet(node.inputs, way="spread"),)


def _edge(
    port: Port, to: str, way: str, edge: Edge | None = None, input: str | None = None
) -> Facts:
    return {
        "from": _port(port),
        "to": to,
        "input": input,
        "way": way,
        "shuffle": None if edge is None else edge.index,
        "by": [] if edge is None else list(edge.keys),
        "in_order_of": edge.event_time if edge is not None and edge.wants_order else None,
    }


def _port(port: Port) -> Facts:
    return {"node": port.node, "side": port.tag}


def _chains(graph: Graph, consumers: Sequence[Consumer]) -> list[list[str]]:
    """What runs in one process without a shuffle between: from its first, each after its feeder.

    What several streams are united into begins a chain of its own.
    """
    fed: dict[str, list[str]] = {node.uid: [] for node in consumers}
    firsts = []
    for node in consumers:
        ports = graph.bare(node.inputs)
        if node.uid in graph.chained and len(ports) == 1:
            fed[ports[0].node].append(node.uid)
        else:
            firsts.append(node.uid)

    def chain(uid: str) -> list[str]:
        return [uid, *(each for follower in fed[uid] for each in chain(follower))]

    return [chain(uid) for uid in firsts]


def _describe(function: object) -> str:
    """Name a user's function, or the class of an object; a lambda by its place."""
    if isinstance(function, RowFunction):
        return f"{function.called} {_describe(function.function)}"
    name = str(getattr(function, "__name__", type(function).__name__))
    code = getattr(function, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return name


# For people


def explained_text(facts: Facts) -> str:
    lines = list(_head(facts))
    for level in facts["levels"]:
        lines += ["", *_level_text(facts, level)]
    return "\n".join(lines)


def _head(facts: Facts) -> Iterator[str]:
    levels = facts["levels"]
    chained = sum(operator["chained"] for operator in facts["operators"])
    shuffles = sum(len(level["shuffles"]) for level in levels)
    said = [
        _many(len(levels), "level"),
        _many(len(facts["operators"]), "operator") + (f" ({chained} chained)" if chained else ""),
        _many(len(facts["sinks"]), "sink"),
        f"{_many(shuffles, 'shuffled stream')}",
        f"max_parallelism {facts['max_parallelism']}",
    ]
    yield f"job {facts['job']}: {', '.join(said)}"
    rounds = facts["max_rounds_per_epoch"]
    level = "a level is a stage of it, a Python process per subtask."
    if rounds == 1:
        yield f"An epoch is one Spark action; {level}"
    else:
        yield f"An epoch has up to {rounds} rounds, while loops send rows back."
        yield f"A round is one Spark action; {level}"
    yield ""
    for source in facts["sources"]:
        yield from _folded(f"source {source['name']}", source["schema"])
        yield from _time_text(source)
        if source["limits"] is not None:
            limit = ", ".join(f"{name}={value}" for name, value in source["limits"].items())
            yield f"  an epoch gets {limit}" if limit else "  an epoch gets all there is: no limit"
    for transform in facts["transforms"]:
        into = [e for e in facts["edges"] if e["to"] == transform["name"]]
        of = ", ".join(port_text(edge["from"]) for edge in into)
        yield f"{transform['name']}  {transform['function']}, of {of}"
    # Rounds belong to the epoch: all loops have those of the one that asks for most.
    often = f"up to {rounds} rounds an epoch" if rounds > 1 else "for the next epoch"
    for loop in facts["loops"]:
        back = ", ".join(map(port_text, loop["feedback"]))
        yield f"loop {loop['uid']}  sends back {back}, {often}"
    for declared in facts["event_times"]:
        yield f"from {', '.join(map(port_text, declared['of']))} on"
        yield from _time_text(declared)


def _time_text(declared: Facts) -> Iterator[str]:
    if declared["event_time"] is None:
        return
    text = f"event time {declared['event_time']}"
    if declared["watermark_ms"] is not None:
        text += f", watermark {span_text(declared['watermark_ms'])} behind"
        idle_ms = declared["idle_after_ms"]
        text += f", idle after {span_text(idle_ms)}" if idle_ms else ", never idle"
    yield f"  {text}"


def _level_text(facts: Facts, level: Facts) -> Iterator[str]:
    yield f"level {level['level']}"
    known = {each["uid"]: each for each in (*facts["operators"], *facts["sinks"])}
    edges = facts["edges"]
    for chain in level["chains"]:
        depth: dict[str, int] = {}
        for uid in chain:
            into = [edge for edge in edges if edge["to"] == uid and edge["way"] != "feedback"]
            fed = into[0]["from"]
            is_first = uid == chain[0]
            depth[uid] = 0 if is_first else 1 + depth[fed["node"]]
            indent = "  " + "   " * depth[uid]
            for edge in into if is_first else ():
                yield indent + _fed_text(edge)
            side = "" if fed["side"] is None else f" of {port_text(fed)}"
            mark = "" if is_first else f"└─ chained{side}: "
            margin = indent if not depth[uid] else indent + "   "
            yield from _consumer_text(known[uid], indent + mark, margin + "  ")
    for uid in level["feedback"]:
        for edge in edges:
            if edge["to"] == uid:
                yield f"  {_shuffle_text(edge)}"
        back = next(edge for edge in edges if edge["from"]["node"] == uid)
        yield f"  feedback {uid}  kept with the epoch, next it comes to operator {back['to']}"
    passing = level["passing"]
    if passing:
        yield f"  shuffle {', '.join(map(str, passing))} passes by, to a later level"


def _fed_text(edge: Facts) -> str:
    """How rows come to the first of a chain."""
    if edge["way"] == "chain":
        return f"{port_text(edge['from'])} ─ chained ─>"
    return _shuffle_text(edge)


def _shuffle_text(edge: Facts) -> str:
    text = f"{port_text(edge['from'])} ═ shuffle {edge['shuffle']}, {way_text(edge)}"
    if edge["input"]:
        text += f", into on_{edge['input']}"
    return text + " ═>"


def way_text(edge: Facts) -> str:
    """How the rows of an edge find their subtask, and in which order they come."""
    if edge["way"] == "keyed":
        text = f"by {', '.join(edge['by'])}"
    else:
        text = "to any subtask" if edge["way"] == "spread" else str(edge["way"])
    return text + (f", in order of {edge['in_order_of']}" if edge["in_order_of"] else "")


def _consumer_text(facts: Facts, first: str, margin: str) -> Iterator[str]:
    if "sink" in facts:
        seen = "whole epochs" if facts["shows"] == "epochs" else "epochs piece by piece"
        yield f"{first}sink {facts['uid']}  {facts['sink']}: {facts['promise']}, {seen}"
        return
    keys = ", ".join(f"{name} {type_}" for name, type_ in facts["keys"].items())
    by = f", key {keys}" if keys else ""
    timers = ", timers" if facts["timers"] else ""
    yield f"{first}operator {facts['uid']}  {facts['function']} ({facts['kind']}{by}{timers})"
    if facts["join"]:
        yield f"{margin}{join_text(facts['join'])}"
    width = max((len(state["name"]) for state in facts["states"]), default=0)
    for state in facts["states"]:
        yield from _folded(f"{margin}state {state['name']:<{width}}", state_text(state))
    yield from _folded(f"{margin}emits", facts["schema"])
    for side in facts["sides"]:
        yield from _folded(f"{margin}side {side['tag']}", side["schema"])


def port_text(port: Facts) -> str:
    return str(port["node"]) if port["side"] is None else f"{port['node']}:{port['side']}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _folded(name: str, text: str) -> Iterator[str]:
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
