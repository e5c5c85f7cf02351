"""Nodes of `.map`, `.filter` and `.flat_map`: each runs where its rows are, without a shuffle.

Rows of an operator are in a slot: the function is an operator chained to it. Other rows are in
Spark: the function runs in the Python worker of the stage that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import ERRORS
from cairn.operators.rows import ROW_FUNCTIONS, RowFunction, RowKind
from cairn.plan.check import check_uid
from cairn.plan.graph import (
    Node,
    Port,
    ProcessNode,
    RowsNode,
    TimeNode,
    TransformNode,
    bare_ports,
    keep_time,
    root_ports,
)
from cairn.plan.levels import rows_operator
from cairn.protocol.letters import SCHEMA as LETTERS
from cairn.user_code import check_arguments


def add_rows_nodes(
    nodes: dict[str, Node],
    ports: Sequence[Port],
    schemas: tuple[pa.Schema, pa.Schema],
    kind: RowKind,
    function: Callable[[Any], Any],
    uid: str | None,
) -> tuple[Port, ...]:
    """Add a function over the rows of some streams; return where its rows come out.

    `schemas` are those of the rows it gets and of the rows it emits.
    """
    if uid is not None:
        check_uid(uid, nodes)
    name = uid or _free_name(nodes, ports, kind)
    if not callable(function):
        raise PlanError(f"{kind} {name!r}: expected a function of a row, found {function!r}")
    check_arguments(function, f"{kind} {name!r}: the function ", "row")
    made = ROW_FUNCTIONS[kind](function)
    # Rows in slots and rows of different Spark stages cannot be united before the function: it is
    # there once for each place.
    in_slots = [port for port in ports if _is_in_slots(nodes, port)]
    in_spark: dict[frozenset[str], list[Port]] = {}
    for port in ports:
        if port not in in_slots:
            in_spark.setdefault(_operators_before(nodes, port), []).append(port)
    found: list[Port] = []
    for side in filter(None, (*in_spark.values(), in_slots)):
        each = name if not found else _free_name(nodes, side, kind)
        column = keep_time(nodes, side, schemas[1])
        node = RowsNode(
            each,
            tuple(side),
            made,
            schemas[1],
            column,
            calls_python=True,
            read_schema=schemas[0],
        )
        nodes[each] = rows_operator(node) if side is in_slots else node
        found.append(Port(each))
    return tuple(found)


def take_errors(nodes: dict[str, Node], ports: Sequence[Port]) -> tuple[Port, ...]:
    """Give functions over rows a side output for rows that they fail on; return those outputs.

    Only operators have side outputs, so the functions run in the slots from now on.
    """
    found = []
    for port in ports:
        node = nodes[port.node]
        if isinstance(node, RowsNode):
            node = rows_operator(node)
        assert isinstance(node, ProcessNode), "functions over rows are operators or transforms"
        nodes[port.node] = replace(node, sides=((ERRORS, LETTERS),))
        found.append(Port(port.node, ERRORS))
    return tuple(found)


def _is_in_slots(nodes: dict[str, Node], port: Port) -> bool:
    return all(isinstance(nodes[bare.node], ProcessNode) for bare in bare_ports(nodes, [port]))


def _operators_before(nodes: dict[str, Node], port: Port) -> frozenset[str]:
    """Return the operators whose rows Spark reads to make this stream: none, if it reads sources.

    Streams with the same ones are there in the same stage.
    """
    roots = (root.node for root in root_ports(nodes, [port]))
    return frozenset(name for name in roots if isinstance(nodes[name], ProcessNode))


def _free_name(nodes: dict[str, Node], ports: Sequence[Port], kind: RowKind) -> str:
    """Return a name made of the source or operator that the rows come from: "pays.map"."""
    base = ports[0].node
    while (before := _input_if_unnamed(nodes[base])) is not None:
        base = before.node
    name, number = f"{base}.{kind}", 1
    while name in nodes:
        number += 1
        name = f"{base}.{kind}-{number}"
    return name


def _input_if_unnamed(node: Node) -> Port | None:
    """Return the first input of a node that the user has not named; else None."""
    if isinstance(node, TransformNode | TimeNode):
        return node.inputs[0]
    if isinstance(node, ProcessNode) and isinstance(node.function, RowFunction):
        return node.inputs[0]
    return None
