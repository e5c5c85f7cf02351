"""A further database for state, as an example: versions of rows in a file of SQLite.

All that a database with versions needs is here; `docs/operations/another-database.md` explains it.
The suites run over it as over the others. It is not part of cairn: one file on one host, with one
writer at a time, has no use as an external database.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cairn.backends.cached.database import Op
from cairn.backends.cached.described import StoredState
from cairn.backends.cached.numbers import PREFIX
from cairn.backends.versioned.contract import (
    Address,
    Kind,
    Layer,
    Named,
    Range,
    VersionStore,
    Writing,
)
from cairn.backends.versioned.kinds import KINDS
from cairn.errors import EpochError, PlanError

T = TypeVar("T")
SCHEME = "sqlite-versions"
TABLES = """
create table if not exists rows (place text, grp int, state int, name blob, epoch int, value blob,
    primary key (place, grp, state, name, epoch)) without rowid;
create table if not exists ranges (place text, operator text, grp int, term int,
    claimed int, collected int default -1, primary key (place, operator, grp)) without rowid;
"""


class SqliteVersions(VersionStore):
    """The rows of a job in a file that many jobs share."""

    kind = "sqlite"

    def __init__(self, address: Address, place: str, label: str) -> None:
        self.address = address
        self.place = place
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    @property
    def where(self) -> str:
        return f"{SCHEME}://{self.address['path']}"

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Call `work` in a transaction; one thread at a time."""
        with self._lock:
            try:
                connection = self._connect()
                connection.execute("begin immediate")
                try:
                    result = work(connection)
                except BaseException:
                    connection.execute("rollback")
                    raise
                connection.execute("commit")
                return result
            except sqlite3.OperationalError as error:
                raise EpochError(
                    f"the database of the job's state cannot be used: {self.where}\n"
                    f"  cause: {error}\n  next: repair it; the job waits for it",
                    database=self.where,
                    is_away=True,
                ) from None

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            # Transactions are begun above.
            self._connection = sqlite3.connect(
                self.address["path"], timeout=10, isolation_level=None, check_same_thread=False
            )
            self._connection.executescript(TABLES)
        return self._connection

    # Reading

    def look_up(self, layer: Layer, keys: Sequence[bytes]) -> list[tuple[int, bytes | None]]:
        listed, bounds = _listed(layer)

        def look(connection: sqlite3.Connection) -> list[tuple[int, bytes | None]]:
            found = []
            for at, key in enumerate(keys):
                row = connection.execute(
                    "select value from rows where place = ? and grp = ? and state = ? and name = ?"
                    f" and ({listed}) order by epoch desc limit 1",
                    (layer.schema, *PREFIX.unpack_from(key), key[PREFIX.size :], *bounds),
                ).fetchone()
                if row is not None:
                    found.append((at, row[0]))
            return found

        return self._run(look)

    def read_page(
        self, layer: Layer, group: int, state: int, low: bytes, high: bytes | None, count: int
    ) -> list[Named]:
        listed, bounds = _listed(layer)
        upper = "" if high is None else " and name < ?"
        # SQLite takes the other columns from the row with the greatest epoch.
        text = (
            "select name, value, max(epoch) from rows where place = ? and grp = ? and state = ?"
            f" and name >= ?{upper} and ({listed}) group by name order by name limit ?"
        )
        more = () if high is None else (high,)
        values = (layer.schema, group, state, low, *more, *bounds, count)
        rows = self._run(lambda connection: connection.execute(text, values).fetchall())
        return [(name, value) for name, value, _ in rows]

    # Writing

    def claim(self, writing: Writing, states: Mapping[str, StoredState]) -> dict[int, int]:
        def claim(connection: sqlite3.Connection) -> dict[int, int]:
            found = connection.execute(
                f"select grp, term, claimed from ranges where {_GROUPS}", self._groups(writing)
            ).fetchall()
            if writing.is_behind((term, epoch) for _, term, epoch in found):
                raise writing.fence_error()
            connection.executemany(
                "insert into ranges (place, operator, grp, term, claimed)"
                " values (?, ?, ?, ?, ?) on conflict do update set term = excluded.term,"
                " claimed = excluded.claimed",
                [
                    (self.place, writing.operator, g, writing.term, writing.epoch)
                    for g in writing.groups
                ],
            )
            return {group: epoch for group, _, epoch in found}

        return self._run(claim)

    def write(self, writing: Writing, ops: Sequence[Op]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            self._check(connection, writing)
            rows = [
                (self.place, *PREFIX.unpack_from(key), key[PREFIX.size :], writing.epoch, value)
                for key, value in ops
            ]
            connection.executemany("insert or replace into rows values (?, ?, ?, ?, ?, ?)", rows)

        self._run(write)

    def finish(self, writing: Writing, visible: Mapping[int, Mapping[int, Layer]]) -> None:
        # Each piece is durable, and there are no views.
        self._run(lambda connection: self._check(connection, writing))

    def _check(self, connection: sqlite3.Connection, writing: Writing) -> None:
        """Refuse a writer that a newer one has fenced off."""
        found = connection.execute(
            f"select count(*) from ranges where {_GROUPS} and term = ? and claimed <= ?",
            (*self._groups(writing), writing.term, writing.epoch),
        ).fetchone()
        if found[0] != len(writing.groups):
            raise writing.fence_error()

    def _groups(self, of: Writing | Range) -> tuple[Any, ...]:
        return self.place, of.operator, _json(of.groups)

    # Keeping house

    def find_missing(self, place: str, operator: str, groups: Sequence[int]) -> str:
        (found,) = self._run(
            lambda connection: connection.execute(
                f"select count(*) from ranges where {_GROUPS}", (place, operator, _json(groups))
            ).fetchone()
        )
        return "" if found == len(groups) else f"has not all key groups of {operator!r} in {place}"

    def list_epochs(self, part: Range, end: int) -> list[int]:
        text = (
            f"select distinct epoch from rows where {_ROWS} and epoch <= ? and epoch >"
            f" (select min(collected) from ranges where {_GROUPS}) order by epoch"
        )
        values = (*self._rows(part), end, *self._groups(part))
        found = self._run(lambda connection: connection.execute(text, values).fetchall())
        return [epoch for (epoch,) in found]

    def remove_older(self, part: Range, epoch: int, *, with_deletions: bool) -> int:
        older = (
            f"delete from rows where {_ROWS} and epoch < ? and (grp, state, name) in"
            f" (select grp, state, name from rows where {_ROWS} and epoch = ?)"
        )

        def remove(connection: sqlite3.Connection) -> int:
            values = (*self._rows(part), epoch)
            removed = connection.execute(older, (*values, *values)).rowcount
            if with_deletions:
                text = f"delete from rows where {_ROWS} and epoch = ? and value is null"
                removed += connection.execute(text, values).rowcount
            return removed

        return self._run(remove)

    def remove_epoch(self, part: Range, epoch: int) -> int:
        return self._change(
            f"delete from rows where {_ROWS} and epoch = ?", *self._rows(part), epoch
        )

    def note_collected(self, part: Range, epoch: int) -> None:
        text = f"update ranges set collected = max(collected, ?) where {_GROUPS}"
        self._change(text, epoch, *self._groups(part))

    def remove_states(self, kept: Sequence[int], before: int) -> int:
        text = (
            "delete from rows where place = ? and epoch < ?"
            " and state not in (select value from json_each(?))"
        )
        return self._change(text, self.place, before, _json(kept))

    def drop(self) -> None:
        for table in ("rows", "ranges"):
            self._change(f"delete from {table} where place = ?", self.place)

    def _rows(self, part: Range) -> tuple[Any, ...]:
        return self.place, _json(part.groups), _json(part.states)

    def _change(self, text: str, *values: Any) -> int:
        return self._run(lambda connection: connection.execute(text, values).rowcount)


_GROUPS = "place = ? and operator = ? and grp in (select value from json_each(?))"
_ROWS = (
    "place = ? and grp in (select value from json_each(?))"
    " and state in (select value from json_each(?))"
)


def _json(numbers: Sequence[int]) -> str:
    return str(list(numbers))


def _listed(layer: Layer) -> tuple[str, list[int]]:
    """Return a condition that is true for the epochs of a layer, and its values."""
    text = " or ".join(["epoch between ? and ?"] * len(layer.epochs)) or "false"
    return text, [bound for each in layer.epochs for bound in (each.first, each.last)]


def _address_of(url: str) -> dict[str, str]:
    path = url.removeprefix(f"{SCHEME}://")
    if not path.startswith("/"):
        raise PlanError(f"expected {SCHEME}:///path/of/file, found {url!r}")
    return {"path": path}


def register() -> None:
    """Let `backend="sqlite-versions:///path"` name this database in this process."""
    KINDS["sqlite"] = Kind("sqlite", (SCHEME,), _address_of, SqliteVersions)
