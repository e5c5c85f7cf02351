"""Find the place in the user's own files where something was raised, or is defined.

An error of a user's function often comes up in a library, or in cairn: state refuses a value that
does not fit. The line to look at is the user's last one before that.

Always true here:
- a place is in a file of the user's wherever there is one in the traceback;
- functions that are installed with a package, or are part of cairn, count as the user's when
  nothing else does.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Final

from cairn.errors import PlanError

_OURS: Final = str(Path(__file__).parent) + os.sep
_LIBRARIES: Final = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Frames come from other machines too, as text. Spark and what it sends along need not be installed.
_INSTALLED: Final = tuple(
    part.replace("/", os.sep)
    for part in (
        "/site-packages/", "/dist-packages/", "/python/pyspark/",
        ".zip/pyspark/", ".zip/py4j/", ".zip/cairn/",
    )
)  # fmt: skip


def find_raise(error: BaseException, called: Any = None) -> str | None:
    """The last place in the user's code that an error came through: "file:line in name".

    `called` is what cairn has called. Where no line of its own was reached (its arguments do not
    fit, or what it returned), that is the place.
    """
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if is_users(frame.filename)]
    code = _code_of(called)
    if not found and code is not None:
        found = [frame for frame in frames if frame.filename == code.co_filename]
    if not found:
        return find_definition(called)
    return f"{found[-1].filename}:{found[-1].lineno} in {found[-1].name}"


def users_frames(error: BaseException) -> traceback.StackSummary:
    """The traceback from where the user's code begins: what lies above is ours."""
    frames = traceback.extract_tb(error.__traceback__)
    start = 0
    while start < len(frames) - 1 and frames[start].filename.startswith(_OURS):
        start += 1
    return traceback.StackSummary.from_list(frames[start:])


def find_definition(called: Any) -> str | None:
    """Return the place where a function or method of the user's is defined."""
    code = _code_of(called)
    if code is None:
        return None
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def check_arguments(called: Any, what: str, *expected: str) -> None:
    """Refuse a function of the user's that cannot be called with these arguments.

    `what` is how errors name it: "operator 'score': Score.process".
    """
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return  # Not every function in C says what it takes.
    try:
        signature.bind(*expected)
    except TypeError:
        at = find_definition(called)
        raise PlanError(
            f"{what}{signature} is called with {len(expected)} arguments"
            + ("" if at is None else f"\n  at: {at}")
            + f"\n  next: let it take ({', '.join(expected)})",
            at=at,
        ) from None


def is_users(filename: str) -> bool:
    """True if a file is neither of cairn, nor of Python, nor installed with a package."""
    if filename.startswith((_OURS, "<frozen ", "<string>", *_LIBRARIES)):
        return False
    return not any(part in filename for part in _INSTALLED)


def _code_of(called: Any) -> CodeType | None:
    """The code behind a callable: the user's, if it is one of ours that calls it."""
    found = [code for each in _candidates(called) if (code := _own_code(each)) is not None]
    return next((code for code in found if is_users(code.co_filename)), found[0] if found else None)


def _candidates(called: Any) -> Iterator[Any]:
    yield called
    held = getattr(called, "__self__", None)
    for each in vars(held).values() if hasattr(held, "__dict__") else ():
        if inspect.isfunction(each):
            yield each
        elif inspect.ismethod(process := getattr(each, "process", None)):
            yield process


def _own_code(called: Callable[..., Any] | None) -> CodeType | None:
    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    return code if isinstance(code, CodeType) else None
