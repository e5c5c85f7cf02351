"""Refuse a wrong job before Spark starts: each check names the thing and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from cairn.codec import ValueTypeError, codec, is_hashable
from cairn.durations import duration_ms
from cairn.errors import PlanError
from cairn.functions import BatchProcess, Function, KeyedProcess, declared_state
from cairn.plan.graph import Watermark, is_time
from cairn.state import Map, Value
from cairn.types import OBJECT, type_ddl

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(kind: str, name: str) -> None:
    """Names become parts of paths and metrics, so they are kept plain."""
    if not isinstance(name, str) or not _UID.fullmatch(name):
        raise PlanError(
            f"{kind} {name!r} is not a plain name\n"
            "  expected: letters, digits, '.', '_' and '-', at most 100, not starting with a mark"
        )


def check_uid(uid: str, taken: Mapping[str, Any]) -> None:
    check_name("uid", uid)
    if uid in taken:
        raise PlanError(
            f"uid {uid!r} is used twice\n  next: give each source, operator and sink a name of "
            "its own; state is found by it after a restart",
            uid=uid,
        )


def check_columns(names: Iterable[str], schema: pa.Schema, what: str) -> None:
    for name in names:
        if name not in schema.names:
            raise PlanError(
                f"{what}: no column {name!r}\n  found: {', '.join(schema.names)}", column=name
            )


def check_keys(columns: tuple[str, ...], schema: pa.Schema) -> None:
    if not columns:
        raise PlanError("key_by needs at least one column")
    check_columns(columns, schema, "key_by")
    if len(set(columns)) != len(columns):
        raise PlanError(f"key_by names a column twice: {', '.join(columns)}")
    for name in columns:
        type_ = schema.field(name).type
        if not is_hashable(type_):
            raise PlanError(
                f"key_by: column {name!r} is {type_ddl(type_)}, which Spark cannot hash\n"
                "  next: key by a field of it, or turn it into an array of structs first",
                column=name,
            )


def check_event_time(column: str | None, schema: pa.Schema, where: str) -> None:
    """`where`: "source 'pays'"."""
    if column is None:
        return
    check_columns([column], schema, f"event_time of {where}")
    type_ = schema.field(column).type
    if not is_time(type_):
        raise PlanError(
            f"event_time of {where}: column {column!r} is {type_ddl(type_)}\n"
            "  expected: a timestamp, a date, a string that is one, or milliseconds since 1970",
            column=column,
        )


def check_watermark(
    watermark: str | None, idle_after: str | None, event_time: str | None, where: str
) -> Watermark | None:
    """What was declared, in milliseconds."""
    idle_ms = None if idle_after is None else duration_ms(idle_after, f"idle_after of {where}")
    if watermark is None:
        return None
    if event_time is None:
        raise PlanError(
            f"watermark of {where}: there is no event time to follow\n"
            "  next: say which column tells it, with event_time="
        )
    return Watermark(duration_ms(watermark, f"watermark of {where}"), idle_ms)


def check_same_schema(left: pa.Schema, right: pa.Schema) -> None:
    mine = {f.name: f.type for f in left}
    theirs = {f.name: f.type for f in right}
    if mine != theirs:
        differing = sorted(n for n in mine | theirs if mine.get(n) != theirs.get(n))
        raise PlanError(
            f"union: the streams differ in {', '.join(differing)}\n"
            f"  found: {left.names} and {right.names}\n"
            "  next: bring them to one schema with .transform(...)"
        )


def check_function(function: Any, uid: str, kind: type[Function] | None = None) -> None:
    """`kind`: KeyedProcess or BatchProcess; None takes either."""
    if isinstance(function, type):
        raise PlanError(f"operator {uid!r}: give an object, {function.__name__}(), not the class")
    found = type(function).__name__
    if isinstance(function, KeyedProcess):
        if kind is BatchProcess:
            raise PlanError(
                f"operator {uid!r}: {found} is a KeyedProcess\n  next: run it with .process(...)"
            )
        if type(function).process is KeyedProcess.process:
            raise PlanError(f"operator {uid!r}: {found} has no process(row, ctx)")
    elif isinstance(function, BatchProcess):
        if kind is KeyedProcess:
            raise PlanError(
                f"operator {uid!r}: {found} is a BatchProcess\n"
                "  next: run it with .process_batch(...)"
            )
        if type(function).process is BatchProcess.process:
            raise PlanError(f"operator {uid!r}: {found} has no process(batch, ctx)")
        _check_batch_state(function, uid)
    else:
        expected = "BatchProcess" if kind is BatchProcess else "KeyedProcess"
        raise PlanError(
            f"operator {uid!r}: {found} is no {expected}\n  next: subclass cairn.{expected}, with "
            f"the code in its process(...), and give an object of that class"
        )
    for declaration in declared_state(function).values():
        entry = declaration.entry_type
        if entry is not None and not is_hashable(entry):
            raise PlanError(
                f"operator {uid!r}, state {declaration.name!r}: {declaration.entry_ddl} cannot be "
                "a map key"
            )
        default = getattr(declaration, "default", None)
        if default is not None:
            try:
                codec(declaration.type).normalise(default)
            except ValueTypeError as error:
                raise PlanError(
                    f"operator {uid!r}, state {declaration.name!r}: its default does not fit: "
                    f"{error}",
                    state=declaration.name,
                ) from None


def _check_batch_state(function: BatchProcess, uid: str) -> None:
    for name, declaration in declared_state(function).items():
        if not isinstance(declaration, Value | Map):
            raise PlanError(
                f"operator {uid!r}, state {name!r}: a BatchProcess has Value and Map state only, "
                f"found {type(declaration).__name__}\n"
                "  next: use one of them, or a KeyedProcess with .process(...)",
                state=name,
            )
        if declaration.type is OBJECT:
            raise PlanError(
                f"operator {uid!r}, state {name!r}: pickled objects do not fit into columns\n"
                "  next: declare a type",
                state=name,
            )


def check_ttl(function: Function, uid: str, *, has_event_time: bool) -> None:
    """State that expires needs a clock, and code that runs row by row."""
    for name, declaration in declared_state(function).items():
        if declaration.ttl is None:
            continue
        if not isinstance(function, KeyedProcess):
            raise PlanError(
                f"operator {uid!r}, state {name!r}: state that expires is for functions that run "
                f"row by row, found {type(function).__name__}\n"
                "  next: use a KeyedProcess with .process(...), or leave ttl= out",
                state=name,
            )
        if declaration.ttl.clock == "event" and not has_event_time:
            raise PlanError(
                f"operator {uid!r}, state {name!r}: its ttl counts event time, which the rows do "
                "not have\n"
                "  next: declare event_time= at the source, or use clock='processing'",
                state=name,
            )
