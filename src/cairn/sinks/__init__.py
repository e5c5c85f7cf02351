"""Where streams end."""

from cairn.sinks.base import Committable, Sink, SinkContext, Writer
from cairn.sinks.delta import Delta
from cairn.sinks.driver import Collect, Console, Noop
from cairn.sinks.files import Files

__all__ = [
    "Collect",
    "Committable",
    "Console",
    "Delta",
    "Files",
    "Noop",
    "Sink",
    "SinkContext",
    "Writer",
]
