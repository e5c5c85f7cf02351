"""Leadership by records in the checkpoint (`store:`): nothing to install.

The leader writes `leader.json` with a counter. A standby watches that record and the log's newest
number change, by its own monotonic clock. If neither changes for a lease, it is granted the lead
on the condition that the log still ends with that number: the log decides between standbys.

Always true here:
- a grant without a takeover fences nobody, and a takeover restarts the wait of all others;
- a leader that finds a later term writes its record no more;
- a resignation counts only if no later term is in the log: a paused leader may write it late;
- a record counts as unchanged from the end of its first read to the begin of its last one, so a
  standby that was paused between them has seen nothing;
- a store that cannot be read restarts the wait; a damaged record is as good as none.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final
from urllib.parse import quote

import msgspec

from cairn.driver.coordinator.leadership.base import Member
from cairn.driver.coordinator.leadership.deadline import Clock, Deadline
from cairn.driver.coordinator.leadership.outage import Outage
from cairn.logs import logger
from cairn.storage.log import Log
from cairn.storage.paths import LEADER_PATH, STANDBYS_FOLDER
from cairn.storage.store import NotFoundError, Store

RENEWALS_PER_LEASE: Final = 3
POLLS_PER_LEASE: Final = 5


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of leader.json."""

    term: int
    counter: int
    member: Member
    resigned: bool = False
    to: str | None = None


class StandbyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of standbys/<identity>.json."""

    counter: int
    member: Member


class StoreLeadership:
    """The drivers of one checkpoint. `clock` and `in_background` are for simulations."""

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float = 10.0,
        clock: Clock = time.monotonic,
        in_background: bool = True,
    ) -> None:
        self.store = store
        self.lease_s = lease_s
        self.clock = clock
        self.in_background = in_background
        self.member: Member | None = None
        self._seen: dict[str, tuple[Any, float]] = {}
        self._counter = 0
        self._standby_at_s = float("-inf")
        self._grant: StoreGrant | None = None
        self._outage = Outage("standby: the checkpoint cannot be read")

    @property
    def url(self) -> str:
        return f"store:?lease={self.lease_s:g}s"

    def campaign(self, member: Member, stop: threading.Event) -> StoreGrant | None:
        self.member = member
        self._standby_at_s = float("-inf")
        while not stop.is_set():
            grant = self.poll()
            if grant is not None:
                return grant
            stop.wait(self.lease_s / POLLS_PER_LEASE)
        self._remove([_standby_path(member.identity)])
        return None

    def poll(self) -> StoreGrant | None:
        """Look once: return a grant if the lead may be taken now. Errors of the store: not now."""
        assert self.member is not None, "campaign sets the member"
        try:
            self._write_standby(self.member)
            begun_s = self.clock()
            log = Log(self.store)
            last = log.newest_number() or 0
            found = self._read(LEADER_PATH, LeaderRecord)
            is_free = found is None and last == 0
            if found is not None and found.resigned and found.to in (None, self.member.identity):
                is_free = last == 0 or log.read(last).term <= found.term
        except Exception as error:
            self._outage.note(error)
            self._seen.pop(LEADER_PATH, None)
            return None
        self._outage.end()
        idle_s = self._idle_s(LEADER_PATH, (found, last), begun_s)
        if not is_free and idle_s < self.lease_s:
            return None
        # After a takeover that failed, the next grant needs a whole wait again.
        self._seen.pop(LEADER_PATH, None)
        self._grant = StoreGrant(self, self.member, last)
        return self._grant

    def update(self, member: Member) -> None:
        self.member = member
        self._standby_at_s = float("-inf")
        if self._grant is not None:
            self._grant.member = member

    def leader(self) -> Member | None:
        begun_s = self.clock()
        try:
            found = self._read(LEADER_PATH, LeaderRecord)
        except Exception:
            return None
        if found is None or found.resigned:
            return None
        is_fresh = self._idle_s("leader", found, begun_s) < self.lease_s
        return found.member if is_fresh else None

    def waiting(self) -> list[Member]:
        try:
            found = self._standbys()
        except Exception:
            return []
        return [record.member for _, record, idle_s in found if idle_s < self.lease_s]

    def close(self) -> None:
        if self._grant is not None:
            self._grant.resign()
        if self.member is not None:
            self._remove([_standby_path(self.member.identity)])

    def remove_dead(self) -> None:
        """Remove the files of standbys that have written nothing for two leases."""
        self._remove([path for path, _, idle_s in self._standbys() if idle_s >= 2 * self.lease_s])

    def _standbys(self) -> list[tuple[str, StandbyRecord, float]]:
        """Return path, record and seconds without a change of each; an order for people only."""
        found = []
        listed = self.store.list(STANDBYS_FOLDER)
        for path in [*self._seen]:
            if path.startswith(STANDBYS_FOLDER) and path not in {each.path for each in listed}:
                self._seen.pop(path, None)
        for stored in listed:
            begun_s = self.clock()
            record = self._read(stored.path, StandbyRecord)
            if record is not None:
                found.append((stored.path, record, self._idle_s(stored.path, record, begun_s)))
        return sorted(found, key=lambda each: each[1].member.since_ms)

    def _write_standby(self, member: Member) -> None:
        now_s = self.clock()
        if now_s - self._standby_at_s >= self.lease_s / RENEWALS_PER_LEASE:
            self._counter += 1
            record = StandbyRecord(counter=self._counter, member=member)
            self.store.put(_standby_path(member.identity), msgspec.json.encode(record))
            self._standby_at_s = now_s

    def _idle_s(self, name: str, value: Any, begun_s: float) -> float:
        """Return how long this value was unchanged when the read begun at `begun_s` found it."""
        seen = self._seen.get(name)
        if seen is None or seen[0] != value:
            self._seen[name] = (value, self.clock())
            return 0.0
        return begun_s - seen[1]

    def _read(self, path: str, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(self.store.get(path), type=kind)
        except (NotFoundError, msgspec.MsgspecError):
            return None  # A damaged record must not keep the job down: the log decides.

    def _remove(self, paths: list[str]) -> None:
        try:
            self.store.delete(paths)
        except Exception as error:
            logger.warning("records of standbys cannot be removed: %s", error)


class StoreGrant:
    """The lead, if the takeover succeeds; after `confirm` it is renewed."""

    def __init__(self, group: StoreLeadership, member: Member, last: int) -> None:
        self.member = member
        self._group = group
        self._last = last
        self._term = 0
        self._counter = 0
        # It has no end until the takeover: only the log decides, and there is nothing to renew.
        self._deadline = Deadline(clock=group.clock)
        self._lock = threading.Lock()
        self._outage = Outage("the lead could not be renewed")

    @property
    def lost(self) -> threading.Event:
        return self._deadline.lost

    @property
    def only_if_last(self) -> int | None:
        return self._last

    def check(self) -> bool:
        """Return True while the grant is held, by the clock."""
        return self._deadline.check()

    def confirm(self, term: int) -> None:
        group = self._group
        self._term = term
        self._deadline.begin(group.lease_s, group.clock())
        self.renew()
        group._remove([_standby_path(self.member.identity)])
        if group.in_background:
            self._deadline.watch()
            threading.Thread(target=self._run, name="cairn-renewals", daemon=True).start()

    def renew(self) -> None:
        """Write the record again, unless a later term has; errors leave the deadline as it is."""
        group = self._group
        begun_s = group.clock()
        try:
            found = group._read(LEADER_PATH, LeaderRecord)
            if found is not None and found.term > self._term:
                self.lost.set()
            self._write()
            self._deadline.extend(begun_s)
        except Exception as error:
            self._outage.note(error)
            return
        self._outage.end()
        try:
            group.remove_dead()
        except Exception as error:
            logger.debug("dead standbys are looked for again later: %s", error)

    def resign(self, to: str | None = None) -> None:
        with self._lock:
            if not self._deadline.check():
                return
            self._deadline.lost.set()
            if self._term > 0:
                try:
                    self._put(resigned=True, to=to)
                except Exception as error:
                    logger.warning("the lead ends with its lease: %s", error)

    def _run(self) -> None:
        while not self.lost.wait(self._group.lease_s / RENEWALS_PER_LEASE):
            self.renew()

    def _write(self) -> None:
        with self._lock:
            if self._deadline.check():
                self._put()

    def _put(self, **fields: Any) -> None:
        self._counter += 1
        record = LeaderRecord(term=self._term, counter=self._counter, member=self.member, **fields)
        self._group.store.put(LEADER_PATH, msgspec.json.encode(record))


def _standby_path(identity: str) -> str:
    return f"{STANDBYS_FOLDER}/{quote(identity, safe='')}.json"
