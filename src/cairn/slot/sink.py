"""A sink in a slot: open for the slot's life, with a writer for each attempt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from cairn.errors import CairnError, EpochError
from cairn.protocol.messages import Begin
from cairn.protocol.spec import (
    JobSpec,
    SinkSpec,
)
from cairn.sinks.base import Sink, SinkContext, Writer, closed_on_error
from cairn.slot.outlet import fit


class SinkRuntime:
    """A sink in a slot: open for the slot's life, a writer per attempt."""

    def __init__(self, spec: SinkSpec, job: JobSpec, scratch: str) -> None:
        self.spec = spec
        self.sink: Sink = spec.sink
        context = SinkContext(
            job.job_id, job.job_name, spec.uid, spec.schema, scratch, checkpoint=job.checkpoint
        )
        with self._name_errors(), closed_on_error([self.sink]):
            self.sink.open(context)
        self.writer: Writer | None = None
        self.told_of: int | None = None
        self.rows = 0
        """Rows of the attempt."""

    def begin(self, begin: Begin, subtask: int) -> None:
        self.abort()
        self.note_committed(begin.parent)
        self.rows = 0
        with self._name_errors():
            self.writer = self.sink.writer(begin.epoch, subtask, begin.execution)

    def write(self, batch: pa.RecordBatch) -> None:
        assert self.writer is not None, "a sink is written to between begin and prepare"
        batch = fit(batch, self.spec.schema)
        self.rows += batch.num_rows
        with self._name_errors():
            self.writer.write(batch)

    def prepare(self) -> Any:
        assert self.writer is not None, "a sink is prepared once per attempt"
        writer, self.writer = self.writer, None
        with self._name_errors():
            try:
                return writer.prepare()
            except BaseException:
                # Nobody else knows the writer any more, and it may hold files and connections.
                with suppress(Exception):
                    writer.abort()
                raise

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Mark errors of the sink, which would otherwise count as the emitting function's."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            uid, is_away = self.spec.uid, self.sink.is_away(error)
            if isinstance(error, CairnError):
                error.facts.update(sink=uid, is_away=is_away)
                raise
            raise EpochError(
                f"sink {uid!r} could not be written: {str(error) or type(error).__name__}",
                sink=uid,
                is_away=is_away,
            ) from error

    def note_committed(self, epoch: int | None) -> None:
        """Call the sink's `on_epoch_committed`, once per epoch."""
        if epoch is not None and epoch != self.told_of:
            self.sink.on_epoch_committed(epoch)
            self.told_of = epoch

    def abort(self) -> None:
        if self.writer is not None:
            writer, self.writer = self.writer, None
            writer.abort()
