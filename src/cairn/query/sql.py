"""SQL over state, by DuckDB over Arrow: no Spark, no server, nothing but reading.

Each state is a table, called `operator.state`; also `operator_state` and `state`, where no
other state has that name; of states whose names differ by case only each has a number. A state
is read when the query scans it, and not before.

Always true here:
- a query is one SELECT over states: what it names besides is refused before it runs;
- DuckDB can reach no file, no network, no extension, no setting and no Python variable: by
  what is refused here, and once more by its own locks;
- what DuckDB counts of memory and time is bounded, and so are rows; all that is wrong with a
  query is a QueryError.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from cairn.errors import CairnError, QueryError
from cairn.snapshots.tables import StateSource, StateTable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SQL_CHARS_MAX: Final = 100_000
THREADS: Final = 2
_BATCH_ROWS: Final = 1 << 14
_TRUNCATED: Final = b"cairn.truncated"
_TABLE_FUNCTIONS: Final = frozenset({"range", "generate_series", "unnest", "repeat", "repeat_row"})
_REFUSED: Final = frozenset(
    {"current_setting", "getenv", "write_log", "query", "query_table", "parse_duckdb_log"}
)
_QUERY_NODES: Final = frozenset(
    {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
)
_SCHEMAS: Final = frozenset({"memory", "temp", "system", "pg_catalog", "information_schema"})
_SETTINGS: Final = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "threads": str(THREADS),
}
_LOCKS: Final = ("SET enable_external_access = false", "SET lock_configuration = true")


def run_sql(
    source: StateSource,
    sql: str,
    *,
    rows_max: int,
    timeout_s: float,
    memory_mb: int = 512,
    bytes_max: int | None = None,
) -> pa.Table:
    """Return the rows of a query, at most `rows_max`; `is_truncated` is True if there were more.

    DuckDB enforces the limits, but not within a function that makes one huge value or takes
    long. Untrusted SQL runs in `sql_apart`.
    """
    # Imported late: it takes a third of a second, and most commands do not need it.
    import duckdb

    connection = duckdb.connect(":memory:", config=_SETTINGS | {"memory_limit": f"{memory_mb}MB"})
    clock = _Clock(connection, timeout_s)
    try:
        connection.execute("SET TimeZone = 'UTC'")
        named = _find_names(connection, sql)
        for at, table in _find_tables(source, named).items():
            _add(connection, at, _Scan(table, clock))
        for lock in _LOCKS:
            connection.execute(lock)
        with clock:
            return _fetch(connection, sql, rows_max, bytes_max or memory_mb << 20)
    except (duckdb.Error, pa.ArrowException) as error:
        raise clock.failed or _as_query_error(error, clock, memory_mb) from None
    finally:
        connection.close()


def is_truncated(table: pa.Table) -> bool:
    """True if the query had more rows than were allowed."""
    return _TRUNCATED in (table.schema.metadata or {})


def table_names(source: StateSource) -> dict[tuple[str, ...], StateTable]:
    """Return the states by their names in SQL: the parts of a name, in lower case."""
    found: dict[tuple[str, ...], StateTable] = {}
    named = _with_sql_names(source.tables())
    names = [
        [
            (f"{table.operator}.{state}",),
            (table.operator, state),
            (re.sub(r"\W", "_", f"{table.operator}_{state}"),),
            (state,),
        ]
        for table, state in named
    ]
    lowered = [[tuple(part.lower() for part in name) for name in each] for each in names]
    counts = Counter(name for each in lowered for name in set(each))
    for (table, _), each in zip(named, lowered, strict=True):
        found |= {name: table for name in each if counts[name] == 1}
    return found


def _with_sql_names(tables: list[StateTable]) -> list[tuple[StateTable, str]]:
    """Return each state with its name in SQL, where `Total` and `total` would be the same: these
    become `Total_1` and `total_2`."""
    lowered = [(table.operator.lower(), table.state.lower()) for table in tables]
    counts, taken = Counter(lowered), set(lowered)
    found = []
    for table, (operator, state) in zip(tables, lowered, strict=True):
        shown, number = table.state, 0
        while counts[operator, state] > 1 and (operator, shown.lower()) in taken:
            number += 1
            shown = f"{table.state}_{number}"
        taken.add((operator, shown.lower()))
        found.append((table, shown))
    return found


# Names in a query


class _Named:
    """Tables and common table expressions of a query, found by DuckDB's own parser."""

    def __init__(self) -> None:
        self.tables: set[tuple[str, ...]] = set()
        self.ctes: set[str] = set()


def _find_names(connection: DuckDBPyConnection, sql: str) -> _Named:
    if len(sql) > SQL_CHARS_MAX:
        raise QueryError(
            f"the query has {len(sql)} characters\n  expected: at most {SQL_CHARS_MAX}\n"
            "  next: read the state as a DataFrame instead"
        )
    # Two parsers could read such text differently: to some a zero ends it.
    if "\x00" in sql or sql.encode(errors="replace").decode() != sql:
        raise QueryError("the query is not text\n  found: a zero, or half a character in it")
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise QueryError(
            f"a query is one SELECT\n  found: {len(statements)} statements\n"
            "  next: run them one by one"
        )
    ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise QueryError(
            "the query is nested too deeply\n  next: join or nest fewer parts"
        ) from None
    kind = statements[0].type.name
    if kind == "MULTI":
        raise QueryError(
            "a query is one SELECT\n  found: a PIVOT that first looks for its columns\n"
            "  next: name them: PIVOT ... ON column IN (...)"
        )
    if kind != "SELECT" or parsed["error"]:
        raise QueryError(
            f"a query only reads\n  expected: one SELECT\n  found: {kind}\n"
            "  next: select from the states, such as: select * from operator.state limit 10"
        )
    found = _Named()
    _walk(parsed["statements"], found)
    internal = connection.execute("SELECT view_name FROM duckdb_views() WHERE internal").fetchall()
    hidden = found.ctes & {name.lower() for (name,) in internal}
    if hidden:
        raise QueryError(
            f"{hidden.pop()!r} is a name of DuckDB's own\n  next: give the WITH part another name"
        )
    return found


def _walk(node: Any, found: _Named) -> None:
    stack = [node]
    while stack:
        each = stack.pop()
        if isinstance(each, list):
            stack.extend(each)
        elif isinstance(each, dict):
            _look(each, found)
            stack.extend(each.values())


def _look(node: dict[str, Any], found: _Named) -> None:
    kind = node.get("type")
    if kind == "BASE_TABLE":
        parts = [node.get("catalog_name"), node.get("schema_name"), node.get("table_name")]
        found.tables.add(tuple(part.lower() for part in parts if part))
    elif kind == "TABLE_FUNCTION":
        name = str((node.get("function") or {}).get("function_name", "")).lower()
        if name not in _TABLE_FUNCTIONS:
            raise QueryError(
                f"{name}() cannot be used here\n  expected: a query over states only\n"
                "  next: select from the states, such as: select * from operator.state limit 10"
            )
    elif kind == "SHOW_REF" and not node.get("query"):
        raise QueryError(
            "SHOW cannot be used here\n  next: `describe operator.state` lists columns"
        )
    elif node.get("class") == "FUNCTION":
        name = str(node.get("function_name", "")).lower()
        if name in _REFUSED:
            raise QueryError(f"{name}() cannot be used here\n  next: leave it out")
    if isinstance(node.get("cte_map"), dict):
        if kind not in _QUERY_NODES:
            raise QueryError(
                f"a query only reads\n  expected: SELECT in all its parts\n  found: {kind}"
            )
        found.ctes |= {str(each["key"]).lower() for each in node["cte_map"].get("map", ())}


def _find_tables(source: StateSource, named: _Named) -> dict[tuple[str, ...], StateTable]:
    known = table_names(source)
    found = {}
    for name in named.tables:
        if name in known:
            if len(name) > 1 and name[0] in _SCHEMAS:
                raise QueryError(
                    f"{name[0]!r} is also a name of DuckDB's own\n"
                    f'  next: write both parts in one pair of double quotes: "{".".join(name)}"'
                )
            found[name] = known[name]
        elif len(name) != 1 or name[0] not in named.ctes:
            names = sorted(
                {f"{t.operator}.{state}" for t, state in _with_sql_names(source.tables())}
            )
            raise QueryError(
                f"no state has the name {'.'.join(name)!r}\n"
                f"  found: {', '.join(names) or 'no state at all'}\n"
                "  next: select from one of these; names with dots or marks in them "
                'are written in double quotes: "operator.state"'
            )
    return found


# Running it


class _Clock:
    """Interrupts a query that takes too long; keeps what failed while a state was read."""

    def __init__(self, connection: DuckDBPyConnection, timeout_s: float) -> None:
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._connection = connection
        self.timeout_s = timeout_s
        self.is_over = False
        self.failed: CairnError | None = None

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.is_over = True
        # Once is not always enough: a query that is just starting does not notice.
        for _ in range(100):
            if self._timer.finished.is_set():
                return
            with contextlib.suppress(Exception):
                self._connection.interrupt()
            time.sleep(0.05)


class _Scan:
    """A state as DuckDB reads it: each scan gets a new stream of rows."""

    def __init__(self, table: StateTable, clock: _Clock) -> None:
        self._table = table
        self._clock = clock
        self._schema = pa.schema([_readable(field) for field in table.schema])

    def __arrow_c_schema__(self) -> Any:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        reader = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._table.batches(ordered=False):
                if self._clock.is_over:
                    raise TimeoutError  # To end here would be a whole answer over half the rows.
                yield batch.cast(self._schema) if batch.schema != self._schema else batch
        except CairnError as error:
            # DuckDB would tell of it in its own words.
            self._clock.failed = error
            raise


def _readable(field: pa.Field) -> pa.Field:
    # DuckDB has no structs without fields.
    empty = pa.types.is_struct(field.type) and not field.type.num_fields
    return pa.field(field.name, pa.null() if empty else field.type)


def _add(connection: DuckDBPyConnection, name: tuple[str, ...], scan: _Scan) -> None:
    """As a table of that name; its scan is kept alive by the connection."""
    if len(name) == 1:
        connection.register(name[0], scan)
        return
    schema, table = (part.replace('"', '""') for part in name)
    inner = f"{name[0]}\x1f{name[1]}"
    connection.register(inner, scan)
    connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
    escaped = inner.replace('"', '""')
    connection.execute(f'CREATE VIEW "{schema}"."{table}" AS SELECT * FROM main."{escaped}"')


def _fetch(connection: DuckDBPyConnection, sql: str, rows_max: int, bytes_max: int) -> pa.Table:
    asked = connection.sql(sql)
    if any("UHUGEINT" in str(type) for type in asked.types):
        # On its way to Arrow it becomes a negative number.
        raise QueryError("a UHUGEINT cannot be shown\n  next: cast it to varchar or hugeint")
    reader = asked.limit(rows_max + 1).to_arrow_reader(_BATCH_ROWS)
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in reader:
        rows += batch.num_rows
        size += batch.nbytes
        if size > bytes_max:
            raise QueryError(
                f"the rows of the query take more than {bytes_max >> 20} MiB\n"
                "  next: select fewer rows or columns"
            )
        batches.append(batch)
    found = _canonical(pa.Table.from_batches(batches, reader.schema).slice(0, rows_max))
    return found.replace_schema_metadata({_TRUNCATED: b"1"} if rows > rows_max else None)


def _canonical(table: pa.Table) -> pa.Table:
    """With types that cairn has names for, and no column name twice."""
    names, taken = [], set()
    for name in table.column_names:
        shown, copy = name, 1
        while shown in taken:
            copy += 1
            shown = f"{name}_{copy}"
        taken.add(shown)
        names.append(shown)
    columns = [_cast(column) for column in table.columns]
    return pa.table(columns, names=names) if names else table


def _cast(column: pa.ChunkedArray) -> pa.ChunkedArray:
    type = column.type
    wanted = _canonical_type(type)
    if wanted is type:
        return column
    try:
        return column.cast(wanted, safe=False)
    except pa.ArrowException:
        if pa.types.is_nested(type):
            return column
        return pa.chunked_array([[None if v is None else str(v) for v in column.to_pylist()]])


def _canonical_type(type: pa.DataType) -> pa.DataType:
    is_ = pa.types
    if is_.is_unsigned_integer(type):
        wider = {8: pa.int16(), 16: pa.int32(), 32: pa.int64()}
        return wider.get(type.bit_width, pa.decimal128(20, 0))
    if is_.is_timestamp(type) and (type.unit != "us" or type.tz not in (None, "UTC")):
        return pa.timestamp("us", None if type.tz is None else "UTC")
    if is_.is_large_string(type) or is_.is_string_view(type) or is_.is_null(type):
        return pa.string()
    if is_.is_large_binary(type) or is_.is_binary_view(type) or is_.is_fixed_size_binary(type):
        return pa.binary()
    if is_.is_dictionary(type):
        return type.value_type
    if is_.is_time(type) or is_.is_interval(type) or is_.is_duration(type):
        return type if type == pa.duration("us") else pa.string()
    if is_.is_list(type) or is_.is_large_list(type):
        return pa.list_(pa.field("element", _canonical_type(type.value_type)))
    if is_.is_struct(type):
        return pa.struct([pa.field(f.name, _canonical_type(f.type)) for f in type])
    if is_.is_map(type):
        return pa.map_(_canonical_type(type.key_type), _canonical_type(type.item_type))
    return type


def _as_query_error(error: Exception, clock: _Clock, memory_mb: int) -> QueryError:
    if clock.is_over:
        return QueryError(
            f"the query took longer than {clock.timeout_s:g} s\n"
            "  next: narrow it down, or read the state as a DataFrame"
        )
    text = str(error).strip()
    if "Out of Memory" in text or "bad_alloc" in text or isinstance(error, MemoryError):
        return QueryError(
            f"the query needs more than {memory_mb} MiB of memory\n"
            "  next: narrow it down, or read the state as a DataFrame"
        )
    # The rest quotes the query, or names settings that cannot be changed here.
    lines = [line for line in text.splitlines() if line.strip()][:4]
    return QueryError("the query cannot be run\n  found: " + "\n  ".join(lines))
