"""The group of drivers of a job, as one of them or a reader sees it."""

from __future__ import annotations

import msgspec

from cairn.driver.coordinator.leadership.base import Member
from cairn.errors import EpochError


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The driver that leads, and those that wait."""

    url: str
    """The address of the group, without secrets."""
    leader: Member | None
    """The driver that leads; None if nobody is known to."""
    standbys: list[Member]
    """The drivers that wait, the next in turn first."""
    this: Member | None = None
    """The driver that was asked; None if the group was read from outside."""


def choose_successor(waiting: list[Member], to: str | None, job: str) -> Member:
    """Return the standby that takes the lead: `to` is an identity or a host, None any.

    EpochError if nobody fits. A hot standby is preferred, and of those the one with the newest
    epoch.
    """
    named = [member for member in waiting if to in (None, member.identity, member.host)]
    if to is not None and not named:
        there = ", ".join(sorted(member.host for member in waiting)) or "none"
        raise EpochError(
            f"no standby of job {job!r} has the host or identity {to!r}: waiting: {there}\n"
            "  next: choose one that waits; cairn leader lists them"
        )
    able = [member for member in named if member.refusal is None]
    if not able and named:
        refused = min(named, key=lambda member: member.since_ms)
        cause = (refused.refusal or "").partition("\n")[0]
        raise EpochError(
            f"no standby of job {job!r} could take over: {refused.host} would be refused: {cause}\n"
            "  next: start a driver whose program continues the state of this one"
        )
    if not able:
        raise EpochError(
            f"no standby of job {job!r} could take over: none waits\n"
            "  next: start another driver with the same ha= and checkpoint"
        )
    return min(able, key=lambda member: (member.standby != "hot", -(member.epoch or 0)))
