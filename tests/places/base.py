"""The interface of a place to tests."""

from __future__ import annotations

import dataclasses
import pickle
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from cairn.sinks.base import Committable, Execution, Sink, SinkContext
from cairn.types import parse_schema

SCHEMA = parse_schema("k long, s string")

Row = tuple[Any, ...]


class Place(ABC):
    """The target of a sink, seen by the driver, a slot and the outside world."""

    is_keyed: ClassVar[bool] = False
    """Rows of one `k` replace each other: the last one of the newest epoch is seen."""
    is_shared: ClassVar[bool] = True
    """Rows that another job or sink publishes into the same place are visible too."""

    is_in_pieces: ClassVar[bool] = False
    """A commit puts one thing after the other in place, and passes driver.sink.piece for each."""
    is_far: ClassVar[bool] = False
    """Each look takes a request; left out where there are many."""
    has_mark: ClassVar[bool] = True
    """A commit ends with a mark, or with a transaction that has it."""
    is_one_whatever_the_batches: ClassVar[bool] = True
    """Equal rows give equal committables also when they come in other batches."""
    text_length: ClassVar[int] = 100_000
    """Text of this length fits."""
    has_no_empty_text: ClassVar[bool] = False
    """Text without letters is null there."""
    needs_text: ClassVar[bool] = False
    """The sink's settings name `s`, so rows cannot be without it."""

    has_target: ClassVar[bool] = True
    """The sink can say where it publishes, and `elsewhere` is another place."""

    def __init__(self, folder: Path) -> None:
        """A new, empty place; `folder` is its own. Servers are those of tests/servers.py."""
        self.folder = folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def make(self) -> Sink:
        """The sink as a program makes it, not opened."""

    @abstractmethod
    def rows(self, driver: Sink) -> list[Row]:
        """Return the rows a reader sees now, as (k, s), in any order."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return unpublished data, without marks: staged files, rows, transactions."""

    def elsewhere(self) -> Place:
        """A place of the same kind at another target."""
        return type(self)(self.folder / "elsewhere")

    def add_column(self, name: str) -> None:
        """Let the target take rows with one more column of text."""

    def connections(self) -> list[str]:
        """Return the open connections of sinks, if that can be seen."""
        return []

    def close(self) -> None:
        """Clear what the test leaves on servers."""

    # For the suite

    def opened(
        self,
        job_id: str = "job",
        uid: str = "out",
        *,
        in_slot: bool = False,
        schema: pa.Schema = SCHEMA,
    ) -> Sink:
        """The sink as a driver has it, made by the program; or as it arrives in a slot."""
        sink = self.make()
        if in_slot:
            sink = pickle.loads(pickle.dumps(sink))
        sink.open(dataclasses.replace(self.context(job_id, uid, in_slot=in_slot), schema=schema))
        return sink

    def other_columns(self) -> pa.Schema:
        """Rows of a later program: a column more, one less where it can be, in another order."""
        return parse_schema("t string, s string, k long" if self.needs_text else "t string, k long")

    def both(self) -> tuple[Sink, Sink]:
        """The sink in a driver, and in a slot."""
        return self.opened(), self.opened(in_slot=True)

    def context(self, job_id: str = "job", uid: str = "out", *, in_slot: bool) -> SinkContext:
        scratch = str(self.scratch) if in_slot else None
        return context(self.folder, job_id, uid, scratch)

    def seen(self, driver: Sink) -> list[Row]:
        return sorted(self.rows(driver), key=str)


def context(folder: Path, job_id: str, uid: str, scratch: str | None) -> SinkContext:
    checkpoint = str(folder / "checkpoint")
    return SinkContext(job_id, "j", uid, SCHEMA, scratch, checkpoint=checkpoint)


def batch(*rows: Row) -> pa.RecordBatch:
    columns = [pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def prepared(sink: Sink, epoch: int, *rows: Row, subtask: int = 0, **execution: int) -> Committable:
    """Prepare these rows in a slot's sink, one batch each, and return the committable."""
    writer = sink.writer(epoch, subtask, Execution(**execution))
    for row in rows:
        writer.write(batch(row))
    committable = writer.prepare()
    assert committable is not None
    return committable
