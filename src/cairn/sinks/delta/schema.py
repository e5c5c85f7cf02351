"""Check that rows fit a Delta table, when the sink is opened and before anything runs.

Always true here:
- a table that would refuse a commit, or whose rules our files would break, is refused with the
  next step;
- a column of the stream is in the table with the same type; other columns of the table are
  nullable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from cairn.errors import PlanError

# Features that need no support from a writer, unless columns or properties use them.
WRITABLE_FEATURES = frozenset(
    {
        "appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors",
        "generatedColumns", "invariants", "timestampNtz", "v2Checkpoint",
    }
)  # fmt: skip
WRITER_VERSION_FEATURES = 7
_COMPUTED = ("delta.generationExpression", "delta.invariants", "delta.identity.start")


class Target(Protocol):
    """The settings that a table is checked against."""

    @property
    def path(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def key(self) -> Sequence[str]: ...
    @property
    def partition_by(self) -> Sequence[str]: ...


def missing_columns(table: Any, schema: pa.Schema) -> list[Any]:
    """Return the fields of the stream that the table lacks, with their Delta types."""
    from deltalake import Schema

    known = {field.name for field in table.schema().fields}
    return [field for field in Schema.from_arrow(schema).fields if field.name not in known]


def check_columns(schema: pa.Schema, target: Target) -> None:
    """Check that Delta has the stream's types, and that the settings name usable columns."""
    for field in schema:
        try:
            _as_stored(pa.schema([field]))
        except Exception:  # deltalake raises no other.
            raise _table_error(
                target,
                f"column {field.name!r} has type {field.type}, which Delta does not have",
                "  next: cast it before the sink, or leave it out",
            ) from None
    for role, names in (("key", target.key), ("partition_by", target.partition_by)):
        unknown = [name for name in names if name not in schema.names]
        if unknown:
            raise _table_error(
                target,
                f"{role} names {unknown[0]!r}, which is not a column of the stream",
                f"  expected: some of {', '.join(schema.names)}",
            )
        for name in names:
            _check_comparable(target, role, schema.field(name))
    if len(target.partition_by) == len(schema):
        raise _table_error(
            target, "every column is in partition_by", "  next: leave at least one for the files"
        )


def check_table(table: Any, schema: pa.Schema, target: Target) -> None:
    """Check that the table accepts these rows, and files written by us."""
    _check_features(table, target)
    _check_properties(table, target)
    theirs = pa.schema(table.schema().to_arrow())
    missing = missing_columns(table, schema)
    if missing:
        raise _table_error(
            target,
            f"the table has no column {missing[0].name!r}",
            f"  found: {', '.join(theirs.names)}\n"
            "  next: ALTER TABLE … ADD COLUMN, or let the sink do it with merge_schema=True",
        )
    for field in _as_stored(schema):
        found = theirs.field(field.name)
        if found.type != field.type:
            raise _table_error(
                target,
                f"column {field.name!r} of the table has another type",
                f"  expected: {field.type}\n  found: {found.type}\n"
                "  next: cast the stream's column, or write to another table",
            )
    unfilled = [f.name for f in theirs if not f.nullable and f.name not in schema.names]
    if unfilled:
        raise _table_error(
            target,
            f"column {unfilled[0]!r} of the table is NOT NULL and not in the stream",
            "  next: add it to the stream, or let the column be null",
        )


def check_partitions(table: Any, schema: pa.Schema, target: Target) -> tuple[str, ...]:
    """Return the table's partition columns, after checking them."""
    columns = tuple(table.metadata().partition_columns)
    if target.partition_by and tuple(target.partition_by) != columns:
        raise _table_error(
            target,
            "the table is partitioned by other columns",
            f"  expected: {', '.join(target.partition_by)}\n"
            f"  found: {', '.join(columns) or 'none'}\n"
            "  next: leave partition_by out, or write to another table",
        )
    for name in columns:
        if name not in schema.names:
            raise _table_error(
                target, f"the table is partitioned by {name!r}, which is not in the stream", ""
            )
        _check_comparable(target, "partition_by", schema.field(name))
    return columns


def _check_comparable(target: Target, role: str, field: pa.Field) -> None:
    kind = field.type
    fits = (
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        # Not as partitions: delta-rs reads some of their values back as others.
        or (role == "key" and _is_exact(kind))
    )
    if not fits:
        raise _table_error(
            target,
            f"{role} column {field.name!r} has type {kind}",
            "  next: use a column of whole numbers, text or dates",
        )


def _is_exact(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_decimal(kind) or pa.types.is_timestamp(kind) or pa.types.is_binary(kind)
    )


def _check_features(table: Any, target: Target) -> None:
    protocol = table.protocol()
    features: Iterable[str] = protocol.writer_features or ()
    unknown = sorted(set(features) - WRITABLE_FEATURES)
    if protocol.min_writer_version > WRITER_VERSION_FEATURES or unknown:
        raise _table_error(
            target,
            "the table needs features that this writer lacks",
            f"  found: writer version {protocol.min_writer_version}, {', '.join(unknown)}\n"
            "  next: drop the feature from the table, or write with sinks.Spark('delta')",
        )


def _check_properties(table: Any, target: Target) -> None:
    properties = table.metadata().configuration
    problem = ""
    if properties.get("delta.columnMapping.mode", "none") != "none":
        problem = "maps its columns (delta.columnMapping.mode)"
    if target.mode == "merge" and properties.get("delta.appendOnly") == "true":
        problem = "allows no changes (delta.appendOnly)"
    if target.mode == "append":
        # Files are only named in the log, so their rows would not be checked.
        checks = [name for name in properties if name.startswith("delta.constraints.")]
        computed = [
            field.name
            for field in table.schema().fields
            if any(name in field.metadata for name in _COMPUTED)
        ]
        if checks or computed:
            problem = f"checks or computes values: {(checks + computed)[0]}"
    if problem:
        raise _table_error(
            target,
            f"the table {problem}",
            "  next: write to a table without it, or write with sinks.Spark('delta')",
        )


def _as_stored(schema: pa.Schema) -> pa.Schema:
    from deltalake import Schema

    return pa.schema(Schema.from_arrow(schema).to_arrow())


def _table_error(target: Target, problem: str, rest: str) -> PlanError:
    return PlanError(f"cannot write to the Delta table {target.path}: {problem}\n{rest}".rstrip())
