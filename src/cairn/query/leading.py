"""The drivers of a job, read from outside: from its checkpoint or its group.

Always true here:
- no clock is compared with another machine's: with `store:` a driver counts as alive if its record
  changes while it is watched;
- nothing is written, and nobody joins the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.in_store import (
    LeaderRecord,
    StandbyRecord,
    StoreLeadership,
)
from cairn.driver.coordinator.leadership.opening import open_leadership
from cairn.driver.group import Group
from cairn.query.health import checkpoint_health, newest_takeover
from cairn.report.status import Health
from cairn.storage.log import Log, job_of
from cairn.storage.manifest import JobInfo
from cairn.storage.notes import read_group
from cairn.storage.paths import LEADER_PATH, STANDBYS_FOLDER
from cairn.storage.store import NotFoundError, Store

LOOKS_PER_LEASE: Final = 20

Record = LeaderRecord | StandbyRecord


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The driver that took the job over last, as the log has it."""

    term: int
    host: str
    pid: int
    wall_ms: int
    """The time of its takeover."""


class LeadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The driver that leads a job, and those that wait."""

    checkpoint: str
    job: JobInfo | None
    health: Health
    driver: Driver | None
    """None before the first start."""
    group: Group | None
    """None if the job was started without `ha`."""


def newest_driver(log: Log) -> Driver | None:
    """Return the driver that took over last; None if there is none, or its record is retired."""
    found = newest_takeover(log)
    if found is None:
        return None
    return Driver(term=found.term, host=found.host, pid=found.pid, wall_ms=found.wall_ms)


def read_lead(store: Store, ha: str | None = None) -> LeadReport:
    """Return who leads and who waits; `ha` names the group if the checkpoint does not."""
    log = Log(store)
    url = ha or read_group(store)
    return LeadReport(
        checkpoint=store.url,
        job=job_of(store),
        health=checkpoint_health(log),
        driver=newest_driver(log),
        group=None if url is None else look_at_group(url, store),
    )


def look_at_group(url: str, store: Store) -> Group:
    """Look at a group without joining it. With `store:` this takes up to a lease."""
    leadership = open_leadership(url, store=store)
    if isinstance(leadership, StoreLeadership):
        return watch_records(store, leadership.url, leadership.lease_s)
    try:
        leader, standbys = leadership.leader(), leadership.waiting()
        return Group(url=leadership.url, leader=leader, standbys=standbys)
    finally:
        leadership.close()


def watch_records(
    store: Store,
    url: str,
    lease_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Group:
    """Watch the records of `store:` until each has changed, at most for a lease."""
    first = newest = _read_records(store)
    alive: set[str] = set()
    began_s = clock()
    while len(alive) < len(newest) and clock() - began_s < lease_s:
        sleep(lease_s / LOOKS_PER_LEASE)
        newest = _read_records(store)
        alive = {path for path in newest if path in alive or newest[path] != first.get(path)}
        # A record that is final will not change.
        alive |= {path for path, record in newest.items() if _is_resigned(record)}
    leads = newest.get(LEADER_PATH)
    is_led = leads is not None and LEADER_PATH in alive and not _is_resigned(leads)
    waiting = [newest[path].member for path in alive if path != LEADER_PATH]
    return Group(
        url=url,
        leader=leads.member if is_led and leads is not None else None,
        standbys=sorted(waiting, key=_since_ms),
    )


def _since_ms(member: Member) -> int:
    return member.since_ms


def _is_resigned(record: Record) -> bool:
    return isinstance(record, LeaderRecord) and record.resigned


def _read_records(store: Store) -> dict[str, Record]:
    found: dict[str, Record] = {}
    paths = [stored.path for stored in store.list(STANDBYS_FOLDER)]
    for path in (LEADER_PATH, *paths):
        kind: type[Record] = LeaderRecord if path == LEADER_PATH else StandbyRecord
        try:
            found[path] = msgspec.json.decode(store.get(path), type=kind)
        except (NotFoundError, msgspec.MsgspecError):
            continue  # Gone since it was listed, or damaged: as good as none.
    return found
