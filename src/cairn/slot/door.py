"""A slot's second socket: lookups of committed state, while epochs come in by the first one.

On the driver's machine it is a Unix socket in the slot's directory; elsewhere it is a port at the
address by which the driver is reached. `protocol/lookups` has the messages, `protocol/channel` the
frames and the handshake.

Always true here:
- nothing is read from a stranger but one short frame, and nothing is unpickled from anybody;
- there is a largest number of guests, and strangers take none of their places: when there are too
  many strangers, the one that has waited longest is disconnected;
- a guest has one question at a time, and gets the answers in the order of the questions.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from cairn.logs import logger
from cairn.protocol.channel import Channel, authenticate_client
from cairn.protocol.lookups import (
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    DoorSpec,
    LookupReply,
    LookupRequest,
    message_encoder,
    request_decoder,
    this_host,
)
from cairn.protocol.messages import End

GUESTS_MAX: Final = 64
STRANGERS_MAX: Final = 16
QUEUE_MAX: Final = 128
"""Connections that wait to be accepted."""
HANDSHAKE_S: Final = 5.0
# While rows are processed Python hands the interpreter over only this often. Its own interval is
# five milliseconds, which every question would wait once or more.
SWITCH_S: Final = 0.001
# After an error of the listening socket: too many files are open, say.
_PAUSE_S: Final = 0.1


class Door:
    """Answers what `look_up` finds, a thread per guest."""

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        key: bytes,
        look_up: Callable[[LookupRequest], LookupReply],
        end: Callable[[End], bool] = lambda order: False,
    ) -> None:
        self.address = address
        self.last_used_s = time.monotonic()
        self._listening = listening
        self._key = key
        self._look_up = look_up
        self._end = end
        self._guests = threading.BoundedSemaphore(GUESTS_MAX)
        self._strangers: list[socket.socket] = []
        """Who has not shown the key yet, or has no place yet; the longest there come first."""
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._listen, daemon=True, name="door").start()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._strangers.append(connected)
                if len(self._strangers) > STRANGERS_MAX:
                    # Its thread closes it.
                    with contextlib.suppress(OSError):
                        self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()
            except RuntimeError:
                # Too many threads on this machine. The client reads the checkpoint instead.
                self._is_stranger_no_more(connected)
                connected.close()
                time.sleep(_PAUSE_S)

    def _is_stranger_no_more(self, connected: socket.socket) -> bool:
        with self._lock:
            if connected not in self._strangers:
                return False
            self._strangers.remove(connected)
            return True

    def _serve(self, connected: socket.socket) -> None:
        channel = Channel(connected)
        is_guest = False

        def has_place() -> bool:
            nonlocal is_guest
            is_guest = self._guests.acquire(timeout=max(end_s - time.monotonic(), 0))
            return is_guest and self._is_stranger_no_more(connected)

        # An error ends the connection, and the client reads the checkpoint instead.
        try:
            is_port = connected.family != socket.AF_UNIX
            if is_port:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_s = time.monotonic() + HANDSHAKE_S
            channel.set_deadline(end_s)
            authenticate_client(channel, self._key, sealed=is_port, has_place=has_place)
            channel.set_timeout(0)
            sys.setswitchinterval(SWITCH_S)
            while True:
                ask = request_decoder.decode(channel.receive(REQUEST_BYTES_MAX))
                if isinstance(ask, End):
                    channel.send(message_encoder.encode(self._end(ask)))
                    continue
                self.last_used_s = time.monotonic()
                told = message_encoder.encode(self._look_up(ask))
                if len(told) > REPLY_BYTES_MAX:
                    told = message_encoder.encode(LookupReply(None))
                channel.send(told)
        except (OSError, msgspec.MsgspecError):
            pass
        except Exception:
            logger.exception("a question about state failed")
        finally:
            self._is_stranger_no_more(connected)
            channel.close()
            if is_guest:
                self._guests.release()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            # This wakes the thread in accept(); closing alone does not.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def open_door(
    spec: DoorSpec,
    directory: str,
    look_up: Callable[[LookupRequest], LookupReply],
    end: Callable[[End], bool] = lambda order: False,
) -> Door:
    """On a Unix socket where the driver is on this machine, else on a port."""
    if spec.host == this_host():
        path = Path(directory) / "door"
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        address = f"unix:{path}"
    else:
        own = _address_towards(spec.address)
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind((own, 0))
        address = f"tcp:{own}:{listening.getsockname()[1]}"
    listening.listen(QUEUE_MAX)
    return Door(listening, address, spec.key, look_up, end)


def _address_towards(other: str) -> str:
    """The address of this machine that another one sees. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((other, 9))
        return str(towards.getsockname()[0])
