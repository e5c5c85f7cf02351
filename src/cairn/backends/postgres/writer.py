"""Writes rows of an epoch to PostgreSQL, in pieces, fenced by term and key group.

Each piece is a transaction that checks the fence. Rows of an epoch are right whether all of them
are there or only some, so a base that was given up half way needs no undo.

Always true here:
- a writer of an older term, or of an older epoch of the same term, writes nothing once a newer one
  has claimed the key groups;
- writing the same rows of an epoch again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cairn.backends.cached.database import Op
from cairn.backends.cached.described import StoredState
from cairn.backends.postgres.binary import copy_rows
from cairn.backends.postgres.layout import create_tables, register_states
from cairn.errors import EpochError

if TYPE_CHECKING:
    from psycopg import Connection

    from cairn.backends.postgres.link import Link


class FencedError(EpochError):
    """Another slot has written newer rows of these key groups. Internal."""


class Writer:
    """Writes the rows of one operator in some key groups, as of one epoch."""

    def __init__(
        self, link: Link, schema: str, operator: str, groups: Sequence[int], term: int, epoch: int
    ) -> None:
        self._link = link
        self._schema = schema
        self._operator = operator
        self._groups = list(groups)
        self._term = term
        self._epoch = epoch

    def claim(self, states: dict[str, StoredState]) -> None:
        """Make the tables, and keep older writers out from now on."""
        self._link.run(lambda connection: self._claim(connection, states))

    def _claim(self, connection: Connection[Any], states: dict[str, StoredState]) -> None:
        prepared = f"{self._schema} {sorted(states)}"
        if prepared not in self._link.prepared:
            create_tables(connection, self._schema)
            register_states(connection, self._schema, self._operator, states)
            self._link.prepared.add(prepared)
        with connection.transaction():
            found = connection.execute(
                f"insert into {self._schema}.ranges as held (operator, grp, term, applied)"
                " select %s, grp, %s, -1 from unnest(%s::int2[]) grp"
                " on conflict (operator, grp) do update set term = excluded.term,"
                " applied = case when held.term = excluded.term then held.applied else -1 end"
                " where held.term < excluded.term"
                " or (held.term = excluded.term and held.applied <= %s)"
                " returning grp",
                (self._operator, self._term, self._groups, self._epoch),
            ).fetchall()
            self._check(len(found))

    def write(self, ops: Sequence[Op]) -> None:
        """Write rows, in one transaction."""
        self._link.run(lambda connection: self._write(connection, ops))

    def _write(self, connection: Connection[Any], ops: Sequence[Op]) -> None:
        with connection.transaction():
            if "incoming" not in self._link.prepared:
                connection.execute(
                    "create temp table if not exists incoming"
                    " (grp int2, state int4, name bytea, value bytea) on commit delete rows"
                )
            self._lock(connection)
            with (
                connection.cursor() as cursor,
                cursor.copy("copy incoming from stdin (format binary)") as copy,
            ):
                copy.write(copy_rows(ops))
            connection.execute(
                f"insert into {self._schema}.rows (grp, state, name, epoch, value)"
                " select grp, state, name, %s, value from incoming"
                " on conflict (grp, state, name, epoch) do update set value = excluded.value",
                [self._epoch],
            )
        self._link.prepared.add("incoming")

    def finish(self, visible: Mapping[int, Mapping[int, str]]) -> None:
        """Note that all rows up to the epoch are here; `visible` is by state and key group."""
        self._link.run(lambda connection: self._finish(connection, visible))

    def _finish(
        self, connection: Connection[Any], visible: Mapping[int, Mapping[int, str]]
    ) -> None:
        shown = [
            (state, group, epochs)
            for state, by_group in visible.items()
            for group, epochs in by_group.items()
        ]
        with connection.transaction():
            self._lock(connection)
            connection.execute(
                f"update {self._schema}.ranges set applied = %s"
                " where operator = %s and grp = any(%s::int2[])",
                (self._epoch, self._operator, self._groups),
            )
            connection.execute(
                f"delete from {self._schema}.visible using {self._schema}.states s"
                " where visible.state = s.state and s.operator = %s"
                " and visible.grp = any(%s::int2[])",
                (self._operator, self._groups),
            )
            connection.execute(
                f"insert into {self._schema}.visible (state, grp, epochs)"
                " select state, grp, epochs::int8multirange"
                " from unnest(%s::int4[], %s::int2[], %s::text[]) v(state, grp, epochs)",
                ([s for s, _, _ in shown], [g for _, g, _ in shown], [e for _, _, e in shown]),
            )

    def _lock(self, connection: Connection[Any]) -> None:
        """Hold the fence for the transaction."""
        found = connection.execute(
            f"select 1 from {self._schema}.ranges where operator = %s and grp = any(%s::int2[])"
            " and term = %s and applied <= %s for share",
            (self._operator, self._groups, self._term, self._epoch),
        ).fetchall()
        self._check(len(found))

    def _check(self, found: int) -> None:
        if found != len(self._groups):
            raise FencedError(
                f"operator {self._operator!r}: another slot has written newer rows of these key "
                f"groups to the database; those of term {self._term} up to epoch {self._epoch} "
                "are not written"
            )
