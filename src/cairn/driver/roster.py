"""The slots of a run that reports have named, and the end of those that were left behind.

A subtask moves when its executor is lost, when Spark prefers another one, or when the parallelism
changes. The slot that ran it before would keep its copy of the state until its lease ends.

Always true here:
- a slot is left behind when it has run something and the newest attempt did without it;
- orders to end say as of which attempt: a slot that has begun a later one stays;
- an order that is lost is sent again after a later epoch, a few times; then the lease ends
  the slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from cairn.protocol.channel import connect
from cairn.protocol.lookups import ended_decoder
from cairn.protocol.messages import End, Report, Token

TIMEOUT_S: Final = 2.0
TRIES_MAX: Final = 5
AT_ONCE_MAX: Final = 32
STRAYS_AFTER: Final = 2
"""A slot that read state ahead and was not used in this number of attempts will not be."""
_ANSWER_BYTES_MAX: Final = 64
_order_encoder: Final = msgspec.msgpack.Encoder()


class SlotInfo(msgspec.Struct, frozen=True):
    """The executor of a subtask in the newest epoch, and the log of its slot."""

    subtask: int
    executor: str
    """Host and process id of the executor's JVM: `host:pid`."""
    log: str
    """The file on that host with what the slot prints and logs; `<log>.1` is the part before."""


class Roster:
    """Slots by the ids of their processes, as reports name them."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._doors: dict[str, str] = {}
        self._in_use: frozenset[str] = frozenset()
        self._tries: dict[str, int] = {}
        """Per slot left behind: how many orders to end it were lost."""
        self._as_of: Token | None = None
        self._slots: dict[int, SlotInfo] = {}
        self._strays_after: int | None = None
        """The attempts to wait for before slots that no report has named are looked for."""
        self._lock = threading.Lock()

    def update(self, newest: Sequence[Report], others: Iterable[Report], as_of: Token) -> None:
        """Add the reports of a complete attempt, and those of attempts before it."""
        with self._lock:
            for report in (*others, *newest):
                if report.slot_id:
                    self._doors[report.slot_id] = report.door
            self._slots = {r.subtask: SlotInfo(r.subtask, r.executor, r.log) for r in newest}
            self._in_use = frozenset(report.slot_id for report in newest)
            self._as_of = as_of
            left = self._doors.keys() - self._in_use
            self._tries = {slot_id: self._tries.get(slot_id, 0) for slot_id in left}
            if self._strays_after:
                self._strays_after -= 1

    def expect_strays(self) -> None:
        """Slots were started that no attempt may use: after some attempts, look for them."""
        with self._lock:
            self._strays_after = STRAYS_AFTER

    @property
    def slots(self) -> list[SlotInfo]:
        """Return where each subtask of the newest attempt ran, in their order."""
        return sorted(self._slots.values(), key=lambda slot: slot.subtask)

    @property
    def has_left_behind(self) -> bool:
        return bool(self._tries) or self._strays_after == 0

    def end_left_behind(self, scan: Callable[[frozenset[str], Token], None]) -> None:
        """Send orders to the slots that are not in use: to their doors, and if need be by `scan`.

        `scan(keep, as_of)` looks for slots where it can, and ends all but those to keep.
        """
        with self._lock:
            left, keep, as_of = list(self._tries), self._in_use, self._as_of
            has_strays = self._strays_after == 0
            if has_strays:
                self._strays_after = None
        if not (left or has_strays) or as_of is None:
            return
        reached = self._send_to(left, End(as_of))
        self._forget(reached)
        with self._lock:
            for slot_id in set(left) - reached:
                if slot_id in self._tries:
                    self._tries[slot_id] += 1
            given_up = {slot_id for slot_id, tries in self._tries.items() if tries >= TRIES_MAX}
        self._forget(given_up)
        if len(reached) < len(left) or has_strays:
            scan(keep, as_of)

    def end_all(self) -> None:
        """Send an order to every slot that a report has named, whatever it does."""
        with self._lock:
            known = list(self._doors)
        self._send_to(known, End())

    def _send_to(self, slot_ids: Sequence[str], order: End) -> set[str]:
        """Send an order to each; return those that need not get it again."""
        with self._lock:
            doors = {slot_id: door for slot_id in slot_ids if (door := self._doors.get(slot_id))}
        if not doors:
            return set()
        with ThreadPoolExecutor(min(len(doors), AT_ONCE_MAX)) as threads:
            settled = threads.map(lambda door: self._send(door, order), doors.values())
            return {slot_id for slot_id, is_done in zip(doors, settled, strict=True) if is_done}

    def _send(self, door: str, order: End) -> bool:
        """Send an order. True if the slot has answered, or is gone."""
        try:
            channel = connect(door, self._key, TIMEOUT_S)
        except (ConnectionRefusedError, FileNotFoundError):
            return True  # The process is gone.
        except OSError:
            return False
        try:
            channel.send(_order_encoder.encode(order))
            # One that stays has begun something since; then a report names it again.
            ended_decoder.decode(channel.receive(_ANSWER_BYTES_MAX))
            return True
        except (OSError, msgspec.MsgspecError):
            return False
        finally:
            channel.close()

    def _forget(self, slot_ids: set[str]) -> None:
        with self._lock:
            for slot_id in slot_ids - self._in_use:
                self._tries.pop(slot_id, None)
                self._doors.pop(slot_id, None)


__all__ = ["Roster", "SlotInfo"]
