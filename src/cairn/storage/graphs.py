"""The graph of a job, kept beside its epochs: `graph/<term>.json`, written by every start.

So a checkpoint can be looked at as a job, with sources, operators and sinks, without the program.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from cairn.report.job_graph import JobGraph
from cairn.storage.notes import GRAPHS_FOLDER, read_notes, write_note
from cairn.storage.store import Store

GRAPHS_KEPT: Final = 5


def write_graph(store: Store, term: int, graph: JobGraph) -> None:
    """Write the graph of the job that this term runs."""
    write_note(store, GRAPHS_FOLDER, f"{term:012d}", graph, keep=GRAPHS_KEPT)


def newest_graph(store: Store) -> tuple[int, JobGraph] | None:
    """Return the last graph and its term; None if there is none that can be read."""
    for note in read_notes(store, GRAPHS_FOLDER):
        if note.name.isdecimal():
            with suppress(msgspec.ValidationError):
                return int(note.name), msgspec.convert(note.facts, JobGraph)
    return None
