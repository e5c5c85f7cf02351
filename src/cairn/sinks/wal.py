"""Any Spark writer as a sink: rows stay in the checkpoint and are written after the commit.

    sinks.Wal(lambda df, epoch: df.write.format("jdbc").options(...).save())
    sinks.Spark("iceberg", path="lake.alerts")

The writer runs in the driver once the epoch is committed. It runs again if it failed, or if the
driver died before it noted the end. So each row arrives at least once, and exactly once if the
target rejects an epoch it already has: then pass `idempotent=True`.

Always true here:
- a DataFrame has all rows of an epoch, with the columns and types of the stream;
- the rows stay in the checkpoint until the writer has returned;
- the writer and its options do not leave the driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.errors import CommitError, PlanError
from cairn.sinks.base import Promise, without_password
from cairn.sinks.staged import GROUP_ROWS, PublishedEpoch, Staged, StagedFile, check_content
from cairn.storage.store import NotFoundError, open_store
from cairn.types import parse_schema, schema_ddl

_SECRET: Final = re.compile(r"pass|pwd|secret|token|key|url|user|credential|jaas|auth", re.I)
_PATTERN: Final = re.compile(r"[*?\[\]{}\\]")
_TEXT_CHARS_MAX: Final = 2000
_PLACES: Final = ("path", "table", "dbtable", "topic", "keyspace", "database", "collection")
"""Options of Spark's writers that name the target."""


class Wal(Staged):
    """Writes each epoch with your function: `writer(dataframe, epoch)`.

    `epoch` is a number. If a number is not enough to reject a repetition, use `epoch.key`, a
    string that no other publication has (see `PublishedEpoch`). Pass `idempotent=True` if the
    target rejects repetitions by one of them, in the transaction that writes the rows.
    """

    promise: Promise = "at-least-once"
    # The writer decides what readers see while it works.
    shows = "pieces"
    driver_only = frozenset({"function"})

    def __init__(
        self, writer: Callable[[Any, PublishedEpoch], object], *, idempotent: bool = False
    ) -> None:
        if not callable(writer):
            raise PlanError(
                f"a Wal sink needs a function that writes its rows\n  found: {writer!r}\n"
                "  expected: a function of a DataFrame and an epoch"
            )
        self.function = writer
        if idempotent:
            self.promise = "exactly-once"

    @property
    def target(self) -> str:
        return "the function of a sinks.Wal"

    def publish(self, epoch: PublishedEpoch, files: Sequence[StagedFile]) -> None:
        self.function(self.dataframe(files), epoch)

    def dataframe(self, files: Sequence[StagedFile]) -> Any:
        """Return a DataFrame of the rows of these files."""
        spark = self.context.spark
        if spark is None:
            raise CommitError(
                f"sink {self.context.uid!r} needs a Spark session to publish with\n"
                "  next: start the job with job.start(), which provides one"
            )
        local = [self._store.local_path(self.staging_path(file.name)) for file in files]
        if all(local):
            for file in files:
                self._read_file(file)  # Spark would read damaged rows without noticing.
        ddl = schema_ddl(parse_schema(self._schema(files[0])))
        if all(local):
            # Escaped, as a folder may be called `a*` or `{b}`. With its option against patterns
            # Spark reads files of such a folder twice.
            paths = [_PATTERN.sub(r"\\\g<0>", f"file://{path}") for path in local]
            return spark.read.schema(ddl).parquet(*paths)
        # Spark may lack the file system of the checkpoint; cairn has it on every machine.
        read = _Reader(self._store.url, self.staging_path(""))
        names = spark.createDataFrame([(file.name,) for file in files], "name string")
        return names.repartition(len(files)).mapInArrow(read, ddl)

    def _schema(self, file: StagedFile) -> pa.Schema:
        # From the file: a new version of the job may have another schema.
        path = self._store.local_path(self.staging_path(file.name))
        return pq.read_schema(path or pa.BufferReader(self._read_file(file)))


class _Reader:
    """Reads staged files in Spark's workers."""

    def __init__(self, url: str, folder: str) -> None:
        self.url = url
        self.folder = folder

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in batch.column(0).to_pylist():
                data = self._read(self.folder + name)
                check_content(name, data, self.url, self.folder + name)
                yield from pq.ParquetFile(pa.BufferReader(data)).iter_batches(GROUP_ROWS)

    def _read(self, path: str) -> bytes:
        try:
            return open_store(self.url, create=False).get(path)
        except NotFoundError:
            raise CommitError(
                f"an executor on {os.uname().nodename} does not see the rows to be published\n"
                f"  expected: {self.url}/{path}\n"
                "  next: pass a checkpoint that driver and executors share"
            ) from None


class Spark(Wal):
    """Writes each epoch as Spark does: `df.write.format(...).mode(...).options(...).save()`.

    Each row arrives at least once: Spark's writers cannot detect a repeated epoch.
    """

    def __init__(self, format: str, mode: str = "append", **options: Any) -> None:
        def write(frame: Any, epoch: PublishedEpoch) -> None:
            writer = frame.write.format(format).mode(mode).options(**options)
            try:
                writer.save()
            except Exception as error:
                raise CommitError(
                    f"Spark could not write epoch {epoch} as {format!r}\n"
                    f"  cause: {_without_secrets(error, options)}"
                ) from None  # The cause may quote the options.

        super().__init__(write)
        self.format = format
        self.places = {name: str(options[name]) for name in _PLACES if name in options}

    @property
    def target(self) -> str:
        places = [f"{name} {without_password(value)!r}" for name, value in self.places.items()]
        return f"Spark's {self.format!r} writer, " + (", ".join(places) or "with its options")


def _without_secrets(error: Exception, options: dict[str, Any]) -> str:
    text = f"{type(error).__name__}: {error}"
    for name, value in options.items():
        if _SECRET.search(name) and str(value):
            text = text.replace(str(value), f"<{name}>")
    return text if len(text) <= _TEXT_CHARS_MAX else text[:_TEXT_CHARS_MAX] + "…"
