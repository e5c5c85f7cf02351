"""The table a sink writes to: its name, its columns, and a check that rows fit into it.

Names keep their case and spaces: `Sales.Orders` is the table "Orders" in the schema "Sales".
A dot inside a name needs quotes: '"my.schema".orders'.

Always true here:
- a table that cannot hold the rows without loss is refused before anything runs, with the
  statement that would make them fit. A value too long for a limited column (`varchar(3)`) fails
  when it is written, except for trailing spaces, which SQL cuts off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cairn.errors import PlanError

if TYPE_CHECKING:
    from psycopg import Connection

_NAME_BYTES_MAX = 63

# For each type: its column type in a new table, then others that hold it without loss.
_TYPES: dict[pa.DataType, tuple[str, ...]] = {
    pa.bool_(): ("boolean",),
    pa.int8(): ("smallint", "integer", "bigint", "numeric"),
    pa.int16(): ("smallint", "integer", "bigint", "numeric"),
    pa.int32(): ("integer", "bigint", "numeric"),
    pa.int64(): ("bigint", "numeric"),
    pa.float32(): ("real", "double precision"),
    pa.float64(): ("double precision",),
    pa.string(): (
        "text", "character varying", "citext", "uuid", "json", "jsonb", "xml", "inet", "cidr",
        "macaddr", "macaddr8", "tsvector", "ltree",
    ),
    pa.binary(): ("bytea",),
    pa.date32(): ("date",),
    pa.timestamp("us", "UTC"): ("timestamp with time zone",),
    pa.timestamp("us"): ("timestamp without time zone",),
    pa.duration("us"): ("interval",),
}  # fmt: skip


def quote(*names: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def quote_list(names: Sequence[str]) -> str:
    return ", ".join(map(quote, names))


def parse_name(table: str) -> tuple[str | None, str]:
    """Return schema, if any, and table."""
    part = r'(?:"((?:[^"]|"")+)"|([^".]+))'
    found = re.fullmatch(rf"(?:{part}\.)?{part}", table)
    if found is None:
        raise PlanError(
            f"{table!r} is not the name of a table\n"
            "  expected: 'table' or 'schema.table', in double quotes where a name holds a dot"
        )
    quoted_schema, schema, quoted_name, name = (part or "" for part in found.groups())
    schema, name = (
        _check_name(whole.replace('""', '"') or plain)
        for whole, plain in ((quoted_schema, schema), (quoted_name, name))
    )
    return schema or None, name


def _check_name(name: str) -> str:
    if len(name.encode()) > _NAME_BYTES_MAX or "\x00" in name:
        raise PlanError(f"{name!r} cannot be a name in PostgreSQL: those have at most 63 bytes")
    return name


def type_in_table(type: pa.DataType) -> str:
    """Return the PostgreSQL type of a column made for this type."""
    if pa.types.is_decimal(type):
        return f"numeric({type.precision},{type.scale})"
    if pa.types.is_nested(type):
        return "jsonb"
    return _TYPES[type][0]


def _fits(type: pa.DataType, found: str, kind: str) -> bool:
    """True if a column of the type found can hold every value of the type."""
    if pa.types.is_nested(type):
        return found in ("json", "jsonb")
    base, limits = re.sub(r"\([\d,]+\)", "", found), re.search(r"\(([\d,]+)\)", found)
    if pa.types.is_string(type):
        return kind == "e" or base in _TYPES[type]
    if base == "numeric" and limits is not None:
        precision, scale = (int(n) for n in f"{limits[1]},0".split(",")[:2])
        digits, fraction = _digits(type)
        return scale >= fraction and precision - scale >= digits
    if limits is not None and limits[1] != "6":
        return False  # A timestamp or interval with fewer digits: values would be rounded.
    return base == "numeric" if pa.types.is_decimal(type) else base in _TYPES[type]


def _digits(type: pa.DataType) -> tuple[int, int]:
    """Return the number of digits before and after the point."""
    if pa.types.is_decimal(type):
        return type.precision - type.scale, type.scale
    if pa.types.is_integer(type):
        return len(str(2 ** (type.bit_width - 1))), 0
    return 1000, 1000  # No numeric holds these without loss.


@dataclass(frozen=True)
class Column:
    name: str
    type: str
    kind: str
    """pg_type.typtype: 'e' is an enum."""
    is_required: bool
    """NOT NULL, without a default."""
    is_computed: bool


_COLUMNS = """
select a.attname,
  case when t.typtype = 'd' then format_type(t.typbasetype, t.typtypmod)
       else format_type(a.atttypid, a.atttypmod) end,
  t.typtype::text,
  a.attnotnull and not a.atthasdef and a.attidentity = '' and a.attgenerated = '',
  a.attgenerated <> '' or a.attidentity = 'a'
from pg_attribute a join pg_type t on t.oid = a.atttypid
where a.attrelid = %s and a.attnum > 0 and not a.attisdropped order by a.attnum
"""

_EXCLUSIVE = """
select exists (select from pg_index where indrelid = %s and (indisunique or indisexclusion))
"""

# The columns of each unique index that `on conflict` can use.
_UNIQUE = """
select array_agg(a.attname::text)
from pg_index i
cross join unnest(i.indkey[0:i.indnkeyatts - 1]) as k(attnum)
join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
where i.indrelid = %s and i.indisunique and i.indimmediate and i.indisvalid
  and i.indpred is null and i.indexprs is null
group by i.indexrelid
"""


@dataclass(frozen=True)
class Table:
    """A table that exists, as the server describes it."""

    schema: str
    name: str
    columns: list[Column]
    unique: list[set[str]]
    """The columns of each index that `on conflict` can use."""
    is_exclusive: bool
    """Rows can conflict with each other."""

    @property
    def sql(self) -> str:
        return quote(self.schema, self.name)

    @property
    def types(self) -> dict[str, tuple[str, bool]]:
        """The type of each column, and whether it is an enum."""
        return {column.name: (column.type, column.kind == "e") for column in self.columns}

    def extra(self, schema: pa.Schema) -> list[str]:
        """Return the columns of the table that rows of this schema do not have."""
        return [column.name for column in self.columns if column.name not in schema.names]


def find_table(connection: Connection[Any], table: str) -> Table | None:
    schema, name = parse_name(table)
    where = quote(name) if schema is None else quote(schema, name)
    found = connection.execute(
        "select c.oid, n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where c.oid = to_regclass(%s)",
        [where],
    ).fetchone()
    if found is None:
        return None
    columns = [Column(*row) for row in connection.execute(_COLUMNS, [found[0]])]
    unique = [set(row[0]) for row in connection.execute(_UNIQUE, [found[0]])]
    exclusive = connection.execute(_EXCLUSIVE, [found[0]]).fetchone()
    return Table(found[1], name, columns, unique, is_exclusive=bool(exclusive and exclusive[0]))


def create_statement(table: str, schema: pa.Schema, key: Sequence[str]) -> str:
    namespace, name = parse_name(table)
    lines = [
        f"  {quote(_check_name(f.name))} {type_in_table(f.type)}{'' if f.nullable else ' not null'}"
        for f in schema
    ]
    if key:
        lines.append(f"  primary key ({quote_list(key)})")
    where = quote(name) if namespace is None else quote(namespace, name)
    return f"create table if not exists {where} (\n" + ",\n".join(lines) + "\n)"


def check_table(table: Table, schema: pa.Schema, key: Sequence[str]) -> None:
    """Refuse a table that rows of this schema do not fit into."""
    columns = {column.name: column for column in table.columns}
    problems: list[str] = []
    statements: list[str] = []
    for field in schema:
        column, wanted = columns.get(field.name), type_in_table(field.type)
        if column is None:
            problems.append(f"column {field.name!r} is missing")
            statements.append(f"alter table {table.sql} add column {quote(field.name)} {wanted};")
        elif column.is_computed:
            problems.append(f"column {field.name!r} is computed by the table, not written to")
            statements.append(f"-- drop {field.name!r} from the rows, or the rule from the column")
        elif not _fits(field.type, column.type, column.kind):
            problems.append(f"column {field.name!r} is {column.type}, the rows hold {wanted}")
            statements.append(
                f"alter table {table.sql} alter column {quote(field.name)} type {wanted};"
            )
    for column in table.columns:
        if column.is_required and column.name not in schema.names:
            problems.append(f"column {column.name!r} is not null, and the rows do not have it")
            statements.append(
                f"alter table {table.sql} alter column {quote(column.name)} drop not null;"
            )
    if key and not problems and set(key) not in table.unique:
        problems.append(f"no primary key or unique index is on exactly ({', '.join(key)})")
        statements.append(f"alter table {table.sql} add primary key ({quote_list(key)});")
    if problems:
        raise PlanError(
            f"rows do not fit into table {table.sql}\n  "
            + "\n  ".join(problems)
            + "\n  next: change the rows, or run\n    "
            + "\n    ".join(statements),
            table=table.sql,
            problems=problems,
        )
