"""Windows in a harness, for the tests of what they emit: rows at seconds, results as bounds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

from cairn import WindowFunction, windows
from cairn.operators.window_functions import WindowApply, WindowReduce
from cairn.operators.window_process import WindowPlan
from cairn.testing import Harness
from cairn.types import parse_schema
from cairn.windows import WindowSpec

SCHEMA = "k string, ts timestamp, v bigint"
T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
T0_MS = int(T0.timestamp() * 1000)


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def row(seconds: float, v: int, k: str = "a") -> tuple[str, dt.datetime, int]:
    return (k, at(seconds), v)


class Listed(WindowFunction):
    """All values of a window, in order."""

    def process(self, key: Any, window: Any, rows: Iterable[Any], ctx: Any) -> Any:
        yield ([r.v for r in rows],)


def total(left: Any, right: Any) -> Any:
    return left._replace(v=left.v + right.v)


def listed(spec: WindowSpec, *, event_time: str | None = "ts", **plan: Any) -> Harness:
    function = WindowApply(
        WindowPlan(spec, **plan), parse_schema(SCHEMA), ["k"], Listed(), "vs array<bigint>"
    )
    return Harness(function, SCHEMA, "k", function.schema, event_time=event_time, now_ms=T0_MS)


def summed(spec: WindowSpec, *, event_time: str | None = "ts", **plan: Any) -> Harness:
    function = WindowReduce(WindowPlan(spec, **plan), parse_schema(SCHEMA), ["k"], total)
    return Harness(function, SCHEMA, "k", function.schema, event_time=event_time, now_ms=T0_MS)


def shown(results: list[Any]) -> list[Any]:
    """(start, end, value) with bounds in seconds since T0."""
    return [
        (*(None if t is None else (t - T0).total_seconds() for t in r[1:3]), r[-1]) for r in results
    ]


def pushed(harness: Harness, *rows: Any) -> list[Any]:
    """The rows as one epoch, committed; what came out, timers at its end included."""
    before = len(harness.outputs)
    harness.push(list(rows))
    harness.commit()
    return shown(harness.outputs[before:])


def advanced(harness: Harness, seconds: float) -> list[Any]:
    """What comes out when the watermark gets there."""
    harness.advance_watermark(at(seconds))
    return shown(harness.tick())


def passed(harness: Harness, seconds: float) -> list[Any]:
    """What comes out when so much time passes by the clock."""
    harness.clock.sleep(seconds)
    return shown(harness.tick())


def state_is_empty(harness: Harness, key: str = "a") -> bool:
    names = set(harness.function.declare_state())
    held = [harness.state(name, key) for name in names]
    return not any(held) and harness.timers(key) == {"event": [], "processing": []}


TUMBLING = windows.tumbling("10 seconds")
SLIDING = windows.sliding("10 seconds", "5 seconds")
SESSION = windows.session("10 seconds")
