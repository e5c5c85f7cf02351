"""Frames over an authenticated socket, between the driver and a slot.

A frame is four bytes of length and then the message. Both ends prove first that they have the
key of the run: each answers the other's random bytes. Over a port every frame also ends in a code
made with a key of this connection alone and the number of the frame. Someone in between can read
frames, but not change them.

Stock parts do not keep these promises. `multiprocessing.connection` has no code per frame, no
deadline for its handshake, and takes twice as long per lookup. TLS would need a certificate for
every slot, or keys shared in advance, which `ssl` has only since Python 3.13.

Always true here:
- over a port, a frame that was changed, repeated or left out ends the connection unread;
- a frame has a largest size, and a handshake a longest time.
"""

from __future__ import annotations

import ctypes
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_READ_BYTES: Final = 4096
_LENGTH: Final = struct.Struct(">I")
_GUEST: Final = b"cairn guest"
_HOST: Final = b"cairn slot"
_GUEST_FRAMES: Final = b"cairn frames of the guest"
_HOST_FRAMES: Final = b"cairn frames of the slot"
_CODE_BYTES: Final = 32
# A Python socket releases the interpreter for every call. The sender would have to wait for it
# again, behind a thread that processes rows: twice per question, on both ends.
_send: Final = ctypes.PyDLL(None).send


class Channel:
    """Frames over a socket. Not for two threads at once."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._end_s: float | None = None
        self._sent: _Codes | None = None
        self._received: _Codes | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def seal(self, mine: bytes, theirs: bytes) -> None:
        """From now on frames carry codes: those sent with one key, those received with another."""
        self._sent, self._received = _Codes(mine), _Codes(theirs)

    def until(self, end_s: float) -> None:
        """By when (of time.monotonic) all that is read and written from now on has to be."""
        self.limit(max(end_s - time.monotonic(), 0.001))
        self._end_s = end_s

    def limit(self, seconds: float) -> None:
        """How long each read and write may take; 0: for ever."""
        self._end_s = None
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.settimeout(None)
        # Left to the system: a timeout of Python's asks it twice for every read.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: bytes) -> None:
        code = b"" if self._sent is None else self._sent.next(message)
        frame = _LENGTH.pack(len(message) + len(code)) + message + code
        sent = max(_send(self._socket.fileno(), frame, len(frame), socket.MSG_DONTWAIT), 0)
        if sent < len(frame):
            self._socket.sendall(memoryview(frame)[sent:])

    def receive(self, bytes_max: int) -> bytes:
        if self._received is None:
            return self._frame(bytes_max)
        data = self._frame(bytes_max + _CODE_BYTES)
        message, code = data[:-_CODE_BYTES], data[-_CODE_BYTES:]
        if not hmac.compare_digest(code, self._received.next(message)):
            self.close()
            raise ConnectionError("a frame that the other end has not sent, or not now")
        return message

    def _frame(self, bytes_max: int) -> bytes:
        data = self._socket.recv(_READ_BYTES)
        while len(data) < _LENGTH.size:
            data += self._more()
        (length,) = _LENGTH.unpack_from(data)
        if length > bytes_max:
            raise ConnectionError(f"a frame of {length} bytes, at most {bytes_max} are read")
        missing = length + _LENGTH.size - len(data)
        if missing < 0:
            raise ConnectionError("more than one frame at once")
        if missing:
            parts = [data]
            while missing > 0:
                parts.append(self._more(missing))
                missing -= len(parts[-1])
            data = b"".join(parts)
        return data[_LENGTH.size :]

    def _more(self, count: int = _READ_BYTES) -> bytes:
        if self._end_s is not None:
            if time.monotonic() >= self._end_s:
                raise TimeoutError("the other end takes too long")
            self.until(self._end_s)
        data = self._socket.recv(min(count, 1 << 20))
        if not data:
            raise ConnectionError("the other end is gone")
        return data

    def close(self) -> None:
        self._socket.close()


class _Codes:
    """The codes of the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, message: bytes) -> bytes:
        # Not put together first: an answer may be large.
        made = hmac.new(self._key, self._count.to_bytes(8, "big"), "sha256")
        made.update(message)
        self._count += 1
        return made.digest()


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, who + nonces, "sha256")


def admit(channel: Channel, key: bytes, *, sealed: bool, has_place: Callable[[], bool]) -> None:
    """Check that the client has the key of the run, and prove that the slot has it.

    Raises ConnectionRefusedError if it has not, or if `has_place` is false.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    channel.send(mine)
    answer = channel.receive(_PROOF_BYTES + _NONCE_BYTES)
    proof, theirs = answer[:_PROOF_BYTES], answer[_PROOF_BYTES:]
    is_known = hmac.compare_digest(proof, _proof(key, _GUEST, mine + theirs))
    if not is_known or len(theirs) != _NONCE_BYTES:
        raise ConnectionRefusedError("a guest without the key of the run")
    if not has_place():
        raise ConnectionRefusedError("too many guests")
    channel.send(_proof(key, _HOST, mine + theirs))
    if sealed:
        nonces = mine + theirs
        channel.seal(_proof(key, _HOST_FRAMES, nonces), _proof(key, _GUEST_FRAMES, nonces))


def knock(address: str, key: bytes, timeout_s: float) -> Channel:
    """Connect to a door; raises OSError when it is not opened."""
    end_s = time.monotonic() + timeout_s
    kind, _, place = address.partition(":")
    if kind == "unix":
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connected = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connected)
    try:
        if kind == "unix":
            # The system waits: with a timeout of Python's a full queue would be an error at once.
            channel.until(end_s)
            connected.connect(place)
        else:
            connected.settimeout(timeout_s)
            host, _, port = place.rpartition(":")
            connected.connect((host, int(port)))
        channel.until(end_s)
        theirs = channel.receive(_NONCE_BYTES)
        mine = secrets.token_bytes(_NONCE_BYTES)
        nonces = theirs + mine
        channel.until(end_s)
        channel.send(_proof(key, _GUEST, nonces) + mine)
        answer = channel.receive(_PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(key, _HOST, nonces)):
            raise ConnectionRefusedError("a slot without the key of the run")
        if kind != "unix":
            channel.seal(_proof(key, _GUEST_FRAMES, nonces), _proof(key, _HOST_FRAMES, nonces))
        channel.limit(timeout_s)
    except BaseException:
        channel.close()
        raise
    return channel
