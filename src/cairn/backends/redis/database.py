"""Rows of an operator in Redis, each key group as of one epoch.

Redis may lose what it was given: it restarts without its file, an older replica takes over,
someone empties it. So each answer comes with the marker of its key group, in one command or
script, and an answer with another marker than that of the slot is refused.

Always true here:
- a row is believed only if its key group has the marker that this slot has written or claimed;
- a key group that is not listed here has no rows that count, whatever Redis has;
- once something is lost, `is_lost` stays until the slot begins a restore or has dropped all rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cairn.backends.cached.database import after
from cairn.backends.cached.numbers import PREFIX
from cairn.backends.cached.ordered import Page
from cairn.backends.redis.link import Link, is_away
from cairn.backends.redis.scripts import (
    CHECK,
    PAGE,
    Script,
    call_script,
    keys_of,
)
from cairn.errors import EpochError

PAGE_ROWS: Final = 2048
GROUP_BYTES: Final = 2
Command = tuple[Script | None, list[Any]]


class LostStateError(EpochError):
    """Redis has not the rows that it was given. The next attempt restores them."""


class RedisDatabase:
    """Rows of some key groups of an operator."""

    def __init__(self, link: Link, job_id: str, operator: str, numbers: dict[str, int]) -> None:
        self.rows_bound = 0
        self.job_id = job_id
        self.operator = operator
        self.link = link
        self.markers: dict[int, str] = {}
        """The marker of each key group whose rows count. A writer replaces the dict."""
        self.writing: dict[int, tuple[str, str]] = {}
        """Key groups that a writer changes now: the marker that they will have, and the begin of
        those that they have between two pieces of the change. A writer replaces the dict."""
        self._at_call = threading.local()
        """Both, as they were when this thread sent its last commands."""
        self.hidden: dict[int, set[int]] = {}
        """Numbers of states whose rows in Redis no longer count, by key group."""
        self.is_lost = False
        self.numbers = numbers
        """The numbers of states, by name."""

    def prefix(self, state: str, group: int) -> bytes:
        return PREFIX.pack(group, self.numbers[state])

    def keys(self, group: int) -> list[str]:
        return keys_of(self.job_id, self.operator, group)

    # Reading

    def get(self, key: bytes) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(keys)
        by_group: dict[int, list[int]] = {}
        for at, key in enumerate(keys):
            group = int.from_bytes(key[:GROUP_BYTES], "big")
            if not self.hidden or not self._is_hidden(group, key):
                by_group.setdefault(group, []).append(at)
        wanted = [(group, at) for group, at in by_group.items() if group in self.markers]
        commands: list[list[Any]] = [
            ["HMGET", self.keys(group)[0], "v", *[keys[i][GROUP_BYTES:] for i in at]]
            for group, at in wanted
        ]
        if not commands:
            return found
        for (group, places), answer in zip(wanted, self._call(commands), strict=True):
            self._believe(group, answer[0])
            for place, value in zip(places, answer[1:], strict=True):
                found[place] = value
        return found

    def scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        low = self._begin_scan(prefix, max(prefix, start))
        while low is not None:
            ((names, values),) = self._read_rows([(prefix, low)], PAGE_ROWS)
            yield from zip([prefix[:GROUP_BYTES] + n for n in names], values, strict=True)
            low = b"(" + names[-1] if len(names) == PAGE_ROWS else None

    def read_pages(self, starts: Sequence[tuple[bytes, bytes]], count: int) -> list[Page]:
        """Return the next `count` names of several prefixes, each from a place on.

        All prefixes are read in one round trip, unless `count` is larger than a page.
        """
        found: list[list[bytes]] = [[] for _ in starts]
        lows: dict[int, bytes] = {}
        for at, (prefix, start) in enumerate(starts):
            low = self._begin_scan(prefix, prefix + start)
            if low is not None:
                lows[at] = low
        left = count
        while lows and left:
            few = min(left, PAGE_ROWS)
            left -= few
            pages = self._read_rows([(starts[at][0], low) for at, low in lows.items()], few)
            full: dict[int, bytes] = {}
            for at, (names, _) in zip(lows, pages, strict=True):
                cut = len(starts[at][0]) - GROUP_BYTES
                found[at] += [name[cut:] for name in names]
                if len(names) == few:
                    full[at] = b"(" + names[-1]
            lows = full
        return [(names, names[-1] if len(names) == count else None) for names in found]

    def _begin_scan(self, prefix: bytes, first: bytes) -> bytes | None:
        """Return the bound of names from a key on; None if no row after it counts."""
        group = int.from_bytes(prefix[:GROUP_BYTES], "big")
        if group not in self.markers or self._is_hidden(group, prefix):
            return None
        if not first.startswith(prefix[:GROUP_BYTES]):
            return None  # It begins after the key group.
        return b"[" + first[GROUP_BYTES:]

    def _read_rows(
        self, lows: Sequence[tuple[bytes, bytes]], count: int
    ) -> list[tuple[list[bytes], list[bytes]]]:
        """Return up to `count` names, with their values, of each prefix from a bound on."""
        groups = [int.from_bytes(prefix[:GROUP_BYTES], "big") for prefix, _ in lows]
        commands = []
        for group, (prefix, low) in zip(groups, lows, strict=True):
            name = prefix[GROUP_BYTES:]
            high = b"(" + after(name) if name.rstrip(b"\xff") else b"+"
            commands.append(call_script(PAGE, self.keys(group), [low, high, count]))
        pages = []
        for group, answer in zip(groups, self._call(commands, PAGE), strict=True):
            marker, is_whole, names, values = answer
            self._believe(group, marker)
            if not is_whole or None in values:
                raise self.report_loss(group, "rows are missing")
            pages.append((names, values))
        return pages

    def _is_hidden(self, group: int, key: bytes) -> bool:
        return PREFIX.unpack_from(key)[1] in self.hidden.get(group, ())

    def check(self) -> None:
        """See in one round trip whether all key groups are as this slot left them."""
        before, writing = self.markers, self.writing
        groups = [group for group in before if group not in writing]
        if not groups:
            return
        keys = [key for group in groups for key in self.keys(group)]
        markers = [before[group] for group in groups]
        (found,) = self._call([call_script(CHECK, keys, markers)], CHECK)
        # A writer may have begun meanwhile, and ended.
        if found < 0 or groups[found] in self.writing:
            return
        if self.markers.get(groups[found]) == markers[found]:
            raise self.report_loss(groups[found], "its marker or the number of its rows differs")

    def _believe(self, group: int, marker: bytes | None) -> None:
        """Refuse an answer of rows that are not those of this slot."""
        found = (marker or b"").decode()
        # A writer may have ended since Redis answered.
        at_call = self._at_call
        for markers, writing in (
            (self.markers, self.writing),
            (at_call.markers, at_call.writing),
        ):
            then, between = writing.get(group, (None, ""))
            if found == markers.get(group):
                return
            if then is not None and (found == then or found.startswith(between)):
                return
        raise self.report_loss(group, f"found {found or 'nothing'}")

    def report_loss(self, group: int, why: str) -> LostStateError:
        """Note that a key group is lost, and return the error that says so."""
        self.is_lost = True
        expected = self.markers.get(group, "")
        return LostStateError(
            f"operator {self.operator!r}: Redis has not the state that it was given\n"
            f"  key group: {group}\n  expected: epoch {expected.partition(':')[0]}\n"
            f"  found: {why}\n"
            "  next: nothing; the next attempt restores it from the checkpoint. If this happens "
            "again, look for evictions, restarts without persistence and failovers of Redis",
            is_lost=True,
        )

    def _call(self, commands: list[list[Any]], *scripts: Script) -> list[Any]:
        self._at_call.markers, self._at_call.writing = self.markers, self.writing
        return call(self.link, commands, *scripts)


def call(link: Link, commands: list[list[Any]], *scripts: Script) -> list[Any]:
    """Send commands in one round trip; load scripts that the server does not know yet."""
    answers = link.call(commands)
    import redis  # After the link has seen that it is installed.

    if any(isinstance(answer, redis.exceptions.NoScriptError) for answer in answers):
        link.call([["SCRIPT", "LOAD", script.text] for script in scripts])
        answers = link.call(commands)
    for answer in answers:
        if isinstance(answer, Exception):
            if isinstance(answer, redis.RedisError) and is_away(answer):
                raise link.away_error(answer)
            raise EpochError(
                f"{link.where} refused a command on state: {answer}\n"
                "  next: let the user of the job run all commands on keys that begin with cairn:, "
                "and nobody else write them"
            ) from None
    return answers
