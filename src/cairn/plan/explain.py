"""Explain a job: its stages, shuffles, chains and states.

`explain_graph` returns the graph as a struct. `report/graph_text` writes it for people, and
`report/drawing` draws it.

Always true here:
- nothing runs: a job is explained before it starts, and needs no checkpoint;
- every edge of the graph is there once for each stream that comes along it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

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
from cairn.operators.as_of import AsOfJoin
from cairn.operators.joins import Join, readable
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
    SelectNode,
    SinkNode,
    SourceNode,
    TimeNode,
    TransformNode,
)
from cairn.plan.key_types import key_types
from cairn.plan.sources import limits
from cairn.report.job_graph import (
    GraphEdge,
    GraphJoin,
    GraphLevel,
    GraphLoop,
    GraphOperator,
    GraphPort,
    GraphReturn,
    GraphSide,
    GraphSink,
    GraphSource,
    GraphState,
    GraphTime,
    GraphTransform,
    JobGraph,
)
from cairn.state import Broadcast, Declaration, OperatorList
from cairn.types import schema_ddl, type_ddl


def explain_graph(graph: Graph) -> JobGraph:
    """Return the graph of a job, in the order of the program."""
    nodes = graph.nodes.values()
    return JobGraph(
        job=graph.name,
        max_parallelism=graph.group_count,
        chaining=graph.chaining,
        max_rounds_per_epoch=max((loop.rounds_max for loop in graph.loops), default=1),
        sources=[_source(node) for node in graph.sources],
        transforms=[_transform(node) for node in nodes if isinstance(node, TransformNode)],
        event_times=[_event_time(graph, node) for node in nodes if isinstance(node, TimeNode)],
        operators=[_operator(graph, op) for op in graph.operators],
        sinks=[_sink(graph, sink) for sink in graph.sinks],
        loops=[_loop(graph, loop) for loop in graph.loops],
        edges=[
            *(edge for node in nodes for edge in _edges(graph, node)),
            *(edge for back in graph.returns for edge in _edges_back(graph, back)),
        ],
        levels=[
            GraphLevel(
                level=level.index,
                chains=_chains(graph, [*level.operators, *level.sinks]),
                feedback=[back.uid for back in graph.returns if _level_back(graph, back) == level],
                shuffles=sorted(
                    e.index for e in level.edges if _name_shuffle(graph, e) == "always"
                ),
                passing=[edge.index for edge in level.passing],
            )
            for level in graph.levels
        ],
    )


def _source(node: SourceNode) -> GraphSource:
    return GraphSource(
        name=node.name,
        columns=node.schema.names,
        schema=schema_ddl(node.schema),
        event_time=node.event_time,
        watermark_ms=None if node.watermark is None else node.watermark.delay_ms,
        idle_after_ms=None if node.watermark is None else node.watermark.idle_ms,
        limits=limits(node.dataframe),
    )


def _transform(node: TransformNode) -> GraphTransform:
    is_partial = isinstance(node, PartialNode)
    return GraphTransform(
        name=node.name,
        function="partial aggregates" if is_partial else _describe(node.function),
        schema=schema_ddl(node.schema),
    )


def _event_time(graph: Graph, node: TimeNode) -> GraphTime:
    return GraphTime(
        name=node.name,
        of=[_port(port) for port in graph.bare(node.inputs)],
        event_time=node.event_time,
        watermark_ms=None if node.watermark is None else node.watermark.delay_ms,
        idle_after_ms=None if node.watermark is None else node.watermark.idle_ms,
    )


def _operator(graph: Graph, node: ProcessNode) -> GraphOperator:
    function = node.function
    states = find_states(function)
    if node.broadcast is not None:
        states = {**states, node.broadcast.name: node.broadcast}
    timers = (EVENT_TIMERS, PROCESSING_TIMERS)
    shown = [_state(name, d) for name, d in states.items() if name not in timers]
    join = None
    if isinstance(function, Join | AsOfJoin):
        join = _join(function)
        shown = [
            msgspec.structs.replace(
                state,
                type=readable(state.type),
                entry_type=None if state.entry_type is None else readable(state.entry_type),
            )
            for state in shown
        ]
    return GraphOperator(
        uid=node.uid,
        function=f"transform {_describe(node.select.function)}"
        if isinstance(node, SelectNode)
        else _describe(function),
        kind=_kind(function),
        level=graph.level_of(node.uid),
        chained=node.uid in graph.chained,
        parallelism=node.parallelism or None,
        keys=_keys(graph, node),
        inputs=[inlet.name for inlet in node.row_inlets if inlet.name],
        join=join,
        states=shown,
        timers=has_timers(function) or _has_own_timers(function),
        schema=schema_ddl(node.schema),
        sides=[GraphSide(tag=tag, schema=schema_ddl(schema)) for tag, schema in node.sides],
    )


def _join(function: Join | AsOfJoin) -> GraphJoin:
    plan = function.plan
    if isinstance(function, AsOfJoin):
        return GraphJoin(how=plan.how, is_as_of=True)
    if plan.clock == "event":
        return GraphJoin(how=plan.how, from_ms=plan.low_ms, to_ms=plan.high_ms)
    return GraphJoin(how=plan.how, ttl_ms=plan.high_ms)


def _kind(function: Function) -> str:
    kinds = (KeyedProcess, BatchProcess, Process)
    return next((kind.__name__ for kind in kinds if isinstance(function, kind)), "Function")


def _has_own_timers(function: Function) -> bool:
    """By the batch, a function says itself when it has something to do."""
    return isinstance(function, BatchProcess) and (
        type(function).next_timer is not BatchProcess.next_timer
    )


def _keys(graph: Graph, node: ProcessNode) -> dict[str, str]:
    """Return the types of the keys, as the state has them."""
    types = key_types(graph, node.inlets) if node.keys else ()
    return {name: type_ddl(type_) for name, type_ in zip(node.keys, types, strict=True)}


def _state(name: str, declaration: Declaration) -> GraphState:
    ttl = declaration.ttl
    entry = declaration.entry_ddl
    redistribute = None
    if isinstance(declaration, Broadcast):
        entry = declaration.key_ddl
    elif isinstance(declaration, OperatorList):
        # The keys that its items are stored under are internal.
        entry, redistribute = None, declaration.redistribute
    return GraphState(
        name=name,
        kind=declaration.kind,
        type=declaration.ddl,
        entry_type=entry,
        ttl=None if ttl is None else ttl.text,
        redistribute=redistribute,
    )


def _sink(graph: Graph, node: SinkNode) -> GraphSink:
    return GraphSink(
        uid=node.uid,
        sink=type(node.sink).__name__,
        promise=node.sink.promise,
        shows=node.sink.shows,
        level=graph.level_of(node.uid),
        chained=node.uid in graph.chained,
    )


def _loop(graph: Graph, node: LoopNode) -> GraphLoop:
    returns = [back for back in graph.returns if back.loop == node.uid]
    return GraphLoop(
        uid=node.uid,
        max_rounds_per_epoch=node.rounds_max,
        feedback=[_port(port) for port in graph.bare(node.feedback)],
        into=[GraphReturn(uid=back.uid, operator=back.operator) for back in returns],
    )


def _level_back(graph: Graph, back: Return) -> Level:
    """Return the level that keeps what is sent back."""
    return next(level for level in graph.levels for e in level.edges if e.consumer == back.uid)


def _edges_back(graph: Graph, back: Return) -> Iterator[GraphEdge]:
    """To where it is kept, and from there to the operator."""
    edge = next(edge for edge in graph.edges if edge.consumer == back.uid)
    for port in edge.inputs:
        yield _edge(graph, port, back.uid, edge.way, edge)
    node = graph.nodes[back.operator]
    assert isinstance(node, ProcessNode), "rows go back to operators"
    name = node.inlets[back.inlet].name or None
    yield _edge(graph, Port(back.uid), back.operator, "feedback", input=name)


def _edges(graph: Graph, node: Any) -> Iterator[GraphEdge]:
    """Yield an edge for each stream that comes into a node."""
    if isinstance(node, TransformNode):
        for port in graph.read(node):
            yield _edge(graph, port, node.name, "transform")
    elif isinstance(node, SinkNode | ProcessNode):
        by_inlet = {e.inlet: e for e in graph.edges if e.consumer == node.uid}
        for index, inlet in enumerate(_inlets(node)):
            edge = by_inlet.get(index)
            for port in graph.bare(inlet.ports):
                way = "chain" if edge is None else edge.way
                yield _edge(graph, port, node.uid, way, edge, inlet.name or None)


def _inlets(node: Consumer) -> Sequence[Inlet]:
    if isinstance(node, ProcessNode):
        return node.inlets
    return (Inlet(node.inputs, way="spread"),)


def _edge(
    graph: Graph,
    port: Port,
    to: str,
    way: str,
    edge: Edge | None = None,
    input: str | None = None,
) -> GraphEdge:
    return GraphEdge(
        source=_port(port),
        to=to,
        input=input,
        way=way,
        shuffle=None if edge is None else edge.index,
        shuffled="never" if edge is None else _name_shuffle(graph, edge),
        by=[] if edge is None else list(edge.keys),
        in_order_of=edge.event_time if edge is not None and edge.wants_order else None,
    )


def _name_shuffle(graph: Graph, edge: Edge) -> str:
    """Return the cases in which Spark shuffles the rows of an edge."""
    level = graph.levels[edge.level]
    if edge in level.counted:
        return "never"
    if not level.is_straight:
        return "always"
    if any(each.parallelism for each in level.edges):
        return "with several executors, or more subtasks than an operator takes"
    if any(isinstance(graph.nodes[each.consumer], ProcessNode) for each in level.edges):
        return "with several executors, or fewer partitions than subtasks"
    return "with several executors"


def _port(port: Port) -> GraphPort:
    return GraphPort(port.node, port.tag)


def _chains(graph: Graph, consumers: Sequence[Consumer]) -> list[list[str]]:
    """Return the chains of a level: consumers in one process, each after its feeder.

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
