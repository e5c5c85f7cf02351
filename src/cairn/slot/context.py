"""The context object handed to a function: the key at hand, and the epoch it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from cairn.backends.handles.framed import Frame
from cairn.errors import FunctionError
from cairn.functions import Timers
from cairn.metrics import Metrics
from cairn.types.durations import MIN_MS


class NoKey:
    """In place of a key group where no key is at hand: state of a key cannot be found by it."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __index__(self) -> int:
        raise FunctionError(
            f"state of a key is used in {self._where}, where no key is at hand\n"
            "  next: use it where rows of keys are processed; what all keys share is broadcast "
            "state: ctx.broadcast"
        )


class SlotContext:
    """Also the scope of the state handles: they read `group` and `key` from here."""

    __slots__ = (
        "_broadcast",
        "at",
        "count_late",
        "epoch",
        "event_time_ms",
        "floor_ms",
        "frame",
        "group",
        "key",
        "keys",
        "late_ms",
        "metrics",
        "now_ms",
        "parallelism",
        "row_times_us",
        "sides",
        "subtask",
        "timer_kind",
        "timers",
        "times_us",
        "watermark_ms",
    )

    def __init__(self) -> None:
        self.key: Any = None
        self.group: Any = 0
        self.frame = Frame()
        """Rows whose state is read together; the current one is at place `at` of it."""
        self.at = 0
        self._broadcast: Any = None
        self.keys: Any = None
        """In a BatchProcess: the keys of the batch at hand, and below their event times."""
        self.times_us: Any = None
        self.event_time_ms: int | None = None
        self.watermark_ms: int | None = None
        self.late_ms: int | None = None
        """Rows older than this are late."""
        self.floor_ms = MIN_MS
        """For state that expires by event time: no row counts as earlier than this."""
        self.now_ms = 0
        self.metrics = Metrics()
        """Metrics of the current function; another function has its own."""
        self.epoch = 0
        self.subtask = 0
        self.parallelism = 1
        self.timers: Timers
        """Timers of the current key; the operator sets them."""
        self.timer_kind: Literal["event", "processing"] | None = None
        self.sides: dict[str, Callable[[Any], None]] = {}
        self.count_late: Callable[[int], None] = lambda rows: None
        """Tell of rows that the function itself has found to be late."""
        self.row_times_us: Iterator[int] | None = None
        """The event times of the rows to come, for a function that reads them."""

    @property
    def broadcast(self) -> Any:
        """The broadcast state of the operator."""
        if self._broadcast is None:
            raise FunctionError(
                "ctx.broadcast is used, but the operator has no broadcast state\n"
                '  next: declare it: stream.broadcast(rules, state.Broadcast("string", "string"))'
            )
        return self._broadcast

    @broadcast.setter
    def broadcast(self, handle: Any) -> None:
        self._broadcast = handle

    def output(self, tag: str, row: Any) -> None:
        emit = self.sides.get(tag)
        if emit is None:
            known = ", ".join(self.sides) or "none"
            raise FunctionError(
                f"no side output {tag!r} is declared\n  found: {known}\n"
                f"  next: declare it with .side({tag!r}, schema)",
                tag=tag,
            )
        emit(row)
