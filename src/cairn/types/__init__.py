"""Declared types: however a type is written, cairn holds it as one Arrow type."""

from cairn.types.declared import (
    OBJECT,
    Row,
    SchemaLike,
    TypeLike,
    all_nullable,
    contains_map,
    format_type,
    parse_schema,
    parse_type,
    row_class,
    schema_ddl,
    type_ddl,
)

__all__ = [
    "OBJECT",
    "Row",
    "SchemaLike",
    "TypeLike",
    "all_nullable",
    "contains_map",
    "format_type",
    "parse_schema",
    "parse_type",
    "row_class",
    "schema_ddl",
    "type_ddl",
]
