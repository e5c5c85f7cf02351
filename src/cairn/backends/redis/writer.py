"""Moves key groups in Redis from one epoch to another, fenced, in one script per key group.

A change that is too large for one script goes in pieces. Between two of them the key group has an
unfinished marker; if it stays, the rows are restored from the checkpoint.

Always true here:
- a writer of an older term, or of an older epoch of the same term, changes nothing once a newer one
  has claimed a key group, and neither does another slot of the same epoch that claimed it before;
- a piece that is sent again after a lost answer changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from cairn.backends.cached.database import Op
from cairn.backends.redis.database import GROUP_BYTES, RedisDatabase, call
from cairn.backends.redis.link import Link
from cairn.backends.redis.scripts import (
    CLAIM,
    UNFINISHED,
    WRITE,
    call_script,
    claims_key,
    keys_of,
    member_of,
)
from cairn.errors import EpochError
from cairn.ids import new_id

PIECE_OPS: Final = 4096
BUFFERED_OPS_MAX: Final = 64 * 1024
BUFFERED_BYTES_MAX: Final = 16 << 20
"""Redis closes a connection with a command of a gigabyte."""
_NAMED_BYTES: Final = 4

Counts = dict[int, tuple[int, int]]
"""Number of keys and rows, by the number of the state."""


class FencedError(EpochError):
    """Another slot has newer rows of these key groups. Internal."""


class Claimed(NamedTuple):
    marker: str
    """Number and nonce of the epoch that the rows are of; empty for none."""
    counts: Counts
    is_whole: bool


def claim(
    link: Link,
    job_id: str,
    operator: str,
    groups: Sequence[int],
    term: int,
    epoch: int,
    owner: str,
) -> dict[int, Claimed]:
    """Keep older writers out from now on; return what Redis has."""
    claims = claims_key(job_id)
    commands: list[list[Any]] = [
        call_script(
            CLAIM,
            [*keys_of(job_id, operator, group), claims],
            [term, epoch, owner, member_of(operator, group)],
        )
        for group in groups
    ]
    found: dict[int, Claimed] = {}
    for group, answer in zip(groups, call(link, commands, CLAIM), strict=True):
        if not answer[0]:
            raise FencedError(
                f"operator {operator!r}: a newer slot has key group {group} in Redis; "
                f"one of term {term} and epoch {epoch} gets nothing"
            )
        counts = msgspec.json.decode(answer[2] or b"{}", type=dict[str, tuple[int, int]])
        found[group] = Claimed(
            answer[1].decode(),
            {int(number): held for number, held in counts.items()},
            bool(answer[3]),
        )
    return found


class Writer:
    """One change of the key groups of an operator, to the state of one epoch."""

    def __init__(
        self,
        link: Link,
        database: RedisDatabase,
        owner: str,
        groups: Iterable[int],
        marker: str,
        check: Callable[[], None],
    ) -> None:
        self._link = link
        self._database = database
        self._owner = owner
        self._groups = list(groups)
        self._marker = marker
        self._between = f"{UNFINISHED}{new_id()}/"
        # Dropped rows go first.
        self._wipes = {group: set(database.hidden.get(group, ())) for group in self._groups}
        self._check = check
        self._at = {group: database.markers.get(group) or "*" for group in self._groups}
        self._pieces = dict.fromkeys(self._groups, 0)
        self._ops: dict[int, list[Op]] = {}
        self._buffered = 0
        self._buffered_bytes = 0
        """At most this many since all buffers were sent."""
        changed = dict.fromkeys(self._groups, (marker, self._between))
        database.writing = database.writing | changed

    def add(self, ops: Iterable[Op]) -> None:
        """Take rows; send them if there are many."""
        buffers = self._ops
        for op in ops:
            group = int.from_bytes(op[0][:GROUP_BYTES], "big")
            buffer = buffers.get(group)
            if buffer is None:
                buffer = buffers[group] = []
            buffer.append(op)
            self._buffered += 1
            self._buffered_bytes += len(op[0]) + len(op[1] or b"")
            if self._buffered_bytes >= BUFFERED_BYTES_MAX:
                self._send(list(buffers), is_last=False)
                self._buffered_bytes = 0
            elif len(buffer) >= PIECE_OPS:
                self._send([group], is_last=False)
        if self._buffered >= BUFFERED_OPS_MAX:
            self._send(list(buffers), is_last=False)

    def finish(self, counts: Mapping[int, Counts]) -> None:
        """Send what is left, and make the rows those of the epoch."""
        step = max(1, len(self._groups) * PIECE_OPS // max(PIECE_OPS, self._buffered))
        for start in range(0, len(self._groups), step):
            self._send(self._groups[start : start + step], is_last=True, counts=counts)

    def _send(
        self, groups: Sequence[int], *, is_last: bool, counts: Mapping[int, Counts] | None = None
    ) -> None:
        self._check()
        commands = []
        then = {}
        for group in groups:
            ops = self._ops.pop(group, [])
            self._buffered -= len(ops)
            self._pieces[group] += 1
            then[group] = self._marker if is_last else f"{self._between}{self._pieces[group]}"
            described = b"" if counts is None else _encode(counts.get(group, {}))
            commands.append(self._command(group, ops, then[group], described))
        for group, (is_done, found) in zip(groups, call(self._link, commands, WRITE), strict=True):
            if not is_done:
                raise self._database.report_loss(group, found.decode() or "nothing")
            self._at[group] = then[group]

    def _command(self, group: int, ops: list[Op], then: str, counts: bytes) -> list[Any]:
        wipes = [
            number.to_bytes(_NAMED_BYTES, "big") + (number + 1).to_bytes(_NAMED_BYTES, "big")
            for number in sorted(self._wipes[group])
            if self._pieces[group] == 1
        ]
        puts: list[bytes] = []
        gone: list[bytes] = []
        for key, value in ops:
            if value is None:
                gone.append(key[GROUP_BYTES:])
            else:
                puts += (key[GROUP_BYTES:], value)
        args = [self._owner, self._at[group], then, counts, len(wipes), len(puts) // 2]
        return call_script(WRITE, self._database.keys(group), [*args, *wipes, *puts, *gone])

    def end(self, *, is_written: bool) -> None:
        """Make the key groups those of the epoch for readers, or note that nothing is known."""
        database = self._database
        if is_written:
            database.markers = database.markers | dict.fromkeys(self._groups, self._marker)
            for group in self._groups:
                database.hidden.pop(group, None)
        ended = set(self._groups)
        database.writing = {g: held for g, held in database.writing.items() if g not in ended}


def _encode(counts: Counts) -> bytes:
    return msgspec.json.encode({str(number): held for number, held in counts.items()})
