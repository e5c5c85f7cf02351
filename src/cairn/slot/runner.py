"""Choose how the function of an operator is called: by row (`records`) or batch (`batches`).

If rows that fail are put aside, `dead_letters` has the counterparts of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from cairn.functions import BatchProcess, Function, KeyedProcess, Process
from cairn.slot.batches import BatchRunner
from cairn.slot.dead_letters import BatchSifter, RecordSifter
from cairn.slot.records import RecordRunner

if TYPE_CHECKING:
    from cairn.slot.operator import Operator


class Runner(Protocol):
    """Calls a function. A new function gets a new runner."""

    handles_late: bool
    """Late rows are the function's affair: they come to it like all others."""

    def reset(self) -> None:
        """An attempt begins: nothing of the one before is left."""

    def begin_rows(self) -> None:
        """Before the first row of an epoch."""

    def run(self, groups: pa.Array, times: pa.Array | None, rows: pa.StructArray) -> None:
        """Some rows, in order, each with its key group and its event time in microseconds."""

    def flush(self) -> None:
        """Process what was gathered, without waiting for more."""

    def end_rows(self) -> None:
        """After the last row."""


def make_runner(operator: Operator, function: Function) -> Runner:
    """By the kind of the function, and by what becomes of rows that it fails on."""
    letters = operator.letters
    if isinstance(function, BatchProcess):
        if letters is not None:
            return BatchSifter(operator, function, letters)
        return BatchRunner(operator, function)
    assert isinstance(function, KeyedProcess | Process)
    if letters is not None:
        return RecordSifter(operator, function, letters)
    return RecordRunner(operator, function)
