"""Where streams end."""

from cairn.sinks.base import Committable, Sink, SinkContext, Writer
from cairn.sinks.driver import Collect, Console, Noop
from cairn.sinks.files import Files
from cairn.sinks.postgres import Postgres

__all__ = [
    "Collect",
    "Committable",
    "Console",
    "Files",
    "Noop",
    "Postgres",
    "Sink",
    "SinkContext",
    "Writer",
]
