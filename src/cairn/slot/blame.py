"""Errors of users' functions: which operator, key, row or timer, and where in their code."""

from __future__ import annotations

import traceback
from typing import Any

from cairn.errors import CairnError, FunctionError
from cairn.letters import sendable
from cairn.slot.outlet import short

MESSAGE_CHARS_MAX = 4000


def located(error: FunctionError, uid: str, key: Any, row: Any, timer: str | None) -> FunctionError:
    """An error of ours raised under a row or a timer: say which."""
    if "timer" in error.facts:
        return error
    cause = {"row": short(row)} if timer is None else {"timer": timer}
    facts = {"operator": uid, "key": short(key), **cause}
    message = error.message
    if "operator" not in error.facts:
        message = f"operator {uid!r}: {message}"
        message += "".join(f"\n  {name}: {text}" for name, text in cause.items())
    return FunctionError(message, **{**facts, **error.facts})


def failed(
    where: str, error: Exception, uid: str, key: Any, row: Any, timer: str | None
) -> CairnError:
    """An error of the user's code, with all that tells where it comes from."""
    if isinstance(error, CairnError) and not isinstance(error, FunctionError):
        return error
    # Cut: it travels to the driver in the text of other errors, several times over.
    text = sendable(str(error)[:MESSAGE_CHARS_MAX])
    lines = [f"{where} of operator {uid!r} raised {type(error).__name__}: {text}"]
    facts: dict[str, Any] = {"operator": uid, "cause": short(error, MESSAGE_CHARS_MAX)}
    if row is not None:
        facts |= {"key": short(key), "row": short(row)}
        lines += [f"  key: {facts['key']}", f"  row: {facts['row']}"]
    if timer is not None:
        facts |= {"key": short(key), "timer": timer}
        lines += [f"  key: {facts['key']}", f"  timer: {timer}"]
    # The user's part of the traceback: what lies above is ours.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    facts["traceback"] = "".join(traceback.format_list(frames))
    if frames:
        lines.append(f"  at: {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
    return FunctionError("\n".join(lines), **facts)
