"""Leadership: several drivers wait, one of them runs the job.

A `Leadership` grants the lead to one member at a time. It is about liveness only: the log decides
who may publish, so a leader that still believes in its grant publishes nothing after another
driver's takeover.

Always true here:
- a grant that is lost stays lost: its member campaigns again;
- no clock is compared with another machine's;
- errors of the service never end a member that waits: it tries again.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

Warmth = Literal["warm", "hot"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A driver that leads or waits, as the others see it."""

    identity: str
    """Unique to this process: a new one for each start."""
    host: str
    pid: int
    url: str | None = None
    """The address of its HTTP API; None if it serves none."""
    since_ms: int = 0
    """Its start of leading, or of waiting, by its own clock: for people, never compared."""
    standby: Warmth = "warm"
    epoch: int | None = None
    """The newest epoch that a hot standby's slots hold."""
    refusal: str | None = None
    """Why this member could not continue the job now; None if it could."""


class Sign(NamedTuple):
    """The record that a driver renews while it lives, as a reader outside of the group sees it."""

    version: Any
    """Another one after each renewal."""
    member: Member
    leads: bool


class Grant(Protocol):
    """The lead, while it is held."""

    @property
    def lost(self) -> threading.Event:
        """Set when the lead is lost, or can no longer be known to be held."""

    @property
    def only_if_last(self) -> int | None:
        """The takeover must follow exactly this record of the log; None if any will do.

        Set where the log itself decides between several members that were granted the lead.
        """

    def confirm(self, term: int) -> None:
        """The takeover succeeded with this term: this member leads."""

    def resign(self, to: str | None = None) -> None:
        """Give the lead up at once; `to` is the identity of the member to take it, if any.

        Idempotent; sets `lost`.
        """


class Leadership(Protocol):
    """A group of members, one of which leads."""

    @property
    def url(self) -> str:
        """The address of the group as it may be shown: without secrets."""

    def campaign(self, member: Member, stop: threading.Event) -> Grant | None:
        """Wait until this member is granted the lead; None once `stop` is set."""

    def update(self, member: Member) -> None:
        """Replace what the others see of this member; best effort, never raises for the service."""

    def leader(self) -> Member | None:
        """Return the member that leads now, as far as is known."""

    def waiting(self) -> list[Member]:
        """Return the members that wait, the next in turn first."""

    def close(self) -> None:
        """Leave the group and resign; the others see this member no more."""
