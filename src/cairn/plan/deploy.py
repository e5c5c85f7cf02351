"""From the graph to what each slot is told: lanes, outlets and pickled functions."""

from __future__ import annotations

from dataclasses import replace

import cloudpickle
import pyarrow as pa

from cairn.backends import DEFAULT_MEMORY_BYTES
from cairn.errors import PlanError
from cairn.functions import Function
from cairn.logs import current_format
from cairn.operators.rows import RowFunction
from cairn.plan.check import check_ttl
from cairn.plan.edges import inlet_time
from cairn.plan.graph import (
    Edge,
    EventTime,
    Graph,
    Level,
    Port,
    ProcessNode,
    RowsNode,
    TransformNode,
)
from cairn.plan.key_types import key_types
from cairn.protocol.envelope import Envelope
from cairn.protocol.letters import OnError
from cairn.protocol.spec import (
    FeedbackSpec,
    InletSpec,
    JobSpec,
    LevelSpec,
    OperatorSpec,
    OutletSpec,
    SinkSpec,
    lane_of_chained,
)


def taps(graph: Graph) -> dict[Port, int]:
    """Operator outputs that Spark transforms, with the lane they travel in until then."""
    found: dict[Port, int] = {}
    for edge in graph.edges:
        for port in edge.inputs:
            for origin in graph.origins(port):
                is_operator = isinstance(graph.nodes[origin.node], ProcessNode)
                if origin != port and is_operator and origin not in found:
                    found[origin] = len(graph.edges) + len(found)
    return found


def source_envelope(graph: Graph) -> Envelope:
    """Return the columns in which rows of several sources are read together, in a lane each."""
    return Envelope(tuple((lane, source.schema) for lane, source in enumerate(graph.sources)))


def lanes_in(level: Level) -> list[Edge]:
    """Return the edges that come into a level, for it and for later ones."""
    return sorted((*level.edges, *level.passing), key=lambda edge: edge.index)


def incoming(level: Level) -> Envelope:
    """Return the columns of the rows that come into a level."""
    return Envelope(tuple((edge.index, edge.schema) for edge in lanes_in(level)))


def outgoing(graph: Graph, level: Level) -> Envelope:
    """Return the columns of the rows that leave a level: for later levels, and for transforms."""
    lanes = [(edge.index, edge.schema) for edge in level.passing]
    uids = {op.uid for op in level.operators}
    direct = [edge for edge in graph.edges if any(port.node in uids for port in edge.inputs)]
    lanes += [(e.index, e.schema) for e in direct if e not in level.passing]
    lanes += [(lane, graph.schema(port)) for port, lane in taps(graph).items() if port.node in uids]
    return Envelope(tuple(sorted(lanes, key=lambda lane: lane[0])))


def job_spec(
    graph: Graph,
    *,
    job_id: str,
    checkpoint: str,
    backend: str,
    backend_memory_bytes: int = DEFAULT_MEMORY_BYTES,
    slot_memory_bytes: int = 0,
    on_error: OnError = "fail",
) -> JobSpec:
    for node in graph.nodes.values():
        if isinstance(node, RowsNode):
            # Spark would pickle it in the first epoch.
            pickle_function(node.name, node.function)
    tap_lanes = taps(graph)
    levels = tuple(
        LevelSpec(
            index=level.index,
            operators=tuple(
                replace(_operator(graph, op, level, tap_lanes), on_error=on_error)
                for op in level.operators
            ),
            sinks=tuple(
                SinkSpec(
                    uid=sink.uid,
                    schema=graph.input_schema(sink),
                    sink=sink.sink,
                    lane=next((e.index for e in level.edges if e.consumer == sink.uid), None),
                )
                for sink in level.sinks
            ),
            incoming=incoming(level),
            outgoing=outgoing(graph, level),
        )
        for level in graph.levels
    )
    operators = {op.uid: op for level in levels for op in level.operators}
    levels = tuple(
        replace(spec, feedbacks=_feedbacks(graph, level, operators))
        for spec, level in zip(levels, graph.levels, strict=True)
    )
    return JobSpec(
        job_id=job_id,
        job_name=graph.name,
        group_count=graph.group_count,
        checkpoint=checkpoint,
        backend=backend,
        levels=levels,
        backend_memory_bytes=backend_memory_bytes,
        slot_memory_bytes=slot_memory_bytes,
        log_format=current_format(),
        rounds_max=max((loop.rounds_max for loop in graph.loops), default=1),
    )


def pickle_function(uid: str, function: Function) -> bytes:
    """A function as it is sent to the slots."""
    try:
        return cloudpickle.dumps(function)  # type: ignore[no-any-return]
    except Exception as error:
        is_plain = isinstance(function, RowFunction)
        raise PlanError(
            f"operator {uid!r}: its function cannot be sent to the slots ({error})\n"
            "  next: create connections, locks and the like in open()"
            + (" of a Process" if is_plain else ", not in __init__")
        ) from error


def _operator(
    graph: Graph, node: ProcessNode, level: Level, tap_lanes: dict[Port, int]
) -> OperatorSpec:
    inlets = _inlets(graph, node, level)
    check_ttl(node.function, node.uid, has_event_time=inlets[0].event_time is not None)
    function = pickle_function(node.uid, node.function)
    outputs: list[tuple[str | None, pa.Schema]] = [(None, node.schema), *node.sides]
    return OperatorSpec(
        uid=node.uid,
        inlets=inlets,
        function=function,
        outlets=tuple(
            _outlet(graph, Port(node.uid, tag), schema, tap_lanes) for tag, schema in outputs
        ),
        is_downstream=any(back.operator == node.uid for back in graph.returns)
        or any(
            isinstance(graph.nodes[origin.node], ProcessNode)
            for origin in graph.origins(*node.row_inputs)
        ),
        is_behind_loop=is_behind_loop(graph, node),
        has_watermark=any(map(graph.times.has_watermark, node.row_inputs)),
        delay_ms=max(map(graph.times.delay_ms, node.row_inputs)),
        stored_key_types=key_types(graph, node.inlets) if node.keys else (),
        broadcast=node.broadcast,
        parallelism=graph.bounds[node.uid],
    )


def _inlets(graph: Graph, node: ProcessNode, level: Level) -> tuple[InletSpec, ...]:
    edges = {edge.inlet: edge for edge in level.edges if edge.consumer == node.uid}
    # Rows of all inlets have a time, or none have.
    is_timed = all(edge.event_time for edge in edges.values() if edge.way != "broadcast")
    found = []
    for index, inlet in enumerate(node.inlets):
        edge = edges.get(index)
        time = inlet_time(graph, node, inlet) if edge is None and is_timed else None
        if edge is not None and edge.event_time is not None:
            time = EventTime(edge.event_time, edge.shift_us)
        found.append(
            InletSpec(
                lane=edge.index if edge is not None else lane_of_chained(index) if edges else None,
                schema=graph.input_schema(inlet),
                keys=inlet.keys,
                event_time=None if time is None else time.column,
                name=inlet.name,
                way=inlet.way,
                shift_us=0 if time is None else time.shift_us,
            )
        )
    return tuple(found)


def _feedbacks(
    graph: Graph, level: Level, operators: dict[str, OperatorSpec]
) -> tuple[FeedbackSpec, ...]:
    """Return the feedback that a level gathers."""
    edges = {edge.consumer: edge for edge in level.edges}
    return tuple(
        FeedbackSpec(
            uid=back.uid,
            operator=back.operator,
            inlet=replace(operators[back.operator].inlets[back.inlet], lane=edges[back.uid].index),
            target=back.inlet,
            key_fields=tuple(operators[back.operator].key_fields),
            parallelism=operators[back.operator].parallelism,
        )
        for back in graph.returns
        if back.uid in edges
    )


def _outlet(graph: Graph, port: Port, schema: pa.Schema, tap_lanes: dict[Port, int]) -> OutletSpec:
    sinks = tuple(
        sink.uid
        for sink in graph.sinks
        if sink.uid in graph.chained and port in graph.bare(sink.inputs)
    )
    lanes = [edge.index for edge in graph.edges if port in edge.inputs]
    if port in tap_lanes:
        lanes.append(tap_lanes[port])
    operators = tuple(
        (op.uid, index)
        for op in graph.operators
        for index, inlet in enumerate(op.inlets)
        if op.uid in graph.chained or (op.uid, index) in graph.chained_inlets
        if port in graph.bare(inlet.ports)
    )
    return OutletSpec(port.tag, schema, sinks, tuple(lanes), operators)


def is_behind_loop(graph: Graph, node: ProcessNode) -> bool:
    """True if rows of a loop come here by way of another operator."""
    into = {back.operator for back in graph.returns}
    seen: set[str] = set()
    waiting = [node]
    while waiting:
        roots = graph.origins(*waiting.pop().row_inputs)
        for upstream in (graph.nodes[root.node] for root in roots):
            if isinstance(upstream, ProcessNode) and upstream.uid not in seen:
                seen.add(upstream.uid)
                waiting.append(upstream)
    return bool(seen & into)


def direct_inputs(graph: Graph, edge: Edge) -> list[Port]:
    return [p for p in edge.inputs if not isinstance(graph.nodes[p.node], TransformNode)]
