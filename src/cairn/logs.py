"""Logging: every record names its job, epoch, operator and subtask.

    cairn.logs.configure(format="json")         one JSON object per line, on stderr
    CAIRN_LOG_FORMAT=json cairn run ...         the same

There is one logger, "cairn". Its records carry `job`, `epoch`, `operator` and `subtask` (None
where there is none) for whatever handler the program has. In slots the root logger writes to
the slot's log file in the same format, so that what user functions log carries them too.

Always true here:
- without `configure` nothing changes in how a program logs;
- a record that cannot be shown as JSON is shown as text inside of it, never lost.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, Literal, TextIO

from cairn.errors import PlanError

Format = Literal["text", "json"]
FORMATS: Final[tuple[Format, ...]] = ("text", "json")
FORMAT_VARIABLE: Final = "CAIRN_LOG_FORMAT"
FIELDS: Final = ("job", "epoch", "operator", "subtask")

logger = logging.getLogger("cairn")

_scope: ContextVar[Mapping[str, Any]] = ContextVar("cairn_log_scope", default=MappingProxyType({}))
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OURS: Final = frozenset({"time", "level", "message", "logger", "error", "stack"})


@contextlib.contextmanager
def scope(**fields: Any) -> Iterator[None]:
    """Add these fields to what is logged inside, on this thread."""
    token = _scope.set({**_scope.get(), **fields})
    try:
        yield
    finally:
        _scope.reset(token)


class ScopeFilter(logging.Filter):
    """Lets every record pass, with the fields of the scope it is logged in."""

    def filter(self, record: logging.LogRecord) -> bool:
        known = _scope.get()
        for name in (*FIELDS, *(name for name in known if name not in FIELDS)):
            if not hasattr(record, name):
                setattr(record, name, known.get(name))
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, message, the fields, and whatever else it has."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": _message(record),
            "logger": record.name,
        }
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        for name, value in extra.items():
            if value is not None:
                said[f"extra_{name}" if name in _OURS else name] = value
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = self.formatStack(record.stack_info)
        return _json(said)


class TextFormatter(logging.Formatter):
    """A line for people: time, level, where, what."""

    def format(self, record: logging.LogRecord) -> str:
        where = " ".join(_where(record))
        head = f"{_time(record)} {record.levelname}"
        line = f"{head} {where}: {_message(record)}" if where else f"{head} {_message(record)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            line += "\n" + self.formatStack(record.stack_info)
        return line


def configure(
    format: Format = "text", *, level: int | str = "INFO", stream: TextIO | None = None
) -> None:
    """Show what cairn logs on `stream`, stderr by default; slots write their logs the same way.

    To be called before the job is started. Called again, it replaces what it did before.
    """
    _check(format)
    for handler in [h for h in logger.handlers if isinstance(h, _Handler)]:
        logger.removeHandler(handler)
    logger.addHandler(_handler(format, stream))
    logger.setLevel(level)
    logger.propagate = False


def configure_from_environment() -> bool:
    """As CAIRN_LOG_FORMAT says, if it says something."""
    format = os.environ.get(FORMAT_VARIABLE)
    if not format:
        return False
    configure(format)  # type: ignore[arg-type]
    return True


def current_format() -> Format:
    """Return the format in which slots write their logs."""
    for handler in logger.handlers:
        if isinstance(handler, _Handler):
            return "json" if isinstance(handler.formatter, JsonFormatter) else "text"
    return "json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text"


def configure_slot(format: Format) -> None:
    """In a slot: all that is logged goes to its log file, what user functions log included."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(handler)
    root.addHandler(_handler(format, None))
    root.setLevel(logging.INFO)


class _Handler(logging.StreamHandler[TextIO]):
    """One that was put up here, and may be taken down here."""


def _handler(format: Format, stream: TextIO | None) -> _Handler:
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(ScopeFilter())
    return handler


def _check(format: str) -> None:
    if format not in FORMATS:
        raise PlanError(f"logs: unknown format {format!r}\n  expected: one of {', '.join(FORMATS)}")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:
        # The arguments do not fit the text, or cannot be shown.
        return f"{_text(record.msg)} {_text(record.args)}"


def _json(said: Mapping[str, Any]) -> str:
    try:
        line = json.dumps(said, ensure_ascii=False, default=str, allow_nan=False)
        line.encode()
    except Exception:
        plain = {name: v if isinstance(v, str | int) else _text(v) for name, v in said.items()}
        # Half a character can only be written as an escape.
        line = json.dumps(plain)
    return line


def _text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _time(record: logging.LogRecord) -> str:
    at = dt.datetime.fromtimestamp(record.created, dt.UTC)
    return at.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _where(record: logging.LogRecord) -> Iterator[str]:
    job, epoch, operator, subtask = (getattr(record, name, None) for name in FIELDS)
    if job is not None:
        yield str(job)
    if operator is not None:
        # The message of a driver's record has the epoch.
        if epoch is not None:
            yield f"epoch {epoch}"
        yield str(operator) if subtask is None else f"{operator}[{subtask}]"


# Once per process, at the first import: the logger's records carry the fields.
logger.addFilter(ScopeFilter())
