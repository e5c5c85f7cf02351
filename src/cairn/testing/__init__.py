"""Fakes for tests: of functions (Harness), and of cairn itself when things go wrong."""

from cairn.testing.clock import ManualClock
from cairn.testing.crash import (
    SimulatedCrash,
    call_at_points,
    crash_env,
    crash_points,
    simulated_crash,
)
from cairn.testing.faulty_store import Fault, FaultyStore
from cairn.testing.harness import Harness

__all__ = [
    "Fault",
    "FaultyStore",
    "Harness",
    "ManualClock",
    "SimulatedCrash",
    "call_at_points",
    "crash_env",
    "crash_points",
    "simulated_crash",
]
