"""Rows of a job in a database with versions, as of an epoch of one history.

A history is a list of layers, newest first: a place, and the epochs in it whose rows count. A
rollback, a branch or an older epoch is another history over the same rows. A branch has a layer of
its own above that of its parent.

Always true here:
- a row of an epoch that the history does not list is not there;
- the first layer that has a row of a name decides, and in it the newest epoch;
- a history only grows, and only by epochs that were applied as a whole, to the rows that it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from cairn.backends.cached.database import after
from cairn.backends.cached.numbers import PREFIX
from cairn.backends.cached.ordered import Page
from cairn.backends.versioned.contract import Epochs, Layer, Named, VersionStore

PAGE_ROWS: Final = 4096

History = tuple[Layer, ...]


def extend(history: History, schema: str, term: int, epoch: int, claimed: int = -1) -> History:
    """Return a history after another epoch was applied in a place.

    `claimed` is the newest epoch before it of which there may be rows. If the history does not end
    with it, nobody finished it, or in another history: none of the epochs in between counts.
    """
    if not history or history[0].schema != schema:
        return (Layer(schema, (Epochs(epoch, epoch, term),)), *history)
    *before, last = history[0].epochs
    if last.term == term and claimed <= last.last <= epoch:
        epochs = (*before, Epochs(last.first, epoch, term))
    else:
        epochs = (*before, last, Epochs(epoch, epoch, term))
    return (Layer(schema, epochs), *history[1:])


class VersionedDatabase:
    """Rows of some key groups, in one history."""

    def __init__(
        self, versions: VersionStore, numbers: Mapping[str, int], history: History = ()
    ) -> None:
        self.history = history
        self.rows_bound = 0
        self._versions = versions
        self._numbers = numbers
        """The numbers of states, by name."""

    def prefix(self, state: str, group: int) -> bytes:
        return PREFIX.pack(group, self._numbers[state])

    def get(self, key: bytes) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(keys)
        missing = list(range(len(keys)))
        for layer in self.history:
            if not missing:
                break
            places = self._versions.look_up(layer, [keys[at] for at in missing])
            for place, value in places:
                found[missing[place]] = value
            known = {place for place, _ in places}
            missing = [at for place, at in enumerate(missing) if place not in known]
        return found

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        first = max(prefix, start)
        head = prefix[: PREFIX.size]
        if not first.startswith(head):
            return  # It begins after the state.
        low: bytes | None = first[PREFIX.size :]
        name = prefix[PREFIX.size :]
        high = after(name) if name.rstrip(b"\xff") else None
        group, state = PREFIX.unpack(head)
        while low is not None:
            pages = [
                self._versions.read_page(layer, group, state, low, high, PAGE_ROWS)
                for layer in self.history
            ]
            rows, last = _merge(pages, PAGE_ROWS)
            for found, value in rows:
                yield head + found, value
            low = None if last is None else last + b"\0"

    def read_pages(self, starts: Sequence[tuple[bytes, bytes]], count: int) -> list[Page]:
        """Return the next `count` names of several prefixes, each from a place on."""
        places = [_split(prefix + start) for prefix, start in starts]
        layers = [self._versions.read_pages(layer, places, count) for layer in self.history]
        pages: list[Page] = []
        for at in range(len(starts)):
            rows, last = _merge([layer[at] for layer in layers], count)
            pages.append(([name for name, _ in rows], last))
        return pages


def _split(key: bytes) -> tuple[int, int, bytes]:
    group, state = PREFIX.unpack_from(key)
    return group, state, key[PREFIX.size :]


def _merge(
    pages: Sequence[Sequence[Named]], count: int
) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
    """Return the rows of pages of several layers, newest first, and where they end; None: nowhere.

    Beyond the end of a full page, its layer may have more names.
    """
    last = min((page[-1][0] for page in pages if len(page) == count), default=None)
    newest: dict[bytes, bytes | None] = {}
    for page in reversed(pages):
        newest.update(page)
    rows = [
        (name, value)
        for name in sorted(newest)
        if (value := newest[name]) is not None and (last is None or name <= last)
    ]
    return rows, last
