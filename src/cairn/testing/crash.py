"""Make a run die at a named point: a real process, or a simulation within one process.

A real process is told by its environment and dies as by SIGKILL:

    subprocess.run(command, env={**os.environ, **crash_env("driver.pack.written", nth=2)})

In a simulation the point raises `SimulatedCrash`, and the caller throws the crashed
driver away:

    with simulated_crash("driver.manifest.written"), suppress(SimulatedCrash):
        coordinator.run_batch(position, execute)

Always true here:
- SimulatedCrash is not an Exception, so nothing in cairn handles it on the way out;
- leaving the block disarms the point.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from cairn import crash


class SimulatedCrash(BaseException):
    """The process would be dead from here on."""

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.point = point


def crash_points(of: Literal["driver", "slot"] | None = None) -> tuple[str, ...]:
    """The names of all crash points, or of those in a driver or in a slot."""
    return tuple(name for name in crash.POINTS if of is None or name.startswith(f"{of}."))


def crash_env(
    point: str, nth: int = 1, once: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """The environment in which a process dies at the nth pass of a point.

    With `once`, the process that creates this file dies and those after it live.
    """
    _check(point, nth)
    environment = {"CAIRN_CRASH_AT": f"{point}:{nth}"}
    if once is not None:
        environment["CAIRN_CRASH_ONCE"] = os.fspath(once)
    return environment


@contextmanager
def simulated_crash(point: str, nth: int = 1) -> Iterator[None]:
    """Within the block, the nth pass of a point raises SimulatedCrash."""
    _check(point, nth)
    passes = 0

    def die(name: str) -> None:
        nonlocal passes
        if name == point:
            passes += 1
            if passes == nth:
                raise SimulatedCrash(point)

    with call_at_points(die):
        yield


@contextmanager
def call_at_points(told: Callable[[str], None]) -> Iterator[None]:
    """Within the block, `told` is called with the name of each crash point that is passed.

    What it raises comes out at that point; while it runs, passes go untold, so it may
    let another driver work while the first one stands still.
    """
    before = crash._told

    def tell(name: str) -> None:
        crash._told = None
        try:
            told(name)
        finally:
            crash._told = tell

    crash._told = tell
    try:
        yield
    finally:
        crash._told = before


def _check(point: str, nth: int) -> None:
    if point not in crash.POINTS:
        raise ValueError(f"no crash point {point!r}\n  found: {', '.join(crash.POINTS)}")
    if nth < 1:
        raise ValueError(f"passes are counted from 1, found {nth}")
