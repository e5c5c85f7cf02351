"""What a job looked like, kept beside its epochs: `graph/<term>.json`, written by every start.

So a checkpoint can be looked at as a job, with sources, operators and sinks, without the program.
"""

from __future__ import annotations

from typing import Any, Final

from cairn.storage.notes import GRAPHS_FOLDER, read_notes, write_note
from cairn.storage.store import Store

Facts = dict[str, Any]

GRAPHS_KEPT: Final = 5


def write_graph(store: Store, term: int, explained: Facts) -> None:
    """`explained` is what `plan.explain` says of the job that this term runs."""
    write_note(store, GRAPHS_FOLDER, f"{term:012d}", explained, keep=GRAPHS_KEPT)


def newest_graph(store: Store) -> tuple[int, Facts] | None:
    """The last one and the term it was started in; None where no start has left one."""
    for note in read_notes(store, GRAPHS_FOLDER):
        if note.name.isdecimal():
            return int(note.name), note.facts
    return None
