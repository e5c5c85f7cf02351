"""Rows of a job in PostgreSQL, as of an epoch of one history.

A history is a list of layers, newest first: a schema, and the epochs in it whose rows count. A
rollback, a branch or an older epoch is another history over the same rows. A branch has a layer of
its own above that of its parent.

Always true here:
- a row of an epoch that the history does not list is not there;
- the first layer that has a row of a name decides, and in it the newest epoch;
- a history only grows, and only by epochs that were applied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cairn.backends.cached.database import after
from cairn.backends.cached.numbers import PREFIX
from cairn.backends.cached.ordered import Page
from cairn.backends.postgres.binary import split_keys

if TYPE_CHECKING:
    from psycopg import Connection

    from cairn.backends.postgres.link import Link

_PAGE_ROWS: Final = 4096


class Epochs(msgspec.Struct, frozen=True, array_like=True):
    """Epochs that one leader committed: all before an epoch that counts do count."""

    first: int
    last: int
    term: int


class Layer(msgspec.Struct, frozen=True, array_like=True):
    schema: str
    epochs: tuple[Epochs, ...]

    @property
    def visible(self) -> str:
        """The epochs as PostgreSQL writes them."""
        return "{" + ",".join(f"[{each.first},{each.last}]" for each in self.epochs) + "}"


History = tuple[Layer, ...]


def extend(history: History, schema: str, term: int, epoch: int) -> History:
    """Return a history after another epoch was applied in a schema."""
    if not history or history[0].schema != schema:
        return (Layer(schema, (Epochs(epoch, epoch, term),)), *history)
    *before, last = history[0].epochs
    if last.term == term and last.last <= epoch:
        epochs = (*before, Epochs(last.first, epoch, term))
    else:
        epochs = (*before, last, Epochs(epoch, epoch, term))
    return (Layer(schema, epochs), *history[1:])


class PostgresDatabase:
    """Rows of some key groups, in one history."""

    def __init__(self, link: Link, numbers: Mapping[str, int], history: History = ()) -> None:
        self.history = history
        self.rows_bound = 0
        self._link = link
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
            wanted = [keys[at] for at in missing]
            places = self._link.run(partial(_look_up, layer, wanted))
            for place, value in places:
                found[missing[place - 1]] = value
            known = {place - 1 for place, _ in places}
            missing = [at for place, at in enumerate(missing) if place not in known]
        return found

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        first = max(prefix, start)
        head = prefix[: PREFIX.size]
        low = first[PREFIX.size :] if first.startswith(head) else None
        if low is None or not self.history:
            return  # It begins after the state.
        name = prefix[PREFIX.size :]
        high = after(name) if name.rstrip(b"\xff") else None
        group, state = PREFIX.unpack(head)
        while True:
            page = self._link.run(partial(_read_page, self.history, group, state, low, high))
            for found, value in page:
                if value is not None:
                    yield head + found, value
            if len(page) < _PAGE_ROWS:
                return
            low = page[-1][0] + b"\0"

    def read_pages(self, starts: Sequence[tuple[bytes, bytes]], count: int) -> list[Page]:
        """Return the next `count` names of several prefixes, each from a place on: one query."""
        keys = [prefix + start for prefix, start in starts]
        layers = [
            self._link.run(partial(_read_names, layer, keys, count)) for layer in self.history
        ]
        pages: list[Page] = []
        for at in range(len(starts)):
            rows = [layer.get(at + 1, []) for layer in layers]
            # Beyond the end of a full page, a layer may have more names.
            ends = [page[-1][0] for page in rows if len(page) == count]
            last = min(ends, default=None)
            newest: dict[bytes, bool] = {}
            for page in reversed(rows):
                newest.update(page)
            names = [n for n in sorted(newest) if newest[n] and (last is None or n <= last)]
            pages.append((names, last))
        return pages


def _look_up(
    layer: Layer, keys: Sequence[bytes], connection: Connection[Any]
) -> list[tuple[int, bytes | None]]:
    """Return (place, value) of each key that the layer has a row of; places count from 1."""
    with connection.cursor(binary=True) as cursor:
        cursor.execute(
            "select k.i::int4, r.value"
            " from unnest(%b::int2[], %b::int4[], %b::bytea[])"
            " with ordinality k(grp, state, name, i)"
            f" cross join lateral (select value from {layer.schema}.rows r"
            " where r.grp = k.grp and r.state = k.state and r.name = k.name"
            " and r.epoch <@ %s::int8multirange order by r.epoch desc limit 1) r",
            (*split_keys(keys), layer.visible),
        )
        return cursor.fetchall()


def _read_names(
    layer: Layer, keys: Sequence[bytes], count: int, connection: Connection[Any]
) -> dict[int, list[tuple[bytes, bool]]]:
    """Return the next names of a layer from each key on, and whether they have a value.

    By the place of the key, which counts from 1.
    """
    found: dict[int, list[tuple[bytes, bool]]] = {}
    with connection.cursor(binary=True) as cursor:
        cursor.execute(
            "select k.i::int4, r.name, r.held"
            " from unnest(%b::int2[], %b::int4[], %b::bytea[])"
            " with ordinality k(grp, state, name, i)"
            " cross join lateral (select distinct on (name) name, value is not null as held"
            f" from {layer.schema}.rows r"
            " where r.grp = k.grp and r.state = k.state and r.name >= k.name"
            " and r.epoch <@ %s::int8multirange order by name, epoch desc limit %s) r",
            (*split_keys(keys), layer.visible, count),
        )
        for place, name, is_held in cursor.fetchall():
            found.setdefault(place, []).append((name, is_held))
    return {place: sorted(page) for place, page in found.items()}


def _read_page(
    history: History,
    group: int,
    state: int,
    low: bytes,
    high: bytes | None,
    connection: Connection[Any],
) -> list[tuple[bytes, bytes | None]]:
    """Return the next names of a state in a key group, with the newest value of each."""
    parts: list[str] = []
    values: list[Any] = []
    for number, layer in enumerate(history):
        upper = "" if high is None else " and name < %s"
        parts.append(
            f"select {number} as layer, name, epoch, value from {layer.schema}.rows"
            " where grp = %s and state = %s and epoch <@ %s::int8multirange"
            f" and name >= %s{upper}"
        )
        values += [group, state, layer.visible, low, *([] if high is None else [high])]
    order = "name, epoch desc" if len(parts) == 1 else "name, layer, epoch desc"
    with connection.cursor(binary=True) as cursor:
        cursor.execute(
            f"select distinct on (name) name, value from ({' union all '.join(parts)}) found"
            f" order by {order} limit {_PAGE_ROWS}",
            values,
        )
        return cursor.fetchall()


def visible_epochs(histories: Iterable[History], schema: str) -> list[Epochs]:
    """Return all epochs of a schema that any of these histories lists, in order."""
    found = {
        epochs
        for history in histories
        for layer in history
        if layer.schema == schema
        for epochs in layer.epochs
    }
    return sorted(found, key=lambda epochs: (epochs.first, epochs.last))
