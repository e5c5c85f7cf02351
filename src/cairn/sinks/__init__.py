"""Where streams end."""

from cairn.sinks.base import Committable, Sink, SinkContext, Writer
from cairn.sinks.delta import Delta
from cairn.sinks.driver import Collect, Console, Noop
from cairn.sinks.files import Files
from cairn.sinks.foreach import Foreach
from cairn.sinks.postgres import Postgres
from cairn.sinks.published import published
from cairn.sinks.redis import Redis
from cairn.sinks.staged import PublishedEpoch
from cairn.sinks.wal import Spark, Wal

__all__ = [
    "Collect",
    "Committable",
    "Console",
    "Delta",
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
    "published",
]
