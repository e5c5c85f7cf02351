"""Operator lists after a change of parallelism: joined, and handed out again.

Each subtask reads the lists of all subtasks of the parent epoch, which are small, and takes
its share. So every attempt, wherever it runs, gets the same lists.

Always true here:
- lists are joined in the order of the subtasks, and stay in order when they are handed out;
- split: each item is in one list, and the lengths of any two lists differ by at most one;
- union: each item is in every list, once, also where it came from several as copies of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import pyarrow as pa

from cairn.backends.handles.operator_list import OWN
from cairn.backends.overlay import MapTable
from cairn.slot.holding import Holding
from cairn.snapshots.reader import EpochReader
from cairn.state import OperatorList
from cairn.storage.manifest import Epoch, StateDecl
from cairn.storage.store import Store
from cairn.types.evolution import reshape

Item = tuple[int, Any]
"""The number of a copy, or OWN, and the stored value."""


def share_of(
    lists: Sequence[Sequence[Item]], subtask: int, parallelism: int, redistribute: str
) -> list[Item]:
    """The items of one subtask; `lists` are those of the subtasks before, in their order."""
    joined = list(_once(lists))
    if redistribute == "union":
        return [(number, value) for number, (_, value) in enumerate(joined)]
    first = len(joined) * subtask // parallelism
    stop = len(joined) * (subtask + 1) // parallelism
    return [(OWN, value) for _, value in joined[first:stop]]


def _once(lists: Sequence[Sequence[Item]]) -> Iterator[Item]:
    seen: set[int] = set()
    for items in lists:
        for copy, value in items:
            if copy not in seen:
                yield copy, value
            if copy != OWN:
                seen.add(copy)


def redistribute(
    holding: Holding,
    store: Store,
    epoch: Epoch,
    *,
    subtask: int,
    owners: int,
    scratch: str,
) -> None:
    """Give a holding, which is empty, its share of the lists of a committed epoch.

    The first `owners` subtasks share the items of lists that are split.
    """
    states = epoch.operators[holding.uid].states
    with EpochReader(store, epoch, scratch) as reader:
        for name in holding.tables.keys() & states.keys():
            table = holding.tables[name]
            assert isinstance(table, MapTable), "an operator list is stored as a map"
            declaration = table.declaration
            assert isinstance(declaration, OperatorList)
            lists: dict[int, list[tuple[Any, Any]]] = {}
            columns = reader.columns(holding.uid)[name]
            for batch in reader.rows(holding.uid, name):
                rows = columns.to_stored(batch)
                for owner, place, value in _read_stored(holding, table, rows, states[name]):
                    lists.setdefault(owner, []).append((place, value))
            given = [
                [(place.copy, value) for place, value in sorted(lists[owner], key=itemgetter(0))]
                for owner in sorted(lists)
            ]
            share = share_of(given, subtask, owners, declaration.redistribute)
            if share:
                place_of = table.entries.normalise_key
                items = {place_of((at, copy)): value for at, (copy, value) in enumerate(share)}
                table.rows[holding.groups.start].promote({subtask: items})


def _read_stored(
    holding: Holding, table: MapTable, rows: pa.RecordBatch, held: StateDecl
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (subtask, place, value) in the declared type, without values that migrate= drops."""
    batch = reshape(rows, table.declaration, holding.key_type, operator=holding.uid, held=held)
    batch = batch.filter(batch["live"])
    yield from zip(
        table.keys.decode_keys(batch["key"]),
        table.entries.decode_keys(batch["entry"]),
        table.values.decode(batch["value"]),
        strict=True,
    )
