"""Where streams end."""

from cairn.sinks.base import Committable, Sink, SinkContext, Writer
from cairn.sinks.driver import Collect, Console, Noop
from cairn.sinks.files import Files
from cairn.sinks.published import published

__all__ = [
    "Collect",
    "Committable",
    "Console",
    "Files",
    "Noop",
    "Sink",
    "SinkContext",
    "Writer",
    "published",
]
