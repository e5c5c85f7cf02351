"""Measures that Spark takes of rows as they pass: latest event times, and numbers of rows.

Always true here:
- the latest event time of an origin is measured where it is declared, whatever is filtered out
  later;
- rows of a sink that drops them are counted where they would leave for it;
- nothing in this module touches Spark: it writes SQL, others run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from cairn.plan.deploy import source_envelope
from cairn.plan.graph import Graph, Port
from cairn.plan.sql import quote, time_sql
from cairn.protocol.envelope import LANE


class Measure(NamedTuple):
    """A number that Spark observes while rows pass."""

    kind: Literal["time", "rows"]
    name: str
    """The origin of the time, or the sink that the rows are counted for."""
    sql: str


class Observed(NamedTuple):
    times: dict[str, int]
    """The latest event time of each origin that had rows, in microseconds."""
    rows: dict[str, int]
    """Per sink that drops its rows, how many there were."""


def source_fields(graph: Graph) -> dict[int, dict[str, str]]:
    """Return the SQL of the columns of each source by name, in the rows of an epoch."""
    if len(graph.sources) == 1:
        return {0: {name: quote(name) for name in graph.sources[0].schema.names}}
    return source_envelope(graph).fields


def source_measures(graph: Graph) -> list[Measure]:
    """Return what is measured of rows as the sources give them."""
    found = []
    for lane, fields in source_fields(graph).items():
        source = graph.sources[lane]
        is_mine = None if len(graph.sources) == 1 else f"{LANE} = {lane}"
        found += port_measures(graph, Port(source.name), fields, is_mine)
    return found


def port_measures(
    graph: Graph,
    port: Port,
    fields: Mapping[str, str] | None = None,
    is_mine: str | None = None,
) -> list[Measure]:
    """Return what is measured of an output.

    `fields` has the SQL of its columns, if these have other names. `is_mine` is the condition for
    its rows, if there are others.
    """
    schema = graph.schema(port)

    def mine(sql: str) -> str:
        return sql if is_mine is None else f"CASE WHEN {is_mine} THEN {sql} END"

    found = []
    for name, node in graph.time_origins.items():
        column = node.event_time
        if column is not None and port in graph.bare((Port(name),)):
            sql = time_sql(fields[column] if fields else quote(column), schema.field(column).type)
            found.append(Measure("time", name, f"max({mine(sql)})"))
    for edge in graph.levels[0].counted:
        if port in edge.inputs:
            found.append(Measure("rows", edge.consumer, f"count({mine('1')})"))
    return found


__all__ = ["Measure", "Observed", "port_measures", "source_fields", "source_measures"]
