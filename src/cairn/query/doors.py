"""The driver's end of the slots' doors: questions to several slots at once.

Always true here:
- a connection has one question under way; a thread takes one for itself and gives it back;
- one that failed, or was late with an answer, is closed: its next answer could be another's;
- however many slots are silent, a query waits for them together: `TIMEOUT_S` for those it has to
  knock at, and once `TIMEOUT_S` for an answer that does not come;
- a slot that did not open in time is left alone for a while, longer each time.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from cairn.protocol.channel import Channel, connect
from cairn.protocol.lookups import (
    REPLY_BYTES_MAX,
    LookupReply,
    LookupRequest,
    message_encoder,
    reply_decoder,
)

TIMEOUT_S: Final = 1.0
IDLE_MAX: Final = 32
"""Idle connections kept for each slot."""
KNOCKS_MAX: Final = 32
"""Connections opened at once for one query."""
AWAY_S: Final = 10.0
AWAY_S_MAX: Final = 80.0
# The system reports the end of a socket's timeout as "try again".
_LATE: Final = (TimeoutError, BlockingIOError)


class Doors:
    """Connections to the slots of a run, by the subtask they run."""

    def __init__(self, places: Callable[[], Mapping[int, str]], key: bytes) -> None:
        """`places`: where the door of each subtask's slot is, as far as it is known."""
        self._places = places
        self._key = key
        self._idle: dict[str, list[Channel]] = {}
        self._away: dict[str, tuple[float, float]] = {}
        """Places that did not answer: for how long they are left alone, and until when."""
        self._lock = threading.Lock()

    def ask(self, asked: Mapping[int, LookupRequest]) -> dict[int, LookupReply]:
        """Return the replies of the slots by subtask; a slot that does not reply is left out."""
        places = self._places()
        waiting: dict[int, Channel] = {}
        to_knock: dict[int, bytes] = {}
        for subtask, ask in asked.items():
            if subtask in places:
                question = message_encoder.encode(ask)
                channel = self._send_again(places[subtask], question)
                if channel is not None:
                    waiting[subtask] = channel
                elif not self._is_away(places[subtask]):
                    to_knock[subtask] = question
        waiting |= self._connect_all(places, to_knock)
        told: dict[int, LookupReply] = {}
        is_late = False
        for subtask, channel in waiting.items():
            place = places[subtask]
            if is_late and not _has_answered(channel):
                self._was_late(place, channel)
                continue
            try:
                told[subtask] = reply_decoder.decode(channel.receive(REPLY_BYTES_MAX))
            except _LATE:
                # All were asked at once: from now on only what is here already counts.
                is_late = True
                self._was_late(place, channel)
            except (OSError, msgspec.MsgspecError):
                channel.close()
            else:
                self._give_back(place, channel)
        return told

    def _send_again(self, place: str, question: bytes) -> Channel | None:
        """Send the question on an idle connection, and return it; None if there is none."""
        while True:
            with self._lock:
                idle = self._idle.get(place)
                channel = idle.pop() if idle else None
            if channel is None:
                return None
            try:
                channel.send(question)
                return channel
            except _LATE:
                self._was_late(place, channel)
            except OSError:
                channel.close()

    def _connect_all(
        self, places: Mapping[int, str], questions: Mapping[int, bytes]
    ) -> dict[int, Channel]:
        """Send the questions on new connections, which are opened at the same time."""
        end_s = time.monotonic() + TIMEOUT_S

        def send(subtask: int) -> Channel | None:
            return self._send(places[subtask], questions[subtask], end_s)

        if len(questions) < 2:
            made = [send(subtask) for subtask in questions]
        else:
            with ThreadPoolExecutor(min(len(questions), KNOCKS_MAX)) as threads:
                made = list(threads.map(send, questions))
        return {at: channel for at, channel in zip(questions, made, strict=True) if channel}

    def _send(self, place: str, question: bytes, end_s: float) -> Channel | None:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return None
        channel = None
        try:
            channel = connect(place, self._key, left_s)
            channel.send(question)
            channel.set_timeout(TIMEOUT_S)
        except OSError as error:
            if channel is not None:
                channel.close()
            if isinstance(error, _LATE):
                self._is_silent(place)
            return None
        with self._lock:
            self._away.pop(place, None)
        return channel

    def _is_silent(self, place: str) -> None:
        with self._lock:
            known = self._away.get(place)
            for_s = AWAY_S if known is None else min(2 * known[0], AWAY_S_MAX)
            self._away[place] = (for_s, time.monotonic() + for_s)

    def _is_away(self, place: str) -> bool:
        known = self._away.get(place)
        return known is not None and time.monotonic() < known[1]

    def _was_late(self, place: str, late: Channel) -> None:
        """Close all connections to a slot that may be gone; the next question connects again."""
        with self._lock:
            idle = self._idle.pop(place, [])
        for channel in (late, *idle):
            channel.close()

    def _give_back(self, place: str, channel: Channel) -> None:
        with self._lock:
            idle = self._idle.setdefault(place, [])
            if len(idle) < IDLE_MAX:
                idle.append(channel)
                return
        channel.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for channels in idle.values():
            for channel in channels:
                channel.close()


def _has_answered(channel: Channel) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))
