"""Rows that a function fails on are put aside, and the epoch goes on as if they had not come.

    RecordSifter    row by row: what the row wrote is undone, what it emitted is withdrawn
    BatchSifter     a batch that fails is tried again in halves, down to the rows that fail alone
    DeadLetters     where they go: to the side output "errors", or else into the slot's log

Only the user's code is forgiven. What fails in cairn itself, in a store or a sink, or in `open`,
`close` and the like, fails the epoch as ever.

Always true here:
- a row leaves either all of its effects (state, timers, output) or a letter;
- nothing leaves an outlet in the middle of a row, and no row that the schema does not fit;
- which rows are put aside depends on state, rows and the epoch alone;
- a row of a broadcast has one letter, of the first subtask; that all others have put it aside
  too is for the coordinator to see, by the digest that each of them acknowledges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import xxhash

from cairn.backends.journal import Journal
from cairn.errors import CairnError, FunctionError
from cairn.functions import ERRORS, BatchProcess, KeyedProcess, Process
from cairn.logs import logger
from cairn.protocol.letters import (
    BROADCAST,
    SAMPLE_MAX,
    SCHEMA,
    error_text,
    json_text,
    key_text,
    sample_of,
    time_of,
    timer_json,
    traceback_text,
)
from cairn.report.epoch import LetterSample
from cairn.slot.batches import BatchInput, BatchRunner
from cairn.slot.gather import Rows
from cairn.slot.outlet import Outlet
from cairn.slot.records import Kind, RecordRunner, Scope
from cairn.slot.sifted_outlet import SiftedOutlet
from cairn.slot.timers import timer_text
from cairn.types import row_class
from cairn.types.codec import codec

if TYPE_CHECKING:
    from cairn.slot.operator import Operator

LOGGED_PER_EPOCH_MAX: Final = 5
_OURS: Final = (
    "cairn.backends.cached.",
    "cairn.backends.packing",
    "cairn.backends.postgres.",
    "cairn.backends.redis.",
    "cairn.backends.versioned.",
    "cairn.backends.rocksdb.",
    "cairn.storage.",
)


class DeadLetters:
    """The rows of an operator that are put aside, and the journal that undoes them."""

    def __init__(self, uid: str, outlets: Iterable[Outlet]) -> None:
        self.journal = Journal()
        self.rows = 0
        """In this epoch."""
        self.sample: list[LetterSample] = []
        """The first of them."""
        self.broadcast_aside = ""
        """Digest of the broadcast rows put aside in this epoch; empty if there are none."""
        self._broadcast_rows = 0
        self._uid = uid
        tagged = (o for o in outlets if o.tag == ERRORS and o.schema == SCHEMA)
        self._outlet = next(tagged, None)

    def reset(self) -> None:
        self.journal.clear()
        self.rows = self._broadcast_rows = 0
        self.sample = []
        self.broadcast_aside = ""

    def count_broadcast(self, *, is_aside: bool) -> None:
        """A row of the broadcast is done. They come in the same order in every subtask."""
        if is_aside:
            known = f"{self.broadcast_aside} {self._broadcast_rows}".encode()
            self.broadcast_aside = xxhash.xxh3_64_hexdigest(known)
        self._broadcast_rows += 1

    def add(
        self,
        error: Exception,
        *,
        input: str | None = None,
        key: Any,
        row: str,
        time_ms: int | None,
        epoch: int,
    ) -> None:
        self.rows += 1
        if len(self.sample) < SAMPLE_MAX:
            self.sample.append(sample_of(error, key=key, row=row, input=input))
        if self._outlet is not None and self._outlet.targets:
            letter = (
                self._uid,
                input,
                error_text(error),
                traceback_text(error),
                key_text(key),
                row,
                time_of(time_ms),
                epoch,
            )
            self._outlet.emit(letter)
        elif self.rows <= LOGGED_PER_EPOCH_MAX:
            self._log(error, key, row, epoch)

    def _log(self, error: Exception, key: Any, row: str, epoch: int) -> None:
        lines = [
            "put a row aside",
            f"  key: {key_text(key)}",
            f"  row: {row}",
            traceback_text(error).rstrip(),
        ]
        if self.rows == LOGGED_PER_EPOCH_MAX:
            lines.append("  no more of them are shown in this epoch")
        where = {"operator": self._uid, "epoch": epoch}
        logger.warning("%s", "\n".join(lines), extra=where)


def check_forgivable(error: Exception) -> None:
    """Raise an error that is not the row's fault: one of cairn itself, or a lack of memory."""
    if isinstance(error, CairnError):
        if not isinstance(error, FunctionError):
            raise error
        return
    if isinstance(error, MemoryError):
        raise error
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    module = "" if frames is None else frames.tb_frame.f_globals.get("__name__", "")
    if module.startswith(_OURS):
        # A database that cannot be read has nothing to do with the row that asked it.
        raise error


EPOCH_END = '{"call":"on_epoch_end"}'
"""In place of the row, in the letter of a key whose `on_epoch_end` failed."""


class RecordSifter(RecordRunner):
    """Runs a function row by row; rows that it fails on are put aside."""

    def __init__(
        self,
        operator: Operator,
        function: KeyedProcess[Any] | Process[Any],
        letters: DeadLetters,
    ) -> None:
        super().__init__(operator, function)
        self._columns = None  # A letter has the whole row.
        self._letters = letters
        outlets = [o for o in operator.outlets if isinstance(o, SiftedOutlet)]
        # The main one first.
        self._sifted = sorted(outlets, key=lambda outlet: outlet.tag is not None)

    def reset(self) -> None:
        super().reset()
        self._letters.reset()

    def _run_rows(self, gathered: Rows, scope: Scope, columns: Sequence[Iterable[Any]]) -> None:
        groups = gathered.groups.to_numpy().tolist()
        keys, times_ms = scope.get("key", repeat(None)), scope.get("event_time_ms", repeat(None))
        (rows,) = columns
        scoped: Iterator[Any] = zip(repeat(0), groups, keys, times_ms, rows, strict=False)
        if self._fires_between_rows:
            assert self._timers is not None
            scoped = self._with_timers(scoped, self._timers.event)
        context = self._operator.context
        process = self._process_row
        main, *sides = outlets = self._sifted
        emit, fits = main.rows.append, main.fits
        journal = self._letters.journal
        journal.clear()
        row: Any = None
        for _, context.group, context.key, context.event_time_ms, row in scoped:
            try:
                result = process(row, context)
                if result is not None:
                    if type(result) is tuple and fits(result):
                        emit(result)
                    else:
                        self._operator.main.emit_all(self._where, result)
                        main.check()
                for outlet in sides:
                    if len(outlet.rows) != outlet.accepted:
                        outlet.check()
            except Exception as error:
                self._put_aside(error, json_text(row), self._input_name)
            if journal:
                journal.clear()
            for outlet in outlets:
                outlet.accepted = emitted = len(outlet.rows)
                if emitted >= outlet.batch_rows:
                    outlet.flush()
        for outlet in outlets:
            outlet.flush()

    def _run_broadcast_rows(self, timed: Iterator[Any]) -> None:
        context = self._operator.context
        for row, context.event_time_ms in timed:
            is_aside = False
            try:
                result = self._function.process_broadcast(row, context)
                if result is not None:
                    self._operator.main.emit_all("process_broadcast()", result)
                self._check()
            except Exception as error:
                # Every subtask has the row, and fails on it: one letter is enough.
                is_told = context.subtask == 0
                self._put_aside(error, json_text(row), BROADCAST, is_told=is_told)
                is_aside = True
            self._letters.count_broadcast(is_aside=is_aside)
            self._row_done()

    def _call(self, kind: Kind, time_ms: int, due: list[tuple[int, Any]]) -> None:
        context = self._operator.context
        function = self._function
        assert isinstance(function, KeyedProcess), "timers belong to keys"
        for context.group, context.key in due:
            try:
                result = function.on_timer(time_ms, context)
                if result is not None:
                    self._operator.main.emit_all("on_timer()", result)
                self._check()
            except Exception as error:
                self._put_aside(error, timer_json(kind, time_ms))
                self._tell_of_failure(function, kind, time_ms)
            self._row_done()

    def _call_epoch_end(self, touched: Iterable[tuple[int, int, Any]]) -> None:
        context = self._operator.context
        function = self._function
        assert isinstance(function, KeyedProcess), "only these have on_epoch_end"
        for context.at, context.group, context.key in touched:
            try:
                result = function.on_epoch_end(context)
                if result is not None:
                    self._operator.main.emit_all("on_epoch_end()", result)
                self._check()
            except Exception as error:
                self._put_aside(error, EPOCH_END)
            self._row_done()

    def _tell_of_failure(self, function: KeyedProcess[Any], kind: Kind, time_ms: int) -> None:
        operator = self._operator
        try:
            function.on_timer_failed(time_ms, operator.context)
            self._check()
        except Exception as error:
            timer = timer_text(kind, time_ms)
            raise operator.blame.describe("on_timer_failed()", error, timer=timer) from error

    def _check(self) -> None:
        for outlet in self._sifted:
            outlet.check()

    def _row_done(self) -> None:
        self._letters.journal.clear()
        for outlet in self._sifted:
            outlet.accept()

    def _put_aside(
        self, error: Exception, row: str, input: str | None = None, *, is_told: bool = True
    ) -> None:
        """The row has not been here, but for a letter."""
        check_forgivable(error)
        self._letters.journal.undo()
        for outlet in self._sifted:
            outlet.withdraw()
        if is_told:
            context = self._operator.context
            self._letters.add(
                error,
                input=input,
                key=context.key,
                row=row,
                time_ms=context.event_time_ms,
                epoch=context.epoch,
            )


class BatchSifter(BatchRunner):
    """Runs a function by the batch; rows that it fails on are put aside."""

    def __init__(self, operator: Operator, function: BatchProcess, letters: DeadLetters) -> None:
        super().__init__(operator, function)
        self._letters = letters
        self._held: list[tuple[Outlet, pa.RecordBatch]] | None = None
        """Output of the current call."""
        self._key_codec = codec(operator.spec.key_type)

    def reset(self) -> None:
        self._letters.reset()
        self._held = None
        super().reset()
        self._letters.journal.clear()

    def end_rows(self) -> None:
        super().end_rows()
        self._letters.journal.clear()

    def _process(self, input: BatchInput, times: pa.Array | None, rows: pa.StructArray) -> None:
        journal = self._letters.journal
        waiting = [(times, rows)]
        while waiting:
            times, rows = waiting.pop()
            held = self._held = []
            try:
                context, batch = self._batch(input, times, rows)
                result = input.handler(batch, context)
                self._emit(self._operator.main, input.where, result)
            except Exception as error:
                check_forgivable(error)
                journal.undo()
                self._held = None
                if len(rows) == 1:
                    self._put_aside(error, input, times, rows)
                else:
                    # In order: the first half is done, whole, before the second.
                    half = len(rows) // 2
                    for part in (slice(half, None), slice(half)):
                        waiting.append((None if times is None else times[part], rows[part]))
                continue
            journal.clear()
            self._held = None
            for outlet, emitted in held:
                self._pass_on(outlet, emitted)
        for outlet in self._operator.outlets:
            outlet.flush()

    def _pass_on(self, outlet: Outlet, batch: pa.RecordBatch) -> None:
        if self._held is None:
            super()._pass_on(outlet, batch)
        else:
            self._held.append((outlet, batch))

    def _put_aside(
        self, error: Exception, input: BatchInput, times: pa.Array | None, rows: pa.StructArray
    ) -> None:
        schema = input.inlet.schema
        columns = zip(schema, rows.flatten(), strict=True)
        row = [codec(field.type).decode(array)[0] for field, array in columns]
        time_us = None if times is None else times[0].as_py()
        self._letters.add(
            error,
            input=input.inlet.name or None,
            key=self._key_codec.decode_keys(input.keys(rows))[0],
            row=json_text(tuple.__new__(row_class(schema), row)),
            time_ms=None if time_us is None else time_us // 1000,
            epoch=self._operator.context.epoch,
        )
