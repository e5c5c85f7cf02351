"""The loop that calls a function for each row, written out for that function.

A row is a named tuple. Most functions only read some of its columns: `row.amount`. For those the
loop has one *view* with these columns as attributes, and sets them for each row: no tuple is made,
and the other columns are not decoded. A function that does anything else with a row gets tuples.

Always true here:
- a view is used only if the bytecode of the function shows that the row cannot leave it;
- a function that reads its row from a view cannot tell the difference.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any, Final

import pyarrow as pa

from cairn.types import row_class

Emit = Callable[[Any], None]
Loop = Callable[[Iterable[Any], Callable[[Any, Any], Any], Any, Any, Emit, Emit], None]
"""Arguments: for each row its scope and its columns (or the row itself); the function, the context,
the view; where a tuple goes that the function returns, and where anything else goes."""

_SEES_FRAMES: Final = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}
"""Names by which code reads variables without naming them."""


def columns_read(process: Callable[..., Any], schema: pa.Schema) -> tuple[str, ...] | None:
    """Return the columns that a method reads, in order; None if it may do more with its row.

    The method is called with a row and a context.
    """
    function = process.__func__ if isinstance(process, MethodType) else None
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    if code.co_argcount < 3 or _SEES_FRAMES & set(code.co_names):
        return None
    row = code.co_varnames[1]
    if row in code.co_cellvars:
        return None
    found: set[str] = set()
    instructions = list(dis.get_instructions(code))
    for at, instruction in enumerate(instructions):
        named = instruction.argval
        if instruction.opcode not in dis.haslocal:
            continue
        if isinstance(named, tuple) and row in named:
            return None  # Two variables at once: it is not looked at more closely.
        if named != row:
            continue
        then = instructions[at + 1]
        is_read = instruction.opname.startswith("LOAD_FAST") and then.opname == "LOAD_ATTR"
        if not is_read or not _is_column(then.argval, schema):
            return None
        found.add(then.argval)
    return tuple(name for name in schema.names if name in found)


def _is_column(name: str, schema: pa.Schema) -> bool:
    """True if the attribute of a row is that column, and a view can have it too."""
    getter = row_class(schema).__dict__.get(name)
    # A slot with two underscores would get another name.
    return name in schema.names and isinstance(getter, _GETTER) and not name.startswith("__")


_GETTER: Final = type(row_class(("column",)).__dict__["column"])


def make_view(columns: Sequence[str]) -> Any:
    """Return an object with these columns as attributes, to be set."""
    return type("RowView", (), {"__slots__": tuple(columns)})()


@functools.cache
def make_loop(scope: tuple[str, ...], columns: tuple[str, ...] | None) -> Loop:
    """Return a loop that sets these attributes of the context, and columns of the view if any."""
    targets = [f"context.{name}" for name in scope]
    targets += ["row"] if columns is None else [f"row.{name}" for name in columns]
    # The loop assigns straight to the context: the cheapest way to set the scope.
    source = f"""
def loop(scoped, process, context, row, emit, emit_other):
    for [{", ".join(targets)}] in scoped:
        result = process(row, context)
        if result is None:
            continue
        if type(result) is tuple:
            emit(result)
        else:
            emit_other(result)
"""
    names: dict[str, Any] = {}
    exec(source, names)
    loop: Loop = names["loop"]
    return loop
