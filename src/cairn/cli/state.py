"""Print the states of an epoch, the rows of one, or the result of a query.

Always true here:
- everything printed is of one committed epoch, held while it is read;
- pickled objects are never unpickled;
- if rows are left out, the output mentions it, unless `--limit` was given.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
from rich.text import Text

from cairn.cli.checkpoint import open_folder
from cairn.cli.job_file import UsageError
from cairn.cli.tables import many, print_json, printable, stdout_console
from cairn.query.json_values import json_columns, json_rows
from cairn.report.text import count, size
from cairn.snapshots.tables import StateSource, StateTable, open_state
from cairn.types import type_ddl

Facts = dict[str, Any]

VALUE_CHARS_MAX: Final = 60
TABLE_ROWS: Final = 20
"""Rows of a table for people, without `--limit`."""
SQL_SECONDS: Final = 600.0
SQL_MEMORY_MB: Final = 2048
SQL_ROWS_MAX: Final = 10_000_000


class Asked(NamedTuple):
    checkpoint: str
    operator: str | None
    state: str | None
    key: str | None
    sql: str | None
    epoch: int | None
    limit: int | None
    form: Literal["text", "json", "csv"]

    @property
    def rows_max(self) -> int:
        """Rows to print, 0 for all. Programs get all by default."""
        if self.limit is not None:
            return self.limit
        return TABLE_ROWS if self.form == "text" else 0


def show_state(asked: Asked, *, is_twice: bool = False) -> None:
    """Print a list of states, rows of a state, or the result of a query."""
    _check(asked, is_twice)
    open_folder(asked.checkpoint)
    with open_state(asked.checkpoint, asked.epoch) as source:
        if asked.sql is not None:
            _show_query(source, asked)
        elif asked.operator is not None and asked.state is not None:
            _show_rows(source, source.table(asked.operator, asked.state), asked)
        else:
            _show_list(source, asked)


def _check(asked: Asked, is_twice: bool) -> None:
    is_of_state = asked.state is not None
    wrong = None
    if is_twice:
        wrong = "--json and --csv cannot be combined\n  next: use one of them"
    elif asked.sql is not None and (is_of_state or asked.operator or asked.key):
        wrong = (
            "--sql cannot be combined with OPERATOR, STATE or --key\n"
            "  next: name the states in the query"
        )
    elif asked.key is not None and not is_of_state:
        wrong = "--key needs a state\n  next: give OPERATOR STATE before it"
    elif asked.form == "csv" and not is_of_state and asked.sql is None:
        wrong = "--csv prints rows, and no state is named\n  next: give OPERATOR STATE, or --sql"
    if wrong is not None:
        raise UsageError(wrong)


# The list of states


def _show_list(source: StateSource, asked: Asked) -> None:
    tables = source.tables()
    if asked.operator is not None:
        mine = [table for table in tables if asked.operator in (table.operator, table.uid)]
        if not mine:
            source.table(asked.operator, "*")  # Raises an error that lists the states.
        tables = mine
    facts = _source_facts(source) | {"states": [_table_facts(table) for table in tables]}
    if asked.form == "json":
        print_json(facts)
        return
    console = stdout_console()
    console.print(_head(facts), soft_wrap=True)
    if not tables:
        console.print("no operator has state")
        return
    bound = "" if source.kind == "savepoint" else "≤ "
    names = ["state", "kind", "by", "type", f"{bound}rows", "files"]
    rows = []
    seen = set()
    for each in facts["states"]:
        # States of an operator share its files, except in a savepoint.
        is_first = source.kind == "savepoint" or each["entry"] not in seen
        seen.add(each["entry"])
        by = ", ".join(f"{column['name']} {column['type']}" for column in each["key"])
        rows.append(
            [
                f"{each['operator']}.{each['state']}",
                each["kind"] + ("" if each["ttl"] is None else ", expires"),
                by,
                each["type"],
                count(each["rows"]),
                size(each["bytes"]) if is_first else "",
            ]
        )
    _print_lines(console, names, rows, numbers={4, 5})


def _source_facts(source: StateSource) -> Facts:
    return {
        "checkpoint": source.url,
        "job": source.job,
        "kind": source.kind,
        "epoch": source.epoch,
        "wall_ms": source.wall_ms,
        "max_parallelism": source.max_parallelism,
    }


def _table_facts(table: StateTable) -> Facts:
    keys = zip(table.key_names, table.key_types, strict=True)
    decl = table.columns.decl
    value = decl.type if decl.entry_type is None else f"{decl.entry_type} → {decl.type}"
    if table.kind in ("timers", "operator-list", "feedback"):
        value = "timestamp" if table.kind == "timers" else decl.type
    return {
        "operator": table.operator,
        "state": table.state,
        "entry": table.uid,
        "kind": table.kind,
        "scope": table.scope,
        "key": [{"name": name, "type": type_ddl(type)} for name, type in keys],
        "type": value,
        "ttl": decl.ttl,
        "columns": json_columns(table.schema),
        "rows": table.count_stored_rows(),
        "bytes": table.bytes,
    }


# Rows


def _show_rows(source: StateSource, table: StateTable, asked: Asked) -> None:
    keys = None if asked.key is None else [table.parse_key(asked.key)]
    batches = table.batches(keys=keys)
    about = _source_facts(source) | {"operator": table.operator, "state": table.state}
    if asked.key is not None:
        about["key"] = asked.key
    hidden = frozenset({"value"} if table.columns.decl.type == "object" else ())
    title = Text.assemble((f"  {table.operator}.{table.state}", "bold"), f"  {table.kind}")
    _show(about, table.schema, batches, asked, title, hidden=hidden)


def _show_query(source: StateSource, asked: Asked) -> None:
    from cairn.query.sql import is_truncated, run_sql

    assert asked.sql is not None
    rows_max = asked.rows_max or SQL_ROWS_MAX
    found = run_sql(
        source, asked.sql, rows_max=rows_max, timeout_s=SQL_SECONDS, memory_mb=SQL_MEMORY_MB
    )
    about = _source_facts(source) | {"sql": asked.sql}
    batches = found.to_batches()
    _show(about, found.schema, batches, asked, Text(""), has_more=is_truncated(found))


def _show(
    about: Facts,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    asked: Asked,
    title: Text,
    *,
    hidden: frozenset[str] = frozenset(),
    has_more: bool = False,
) -> None:
    """Print the rows up to the limit, and a note if there are more."""
    rows_max = asked.rows_max
    if asked.form == "csv":
        _write_csv(schema, _slice(batches, rows_max))
        if has_more and asked.limit is None:
            print(f"… more: only the first {SQL_ROWS_MAX:,} rows are printed", file=sys.stderr)
        return
    rows = [row for batch in _slice(batches, rows_max, more=1) for row in json_rows(batch)]
    is_truncated = has_more or (bool(rows_max) and len(rows) > rows_max)
    rows = rows[: rows_max or None]
    if asked.form == "json":
        columns = json_columns(schema)
        print_json(about | {"columns": columns, "rows": rows, "truncated": is_truncated})
        return
    console = stdout_console()
    console.print(_head(about) + title, soft_wrap=True)
    if not rows:
        console.print("no such key" if asked.key is not None else "no rows")
        return
    numbers = {at for at, field in enumerate(schema) if _is_number(field.type)}
    cells = [[_cell(row[n], is_hidden=n in hidden) for n in schema.names] for row in rows]
    _print_lines(console, schema.names, cells, numbers)
    if is_truncated:
        note = f"… more: these are the first {many(len(rows), 'row')}; --limit 0 shows all"
        console.print(Text(note, "dim"))


def _slice(
    batches: Iterable[pa.RecordBatch], limit: int, more: int = 0
) -> Iterator[pa.RecordBatch]:
    left = limit + more
    for batch in batches:
        if not limit:
            yield batch
            continue
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return


def _write_csv(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(schema.names)
    for batch in batches:
        for row in json_rows(batch):
            writer.writerow([_csv_cell(value) for value in row.values()])


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def _cell(value: Any, *, is_hidden: bool) -> str:
    if is_hidden and value is not None:
        return f"<{len(value) * 3 // 4} bytes pickled>"
    if value is None:
        return "null"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = printable(text[: VALUE_CHARS_MAX + 1])
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


def _is_number(type: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_integer(type) or is_.is_floating(type) or is_.is_decimal(type))


def _head(facts: Facts) -> Text:
    what = "savepoint of epoch" if facts["kind"] == "savepoint" else "epoch"
    return Text.assemble(
        (facts["job"] or "job.json is missing", "bold cyan"),
        f"  {what} {facts['epoch']}",
        (f"  {facts['checkpoint']}", "dim"),
    )


def _print_lines(console: Any, names: list[str], rows: list[list[str]], numbers: set[int]) -> None:
    widths = [max(len(row[at]) for row in [names, *rows]) for at in range(len(names))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.rjust(width) if at in numbers else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    console.print(Text(line(names), "dim"), soft_wrap=True)
    for row in rows:
        console.print(Text(line(row)), soft_wrap=True)
