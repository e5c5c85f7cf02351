"""Leadership by a Lease of Kubernetes (`kubernetes:lease/NAME?namespace=x&lease=15s`).

The Lease NAME (coordination.k8s.io/v1) names its holder, which leads and renews it. A standby
watches the lease change, by its own monotonic clock. If it does not change for a lease, or nobody
holds it, the standby replaces it on the condition that it is still the one that was seen
(`resourceVersion`). Each standby renews a lease of its own, NAME.HASH: every object has one
writer, so a standby that describes itself never makes a renewal of the leader fail.

Always true here:
- a lease is replaced only on the condition of its version; status 409 means that another was first;
- a grant is one pair of holder and `leaseTransitions`: a write that was not acknowledged is found
  by it, and an earlier grant of the same process is told apart;
- times in a lease are for people: they are written and never compared.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import re
import threading
import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from cairn.driver.coordinator.leadership.base import Member, Sign
from cairn.driver.coordinator.leadership.deadline import Deadline
from cairn.driver.coordinator.leadership.leases import (
    RESOURCE,
    ConflictError,
    Json,
    Leases,
    describe,
)
from cairn.driver.coordinator.leadership.outage import Outage
from cairn.errors import PlanError
from cairn.logs import logger

RENEWALS_PER_LEASE: Final = 3
POLLS_PER_LEASE: Final = 5
CONFLICTS_MAX: Final = 3
MEMBER_ANNOTATION: Final = "cairn/member"
NEXT_ANNOTATION: Final = "cairn/next"
GROUP_LABEL: Final = "cairn/standby-of"
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,44}[a-z0-9])?")


class KubernetesLeadership:
    """The members around one lease."""

    def __init__(self, place: str, *, lease_s: float, namespace: str) -> None:
        kind, _, self.name = place.partition("/")
        if kind != "lease" or not _NAME.fullmatch(self.name):
            raise PlanError(
                f"a kubernetes: leadership names a lease, found {place!r}\n"
                "  expected: kubernetes:lease/NAME, with up to 46 lower-case letters, digits and -"
            )
        self.lease_s = lease_s
        # A request that takes longer would leave no time for a second one before the end.
        self.leases = Leases(namespace, timeout_s=lease_s / RENEWALS_PER_LEASE)
        self._member: Member | None = None
        self._seen: dict[str, tuple[Any, float]] = {}
        self._standby_at_s = -math.inf
        self._grant: KubernetesGrant | None = None
        self._outage = Outage("standby: the API of Kubernetes cannot be used")

    @property
    def url(self) -> str:
        place = f"kubernetes:lease/{self.name}?namespace={self.leases.namespace}"
        return f"{place}&lease={self.lease_s:g}s"

    def campaign(self, member: Member, stop: threading.Event) -> KubernetesGrant | None:
        self._member = member
        self._standby_at_s = -math.inf
        while not stop.is_set():
            grant = self.poll()
            if grant is not None:
                return grant
            stop.wait(self.lease_s / POLLS_PER_LEASE)
        self.remove_standby(member)
        return None

    def poll(self) -> KubernetesGrant | None:
        """Look once: take the lease if it is free or was not renewed. Errors: not now."""
        assert self._member is not None, "campaign sets the member"
        try:
            self._write_standby(self._member)
        except Exception as error:
            # Only what the others see of this member: it must not keep the job down.
            logger.debug("the lease of a standby was not renewed: %s", describe(error))
        try:
            grant = self._try(self._member)
        except ConflictError:
            self._seen.pop(self.name, None)
            return None
        except Exception as error:
            self._outage.note(error, kind=describe(error))
            self._seen.pop(self.name, None)
            return None
        self._outage.end()
        return grant

    def update(self, member: Member) -> None:
        # Written with the next renewal: a hot standby changes more often than an API should hear.
        self._member = member
        if self._grant is not None:
            self._grant.member = member

    def leader(self) -> Member | None:
        begun_s = time.monotonic()
        try:
            lease = self.leases.read(self.name)
        except Exception:
            return None
        if lease is None or not _holder(lease):
            return None
        is_fresh = self._idle_s("leader", _version(lease), begun_s) < self._patience_s(lease)
        return _member(lease) if is_fresh else None

    def waiting(self) -> list[Member]:
        try:
            standbys = self._standbys()
        except Exception:
            return []
        found = [_member(lease) for lease, idle_s in standbys if idle_s < self.lease_s]
        return sorted((each for each in found if each is not None), key=lambda each: each.since_ms)

    def signs(self) -> dict[str, Sign]:
        """Return the leases that are held, by name; errors of the API are raised."""
        lease = self.leases.read(self.name)
        held = [] if lease is None or not _holder(lease) else [lease]
        found = {}
        for each in [*held, *self.leases.list(f"{GROUP_LABEL}={self.name}")]:
            name, member = each["metadata"]["name"], _member(each)
            if member is not None:
                found[name] = Sign(_version(each), member, leads=name == self.name)
        return found

    def close(self) -> None:
        if self._grant is not None:
            self._grant.resign()
        if self._member is not None:
            self.remove_standby(self._member)
        with suppress(Exception):
            self.leases.close()

    def remove_standby(self, member: Member) -> None:
        try:
            self.leases.delete(self._standby_name(member))
        except Exception as error:
            logger.debug("the lease of a standby stays for a while: %s", describe(error))

    def remove_dead(self) -> None:
        """Delete the leases of standbys that were not renewed for two leases."""
        for lease, idle_s in self._standbys():
            if idle_s >= 2 * self.lease_s:
                self.leases.delete(lease["metadata"]["name"])

    def record(self, member: Member, *, transitions: int) -> Json:
        """Return the leader's lease as this member writes it."""
        return {
            "apiVersion": "/".join(RESOURCE),
            "kind": "Lease",
            "metadata": {
                "name": self.name,
                "namespace": self.leases.namespace,
                "annotations": {MEMBER_ANNOTATION: msgspec.json.encode(member).decode()},
            },
            "spec": {
                "holderIdentity": member.identity,
                "leaseDurationSeconds": max(math.ceil(self.lease_s), 1),
                "leaseTransitions": transitions,
                "renewTime": _now(),
            },
        }

    def _try(self, member: Member) -> KubernetesGrant | None:
        begun_s = time.monotonic()
        found = self.leases.read(self.name)
        transitions = 0
        if found is not None:
            version, transitions = _version(found), _transitions(found) + 1
            idle_s = self._idle_s(self.name, version, begun_s)
            named = _annotations(found).get(NEXT_ANNOTATION)
            # An own one: a write that was not acknowledged, or of a grant that was lost.
            is_free = _holder(found) == member.identity
            if not _holder(found):
                is_free = named in (None, member.identity)
            if not is_free and idle_s < self._patience_s(found):
                return None
        lease = self.record(member, transitions=transitions)
        lease["spec"]["acquireTime"] = lease["spec"]["renewTime"]
        if found is not None:
            lease["metadata"]["resourceVersion"] = version
        begun_s = time.monotonic()
        written = self.leases.write(lease)
        self._seen.pop(self.name, None)
        if written is None:
            return None
        self._grant = KubernetesGrant(self, member, written, begun_s)
        return self._grant

    def _patience_s(self, lease: Json) -> float:
        """Return the longer of the own lease and the holder's: a healthy leader is left alone."""
        held_s = lease.get("spec", {}).get("leaseDurationSeconds") or 0
        return self.lease_s if held_s - self.lease_s < 1 else float(held_s)

    def _idle_s(self, name: str, version: str, begun_s: float) -> float:
        """Return how long the lease was unchanged when the read begun at `begun_s` found it."""
        seen = self._seen.get(name)
        if seen is None or seen[0] != version:
            self._seen[name] = (version, time.monotonic())
            return 0.0
        return begun_s - seen[1]

    def _standby_name(self, member: Member) -> str:
        return f"{self.name}.{hashlib.sha256(member.identity.encode()).hexdigest()[:16]}"

    def _write_standby(self, member: Member) -> None:
        now_s = time.monotonic()
        if now_s - self._standby_at_s < self.lease_s / RENEWALS_PER_LEASE:
            return
        found = self.leases.read(self._standby_name(member))
        lease = self.record(member, transitions=0)
        lease["metadata"]["name"] = self._standby_name(member)
        lease["metadata"]["labels"] = {GROUP_LABEL: self.name}
        if found is not None:
            lease["metadata"]["resourceVersion"] = _version(found)
        with suppress(ConflictError):  # Removed as dead, or an own write that arrived late.
            self.leases.write(lease)
            self._standby_at_s = now_s

    def _standbys(self) -> list[tuple[Json, float]]:
        """Return the leases of standbys, each with the seconds without a change."""
        begun_s = time.monotonic()
        found = self.leases.list(f"{GROUP_LABEL}={self.name}")
        names = {lease["metadata"]["name"] for lease in found}
        for name in [*self._seen]:
            if name.startswith(f"{self.name}.") and name not in names:
                self._seen.pop(name, None)
        return [
            (lease, self._idle_s(lease["metadata"]["name"], _version(lease), begun_s))
            for lease in found
        ]


class KubernetesGrant:
    """The lead, while the lease names this member and is renewed."""

    only_if_last: int | None = None

    def __init__(
        self, group: KubernetesLeadership, member: Member, lease: Json, begun_s: float
    ) -> None:
        self.member = member
        self._group = group
        self._version = _version(lease)
        self._transitions = _transitions(lease)
        self._acquired = lease["spec"].get("acquireTime")
        self._deadline = Deadline()
        self._deadline.begin(group.lease_s, begun_s)
        self._lock = threading.Lock()
        self._outage = Outage("leader: the API of Kubernetes cannot be used")
        self._deadline.watch()
        threading.Thread(target=self._run, name="cairn-renewals", daemon=True).start()

    @property
    def lost(self) -> threading.Event:
        return self._deadline.lost

    def confirm(self, term: int) -> None:
        """Nothing to write for the lead: the lease is held already."""
        self._group.remove_standby(self.member)

    def resign(self, to: str | None = None) -> None:
        with self._lock:
            if not self._deadline.check():
                return
            self.lost.set()
            lease = self._group.record(self.member, transitions=self._transitions)
            del lease["spec"]["holderIdentity"]
            if to is not None:
                lease["metadata"]["annotations"][NEXT_ANNOTATION] = to
            try:
                self._write(lease)
            except Exception as error:
                logger.warning("the lead ends with its lease: %s", describe(error))

    def renew(self) -> None:
        """Replace the lease, unless another member holds it; errors leave the deadline as it is."""
        begun_s = time.monotonic()
        try:
            with self._lock:
                if not self._deadline.check():
                    return
                lease = self._group.record(self.member, transitions=self._transitions)
                if self._write(lease):
                    self._deadline.extend(begun_s)
                else:
                    self.lost.set()
        except Exception as error:
            self._outage.note(error, kind=describe(error))
            return
        self._outage.end()
        try:
            self._group.remove_dead()
        except Exception as error:
            logger.debug("dead standbys are looked for again later: %s", describe(error))

    def _write(self, lease: Json) -> bool:
        """Replace the lease if it is of this grant; False if it is not."""
        lease["spec"]["acquireTime"] = self._acquired
        for _ in range(CONFLICTS_MAX):
            lease["metadata"]["resourceVersion"] = self._version
            try:
                written = self._group.leases.write(lease)
            except ConflictError:
                # It may be an own write that was not acknowledged.
                found = self._group.leases.read(self._group.name)
                if found is None or not self._is_own(found):
                    return False
                self._version = _version(found)
            else:
                if written is not None:
                    self._version = _version(written)
                return written is not None
        raise ConflictError

    def _is_own(self, lease: Json) -> bool:
        own = (self.member.identity, self._transitions)
        return (_holder(lease), _transitions(lease)) == own

    def _run(self) -> None:
        while not self.lost.wait(self._group.lease_s / RENEWALS_PER_LEASE):
            self.renew()


def _version(lease: Json) -> str:
    return str(lease["metadata"]["resourceVersion"])


def _holder(lease: Json) -> str:
    return lease.get("spec", {}).get("holderIdentity") or ""


def _transitions(lease: Json) -> int:
    return lease.get("spec", {}).get("leaseTransitions") or 0


def _annotations(lease: Json) -> dict[str, str]:
    return lease["metadata"].get("annotations") or {}


def _member(lease: Json) -> Member | None:
    try:
        return msgspec.json.decode(_annotations(lease).get(MEMBER_ANNOTATION, ""), type=Member)
    except msgspec.MsgspecError:
        return None


def _now() -> str:
    """Return the time as the API wants it: always with microseconds."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
