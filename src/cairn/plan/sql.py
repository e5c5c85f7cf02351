"""SQL of the rows that a level is fed: lane, group, subtask, [time, tie], a struct per lane, [ack].

Always true here:
- the key group of a row is computed by Spark SQL, and `keygroups` computes the same in Python;
- nothing in this module touches Spark: it writes SQL, others run it.
"""

from __future__ import annotations

import pyarrow as pa

from cairn.key_groups import spark_key_group_sql
from cairn.plan.graph import Edge, Graph, Level, ProcessNode
from cairn.protocol.spec import lane_name
from cairn.types import schema_ddl, type_ddl
from cairn.types.codec import is_hashable


def lanes_in(level: Level) -> list[Edge]:
    """Return the edges that come into a level, for it and for later ones."""
    return sorted((*level.edges, *level.passing), key=lambda edge: edge.index)


def input_columns(level: Level) -> list[str]:
    columns = ["lane", "group", "subtask"]
    if any(edge.event_time for edge in level.edges):
        columns.append("time")
    if is_sorted(level):
        columns.append("tie")
    columns += [lane_name(edge.index) for edge in lanes_in(level)]
    return columns if level.index == 0 else [*columns, "ack"]


def is_sorted(level: Level) -> bool:
    """True if a function of the level wants its rows in the order of event time."""
    return any(edge.event_time and edge.wants_order for edge in level.edges)


def lane_values(
    graph: Graph, parallelism: int, edge: Edge, prefix: str, level: Level
) -> dict[str, str]:
    """SQL for each input column of a level, of a row on an edge. `prefix` leads to its columns."""
    count = graph.group_count
    here = edge in level.edges
    values = {"lane": str(edge.index), "ack": "cast(null AS binary)"}
    if edge.keys and here:
        keys = [
            (_widen(prefix + quote(name), edge.schema.field(name).type, type_), type_)
            for name, type_ in zip(edge.keys, edge.key_types, strict=True)
        ]
        values["group"] = spark_key_group_sql(keys, count)
        # coalesce: Spark believes a division can be null, and would filter on that.
        values["subtask"] = (
            f"coalesce(cast({values['group']} * {parallelism} div {count} AS int), 0)"
        )
    else:
        values["group"] = "0"
        values["subtask"] = f"pmod(spark_partition_id(), {parallelism})"
        if level.index == 0 and isinstance(graph.nodes[edge.consumer], ProcessNode):
            # Row by row: a source may well come in one partition, or in many small ones.
            row = "monotonically_increasing_id() + spark_partition_id()"
            values["subtask"] = f"cast(pmod({row}, {parallelism}) AS int)"
    columns = [prefix + quote(name) for name in edge.schema.names]
    if edge.event_time and here:
        type_ = edge.schema.field(edge.event_time).type
        shift = f" + ({edge.shift_us})" if edge.shift_us else ""
        values["time"] = time_sql(prefix + quote(edge.event_time), type_) + shift
        hashed = [
            c if is_hashable(f.type) else f"to_json({c})"
            for c, f in zip(columns, edge.schema, strict=True)
        ]
        values["tie"] = f"xxhash64({', '.join(hashed)})"
    else:
        values["time"] = values["tie"] = "cast(null AS bigint)"
    for other in lanes_in(level):
        name = lane_name(other.index)
        if other.index == edge.index:
            fields = ", ".join(
                f"'{_escape(f.name)}', cast({c} AS {type_ddl(f.type)})"
                for c, f in zip(columns, edge.schema, strict=True)
            )
            values[name] = f"named_struct({fields})"
        else:
            values[name] = f"cast(null AS struct<{schema_ddl(other.schema)}>)"
    return values


def _widen(column: str, found: pa.DataType, wanted: pa.DataType) -> str:
    return column if found == wanted else f"cast({column} AS {type_ddl(wanted)})"


def time_sql(column: str, type_: pa.DataType) -> str:
    """Microseconds since 1970 of an event-time column; null where it has none."""
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        return f"unix_micros({column})"
    if pa.types.is_timestamp(type_):
        # A cast would take it for a time of the session's zone, and a change of clocks for a gap.
        return (
            f"(unix_date(cast({column} AS date)) * 86400000000L + hour({column}) * 3600000000L"
            f" + minute({column}) * 60000000L"
            f" + cast(extract(SECOND FROM {column}) * 1000000L AS bigint))"
        )
    if pa.types.is_date(type_):
        return f"(unix_date({column}) * 86400000000L)"
    if pa.types.is_integer(type_):
        return f"try_multiply(cast({column} AS bigint), 1000L)"
    return f"unix_micros(try_cast({column} AS timestamp))"


def quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _escape(name: str) -> str:
    return name.replace("\\", "\\\\").replace("'", "\\'")
