"""The drivers of a job, read from outside: from its checkpoint or its group.

Always true here:
- no clock is compared with another machine's: with `store:` and Kubernetes a driver counts as alive
  if its record changes while it is watched;
- nothing is written, and nobody joins the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from cairn.driver.coordinator.leadership.base import Member, Sign
from cairn.driver.coordinator.leadership.in_store import (
    LeaderRecord,
    StandbyRecord,
    StoreLeadership,
)
from cairn.driver.coordinator.leadership.kubernetes import KubernetesLeadership
from cairn.driver.coordinator.leadership.leases import describe
from cairn.driver.coordinator.leadership.opening import open_leadership
from cairn.driver.coordinator.leadership.zookeeper import ZooKeeperLeadership
from cairn.driver.group import Group
from cairn.errors import CairnError, QueryError
from cairn.query.health import checkpoint_health, newest_takeover
from cairn.report.status import Health
from cairn.storage.log import Log, job_of
from cairn.storage.manifest import JobInfo
from cairn.storage.notes import read_group
from cairn.storage.paths import LEADER_PATH, STANDBYS_FOLDER
from cairn.storage.store import NotFoundError, Store

LOOKS_PER_LEASE: Final = 20


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
    """Look at a group without joining it. Without ZooKeeper this takes up to a lease.

    QueryError if its service does not answer.
    """
    leadership = open_leadership(url, store=store)
    shown = leadership.url
    try:
        if isinstance(leadership, StoreLeadership):
            return watch(lambda: _read_records(store), shown, leadership.lease_s)
        if isinstance(leadership, KubernetesLeadership):
            return watch(leadership.signs, shown, leadership.lease_s)
        if isinstance(leadership, ZooKeeperLeadership):
            leader, standbys = leadership.look()
            return Group(url=shown, leader=leader, standbys=standbys)
        raise AssertionError(f"a leadership that nobody can look at: {shown}")
    except CairnError:
        raise
    except Exception as error:
        # The text of an error may have secrets in it.
        raise QueryError(
            f"the group {shown} cannot be read: {describe(error)}\n"
            "  next: check that its service runs and may be reached from here, with the same "
            "credentials as the drivers"
        ) from None
    finally:
        leadership.close()


def watch(
    read: Callable[[], dict[str, Sign]],
    url: str,
    lease_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Group:
    """Read the signs of a group until each has changed, at most for a lease."""
    first = newest = read()
    alive: set[str] = set()
    began_s = clock()
    while len(alive) < len(newest) and clock() - began_s < lease_s:
        sleep(lease_s / LOOKS_PER_LEASE)
        newest = read()
        alive = {name for name in newest if name in alive or newest[name] != first.get(name)}
    living = [newest[name] for name in alive]
    return Group(
        url=url,
        leader=next((sign.member for sign in living if sign.leads), None),
        standbys=sorted((sign.member for sign in living if not sign.leads), key=_since_ms),
    )


def _since_ms(member: Member) -> int:
    return member.since_ms


def _read_records(store: Store) -> dict[str, Sign]:
    found: dict[str, Sign] = {}
    for path in (LEADER_PATH, *(stored.path for stored in store.list(STANDBYS_FOLDER))):
        leads = path == LEADER_PATH
        kind: type[LeaderRecord | StandbyRecord] = LeaderRecord if leads else StandbyRecord
        try:
            record = msgspec.json.decode(store.get(path), type=kind)
        except (NotFoundError, msgspec.MsgspecError):
            continue  # Gone since it was listed, or damaged: as good as none.
        if not (isinstance(record, LeaderRecord) and record.resigned):
            found[path] = Sign(record, record.member, leads)
    return found
