"""Remove versions of rows from a database that no kept epoch, hold or branch can read.

The bases that are kept say which epochs of the rows count, each in its history. A version goes
when all kept histories of its key group have a newer one, a deletion when it hides nothing,
and versions of epochs that no history lists when all of them have a later one. One epoch and a few
key groups at a time, so no transaction is long.

Always true here:
- the newest version that a kept history has of a name stays, unless it is a deletion;
- a late writer cannot bring back what a collected deletion hid: the fence of its key groups has a
  newer epoch; and no epoch takes a base that is older than the one it has;
- rows of other places, of a branch's parent, are collected by their own job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from cairn.backends.versioned.contract import Layer, Range, VersionStore, place_of
from cairn.backends.versioned.database import History
from cairn.backends.versioned.index import FORMATS, VersionedIndex, decode_index
from cairn.backends.versioned.kinds import open_place
from cairn.storage.holds import find_holds
from cairn.storage.log import Log, job_of
from cairn.storage.manifest import Epoch
from cairn.storage.paths import EXTERNAL_SUFFIX, STATE_FOLDER
from cairn.storage.references import files_of
from cairn.storage.store import NotFoundError, Store

_GROUPS_AT_ONCE: Final = 16


class _Part(NamedTuple):
    """Key groups and states of an operator that the same histories are kept of."""

    range: Range
    layers: tuple[Layer, ...]
    """One of each kept history: the epochs of the job's own place."""
    is_bottom: bool
    """No history has rows of another place below these."""

    @property
    def end(self) -> int:
        """The newest epoch that all histories have reached."""
        return min(layer.epochs[-1].last for layer in self.layers)

    def is_in_all(self, epoch: int) -> bool:
        return all(layer.lists(epoch) for layer in self.layers)

    def is_in_none(self, epoch: int) -> bool:
        return not any(layer.lists(epoch) for layer in self.layers)


class VersionCollector:
    """Collects for one leader. Index files never change, so each is read once."""

    def __init__(self, store: Store, job_id: str, term: int) -> None:
        self._store = store
        self._place = place_of(job_id)
        self._term = term
        self._indexes: dict[str, VersionedIndex] = {}

    def collect(self) -> int:
        """Remove all versions that are not needed; return their number."""
        indexes = self._read_kept()
        removed = 0
        for mine in _by_database(indexes):
            versions = open_place(
                mine[0].kind, mine[0].address, self._place, f"cairn:{self._place[6:18]}:collector"
            )
            try:
                for part in _parts(mine, self._place):
                    removed += self._collect_part(versions, part)
                removed += self._collect_states(versions, mine)
            finally:
                versions.close()
        return removed

    def _read_kept(self) -> list[VersionedIndex]:
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
                    if file.format in FORMATS and not file.store
                }
        self._indexes = {p: index for p, index in self._indexes.items() if p in paths}
        for path in paths - self._indexes.keys():
            name = f"{self._store.url}/{path}"
            self._indexes[path] = decode_index(self._store.get(path), name)
        return list(self._indexes.values())

    def _collect_part(self, versions: VersionStore, part: _Part) -> int:
        removed = 0
        done: int | None = None
        is_gapless = True
        for epoch in versions.list_epochs(part.range, part.end):
            is_in_all = part.is_in_all(epoch)
            if not is_in_all and not part.is_in_none(epoch):
                is_gapless = False  # Some history still needs it: it is looked at again.
                continue
            for some in _pieces(part.range):
                if is_in_all:
                    # A deletion may hide a row of a branch's parent.
                    removed += versions.remove_older(some, epoch, with_deletions=part.is_bottom)
                else:
                    # It was rolled back, or no base was made of it.
                    removed += versions.remove_epoch(some, epoch)
            if is_gapless:
                done = epoch
        if done is not None:
            versions.note_collected(part.range, done)
        return removed

    def _collect_states(self, versions: VersionStore, indexes: list[VersionedIndex]) -> int:
        """Remove rows of states that no kept base has any more."""
        kept = sorted({n for i in indexes for part in i.parts for n in part.states.values()})
        has_rows = any(
            layer.schema == self._place for i in indexes for p in i.parts for layer in p.history
        )
        return versions.remove_states(kept, self._term) if has_rows else 0


def _by_database(indexes: Iterable[VersionedIndex]) -> Iterator[list[VersionedIndex]]:
    found: dict[tuple[str, ...], list[VersionedIndex]] = {}
    for index in indexes:
        where = (index.kind, *(word for pair in sorted(index.address.items()) for word in pair))
        found.setdefault(where, []).append(index)
    yield from found.values()


def _pieces(whole: Range) -> Iterator[Range]:
    for start in range(0, len(whole.groups), _GROUPS_AT_ONCE):
        yield whole._replace(groups=whole.groups[start : start + _GROUPS_AT_ONCE])


def _parts(indexes: Iterable[VersionedIndex], place: str) -> Iterator[_Part]:
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
        layers = [[y for y in history if y.schema == place] for history in kept_of]
        if not all(layers):
            continue  # One of them has nothing here yet, and may need any row.
        is_bottom = all(len(history) == 1 for history in kept_of)
        by_states: dict[tuple[int, ...], list[int]] = {}
        for group, states in numbers.items():
            by_states.setdefault(tuple(sorted(states)), []).append(group)
        for some, groups_of in by_states.items():
            owned = tuple(sorted(groups_of))
            yield _Part(Range(operator, some, owned), tuple(y[0] for y in layers), is_bottom)


def drop_state(store: Store) -> list[str]:
    """Drop the rows of a checkpoint's job; return what could not be reached."""
    job = job_of(store)
    if job is None:
        return ["the rows of the job cannot be found, because job.json cannot be read"]
    indexes = []
    for there in store.list(STATE_FOLDER):
        if there.path.endswith(EXTERNAL_SUFFIX):
            try:
                indexes.append(decode_index(store.get(there.path), there.path))
            except NotFoundError:
                continue
    unreached = []
    for mine in _by_database(indexes):
        place = place_of(job.job_id)
        versions = open_place(mine[0].kind, mine[0].address, place, "cairn:rm")
        try:
            versions.drop()
        except Exception as error:
            unreached.append(f"{versions.where}, schema {place}: {str(error).splitlines()[0]}")
        finally:
            versions.close()
    return unreached
