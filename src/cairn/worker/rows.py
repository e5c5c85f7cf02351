"""Row functions that run in Spark's Python worker, in the stage that reads their rows.

Always true here:
- functions that follow each other run in one worker, on rows that fit the declared schemas;
- an error reaches the driver as one of a slot does: with the row, and its place in the user's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from cairn.errors import CairnError, FunctionError
from cairn.operators.rows import FilterRows, RowFunction
from cairn.protocol.messages import Failure, pack_failure
from cairn.protocol.spec import InletSpec
from cairn.slot.blame import function_error, place_error
from cairn.slot.outlet import Outlet, fit, short
from cairn.slot.reader import RowReader
from cairn.worker.forward import SubtaskError


@dataclass(frozen=True)
class RowStep:
    """A function with the name of its node and the columns of its input and output."""

    uid: str
    function: RowFunction
    input: pa.Schema
    output: pa.Schema


class RowSteps:
    """For `mapInArrow`: rows of the first step's input in, rows of the last one's output out."""

    def __init__(self, steps: Sequence[RowStep]) -> None:
        self._steps = tuple(steps)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        out: list[pa.RecordBatch] = []
        running = [_RunningStep(step) for step in self._steps]
        for step, following in pairwise(running):
            step.outlet.targets.append(following.run)
        running[-1].outlet.targets.append(out.append)
        try:
            for batch in batches:
                running[0].run(batch)
                yield from out
                out.clear()
        except CairnError as error:
            facts = {k: v for k, v in error.facts.items() if isinstance(v, str)}
            raise SubtaskError(
                pack_failure(Failure(type(error).__name__, error.message, facts))
            ) from error


class _RunningStep:
    def __init__(self, of: RowStep) -> None:
        self.outlet = Outlet(of.uid, None, of.output)
        self._step = of
        self._where = f"{of.function.called}()"
        self._reader = RowReader(InletSpec(None, of.input, way="spread"))

    def run(self, batch: pa.RecordBatch) -> None:
        batch = fit(batch, self._step.input)
        rows, _ = self._reader.read(batch.to_struct_array())
        if isinstance(self._step.function, FilterRows):
            # Kept rows leave as they came: nothing is encoded again.
            passes = [self._call(row) is not None for row in rows]
            self.outlet.pass_on(batch.filter(pa.array(passes, pa.bool_())))
            return
        for row in rows:
            result = self._call(row)
            if result is not None:
                self._emit(result, row)
        try:
            self.outlet.flush()
        except FunctionError as error:
            raise self._place(error) from error

    def _call(self, row: Any) -> Any:
        try:
            return self._step.function.process(row, None)
        except Exception as error:
            raise self._blame(error, row) from error

    def _emit(self, result: Any, row: Any) -> None:
        try:
            self.outlet.emit_all(self._where, result)
        except FunctionError as error:
            raise self._place(error) from error
        except Exception as error:
            raise self._blame(error, row) from error

    def _blame(self, error: Exception, row: Any) -> CairnError:
        step = self._step
        return function_error(step.uid, self._where, error, step.function.function, row=short(row))

    def _place(self, error: FunctionError) -> FunctionError:
        # Rows leave while the next step runs: the error may be of a step behind this one.
        if error.facts.get("operator", self._step.uid) != self._step.uid:
            return error
        return place_error(self._step.uid, error, self._step.function.function)
