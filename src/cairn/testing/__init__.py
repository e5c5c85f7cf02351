"""Fakes for tests: of functions (Harness), and of cairn itself when things go wrong."""

from cairn.testing.clock import ManualClock
from cairn.testing.crash import (
    SimulatedCrash,
    crash_env,
    crash_points,
    simulated_crash,
    told_of_passes,
)
from cairn.testing.faulty_store import Fault, FaultyStore
from cairn.testing.harness import Harness

__all__ = [
    "Fault",
    "FaultyStore",
    "Harness",
    "ManualClock",
    "SimulatedCrash",
    "crash_env",
    "crash_points",
    "simulated_crash",
    "told_of_passes",
]
