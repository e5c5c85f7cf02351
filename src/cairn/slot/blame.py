"""Errors of users' functions: which operator, key, row or timer, and where in their code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cairn.errors import CairnError, FunctionError, PlanError
from cairn.protocol.letters import message_of, sendable
from cairn.slot.outlet import short
from cairn.user_code import find_raise, users_frames

if TYPE_CHECKING:
    from cairn.slot.operator import Operator

MESSAGE_CHARS_MAX = 4000


class Blame:
    """Makes errors of an operator's function say where they come from."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._uid = operator.spec.uid

    def place(self, error: FunctionError, where: str = "process()", **facts: str) -> FunctionError:
        """Return an error that cairn raised inside the function, with its place and other facts."""
        return place_error(self._uid, error, self._method(where), **facts)

    def locate(
        self, where: str, error: FunctionError, row: Any = None, *, timer: str | None = None
    ) -> FunctionError:
        """Return an error that cairn raised inside the function, with the row or timer."""
        if "timer" in error.facts:
            return error
        cause = {} if row is None else {"row": short(row)}
        if timer is not None:
            cause = {"timer": timer}
        return self.place(error, where, key=short(self._operator.context.key), **cause)

    def describe(
        self,
        where: str,
        error: Exception,
        row: Any = None,
        *,
        timer: str | None = None,
        called: Any = None,
        has_key: bool = False,
    ) -> CairnError:
        """Return an error of the user's code, with the place it comes from.

        It names the key if it is about a row or a timer, or if `has_key`.
        """
        facts: dict[str, str] = {}
        if row is not None:
            facts["row"] = short(row)
        if timer is not None:
            facts["timer"] = timer
        if facts or has_key:
            facts = {"key": short(self._operator.context.key), **facts}
        return function_error(self._uid, where, error, called or self._method(where), **facts)

    def _method(self, where: str) -> Any:
        """Return the method of the function that errors call `where`."""
        return getattr(self._operator.function, where.removesuffix("()"), None)


def place_error(uid: str, error: FunctionError, called: Any, **facts: str) -> FunctionError:
    """Add the operator, the place in the user's code and further facts to an error of cairn's."""
    message = error.message
    if "operator" not in error.facts:
        message = f"operator {uid!r}: {message}"
        shown = {name: text for name, text in facts.items() if name != "key"}
        message += "".join(f"\n  {name}: {text}" for name, text in shown.items())
    at = None if "at" in error.facts else find_raise(error, called)
    if at is not None:
        message += f"\n  at: {at}"
        facts["at"] = at
    return FunctionError(message, **{"operator": uid, **facts, **error.facts})


def function_error(uid: str, where: str, error: Exception, called: Any, **facts: str) -> CairnError:
    """Return the error to report for one that the user's code raised in `where`.

    `facts` are what it was called for: the row or the timer, and the key.
    """
    if isinstance(error, CairnError) and not isinstance(error, FunctionError | PlanError):
        return error
    # Cut: it travels to the driver in the text of other errors, several times over.
    text = sendable(message_of(error)[:MESSAGE_CHARS_MAX])
    kind = type(error).__name__
    lines = [f"{where} of operator {uid!r} raised {kind}: {text}"]
    lines += [f"  {name}: {value}" for name, value in facts.items()]
    at = find_raise(error, called)
    if at is not None:
        facts["at"] = at
        lines.append(f"  at: {at}")
    return FunctionError(
        "\n".join(lines),
        operator=uid,
        cause=short(error, MESSAGE_CHARS_MAX),
        cause_type=kind,
        cause_text=text,
        traceback="".join(users_frames(error).format()),
        **facts,
    )
