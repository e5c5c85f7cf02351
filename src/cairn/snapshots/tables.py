"""State of an epoch or a savepoint as typed tables, by key group, without Spark.

    with open_state("s3://lake/fraud") as source:
        for batch in source.table("score", "total").batches():
            ...

Always true here:
- all tables of a source belong to one committed epoch;
- savepoint, checkpoint and branch of the same epoch have the same rows;
- only the needed key groups are read, and for given keys only their rows; from a savepoint,
  whole files of these groups;
- no user code is run: `object` state stays pickled, and aggregating state has its stored value,
  not its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from cairn.errors import QueryError, RestoreError, StaleEpochError, StateNotFoundError
from cairn.key_groups import groups_of, key_group
from cairn.snapshots.columns import StateColumns, is_plain
from cairn.snapshots.holds import READ_MS, Reading, Unheld
from cairn.snapshots.key_text import parse_key
from cairn.snapshots.reader import uid_with_state
from cairn.snapshots.savepoint import open_savepoint
from cairn.snapshots.shape import Shape
from cairn.snapshots.stored_states import EpochStates, SavepointStates, StoredStates
from cairn.storage.log import read_job
from cairn.storage.manifest import Epoch, operator_uids
from cairn.storage.paths import LOG_FOLDER, SAVEPOINT_PATH
from cairn.storage.removal import is_being_removed
from cairn.storage.store import NotFoundError, Store, open_store
from cairn.types.codec import ValueTypeError

Key = tuple[Any, ...]


class StateTable:
    """One state of an epoch or a savepoint, as rows of typed columns."""

    def __init__(
        self, states: StoredStates, operator: str, uid: str, columns: StateColumns, group_count: int
    ) -> None:
        self.operator = operator
        self.uid = uid
        """The uid in the manifest: the operator, with a suffix for some scopes."""
        self.state = columns.name
        about = states.about(uid, columns.name)
        self.scope: str = about.scope
        self.rows = about.rows
        """Stored rows of its files, which other states of the operator may share: an upper bound
        of its keys and entries, known without reading."""
        self.bytes = about.bytes
        """The bytes of these files."""
        self.groups = range(group_count)
        self.columns = columns
        self._states = states
        self._parallelism = about.parallelism
        self.shape = Shape(columns, about.scope)
        self.kind = self.shape.kind
        self.key_names = self.shape.key_names
        self.key_types = self.shape.key_types
        self.schema = self.shape.schema

    def __repr__(self) -> str:
        return f"<StateTable {self.operator}.{self.state}: {self.kind}>"

    def batches(
        self,
        groups: range | None = None,
        keys: Sequence[Key] | None = None,
        *,
        ordered: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows, of some key groups or keys if given.

        They are in the order of key groups and keys; without `ordered` it is faster.
        """
        wanted = self.groups if groups is None else groups
        if keys is None:
            stored = self._states.read(self.columns, self.uid, wanted, None, ordered=ordered)
            yield from self.shape.batches(stored)
            return
        if self.scope in ("feedback", "subtask"):
            # They are few, and their key group depends on the parallelism.
            some = [self._to_stored_key(key) for key in keys]
            yield from self.shape.batches(self._of_keys(wanted, some))
            return
        by_group: dict[int, list[Any]] = {}
        for key in keys:
            by_group.setdefault(self.key_group(key), []).append(self._to_stored_key(key))
        for run in _runs(sorted(group for group in by_group if group in wanted)):
            some = [key for group in run for key in by_group[group]]
            yield from self.shape.batches(self._of_keys(run, some))

    def key_group(self, key: Key) -> int:
        """Return the key group of a key. QueryError if it does not fit the key columns."""
        stored = self._to_stored_key(key)
        if self.scope == "shared":
            return 0
        if self.scope == "subtask":
            group_count = len(self.groups)
            subtask = 0 if stored is None else stored
            if not 0 <= subtask < self._parallelism:
                return 0
            return min(groups_of(subtask, self._parallelism, group_count).start, group_count - 1)
        parts = [stored] if len(self.key_types) == 1 else list(stored)
        return key_group(parts, self.key_types, len(self.groups))

    def parse_key(self, text: str) -> Key:
        """Parse a key: alice, 42, or a JSON array with a value for each key column."""
        return parse_key(text, self.key_names, self.key_types)

    def count_stored_rows(self) -> int:
        """Return the rows of this state in its files: an upper bound of its keys and entries."""
        return self._states.group_rows(self.uid, self.state).total()

    def splits(self, count: int) -> list[range]:
        """Return up to `count` ranges of key groups with about equally many rows."""
        rows = self._states.group_rows(self.uid, self.state)
        per_group = np.array([rows[group] for group in self.groups], np.float64)
        total = per_group.sum()
        if count <= 1 or not total:
            return [self.groups]
        # A group belongs to the part that contains its middle.
        middle = np.cumsum(per_group) - per_group / 2
        part = np.minimum((middle * count / total).astype(np.int64), count - 1)
        starts = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1).tolist(), len(self.groups)]
        return [range(a, b) for a, b in pairwise(starts)]

    def _to_stored_key(self, key: Key) -> Any:
        if not isinstance(key, tuple) or len(key) != len(self.key_types):
            raise QueryError(
                f"a key of {self.operator}.{self.state} is a tuple of {len(self.key_types)}\n"
                f"  expected: {', '.join(self.key_names)}\n  found: {key!r}",
                operator=self.operator,
                state=self.state,
            )
        whole = key[0] if len(key) == 1 else key
        try:
            stored = None if whole is None else self.columns.keys.normalise_key(whole)
            self.columns.keys.encode([stored])  # Raises for numbers that are too large.
            return stored
        except (ValueTypeError, OverflowError) as error:
            raise QueryError(
                f"a key does not fit {self.operator}.{self.state}\n  found: {error}",
                operator=self.operator,
                state=self.state,
            ) from None

    def _of_keys(self, groups: range, keys: list[Any]) -> Iterator[pa.RecordBatch]:
        """Yield the plain rows of these keys."""
        type, codec = self.columns.key_type, self.columns.keys
        is_found_by_arrow = is_plain(type)
        given = None
        if is_found_by_arrow or len(self.key_types) > 1:
            given = codec.encode(keys)
        wanted = set(keys)
        for batch in self._states.read(self.columns, self.uid, groups, given, ordered=True):
            held = codec.decode_keys(batch["key"])
            found = batch.filter(pa.array([key in wanted for key in held], pa.bool_()))
            if found.num_rows:
                yield found


@dataclass(eq=False, repr=False)
class StateSource:
    """All states of an epoch or a savepoint. Close it, or use it in a `with`."""

    url: str
    states: StoredStates
    _: KW_ONLY
    kind: Literal["epoch", "savepoint"]
    epoch: int
    wall_ms: int
    """The time at which the epoch was committed, or the savepoint written."""
    job: str
    max_parallelism: int

    def __enter__(self) -> StateSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StateSource {self.kind} {self.epoch} of {self.url}>"

    def close(self) -> None:
        self.states.close()

    def tables(self) -> list[StateTable]:
        """Return all tables, in the order of the job."""
        operators = self.states.operators
        return [self._table(uid, name) for uid in operators for name in operators[uid].states]

    def table(self, operator: str, state: str) -> StateTable:
        """Return one table. StateNotFoundError lists the existing ones."""
        operators = self.states.operators
        uid = uid_with_state(operators, operator, state)
        if uid not in operators or state not in operators[uid].states:
            raise self._not_found(operator, state)
        return self._table(uid, state)

    def _table(self, uid: str, state: str) -> StateTable:
        columns = self.states.columns(uid)[state]
        return StateTable(
            self.states, self._operator(uid, state), uid, columns, self.max_parallelism
        )

    def _operator(self, uid: str, state: str) -> str:
        """Return the operator's own name, unless several of its scopes have such a state."""
        operators = self.states.operators
        name = uid.split(":")[0]
        having = [
            each for each in operator_uids(operators, name) if state in operators[each].states
        ]
        return name if having == [uid] else uid

    def _not_found(self, operator: str, state: str) -> StateNotFoundError:
        operators = self.states.operators
        known = [f"{self._operator(u, s)}.{s}" for u in operators for s in operators[u].states]
        what = f"the savepoint of epoch {self.epoch}" if self.kind == "savepoint" else ""
        return StateNotFoundError(
            f"no state {operator}.{state} in {what or f'epoch {self.epoch}'}\n"
            f"  url: {self.url}\n  found: {', '.join(known) or 'no state at all'}\n"
            "  next: use one of these names",
            operator=operator,
            state=state,
        )


def open_state(at: str | Store, epoch: int | None = None, *, hold_ms: int = READ_MS) -> StateSource:
    """Open the state of a checkpoint, a branch or a savepoint; by default the newest epoch.

    The epoch is held while the source is open, and at most `hold_ms` after its reader died; with
    0 nothing is written, and the epoch is not held.
    """
    store = at if isinstance(at, Store) else _store_at(at)
    url = store.url
    if store.exists(SAVEPOINT_PATH):
        return _open_saved(url, epoch)
    job = read_job(store)
    if job is None and not store.list(LOG_FOLDER):
        raise _nothing_at(url, "neither a checkpoint nor a savepoint")
    reading = Reading(store, epoch, hold_ms)
    return StateSource(
        url,
        EpochStates(store, reading),
        kind="epoch",
        epoch=reading.number,
        wall_ms=reading.epoch.wall_ms,
        job="" if job is None else job.name,
        max_parallelism=_group_count(reading) if job is None else job.max_parallelism,
    )


def open_epoch(store: Store, epoch: Epoch, max_parallelism: int) -> StateSource:
    """Open the state of an epoch that another process holds, in a worker."""
    return StateSource(
        store.url,
        EpochStates(store, Unheld(store, epoch)),
        kind="epoch",
        epoch=epoch.number,
        wall_ms=epoch.wall_ms,
        job="",
        max_parallelism=max_parallelism,
    )


def _open_saved(url: str, epoch: int | None) -> StateSource:
    savepoint = open_savepoint(url)
    info = savepoint.info
    if epoch is not None and epoch != info.epoch:
        raise StaleEpochError(
            f"the savepoint at {url} has another epoch\n  expected: {epoch}\n"
            f"  found: {info.epoch}\n  next: leave the epoch out",
            epoch=epoch,
        )
    return StateSource(
        url,
        SavepointStates(savepoint),
        kind="savepoint",
        epoch=info.epoch,
        wall_ms=info.created_ms,
        job=info.job,
        max_parallelism=info.max_parallelism,
    )


def _store_at(url: str) -> Store:
    try:
        store = open_store(url, create=False)
    except NotFoundError:
        raise _nothing_at(url, "no such folder") from None
    except ValueError as error:
        raise RestoreError(str(error), url=url) from None
    if is_being_removed(store):
        raise _nothing_at(url, "the rest of an interrupted removal")
    return store


def _nothing_at(url: str, found: str) -> RestoreError:
    return RestoreError(
        f"no state at {url}\n  found: {found}\n"
        "  next: give the checkpoint= that the job was started with, or a savepoint's folder",
        url=url,
    )


def _group_count(reading: Reading) -> int:
    """Return the number of key groups without job.json: the highest of all operators."""
    operators = reading.epoch.operators.values()
    return max((part.groups.stop for each in operators for part in each.ranges), default=1)


def _runs(groups: list[int]) -> Iterator[range]:
    """Yield the ranges of consecutive key groups."""
    start = 0
    for at in range(1, len(groups) + 1):
        if at == len(groups) or groups[at] != groups[at - 1] + 1:
            yield range(groups[start], groups[at - 1] + 1)
            start = at
