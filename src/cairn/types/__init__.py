"""Declared types: however a type is written, cairn holds it as one Arrow type."""

from cairn.types.declared import (
    OBJECT,
    SchemaLike,
    TypeLike,
    all_nullable,
    contains_map,
    parse_schema,
    parse_type,
    row_class,
    schema_ddl,
    shown_type,
    type_ddl,
)

__all__ = [
    "OBJECT",
    "SchemaLike",
    "TypeLike",
    "all_nullable",
    "contains_map",
    "parse_schema",
    "parse_type",
    "row_class",
    "schema_ddl",
    "shown_type",
    "type_ddl",
]
