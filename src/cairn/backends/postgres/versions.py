"""Versions of rows in PostgreSQL: a schema per job, read by queries and written by COPY.

Each piece that is written is a transaction that checks the fence. No history has the rows of a base
that was given up half way, so nothing is undone.

Always true here:
- a writer of an older term, or of an older epoch of the same term, writes nothing once a newer one
  has claimed the key groups;
- a page, a look-up and a piece are one statement or transaction each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cairn.backends.cached.database import Op
from cairn.backends.cached.described import StoredState
from cairn.backends.cached.numbers import PREFIX
from cairn.backends.postgres.binary import copy_rows, split_keys
from cairn.backends.postgres.layout import check_schema, create_tables, drop_tables, register_states
from cairn.backends.postgres.link import Link, describe
from cairn.backends.versioned.contract import Address, Layer, Named, Range, VersionStore, Writing

if TYPE_CHECKING:
    from psycopg import Connection


class PostgresVersions(VersionStore):
    """The rows of a job in its schema."""

    kind = "postgres"

    def __init__(self, address: Address, place: str, label: str) -> None:
        self.address = address
        self.place = place
        if place:
            check_schema(place)
        self._reads = Link(address, f"{label}:reads")
        self._writes = Link(address, f"{label}:writes")

    @property
    def where(self) -> str:
        return describe(self.address)

    def close(self) -> None:
        self._reads.close()
        self._writes.close()

    # Reading

    def look_up(self, layer: Layer, keys: Sequence[bytes]) -> list[tuple[int, bytes | None]]:
        return self._reads.run(partial(_look_up, layer, keys))

    def read_page(
        self, layer: Layer, group: int, state: int, low: bytes, high: bytes | None, count: int
    ) -> list[Named]:
        return self._reads.run(partial(_read_page, layer, group, state, low, high, count))

    def read_pages(
        self, layer: Layer, starts: Sequence[tuple[int, int, bytes]], count: int
    ) -> list[Sequence[Named]]:
        return self._reads.run(partial(_read_pages, layer, starts, count))

    # Writing

    def claim(self, writing: Writing, states: Mapping[str, StoredState]) -> dict[int, int]:
        return self._writes.run(lambda connection: self._claim(connection, writing, states))

    def _claim(
        self, connection: Connection[Any], writing: Writing, states: Mapping[str, StoredState]
    ) -> dict[int, int]:
        prepared = f"{self.place} {sorted(states)}"
        if prepared not in self._writes.prepared:
            create_tables(connection, self.place)
            register_states(connection, self.place, writing.operator, dict(states))
            self._writes.prepared.add(prepared)
        owned = (writing.operator, list(writing.groups))
        with connection.transaction():
            connection.execute(
                f"insert into {self.place}.ranges (operator, grp, term, applied)"
                " select %s, grp, -1, -1 from unnest(%s::int2[]) grp order by grp"
                " on conflict do nothing",
                owned,
            )
            found = connection.execute(
                f"select grp, term, claimed from {self.place}.ranges"
                " where operator = %s and grp = any(%s::int2[]) order by grp for update",
                owned,
            ).fetchall()
            if writing.is_behind((term, epoch) for _, term, epoch in found):
                raise writing.fence_error()
            connection.execute(
                f"update {self.place}.ranges set term = %s, claimed = %s,"
                " applied = case when term = %s then applied else -1 end"
                " where operator = %s and grp = any(%s::int2[])",
                (writing.term, writing.epoch, writing.term, *owned),
            )
            return {group: epoch for group, _, epoch in found}

    def write(self, writing: Writing, ops: Sequence[Op]) -> None:
        self._writes.run(lambda connection: self._write(connection, writing, ops))

    def _write(self, connection: Connection[Any], writing: Writing, ops: Sequence[Op]) -> None:
        import psycopg

        rows = copy_rows(ops, writing.epoch)
        with connection.transaction():
            self._lock(connection, writing)
            try:
                with connection.transaction():
                    _copy(connection, f"{self.place}.rows", rows)
            except psycopg.errors.UniqueViolation:
                # An answer was lost, or an epoch that waits for the base runs again.
                connection.execute(
                    "create temp table if not exists incoming"
                    " (grp int2, state int4, name bytea, epoch int8, value bytea)"
                    " on commit delete rows"
                )
                _copy(connection, "incoming", rows)
                connection.execute(
                    f"insert into {self.place}.rows (grp, state, name, epoch, value)"
                    " select grp, state, name, epoch, value from incoming"
                    " on conflict (grp, state, name, epoch) do update set value = excluded.value"
                )

    def finish(self, writing: Writing, visible: Mapping[int, Mapping[int, Layer]]) -> None:
        self._writes.run(lambda connection: self._finish(connection, writing, visible))

    def _finish(
        self,
        connection: Connection[Any],
        writing: Writing,
        visible: Mapping[int, Mapping[int, Layer]],
    ) -> None:
        shown = [
            (state, group, _visible(layer))
            for state, by_group in visible.items()
            for group, layer in by_group.items()
        ]
        groups = list(writing.groups)
        with connection.transaction():
            self._lock(connection, writing)
            connection.execute(
                f"update {self.place}.ranges set applied = %s"
                " where operator = %s and grp = any(%s::int2[])",
                (writing.epoch, writing.operator, groups),
            )
            connection.execute(
                f"delete from {self.place}.visible using {self.place}.states s"
                " where visible.state = s.state and s.operator = %s"
                " and visible.grp = any(%s::int2[])",
                (writing.operator, groups),
            )
            connection.execute(
                f"insert into {self.place}.visible (state, grp, epochs)"
                " select state, grp, epochs::int8multirange"
                " from unnest(%s::int4[], %s::int2[], %s::text[]) v(state, grp, epochs)",
                ([s for s, _, _ in shown], [g for _, g, _ in shown], [e for _, _, e in shown]),
            )

    def _lock(self, connection: Connection[Any], writing: Writing) -> None:
        """Hold the fence for the transaction."""
        found = connection.execute(
            f"select 1 from {self.place}.ranges where operator = %s and grp = any(%s::int2[])"
            " and term = %s and claimed <= %s for share",
            (writing.operator, list(writing.groups), writing.term, writing.epoch),
        ).fetchall()
        if len(found) != len(writing.groups):
            raise writing.fence_error()

    # Keeping house

    def find_missing(self, place: str, operator: str, groups: Sequence[int]) -> str:
        def look(connection: Connection[Any]) -> str:
            found = connection.execute("select to_regnamespace(%s)", [place]).fetchone()
            if found is None or found[0] is None:
                return f"has no schema {place}"
            found = connection.execute(
                f"select count(*) from {place}.ranges"
                " where operator = %s and grp = any(%s::int2[])",
                [operator, list(groups)],
            ).fetchone()
            if found is None or found[0] != len(groups):
                return f"has not all key groups of {operator!r} in schema {place}"
            return ""

        return self._reads.run(look)

    def list_epochs(self, part: Range, end: int) -> list[int]:
        groups, states = list(part.groups), list(part.states)
        rows = self._writes.run(
            lambda connection: connection.execute(
                f"select distinct r.epoch from {self.place}.rows r"
                f" where r.epoch > (select min(collected) from {self.place}.ranges"
                " where operator = %s and grp = any(%s::int2[])) and r.epoch <= %s"
                " and r.grp = any(%s::int2[]) and r.state = any(%s::int4[]) order by 1",
                (part.operator, groups, end, groups, states),
            ).fetchall()
        )
        return [epoch for (epoch,) in rows]

    def remove_older(self, part: Range, epoch: int, *, with_deletions: bool) -> int:
        values = (epoch, list(part.groups), list(part.states))

        def remove(connection: Connection[Any]) -> int:
            with connection.transaction():
                older = connection.execute(
                    f"delete from {self.place}.rows r using {self.place}.rows n"
                    " where n.epoch = %s and n.grp = any(%s::int2[]) and n.state = any(%s::int4[])"
                    " and r.grp = n.grp and r.state = n.state and r.name = n.name"
                    " and r.epoch < n.epoch",
                    values,
                ).rowcount
                if not with_deletions:
                    return older
                gone = connection.execute(
                    f"delete from {self.place}.rows where epoch = %s and grp = any(%s::int2[])"
                    " and state = any(%s::int4[]) and value is null",
                    values,
                ).rowcount
            return older + gone

        return self._writes.run(remove)

    def remove_epoch(self, part: Range, epoch: int) -> int:
        return self._writes.run(
            lambda connection: (
                connection.execute(
                    f"delete from {self.place}.rows where epoch = %s and grp = any(%s::int2[])"
                    " and state = any(%s::int4[])",
                    (epoch, list(part.groups), list(part.states)),
                ).rowcount
            )
        )

    def note_collected(self, part: Range, epoch: int) -> None:
        self._writes.run(
            lambda connection: connection.execute(
                f"update {self.place}.ranges set collected = greatest(collected, %s)"
                " where operator = %s and grp = any(%s::int2[])",
                (epoch, part.operator, list(part.groups)),
            )
        )

    def remove_states(self, kept: Sequence[int], before: int) -> int:
        return self._writes.run(
            lambda connection: (
                connection.execute(
                    f"delete from {self.place}.rows where epoch < %s and state in"
                    f" (select state from {self.place}.states where state <> all(%s::int4[]))",
                    (before, list(kept)),
                ).rowcount
            )
        )

    def drop(self) -> None:
        self._writes.run(lambda connection: drop_tables(connection, self.place))


def _copy(connection: Connection[Any], table: str, rows: bytes) -> None:
    text = f"copy {table} (grp, state, name, epoch, value) from stdin (format binary)".encode()
    with connection.cursor() as cursor, cursor.copy(text) as copy:
        copy.write(rows)


def _visible(layer: Layer) -> str:
    """Return the epochs of a layer as PostgreSQL writes them."""
    return "{" + ",".join(f"[{each.first},{each.last}]" for each in layer.epochs) + "}"


def _look_up(
    layer: Layer, keys: Sequence[bytes], connection: Connection[Any]
) -> list[tuple[int, bytes | None]]:
    with connection.cursor(binary=True) as cursor:
        cursor.execute(
            "select k.i::int4 - 1, r.value"
            " from unnest(%b::int2[], %b::int4[], %b::bytea[])"
            " with ordinality k(grp, state, name, i)"
            f" cross join lateral (select value from {layer.schema}.rows r"
            " where r.grp = k.grp and r.state = k.state and r.name = k.name"
            " and r.epoch <@ %s::int8multirange order by r.epoch desc limit 1) r",
            (*split_keys(keys), _visible(layer)),
        )
        return cursor.fetchall()


def _read_pages(
    layer: Layer,
    starts: Sequence[tuple[int, int, bytes]],
    count: int,
    connection: Connection[Any],
) -> list[Sequence[Named]]:
    keys = [PREFIX.pack(group, state) + low for group, state, low in starts]
    found: dict[int, list[Named]] = {}
    with connection.cursor(binary=True) as cursor:
        cursor.execute(
            "select k.i::int4 - 1, r.name, r.held"
            " from unnest(%b::int2[], %b::int4[], %b::bytea[])"
            " with ordinality k(grp, state, name, i)"
            " cross join lateral (select distinct on (name) name, value is not null as held"
            f" from {layer.schema}.rows r"
            " where r.grp = k.grp and r.state = k.state and r.name >= k.name"
            " and r.epoch <@ %s::int8multirange order by name, epoch desc limit %s) r",
            (*split_keys(keys), _visible(layer), count),
        )
        for place, name, is_held in cursor.fetchall():
            found.setdefault(place, []).append((name, b"" if is_held else None))
    return [sorted(found.get(at, []), key=_name) for at in range(len(starts))]


def _name(row: Named) -> bytes:
    return row[0]


def _read_page(
    layer: Layer,
    group: int,
    state: int,
    low: bytes,
    high: bytes | None,
    count: int,
    connection: Connection[Any],
) -> list[Named]:
    upper = "" if high is None else " and name < %s"
    more = () if high is None else (high,)
    with connection.cursor(binary=True) as cursor:
        cursor.execute(
            f"select distinct on (name) name, value from {layer.schema}.rows"
            " where grp = %s and state = %s and epoch <@ %s::int8multirange"
            f" and name >= %s{upper} order by name, epoch desc limit %s",
            (group, state, _visible(layer), low, *more, count),
        )
        return cursor.fetchall()
