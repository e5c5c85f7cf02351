"""Errors of users' functions: which operator, key, row or timer, and where in their code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cairn.errors import CairnError, FunctionError, PlanError
from cairn.protocol.letters import message_of, sendable
from cairn.slot.outlet import short
from cairn.user_code import raised_at, users_frames

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
        message = error.message
        if "operator" not in error.facts:
            message = f"operator {self._uid!r}: {message}"
            shown = {name: text for name, text in facts.items() if name != "key"}
            message += "".join(f"\n  {name}: {text}" for name, text in shown.items())
        at = None if "at" in error.facts else raised_at(error, self._method(where))
        if at is not None:
            message += f"\n  at: {at}"
            facts["at"] = at
        return FunctionError(message, **{"operator": self._uid, **facts, **error.facts})

    def locate(
        self, where: str, error: FunctionError, row: Any = None, *, timer: str | None = None
    ) -> FunctionError:
        """Return an error that cairn raised inside the function, with the row or timer."""
        if "timer" in error.facts:
            return error
        cause = {"row": short(row)} if timer is None else {"timer": timer}
        return self.place(error, where, key=short(self._operator.context.key), **cause)

    def describe(
        self,
        where: str,
        error: Exception,
        row: Any = None,
        *,
        timer: str | None = None,
        called: Any = None,
    ) -> CairnError:
        """Return an error of the user's code, with the place it comes from."""
        if isinstance(error, CairnError) and not isinstance(error, FunctionError | PlanError):
            return error
        # Cut: it travels to the driver in the text of other errors, several times over.
        text = sendable(message_of(error)[:MESSAGE_CHARS_MAX])
        kind = type(error).__name__
        lines = [f"{where} of operator {self._uid!r} raised {kind}: {text}"]
        facts: dict[str, Any] = {
            "operator": self._uid,
            "cause": short(error, MESSAGE_CHARS_MAX),
            "cause_type": kind,
            "cause_text": text,
        }
        key = short(self._operator.context.key)
        if row is not None:
            facts |= {"key": key, "row": short(row)}
            lines += [f"  key: {key}", f"  row: {facts['row']}"]
        if timer is not None:
            facts |= {"key": key, "timer": timer}
            lines += [f"  key: {key}", f"  timer: {timer}"]
        facts["traceback"] = "".join(users_frames(error).format())
        at = raised_at(error, called or self._method(where))
        if at is not None:
            facts["at"] = at
            lines.append(f"  at: {at}")
        return FunctionError("\n".join(lines), **facts)

    def _method(self, where: str) -> Any:
        """Return the method of the function that errors call `where`."""
        return getattr(self._operator.function, where.removesuffix("()"), None)
