"""A slot's other door: lookups of committed state, while epochs come in by the first one.

    Ask     state of some keys, in one version
    Told    what is held of them, or that this version is not here

A frame is four bytes of length and then the message, in msgpack. Who connects proves first
that it has the key of the run, and so does the slot: each answers the other's random bytes. On
the machine of the driver the door is a Unix socket in the slot's directory; elsewhere it is a
port at the address by which the driver is reached.

Always true here:
- nothing is read from a stranger but one short frame, and nothing is unpickled from anybody;
- a frame has a largest size, a door a largest number of guests, a handshake a longest time;
- a guest has one question at a time, and gets the answers in the order of the questions.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cairn.backends.held import Form

ASK_BYTES_MAX: Final = 8 << 20
TOLD_BYTES_MAX: Final = 64 << 20
GUESTS_MAX: Final = 64
HANDSHAKE_S: Final = 5.0
# While rows are processed Python hands the interpreter over only this often. Its own interval is
# five milliseconds, which every question would wait once or more.
SWITCH_S: Final = 0.001
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_READ_BYTES: Final = 4096
_LENGTH: Final = struct.Struct(">I")
_GUEST: Final = b"cairn guest"
_HOST: Final = b"cairn slot"


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What is held of some keys."""

    uid: str
    state: str
    version: str
    form: Form
    groups: list[int]
    keys: list[bytes]
    """Packed, each in its key group."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    values: list[bytes | None] | None
    """Packed, None for nothing; without a list the version is not here."""
    floor_ms: int | None = None
    """What had expired by then may be gone already."""


@dataclass(frozen=True)
class DoorSpec:
    """What slots are told of the driver: whom to let in, and where it is."""

    key: bytes = field(repr=False)
    host: str
    address: str
    """Where the driver is reached from other machines."""


ask_encoder: Final = msgspec.msgpack.Encoder()
ask_decoder: Final = msgspec.msgpack.Decoder(Ask)
told_decoder: Final = msgspec.msgpack.Decoder(Told)


def this_host() -> str:
    """The same for two processes on one machine, which see the same files."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename}:{boot}"


class Channel:
    """Frames over a socket. Not for two threads at once."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def limit(self, seconds: float) -> None:
        """How long each read and write may take; 0: for ever."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.settimeout(None)
        # Left to the system: a timeout of Python's asks it twice for every read.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: bytes) -> None:
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, bytes_max: int) -> bytes:
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
        data = self._socket.recv(min(count, 1 << 20))
        if not data:
            raise ConnectionError("the other end is gone")
        return data

    def close(self) -> None:
        self._socket.close()


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, who + nonces, "sha256")


def _let_in(channel: Channel, key: bytes) -> None:
    """Of the slot: whoever is there must know the key."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    channel.send(mine)
    answer = channel.receive(_PROOF_BYTES + _NONCE_BYTES)
    proof, theirs = answer[:_PROOF_BYTES], answer[_PROOF_BYTES:]
    is_known = hmac.compare_digest(proof, _proof(key, _GUEST, mine + theirs))
    if not is_known or len(theirs) != _NONCE_BYTES:
        raise ConnectionRefusedError("a guest without the key of the run")
    channel.send(_proof(key, _HOST, mine + theirs))


def knock(address: str, key: bytes, timeout_s: float) -> Channel:
    """Connect to a door; raises OSError when it is not opened."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connected = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connected)
    try:
        connected.settimeout(timeout_s)
        if kind == "unix":
            connected.connect(place)
        else:
            host, _, port = place.rpartition(":")
            connected.connect((host, int(port)))
        channel.limit(timeout_s)
        theirs = channel.receive(_NONCE_BYTES)
        mine = secrets.token_bytes(_NONCE_BYTES)
        channel.send(_proof(key, _GUEST, theirs + mine) + mine)
        answer = channel.receive(_PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(key, _HOST, theirs + mine)):
            raise ConnectionRefusedError("a slot without the key of the run")
    except BaseException:
        channel.close()
        raise
    return channel


class Door:
    """Answers what `look_up` finds, a thread per guest."""

    def __init__(
        self, listening: socket.socket, address: str, key: bytes, look_up: Callable[[Ask], Told]
    ) -> None:
        self.address = address
        self.last_used_s = time.monotonic()
        self._listening = listening
        self._key = key
        self._look_up = look_up
        self._guests = threading.BoundedSemaphore(GUESTS_MAX)
        self._closed = False
        threading.Thread(target=self._listen, daemon=True, name="door").start()

    def _listen(self) -> None:
        while not self._closed:
            self._guests.acquire()
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return  # Closed.
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        channel = Channel(connected)
        # An error ends the connection; whoever asked takes that for an answer.
        try:
            if connected.family != socket.AF_UNIX:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel.limit(HANDSHAKE_S)
            _let_in(channel, self._key)
            channel.limit(0)
            sys.setswitchinterval(SWITCH_S)
            while True:
                ask = ask_decoder.decode(channel.receive(ASK_BYTES_MAX))
                self.last_used_s = time.monotonic()
                told = ask_encoder.encode(self._look_up(ask))
                if len(told) > TOLD_BYTES_MAX:
                    told = ask_encoder.encode(Told(None))
                channel.send(told)
        except (OSError, msgspec.MsgspecError):
            pass
        except Exception:
            traceback.print_exc()
        finally:
            channel.close()
            self._guests.release()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            # Who waits in accept() is woken by this, not by closing alone.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def open_door(spec: DoorSpec, directory: str, look_up: Callable[[Ask], Told]) -> Door:
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
    listening.listen(GUESTS_MAX)
    return Door(listening, address, spec.key, look_up)


def _address_towards(other: str) -> str:
    """The address of this machine that another one sees. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((other, 9))
        return str(towards.getsockname()[0])
