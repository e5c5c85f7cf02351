"""The driver's end of the slots' doors: questions to several slots at once.

Always true here:
- a connection has one question under way; a thread takes one for itself and gives it back;
- one that failed, or was late with an answer, is closed: its next answer could be another's;
- no question waits longer than `TIMEOUT_S` for its slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from cairn.slot.door import TOLD_BYTES_MAX, Ask, Channel, Told, ask_encoder, knock, told_decoder

TIMEOUT_S: Final = 1.0
IDLE_MAX: Final = 32
"""So many connections to a slot are kept."""


class Doors:
    """Connections to the slots of a run, by the subtask they run."""

    def __init__(self, places: Callable[[], Mapping[int, str]], key: bytes) -> None:
        """`places`: where the door of each subtask's slot is, as far as it is known."""
        self._places = places
        self._key = key
        self._idle: dict[str, list[Channel]] = {}
        self._lock = threading.Lock()

    def ask(self, asked: Mapping[int, Ask]) -> dict[int, Told]:
        """What each subtask's slot says; of those that say nothing there is no answer."""
        places = self._places()
        waiting: list[tuple[int, str, Channel]] = []
        told: dict[int, Told] = {}
        for subtask, ask in asked.items():
            place = places.get(subtask)
            channel = None if place is None else self._sent(place, ask_encoder.encode(ask))
            if place is not None and channel is not None:
                waiting.append((subtask, place, channel))
        for subtask, place, channel in waiting:
            try:
                told[subtask] = told_decoder.decode(channel.receive(TOLD_BYTES_MAX))
            except (OSError, msgspec.MsgspecError):
                channel.close()
            else:
                self._give_back(place, channel)
        return told

    def _sent(self, place: str, question: bytes) -> Channel | None:
        """A connection with the question on its way."""
        while True:
            with self._lock:
                idle = self._idle.get(place)
                channel = idle.pop() if idle else None
            is_new = channel is None
            try:
                if channel is None:
                    channel = knock(place, self._key, TIMEOUT_S)
                channel.send(question)
                return channel
            except OSError:
                if channel is not None:
                    channel.close()
                if is_new:
                    return None

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
