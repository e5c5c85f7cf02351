"""Refuse a wrong job before Spark starts: each check names the thing and the next step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from cairn.errors import PlanError
from cairn.functions import BatchProcess, Function, KeyedProcess, Process, find_states
from cairn.plan.graph import Watermark, is_time
from cairn.plan.key_types import common_type
from cairn.sinks.base import ROUNDS_MAX
from cairn.state import Broadcast, Declaration, Map, OperatorList, Reducing, Value
from cairn.types import OBJECT, type_ddl
from cairn.types.codec import ValueTypeError, codec, is_hashable
from cairn.types.durations import Duration, duration_ms
from cairn.user_code import check_arguments

S = TypeVar("S")

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(kind: str, name: str) -> None:
    """Names become parts of paths and metrics, so they are kept plain."""
    if not isinstance(name, str) or not _UID.fullmatch(name):
        raise PlanError(
            f"{kind} {name!r} is not a plain name\n"
            "  expected: letters, digits, '.', '_' and '-', at most 100, not starting with a mark"
        )


NO_UID: Final = ""
"""Value of `uid=` if none is given."""


def check_uid(uid: str, taken: Mapping[str, Any]) -> None:
    if uid == NO_UID:
        raise PlanError(
            "no uid is given\n  next: give one, uid='...': state and output are found by it after "
            "a restart, however the program changes"
        )
    check_name("uid", uid)
    if uid in taken:
        kind = type(taken[uid]).__name__.removesuffix("Node").lower()
        known = {"process": "an operator", "rows": "a function over rows"}.get(kind, f"a {kind}")
        raise PlanError(
            f"uid {uid!r} is used twice\n  found: {known} has this name\n"
            "  next: give each source, operator and sink a name of its own; state is found by it "
            "after a restart",
            uid=uid,
        )


def check_bound(uid: str, parallelism: int | str | None) -> int:
    """Return the parallelism of an operator; 0: that of the job."""
    if parallelism is None:
        return 0
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or parallelism < 1:
        raise PlanError(
            f"operator {uid!r}: parallelism={parallelism!r}\n"
            "  expected: the number of subtasks that get its rows at most, 1 or more\n"
            "  next: leave it out for as many as the job has",
            uid=uid,
        )
    return parallelism


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
    watermark: Duration | None,
    idle_after: Duration | None,
    event_time: str | None,
    where: str,
) -> Watermark | None:
    """Return a declared watermark in milliseconds."""
    idle_ms = None if idle_after is None else duration_ms(idle_after, f"idle_after of {where}")
    if watermark is None:
        return None
    if event_time is None:
        raise PlanError(
            f"watermark of {where}: it needs an event time\n"
            "  next: name the column with event_time="
        )
    return Watermark(duration_ms(watermark, f"watermark of {where}"), idle_ms)


def check_rounds(uid: str, rounds: Any) -> None:
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 1 <= rounds < ROUNDS_MAX:
        raise PlanError(
            f"loop {uid!r}: max_rounds_per_epoch must be a number from 1 to {ROUNDS_MAX - 1}, "
            f"found {rounds!r}",
            uid=uid,
        )


def check_body(uid: str, result: Any, stream: type[S]) -> tuple[S, S]:
    """Return the two streams that the body of a loop returned; refuse anything else."""
    if isinstance(result, tuple) and len(result) == 2:
        feedback, output = result
        if isinstance(feedback, stream) and isinstance(output, stream):
            return feedback, output
    raise PlanError(
        f"loop {uid!r}: its body must return (feedback, output), two streams\n  found: {result!r}",
        uid=uid,
    )


def check_same_schema(left: pa.Schema, right: pa.Schema, what: str = "union") -> None:
    mine = {f.name: f.type for f in left}
    theirs = {f.name: f.type for f in right}
    if mine != theirs:
        differing = sorted(n for n in mine | theirs if mine.get(n) != theirs.get(n))
        told = [
            ", ".join(f"{n} {type_ddl(types[n]) if n in types else 'missing'}" for n in differing)
            for types in (mine, theirs)
        ]
        raise PlanError(
            f"{what}: the streams differ in {', '.join(differing)}\n"
            f"  found: {told[0]}, and {told[1]}\n"
            "  next: bring them to one schema with .transform(...)"
        )


_HOW_TO_RUN = {
    KeyedProcess: ".key_by(...).process(...)",
    Process: ".process(...) on a stream without keys",
    BatchProcess: ".key_by(...).process_batch(...)",
}


def check_function(function: Any, uid: str, kind: type[Function] | None = None) -> None:
    """`kind`: KeyedProcess, Process or BatchProcess; None takes any."""
    if isinstance(function, type):
        raise PlanError(f"operator {uid!r}: give an object, {function.__name__}(), not the class")
    found = type(function).__name__
    known = next((k for k in _HOW_TO_RUN if isinstance(function, k)), None)
    if known is None:
        expected = (kind or KeyedProcess).__name__
        raise PlanError(
            f"operator {uid!r}: {found} is not a {expected}\n"
            f"  next: subclass cairn.{expected}, with the code in its process(...), and give an "
            "object of that class"
        )
    if kind is not None and known is not kind:
        raise PlanError(
            f"operator {uid!r}: {found} is a {known.__name__}\n"
            f"  next: run it with {_HOW_TO_RUN[known]}"
        )
    if isinstance(function, BatchProcess):
        _check_batch_state(function, uid)
    _check_methods(function, uid, known)
    for declaration in find_states(function).values():
        _check_scope(function, uid, declaration)
        entry = declaration.entry_type
        if entry is not None:
            check_map_key(entry, uid, declaration.name)
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


_METHODS = (
    "open", "process", "process_broadcast", "on_timer", "on_timer_failed", "begin_epoch",
    "end_epoch", "next_timer", "on_epoch_end", "on_epoch_committed", "close",
)  # fmt: skip


def _check_methods(function: Function, uid: str, kind: type[Function]) -> None:
    """Refuse a function that cannot be called as its kind is."""
    found = type(function).__name__
    for name in _METHODS:
        if hasattr(kind, name):
            expected = list(inspect.signature(getattr(kind, name)).parameters)[1:]
            what = f"operator {uid!r}: {found}.{name}"
            check_arguments(getattr(function, name), what, *expected)
    for name, declaration in find_states(function).items():
        what = f"operator {uid!r}, state {name!r}:"
        if isinstance(declaration, Reducing):
            check_arguments(declaration.reduce, f"{what} its function ", "stored", "value")
        if declaration.migrate is not None:
            check_arguments(declaration.migrate, f"{what} migrate=", "value")


OWN_METHODS = frozenset(name for name in dir(KeyedProcess) if name.startswith("on_"))
"""Methods of functions themselves: no input may have such a name."""


_NO_BROADCAST = (KeyedProcess.process_broadcast, Process.process_broadcast)


def check_handlers(
    function: Function, uid: str, inputs: Sequence[str] = (), *, has_broadcast: bool = False
) -> None:
    """The methods that a function must have for what comes in."""
    found = type(function).__name__
    expected = [f"on_{name}" for name in inputs]
    base = next(kind for kind in _HOW_TO_RUN if isinstance(function, kind))
    rows = "batch" if base is BatchProcess else "row"
    if not inputs and getattr(type(function), "process", None) is getattr(base, "process", None):
        raise PlanError(f"operator {uid!r}: {found} has no process({rows}, ctx)")
    missing = [name for name in expected if not callable(getattr(function, name, None))]
    for name in expected:
        if name not in missing:
            what = f"operator {uid!r}: {found}.{name}"
            check_arguments(getattr(function, name), what, rows, "ctx")
    if has_broadcast and base is BatchProcess:
        raise PlanError(
            f"operator {uid!r}: {found} is a BatchProcess, which takes no broadcast\n"
            "  next: use a KeyedProcess with .broadcast(...).process(...)"
        )
    own = getattr(type(function), "process_broadcast", None)
    if has_broadcast and own in _NO_BROADCAST:
        missing.append("process_broadcast")
    if missing:
        raise PlanError(
            f"operator {uid!r}: {found} has no {missing[0]}({rows}, ctx)\n"
            f"  found inputs: {', '.join([*inputs, *(['a broadcast'] if has_broadcast else [])])}\n"
            f"  next: give {found} a method for each of them"
        )
    if not has_broadcast and own is not None and own not in _NO_BROADCAST:
        raise PlanError(
            f"operator {uid!r}: {found} has process_broadcast(), but the stream has no broadcast\n"
            "  next: give it one, with .broadcast(rows, ...) before .process(...)"
        )
    known = {name for name in dir(function) if name.startswith("on_")}
    unknown = known - set(expected) - OWN_METHODS
    if inputs and unknown:
        raise PlanError(
            f"operator {uid!r}: {found} has {sorted(unknown)[0]}(), but no such input\n"
            f"  found inputs: {', '.join(inputs)}"
        )


def check_stream(what: str, stream: Any, job: Any, kind: type[Any]) -> None:
    """An argument that must be a stream of this job, before anything is asked of it."""
    if not isinstance(stream, kind):
        raise PlanError(
            f"{what}: found {type(stream).__name__}, expected a stream without keys\n"
            "  next: give what job.source, .process or .transform returns, before .key_by"
        )
    if getattr(stream, "_job", None) is not job:
        raise PlanError(f"{what} of streams of two jobs\n  next: build both with one Job")


def check_same_keys(types: Mapping[str, Sequence[pa.DataType]], what: str = "connect") -> None:
    """Connected streams share state by key, so their keys must be comparable."""
    counts = {len(each) for each in types.values()}
    told = {
        name: ", ".join(type_ddl(type_) for type_ in each) or "none" for name, each in types.items()
    }
    keys = "; ".join(f"{name}: {text}" for name, text in told.items())
    if len(counts) > 1:
        raise PlanError(
            f"{what}: the streams are keyed by different numbers of columns\n  found: {keys}"
        )
    for columns in zip(*types.values(), strict=True):
        if common_type(columns) is None:
            raise PlanError(
                f"{what}: keys of different types never meet\n  found: {keys}\n"
                "  expected: the same types, or whole numbers of any width, or floating ones\n"
                "  next: cast one of them before, with .transform(...)"
            )
    for name in types:
        if f"on_{name}" in OWN_METHODS or not name.isidentifier():
            raise PlanError(f"connect: an input cannot be called {name!r}\n  next: rename it")


def check_broadcast(declaration: Any) -> None:
    if declaration is not None and not isinstance(declaration, Broadcast):
        raise PlanError(
            f"broadcast: {declaration!r} is not a declaration of broadcast state\n"
            '  next: declare it, for example state.Broadcast("string", "string")'
        )


def _check_scope(function: Function, uid: str, declaration: Declaration) -> None:
    """State of a key where there are keys, state of a subtask where there are none."""
    found, kind = type(function).__name__, type(declaration).__name__
    has_keys = not isinstance(function, Process)
    if isinstance(declaration, Broadcast):
        if isinstance(function, BatchProcess):
            raise PlanError(
                f"operator {uid!r}, state {declaration.name!r}: a BatchProcess has no broadcast "
                "state\n  next: use a KeyedProcess with .broadcast(...).process(...)",
                state=declaration.name,
            )
        check_map_key(declaration.key_type, uid, declaration.name)
    elif isinstance(declaration, OperatorList) and has_keys:
        raise PlanError(
            f"operator {uid!r}, state {declaration.name!r}: {found} runs by key, so that a list of "
            "its subtask would belong to no key\n"
            "  next: use state.List for a list per key, or a Process for lists of subtasks",
            state=declaration.name,
        )
    elif not isinstance(declaration, OperatorList) and not has_keys:
        raise PlanError(
            f"operator {uid!r}, state {declaration.name!r}: {found} is a Process, which has no key "
            f"that state.{kind} could belong to\n"
            "  next: use state.OperatorList, or key_by(...) and a KeyedProcess",
            state=declaration.name,
        )


def check_map_key(type_: Any, uid: str, state: str) -> None:
    if not is_hashable(type_):
        raise PlanError(
            f"operator {uid!r}, state {state!r}: {type_ddl(type_)} cannot be a map key", state=state
        )


def check_broadcast_state(function: Function, uid: str, declaration: Declaration | None) -> None:
    """Broadcast state that a function declares is that of its stream."""
    found = type(function).__name__
    for name, declared in find_states(function).items():
        if not isinstance(declared, Broadcast) or declared is declaration:
            continue
        raise PlanError(
            f"operator {uid!r}, state {name!r}: {found} declares broadcast state that no stream "
            "is broadcast to\n"
            f"  next: give it with the stream: .broadcast(rows, {found}.{name})",
            state=name,
        )
    if isinstance(declaration, Broadcast):
        check_map_key(declaration.key_type, uid, declaration.name)


def check_same_broadcast(function: Function, uid: str, declaration: Declaration | None) -> None:
    """Broadcast state belongs to the stream: a function that replaces another cannot change it."""
    for name, found in find_states(function).items():
        if not isinstance(found, Broadcast):
            continue
        planned = declaration if isinstance(declaration, Broadcast) else None
        if planned is None or (name, found.key_ddl, found.ddl) != (
            planned.name,
            planned.key_ddl,
            planned.ddl,
        ):
            raise PlanError(
                f"operator {uid!r}: its broadcast state is {planned!r}, the new function declares "
                f"{found!r}\n  next: stop the run and start the job with the new function",
                uid=uid,
                state=name,
            )


def _check_batch_state(function: BatchProcess, uid: str) -> None:
    for name, declaration in find_states(function).items():
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
    for name, declaration in find_states(function).items():
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
