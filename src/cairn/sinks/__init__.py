"""Sinks: the targets that streams are published to."""

from cairn.sinks.base import Committable, Execution, Sink, SinkContext, Writer
from cairn.sinks.delta.sink import Delta
from cairn.sinks.driver import Collect, Console, Noop
from cairn.sinks.files.published import list_published
from cairn.sinks.files.sink import Files
from cairn.sinks.foreach import Foreach
from cairn.sinks.postgres.sink import Postgres
from cairn.sinks.redis import Redis
from cairn.sinks.staged import PublishedEpoch
from cairn.sinks.wal import Spark, Wal

__all__ = [
    "Collect",
    "Committable",
    "Console",
    "Delta",
    "Execution",
    "Files",
    "Foreach",
    "Noop",
    "Postgres",
    "PublishedEpoch",
    "Redis",
    "Sink",
    "SinkContext",
    "Spark",
    "Wal",
    "Writer",
    "list_published",
]
