"""Remove versions of rows from PostgreSQL that no kept epoch, hold or branch can read.

The bases that are kept say which epochs of the rows count, each in its history. A version goes
when all kept histories of its key group have a newer one, a deletion when it hides nothing,
and versions of epochs that no history lists when their term is over. One epoch and a few key groups
at a time, so no transaction is long.

Always true here:
- the newest version that a kept history has of a name stays, unless it is a deletion;
- a late writer cannot bring back what a collected deletion hid: the fence of its key groups has a
  newer epoch;
- rows of other schemas, of a branch's parent, are collected by their own job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cairn.backends.postgres.database import History, Layer
from cairn.backends.postgres.files import PostgresIndex, decode_index
from cairn.backends.postgres.layout import drop_tables, schema_of
from cairn.backends.postgres.link import Address, Link, describe
from cairn.storage.holds import find_holds
from cairn.storage.log import Log, job_of
from cairn.storage.manifest import Epoch
from cairn.storage.paths import EXTERNAL_SUFFIX, STATE_FOLDER
from cairn.storage.references import files_of
from cairn.storage.store import NotFoundError, Store

if TYPE_CHECKING:
    from psycopg import Connection

_GROUPS_AT_ONCE: Final = 16


class _Part(NamedTuple):
    """Key groups and states of an operator that the same histories are kept of."""

    operator: str
    states: tuple[int, ...]
    groups: tuple[int, ...]
    layers: tuple[Layer, ...]
    """One of each kept history: the epochs of the job's own schema."""
    is_bottom: bool
    """No history has rows of another schema below these."""

    @property
    def end(self) -> int:
        """The newest epoch that all histories have reached."""
        return min(layer.epochs[-1].last for layer in self.layers)

    def is_in_all(self, epoch: int) -> bool:
        return all(_lists(layer, epoch) for layer in self.layers)

    def is_in_none(self, epoch: int) -> bool:
        return not any(_lists(layer, epoch) for layer in self.layers)


def _lists(layer: Layer, epoch: int) -> bool:
    return any(each.first <= epoch <= each.last for each in layer.epochs)


class VersionCollector:
    """Collects for one leader. Index files never change, so each is read once."""

    def __init__(self, store: Store, job_id: str, term: int) -> None:
        self._store = store
        self._schema = schema_of(job_id)
        self._term = term
        self._indexes: dict[str, PostgresIndex] = {}

    def collect(self) -> int:
        """Remove all versions that are not needed; return their number."""
        indexes = self._read_kept()
        removed = 0
        for address in {describe(index.address): index.address for index in indexes}.values():
            mine = [index for index in indexes if index.address == address]
            link = Link(address, f"cairn:{self._schema[6:18]}:collector")
            try:
                for part in _parts(mine, self._schema):
                    removed += self._collect_part(link, part)
                removed += self._collect_states(link, mine)
            finally:
                link.close()
        return removed

    def _read_kept(self) -> list[PostgresIndex]:
        """Return the indexes of all bases that records or holds list."""
        log = Log(self._store)
        oldest_kept = log.oldest_kept()
        # Holds first: a branch that is made meanwhile is made of a record that is kept.
        paths = {p for p in find_holds(self._store).all.paths if p.endswith(EXTERNAL_SUFFIX)}
        for number in log.numbers():
            record = log.read(number) if number >= oldest_kept else None
            if isinstance(record, Epoch):
                paths |= {
                    file.path
                    for file in files_of(record)
                    if file.format == "postgres" and not file.store
                }
        self._indexes = {p: index for p, index in self._indexes.items() if p in paths}
        for path in paths - self._indexes.keys():
            name = f"{self._store.url}/{path}"
            self._indexes[path] = decode_index(self._store.get(path), name)
        return list(self._indexes.values())

    def _collect_part(self, link: Link, part: _Part) -> int:
        known = link.run(lambda connection: self._list_epochs(connection, part))
        removed = 0
        done: int | None = None
        is_gapless = True
        for epoch in known:
            is_in_all = part.is_in_all(epoch)
            if not is_in_all and not (part.is_in_none(epoch) and epoch < self._term):
                is_gapless = False  # Some history still needs it: it is looked at again.
                continue
            for start in range(0, len(part.groups), _GROUPS_AT_ONCE):
                some = list(part.groups[start : start + _GROUPS_AT_ONCE])
                work = self._remove_older if is_in_all else self._remove_epoch
                removed += link.run(lambda c, w=work, e=epoch, g=some: w(c, part, e, g))  # type: ignore[misc]
            if is_gapless:
                done = epoch
        if done is not None:
            link.run(lambda connection: self._note(connection, part, done))
        return removed

    def _list_epochs(self, connection: Connection[Any], part: _Part) -> list[int]:
        """Return the epochs with rows that were not collected yet, oldest first."""
        rows = connection.execute(
            f"select distinct r.epoch from {self._schema}.rows r"
            f" where r.epoch > (select min(collected) from {self._schema}.ranges"
            " where operator = %s and grp = any(%s::int2[])) and r.epoch <= %s"
            " and r.grp = any(%s::int2[]) and r.state = any(%s::int4[]) order by 1",
            (part.operator, list(part.groups), part.end, list(part.groups), list(part.states)),
        ).fetchall()
        return [epoch for (epoch,) in rows]

    def _remove_older(
        self, connection: Connection[Any], part: _Part, epoch: int, groups: list[int]
    ) -> int:
        """Remove versions that those of this epoch replace, and deletions that hide nothing."""
        values = (epoch, groups, list(part.states))
        with connection.transaction():
            older = connection.execute(
                f"delete from {self._schema}.rows r using {self._schema}.rows n"
                " where n.epoch = %s and n.grp = any(%s::int2[]) and n.state = any(%s::int4[])"
                " and r.grp = n.grp and r.state = n.state and r.name = n.name"
                " and r.epoch < n.epoch",
                values,
            ).rowcount
            if not part.is_bottom:
                return older  # A deletion may hide a row of a branch's parent.
            gone = connection.execute(
                f"delete from {self._schema}.rows where epoch = %s and grp = any(%s::int2[])"
                " and state = any(%s::int4[]) and value is null",
                values,
            ).rowcount
        return older + gone

    def _remove_epoch(
        self, connection: Connection[Any], part: _Part, epoch: int, groups: list[int]
    ) -> int:
        """Remove rows of an epoch that was rolled back, or that no base was made of."""
        return connection.execute(
            f"delete from {self._schema}.rows where epoch = %s and grp = any(%s::int2[])"
            " and state = any(%s::int4[])",
            (epoch, groups, list(part.states)),
        ).rowcount

    def _note(self, connection: Connection[Any], part: _Part, epoch: int) -> None:
        connection.execute(
            f"update {self._schema}.ranges set collected = greatest(collected, %s)"
            " where operator = %s and grp = any(%s::int2[])",
            (epoch, part.operator, list(part.groups)),
        )

    def _collect_states(self, link: Link, indexes: list[PostgresIndex]) -> int:
        """Remove rows of states that no kept base has any more."""
        kept = sorted({n for i in indexes for part in i.parts for n in part.states.values()})

        def remove(connection: Connection[Any]) -> int:
            return connection.execute(
                f"delete from {self._schema}.rows where epoch < %s and state in"
                f" (select state from {self._schema}.states where state <> all(%s::int4[]))",
                (self._term, kept),
            ).rowcount

        has_rows = any(
            layer.schema == self._schema for i in indexes for p in i.parts for layer in p.history
        )
        return link.run(remove) if has_rows else 0


def _parts(indexes: Iterable[PostgresIndex], schema: str) -> Iterator[_Part]:
    """Yield the key groups of all operators, by the histories that are kept of them."""
    kept: dict[tuple[str, int], dict[int, set[History]]] = {}
    for index in indexes:
        for part in index.parts:
            for number in part.states.values():
                by_group = kept.setdefault((index.operator, number), {})
                for group in part.groups:
                    by_group.setdefault(group, set()).add(part.history)
    found: dict[tuple[str, frozenset[History]], dict[int, set[int]]] = {}
    for (operator, number), by_group in kept.items():
        for group, histories in by_group.items():
            groups = found.setdefault((operator, frozenset(histories)), {})
            groups.setdefault(group, set()).add(number)
    for (operator, kept_of), numbers in found.items():
        layers = [[y for y in history if y.schema == schema] for history in kept_of]
        if not all(layers):
            continue  # One of them has nothing here yet, and may need any row.
        is_bottom = all(len(history) == 1 for history in kept_of)
        by_states: dict[tuple[int, ...], list[int]] = {}
        for group, states in numbers.items():
            by_states.setdefault(tuple(sorted(states)), []).append(group)
        for some, groups_of in by_states.items():
            owned = tuple(sorted(groups_of))
            yield _Part(operator, some, owned, tuple(y[0] for y in layers), is_bottom)


def drop_state(store: Store) -> list[str]:
    """Drop the schema of a checkpoint's job; return what could not be reached."""
    job = job_of(store)
    if job is None:
        return ["PostgreSQL: the job's schema cannot be found, because job.json cannot be read"]
    addresses: dict[str, Address] = {}
    for there in store.list(STATE_FOLDER):
        if there.path.endswith(EXTERNAL_SUFFIX):
            try:
                index = decode_index(store.get(there.path), there.path)
            except NotFoundError:
                continue
            addresses[describe(index.address)] = index.address
    unreached = []
    schema = schema_of(job.job_id)
    for name, address in addresses.items():
        link = Link(address, "cairn:rm")
        try:
            link.run(lambda connection: drop_tables(connection, schema))
        except Exception as error:
            unreached.append(f"{name}, schema {schema}: {str(error).splitlines()[0]}")
        finally:
            link.close()
    return unreached
