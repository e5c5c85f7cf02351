"""Errors of cairn and of user functions, found in the text of Spark's errors.

Errors of slots and Python functions reach the driver as text inside Java errors, with hundreds of
lines around them.

Always true here:
- the error has a few lines; Spark's whole text goes to the log at level debug;
- its cause, if any, is the exception of the user's function, never one of Spark.
"""

from __future__ import annotations

import ast
import builtins
import re
from typing import Any, Final

from cairn import errors
from cairn.errors import CairnError, EpochError, FunctionError
from cairn.logs import logger
from cairn.protocol.messages import Failure, find_failure
from cairn.report.status import FIX_FUNCTION
from cairn.user_code import is_users

FRAMES_LINES_MAX: Final = 20
CONCURRENT_MARKS: Final = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "Multiple streaming queries are concurrently",
)
_TRACEBACK: Final = re.compile(
    r"Traceback \(most recent call last\):\n((?:[ \t].*\n|\n)+)(\w[\w.]*(?:: .*)?)"
)
_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in (.+)')
_WRAPPING: Final = ("An error occurred while calling",)


def as_cairn_error(error: BaseException, epoch: int) -> CairnError:
    if isinstance(error, CairnError):
        return error
    text = str(error)
    logger.debug("epoch %d failed in Spark: %s", epoch, text)
    failure = find_failure(text)
    if failure is not None:
        return _slot_error(failure, epoch)
    raised = _python_error(text, epoch)
    if raised is not None:
        return raised
    return EpochError(
        f"epoch {epoch} failed in Spark: {_first_line(text) or type(error).__name__}\n"
        "  next: read Spark's whole text in the error's .text, or in the log at level debug",
        epoch=epoch,
        text=text,
    )


def _first_line(text: str) -> str:
    """Return the first line with content, or the exception of a Python worker."""
    raised = _TRACEBACK.search(text)
    if raised is not None:
        return raised[2]
    lines = [line.strip().removeprefix(": ") for line in text.splitlines()]
    return next((line for line in lines if line and not line.startswith(_WRAPPING)), "")


def _slot_error(failure: Failure, epoch: int) -> CairnError:
    kind: Any = getattr(errors, failure.kind, EpochError)
    kind = kind if isinstance(kind, type) and issubclass(kind, CairnError) else EpochError
    message = failure.message
    if failure.facts.get("log"):
        message += f"\n  log: {failure.facts['log']}"
        if failure.facts.get("executor"):
            message += f" (executor {failure.facts['executor']})"
    if kind is FunctionError and "\n  next: " not in message:
        message += f"\n  next: {FIX_FUNCTION}"
    found: CairnError = kind(message, **{"epoch": epoch, **failure.facts})
    found.__cause__ = _users_error(failure)
    return found


def _users_error(failure: Failure) -> Exception | None:
    """Return the exception of a user's function, with its traceback as a note."""
    kind = getattr(builtins, str(failure.facts.get("cause_type")), None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None  # Its class may not be importable here.
    shown, text = str(failure.facts.get("cause")), failure.facts.get("cause_text")
    try:
        made = kind(*ast.literal_eval(f"[{shown[len(kind.__name__) + 1 : -1]}]"))
    except Exception:  # Its arguments are not plain values, or were cut.
        try:
            made = kind(text)
        except TypeError:  # For example UnicodeError: it needs more than a text.
            made = Exception(f"{kind.__name__}: {text}")
    frames = str(failure.facts.get("traceback", "")).rstrip().splitlines()
    if frames:
        made.add_note("\n".join(frames[-FRAMES_LINES_MAX:]))
    return made


def _python_error(text: str, epoch: int) -> FunctionError | None:
    """Return the error of a Python function that Spark itself calls, in a transform or a source."""
    for frames, raised in _TRACEBACK.findall(text):
        places = [place for place in _FRAME.findall(frames) if is_users(place[0])]
        if places:
            file, line, name = places[-1]
            at = f"{file}:{line} in {name}"
            return FunctionError(
                f"a Python function that Spark calls raised {raised}\n  at: {at}\n"
                "  next: fix it and start the job again: it goes on with this epoch",
                epoch=epoch,
                operator=None,
                cause=raised,
                at=at,
                traceback=frames,
            )
    return None


def is_concurrent_use(error: BaseException | None) -> bool:
    """True if Spark reports that another query uses its checkpoint."""
    return error is not None and any(mark in str(error) for mark in CONCURRENT_MARKS)


def is_spark_gone(spark: Any) -> bool:
    """Return True if the JVM of a session has died or its context was stopped, for good."""
    from py4j.protocol import Py4JJavaError

    try:
        return bool(spark.sparkContext._jsc.sc().isStopped())
    except Py4JJavaError:
        return False
    except Exception:
        return True  # Nothing answers, or pyspark has forgotten the context.


def error_without_spark(job: str) -> EpochError:
    """Return the error of a run whose Spark is gone."""
    return EpochError(
        f"Spark of this driver has ended, so job {job!r} cannot begin again in this process\n"
        "  next: start the process again, as systemd and Kubernetes do by themselves"
    )
