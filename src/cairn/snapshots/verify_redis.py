"""Compare the rows in Redis with the log.

A key group whose marker is an epoch in the log must have the rows of that epoch. A key group that
Redis has lost is not damage: the next restore reads it from the checkpoint. Neither are rows that a
slot with other types of state has written, or rows that have expired since the epoch.

Always true here:
- nothing is changed, and a running job is not disturbed.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from cairn.backends.cached.described import describe_state
from cairn.backends.cached.numbers import state_number
from cairn.backends.cached.rows import scan_rows
from cairn.backends.cached.timer_names import KIND
from cairn.backends.heap.backend import HeapBackend
from cairn.backends.layout import RowsByGroup
from cairn.backends.overlay import make_table
from cairn.backends.packing import Packing, packing_of
from cairn.backends.redis.cleaning import addresses, list_groups
from cairn.backends.redis.database import LostStateError, RedisDatabase, call
from cairn.backends.redis.link import Link, describe
from cairn.errors import CairnError
from cairn.functions import EVENT_TIMERS, PROCESSING_TIMERS
from cairn.snapshots.columns import StateColumns
from cairn.snapshots.reader import EpochReader
from cairn.storage.log import Log, job_of
from cairn.storage.manifest import Epoch
from cairn.storage.store import Store
from cairn.types.codec import Key

Row = tuple[str, str]
"""State, and the row as text."""


class Checked(NamedTuple):
    """Findings, as (place, what) each."""

    damage: list[tuple[str, str]]
    lost: list[tuple[str, str]]
    groups: int
    """Number of key groups that were compared."""


def verify_redis(store: Store) -> Checked:
    """Compare each key group in Redis with the epoch that its marker names."""
    checked = Checked([], [], 0)
    job = job_of(store)
    if job is None:
        return checked
    for address in addresses(store):
        link = Link(address, "cairn:verify")
        try:
            found = _check_server(link, store, job.job_id, describe(address))
        except CairnError as error:
            found = Checked([], [(describe(address), error.message.splitlines()[0])], 0)
        finally:
            link.close()
        checked = Checked(
            checked.damage + found.damage, checked.lost + found.lost, checked.groups + found.groups
        )
    return checked


def _check_server(link: Link, store: Store, job_id: str, where: str) -> Checked:
    log = Log(store)
    damage: list[tuple[str, str]] = []
    lost: list[tuple[str, str]] = []
    compared = 0
    newest = log.newest_epoch()
    # The job's clock may be ahead of this machine's.
    now_ms = max(time.time_ns() // 1_000_000, 0 if newest is None else newest.now_ms)
    by_operator = itertools.groupby(list_groups(link, job_id), key=lambda each: each[0])
    for operator, claimed in by_operator:
        groups = sorted(group for _, group in claimed)
        database = RedisDatabase(link, job_id, operator, {})
        fences = call(link, [["HMGET", database.keys(group)[0], "v", "s"] for group in groups])
        by_fence: dict[tuple[str, frozenset[int]], list[int]] = {}
        for group, (marker, described) in zip(groups, fences, strict=True):
            fence = (marker or b"").decode(), _numbers_in(described)
            by_fence.setdefault(fence, []).append(group)
        for (marker, numbers), owned in by_fence.items():
            place = f"{where}, operator {operator!r}, key groups {_ranges(owned)}"
            epoch = _epoch_of(log, marker)
            if epoch is None or operator not in epoch.operators:
                if not marker or marker.startswith("~"):
                    lost.append((place, "Redis has no whole epoch; the next restore replaces it"))
                continue
            # Rows that expired later may be gone from Redis already.
            epoch = msgspec.structs.replace(epoch, now_ms=max(epoch.now_ms, now_ms))
            columns = EpochReader(store, epoch).columns(operator)
            packings = {name: _packing(each, owned[-1] + 1) for name, each in columns.items()}
            database.numbers = {
                name: state_number(operator, name, describe_state(packing, {}))
                for name, packing in packings.items()
            }
            if not numbers.issuperset(database.numbers.values()):
                lost.append((place, f"its states are not those of epoch {epoch.number}"))
                continue
            try:
                for group, what in _compare(store, database, epoch, marker, owned, packings):
                    place = f"{where}, operator {operator!r}, key group {group}"
                    damage.append((place, f"{what} of epoch {epoch.number}"))
                compared += len(owned)
            except LostStateError as error:
                lost.append((place, error.message.splitlines()[-2].strip()))
    return Checked(damage, lost, compared)


def _epoch_of(log: Log, marker: str) -> Epoch | None:
    number, _, nonce = marker.partition(":")
    if not number.isdigit() or int(number) < log.oldest_kept():
        return None
    try:
        epoch = log.epoch(int(number))
    except CairnError:
        return None
    return epoch if epoch.nonce == nonce else None


def _compare(
    store: Store,
    database: RedisDatabase,
    epoch: Epoch,
    marker: str,
    owned: list[int],
    packings: Mapping[str, Packing],
) -> Iterator[tuple[int, str]]:
    """Yield each key group that differs, and how."""
    operator = database.operator
    with EpochReader(store, epoch) as reader:
        columns = reader.columns(operator)
        for group in owned:
            database.markers[group] = marker
            expected: Counter[Row] = Counter()
            for chunk in reader.chunks(operator, range(group, group + 1), ordered=False):
                for name, batches in chunk.rows.items():
                    expected.update(_texts(name, batches))
            found: Counter[Row] = Counter()
            for name, packing in packings.items():
                pieces = (
                    describe_state(packing, {})
                    .layout(name)
                    .pieces(_rows(database, name, packing, group), 8192)
                )
                found.update(_texts(name, map(columns[name].of_stored, pieces)))
            missing, more = (expected - found).total(), (found - expected).total()
            if missing or more:
                yield group, f"{missing} rows are missing, and {more} others are not those"


def _numbers_in(described: bytes | None) -> frozenset[int]:
    """Return the numbers of the states that the fence of a key group lists."""
    return frozenset(map(int, msgspec.json.decode(described or b"{}", type=dict[str, Any])))


def _packing(columns: StateColumns, group_count: int) -> Packing:
    """Return the form of a state in Redis."""
    table = make_table(columns.declaration, columns.key_type, HeapBackend(), group_count)
    packing = packing_of(table)
    if columns.declaration.name in (EVENT_TIMERS, PROCESSING_TIMERS):
        return Packing(KIND, packing.keys, packing.values, packing.entries)
    return packing


def _rows(database: RedisDatabase, name: str, packing: Packing, group: int) -> RowsByGroup:
    rows: dict[Key, object] = dict(scan_rows(database, database.prefix(name, group), packing))
    if rows:
        yield group, rows


def _texts(name: str, batches: Iterable[object]) -> Iterator[Row]:
    for batch in batches:
        for row in batch.to_pylist():  # type: ignore[attr-defined]
            yield name, repr(row)


def _ranges(groups: list[int]) -> str:
    return f"{groups[0]} to {groups[-1]}" if len(groups) > 1 else str(groups[0])
