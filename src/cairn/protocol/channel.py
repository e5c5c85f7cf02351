"""Frames over an authenticated socket, between the driver and a slot.

A frame is four bytes of length and then the message. Both ends first prove that they have the
key of the run: each signs the other's random bytes. Over a port every frame also ends in a code,
made from a key of this connection and the number of the frame. An attacker in between can read
frames, but not change them.

Stock parts do not keep these promises. `multiprocessing.connection` has no code per frame, no
deadline for its handshake, and takes twice as long per lookup. TLS would need a certificate for
every slot, or keys shared in advance, which `ssl` has only since Python 3.13.

Always true here:
- over a port, a frame that was changed, repeated or left out ends the connection unread;
- frames have a maximum size, and handshakes a maximum time.
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
_CLIENT: Final = b"cairn guest"
_SLOT: Final = b"cairn slot"
_CLIENT_FRAMES: Final = b"cairn frames of the guest"
_SLOT_FRAMES: Final = b"cairn frames of the slot"
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
        """Use codes for all further frames: one key for sending, one for receiving."""
        self._sent, self._received = _Codes(mine), _Codes(theirs)

    def set_deadline(self, end_s: float) -> None:
        """Fail reads and writes after this time of `time.monotonic`."""
        self.set_timeout(max(end_s - time.monotonic(), 0.001))
        self._end_s = end_s

    def set_timeout(self, seconds: float) -> None:
        """Limit the time of each read and write; 0 removes the limit."""
        self._end_s = None
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.settimeout(None)
        # The system keeps the time: a Python timeout costs a second call for every read.
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
            raise ConnectionError("a frame was changed, repeated or left out on the way")
        return message

    def _frame(self, bytes_max: int) -> bytes:
        data = self._socket.recv(_READ_BYTES)
        while len(data) < _LENGTH.size:
            data += self._more()
        (length,) = _LENGTH.unpack_from(data)
        if length > bytes_max:
            raise ConnectionError(f"a frame has {length} bytes, more than the {bytes_max} allowed")
        missing = length + _LENGTH.size - len(data)
        if missing < 0:
            raise ConnectionError("two frames were sent at once")
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
                raise TimeoutError("the other end took too long")
            self.set_deadline(self._end_s)
        data = self._socket.recv(min(count, 1 << 20))
        if not data:
            raise ConnectionError("the other end closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()


class _Codes:
    """Makes the codes of the frames in one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, message: bytes) -> bytes:
        # In two calls, without a copy: a message may be large.
        made = hmac.new(self._key, self._count.to_bytes(8, "big"), "sha256")
        made.update(message)
        self._count += 1
        return made.digest()


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, who + nonces, "sha256")


def authenticate_client(
    channel: Channel, key: bytes, *, sealed: bool, has_place: Callable[[], bool]
) -> None:
    """Check that the client has the key of the run, and prove that the slot has it.

    Raises ConnectionRefusedError if it does not, or if `has_place` returns False.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    channel.send(mine)
    answer = channel.receive(_PROOF_BYTES + _NONCE_BYTES)
    proof, theirs = answer[:_PROOF_BYTES], answer[_PROOF_BYTES:]
    is_known = hmac.compare_digest(proof, _proof(key, _CLIENT, mine + theirs))
    if not is_known or len(theirs) != _NONCE_BYTES:
        raise ConnectionRefusedError("the client does not have the key of the run")
    if not has_place():
        raise ConnectionRefusedError("too many clients")
    channel.send(_proof(key, _SLOT, mine + theirs))
    if sealed:
        nonces = mine + theirs
        channel.seal(_proof(key, _SLOT_FRAMES, nonces), _proof(key, _CLIENT_FRAMES, nonces))


def connect(address: str, key: bytes, timeout_s: float) -> Channel:
    """Connect to a slot; raises OSError if that fails."""
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
            # The system waits: with a Python timeout a full queue would be an error at once.
            channel.set_deadline(end_s)
            connected.connect(place)
        else:
            connected.settimeout(timeout_s)
            host, _, port = place.rpartition(":")
            connected.connect((host, int(port)))
        channel.set_deadline(end_s)
        theirs = channel.receive(_NONCE_BYTES)
        mine = secrets.token_bytes(_NONCE_BYTES)
        nonces = theirs + mine
        channel.set_deadline(end_s)
        channel.send(_proof(key, _CLIENT, nonces) + mine)
        answer = channel.receive(_PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(key, _SLOT, nonces)):
            raise ConnectionRefusedError("the slot does not have the key of the run")
        if kind != "unix":
            channel.seal(_proof(key, _CLIENT_FRAMES, nonces), _proof(key, _SLOT_FRAMES, nonces))
        channel.set_timeout(timeout_s)
    except BaseException:
        channel.close()
        raise
    return channel
