"""SQL of the rows that a level is fed: [lane, group, subtask, time, tie], columns, [ack].

Columns that a level does not need are not there. The envelope has the rows' columns.

Always true here:
- the key group of a row is computed by Spark SQL, and `keygroups` computes the same in Python;
- nothing in this module touches Spark: it writes SQL, others run it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cairn.key_groups import Starts, count_owners, spark_key_group_sql, starts_within
from cairn.plan.deploy import incoming
from cairn.plan.graph import Edge, Graph, Level, Node, ProcessNode
from cairn.protocol.envelope import ACK, LANE, Envelope
from cairn.types import type_ddl
from cairn.types.codec import is_hashable

GROUP, SUBTASK, TIME, TIE, NO_ROWS = "group", "subtask", "time", "tie", "no_rows"


@dataclass(frozen=True)
class Feed:
    """The rows that a level is fed, as SQL."""

    graph: Graph
    level: Level
    parallelism: int
    is_pinned: bool
    """Rows are joined to the pin table by their subtask. A row without a group is the table's."""
    starts: Starts = ()
    """The first key group of each subtask; empty: equal ranges."""

    @property
    def envelope(self) -> Envelope:
        return incoming(self.level)

    @property
    def consumers(self) -> list[Node]:
        """The operators and sinks that the rows are for."""
        return [self.graph.nodes[edge.consumer] for edge in self.level.edges]

    @property
    def is_straight(self) -> bool:
        """True if the rows may go to any subtask, and need no shuffle to get there."""
        return self.level.is_straight and not self.is_pinned and not self._is_bounded

    @property
    def _is_bounded(self) -> bool:
        """True if an operator of the level runs in fewer subtasks than the job has."""
        return any(0 < edge.parallelism < self.parallelism for edge in self.level.edges)

    @property
    def checked_starts(self) -> Starts | None:
        """The ranges of all the rows of the level; None if they have none, or not the same."""
        if not is_keyed(self.level):
            return None
        found = {self._starts_of(edge.parallelism) for edge in self.level.edges}
        return found.pop() if len(found) == 1 else None

    def _starts_of(self, most: int) -> Starts:
        return starts_within(most, self.parallelism, self.graph.group_count, self.starts)

    @property
    def columns(self) -> list[str]:
        """All columns of the rows, before they are in the partition of their subtask."""
        is_plain = is_keyed(self.level) and not self._is_bounded
        has_subtask = self.is_pinned or self.level.passing or not is_plain
        columns = [LANE] if self.envelope.has_lanes else []
        if self.is_pinned or any(edge.keys for edge in self.level.edges):
            columns.append(GROUP)
        columns += [SUBTASK] if has_subtask and not self.is_straight else []
        if any(edge.event_time for edge in self.level.edges):
            columns.append(TIME)
        columns += [TIE] if is_sorted(self.level) else []
        columns += self.envelope.columns
        columns += [ACK] if self.level.index else []
        # Spark's tasks need a column, even without rows.
        return columns or [NO_ROWS]

    @property
    def sent(self) -> list[str]:
        """The columns that Python needs. Spark alone needs the others, to shuffle and to sort."""
        return [name for name in self.columns if name not in (SUBTASK, TIE)]

    @property
    def subtask(self) -> str:
        """The subtask of a row that has these columns."""
        if SUBTASK in self.columns:
            return SUBTASK
        return self._any() if self.is_straight else self._owner(quote(GROUP))

    def _any(self, most: int = 0) -> str:
        # Row by row: a source may well come in one partition, or in many small ones.
        row = "monotonically_increasing_id() + spark_partition_id()"
        return f"cast(pmod({row}, {self._count(most)}) AS int)"

    def _count(self, most: int) -> int:
        """Return the number of subtasks that run an operator."""
        return count_owners(most, self.parallelism)

    def _owner(self, group: str, most: int = 0) -> str:
        # coalesce: Spark believes a division can be null, and would filter on that.
        count, subtasks = self.graph.group_count, self._count(most)
        if self.starts and subtasks == self.parallelism:
            ranges = zip(self.starts, (*self.starts[1:], count), strict=True)
            owners = ", ".join(
                str(at) for at, (first, end) in enumerate(ranges) for _ in range(first, end)
            )
            # Spark folds the array into one literal: a row costs one look into it.
            return f"coalesce(get(array({owners}), {group}), 0)"
        return f"coalesce(cast({group} * {subtasks} div {count} AS int), 0)"

    @property
    def passing(self) -> list[int]:
        """The lanes of rows that bypass the stage of the level.

        Pinned rows pass in the forwarder: the pin's join relies on how the rows are shuffled.
        """
        if self.is_pinned or not self.level.edges:
            return []
        return [edge.index for edge in self.level.passing]

    @property
    def is_passing(self) -> str:
        """The condition for rows of these lanes."""
        return f"{LANE} IN ({', '.join(map(str, self.passing))})"

    @property
    def is_taken(self) -> str:
        """The condition for rows of the level, and for acknowledgements."""
        return f"{LANE} IS NULL OR NOT {self.is_passing}"

    def pass_on(self, out: Envelope) -> list[str]:
        """Return the columns of passing rows, as the level's output has them."""
        columns = {LANE: LANE, ACK: "cast(null AS binary)"}
        for name, type_ in out.columns.items():
            taken: dict[str, list[int]] = {}
            for lane in self.passing:
                if name in out.names[lane]:
                    at = out.names[lane].index(name)
                    taken.setdefault(self.envelope.names[lane][at], []).append(lane)
            cases = " ".join(
                f"WHEN {LANE} IN ({', '.join(map(str, lanes))}) THEN {column}"
                for column, lanes in taken.items()
            )
            nothing = f"cast(null AS {type_ddl(type_)})"
            if len(taken) == 1:
                (columns[name],) = taken
            else:
                columns[name] = f"CASE {cases} ELSE {nothing} END" if cases else nothing
        return [f"{columns[name]} AS {name}" for name in out.schema.names]

    @property
    def here(self) -> str:
        """The subtask whose number the partition at hand has."""
        return f"pmod(spark_partition_id(), {self.parallelism})"

    def nothing(self, name: str) -> str:
        """Return a column's value in rows that do not have it, and in acknowledgements."""
        if name == GROUP:
            return "0"
        if name == SUBTASK:
            return self.here
        types = {LANE: "int", TIME: "bigint", TIE: "bigint", ACK: "binary", NO_ROWS: "int"}
        type_ = types.get(name) or type_ddl(self.envelope.columns[name])
        return f"cast(null AS {type_})"

    def values(self, edge: Edge, fields: Mapping[str, str]) -> dict[str, str]:
        """Return each column of a row on an edge. `fields` has the SQL of the row's, by name."""
        here = edge in self.level.edges
        values = {name: self.nothing(name) for name in self.columns} | {LANE: str(edge.index)}
        if edge.keys and here:
            keys = [
                (_widen(fields[name], edge.schema.field(name).type, type_), type_)
                for name, type_ in zip(edge.keys, edge.key_types, strict=True)
            ]
            values[GROUP] = spark_key_group_sql(keys, self.graph.group_count)
            values[SUBTASK] = self._owner(values[GROUP], edge.parallelism)
        elif self.level.index == 0 and isinstance(self.graph.nodes[edge.consumer], ProcessNode):
            values[SUBTASK] = self._any(edge.parallelism)
        elif here and self._count(edge.parallelism) < self.parallelism:
            values[SUBTASK] = f"pmod({self.here}, {edge.parallelism})"
        if edge.event_time and here:
            type_ = edge.schema.field(edge.event_time).type
            shift = f" + ({edge.shift_us})" if edge.shift_us else ""
            values[TIME] = time_sql(fields[edge.event_time], type_) + shift
            hashed = [
                fields[f.name] if is_hashable(f.type) else f"to_json({fields[f.name]})"
                for f in edge.schema
            ]
            values[TIE] = f"xxhash64({', '.join(hashed)})"
        for name, field in zip(self.envelope.names[edge.index], edge.schema, strict=True):
            values[name] = f"cast({fields[field.name]} AS {type_ddl(field.type)})"
        return values

    def label(
        self, fields: Mapping[int, Mapping[str, str]], edges: Mapping[int, Edge], *, has_acks: bool
    ) -> list[str]:
        """Return the columns of rows that are in lanes already, and go one way each.

        `fields` has the SQL of the columns of each lane there is, `edges` the edges of those whose
        rows this level is fed.
        """
        values = {lane: self.values(edge, fields[lane]) for lane, edge in edges.items()}
        if len(fields) == 1 and values:
            (found,) = values.values()
            if has_acks:
                found[LANE] = f"CASE WHEN {ACK} IS NULL THEN {found[LANE]} END"
        else:
            found = {name: self._case(name, values, edges) for name in self.columns}
        if has_acks:
            found[ACK] = ACK
        return [f"{found[name]} AS {quote(name)}" for name in self.columns]

    def _case(
        self, name: str, values: Mapping[int, Mapping[str, str]], edges: Mapping[int, Edge]
    ) -> str:
        """Return a column that depends on the lane."""
        by_lane = {lane: value[name] for lane, value in values.items()}
        if name in self.envelope.columns:
            # In rows of lanes that do not have the column, nobody reads it.
            names = self.envelope.names
            mine = {by_lane[n] for n, edge in edges.items() if name in names[edge.index]}
            if len(mine) == 1:
                return mine.pop()
        nothing = self.nothing(name)
        cases = " ".join(f"WHEN {lane} THEN {v}" for lane, v in by_lane.items() if v != nothing)
        case = f"CASE {LANE} {cases} ELSE {nothing} END" if cases else nothing
        return f"coalesce({case}, 0)" if name == SUBTASK else case

    def fork(
        self, fields: Mapping[int, Mapping[str, str]], ways: Mapping[int, Sequence[Edge]]
    ) -> str:
        """Return the SQL of rows that go several ways each, by the lane they are in."""
        arrays = {}
        for lane, edges in ways.items():
            structs = []
            for edge in edges:
                values = self.values(edge, fields[lane])
                named = ", ".join(f"'{name}', {values[name]}" for name in self.columns)
                structs.append(f"named_struct({named})")
            arrays[lane] = f"array({', '.join(structs)})" if structs else "null"
        if len(arrays) == 1:
            return f"inline({next(iter(arrays.values()))})"
        cases = " ".join(f"WHEN {lane} THEN {array}" for lane, array in arrays.items())
        return f"inline(CASE {LANE} {cases} END)"


def is_kept(lanes: Sequence[int], kept: Collection[int], *, has_acks: bool) -> str:
    """Return the condition for rows of some of the lanes, and for all acknowledgements."""
    conditions = [f"{ACK} IS NOT NULL"] if has_acks else []
    if kept:
        assert len(lanes) > 1, "all rows of a single lane are kept, or none"
        conditions.append(f"{LANE} IN ({', '.join(map(str, kept))})")
    return " OR ".join(conditions)


def is_keyed(level: Level) -> bool:
    """True if all rows for the level have a key group, which gives their subtask."""
    return all(edge.keys for edge in level.edges)


def is_sorted(level: Level) -> bool:
    """True if a function of the level wants its rows in the order of event time."""
    return any(edge.event_time and edge.wants_order for edge in level.edges)


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


def escape(text: str) -> str:
    """Return a text as it stands between the quotes of an SQL literal."""
    return text.replace("\\", "\\\\").replace("'", "\\'")
