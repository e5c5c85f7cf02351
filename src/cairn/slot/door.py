"""A slot's other door: lookups of committed state, while epochs come in by the first one.

    Ask     state of some keys, in one version
    End     the slot is not needed any more
    Told    what is held of them, or that this version is not here

A frame is four bytes of length and then the message, in msgpack. Who connects proves first
that it has the key of the run, and so does the slot: each answers the other's random bytes. On
the machine of the driver the door is a Unix socket in the slot's directory; elsewhere it is a
port at the address by which the driver is reached. There every frame ends in a code made with a
key of this connection alone and the number of the frame: who is in between can read, not change.

Always true here:
- nothing is read from a stranger but one short frame, and nothing is unpickled from anybody;
- over a port, a frame that was changed, repeated or left out ends the connection unread;
- a frame has a largest size, a door a largest number of guests, a handshake a longest time;
- strangers take no place of guests: of too many, the one that has waited longest has to go;
- a guest has one question at a time, and gets the answers in the order of the questions.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cairn.backends.held import Form
from cairn.logs import logger
from cairn.protocol.messages import End

ASK_BYTES_MAX: Final = 8 << 20
TOLD_BYTES_MAX: Final = 64 << 20
GUESTS_MAX: Final = 64
STRANGERS_MAX: Final = 16
QUEUE_MAX: Final = 128
"""So many wait to be looked at."""
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
_GUEST_FRAMES: Final = b"cairn frames of the guest"
_HOST_FRAMES: Final = b"cairn frames of the slot"
_CODE_BYTES: Final = 32
# After an error of the listening socket: of files there are too many open, say.
_PAUSE_S: Final = 0.1
# A socket of Python's gives the interpreter away for every call. Whoever sends would stand in line
# for it again, behind a thread that processes rows: twice for a question, and each time both pay.
_send: Final = ctypes.PyDLL(None).send


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
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
ask_decoder: Final = msgspec.msgpack.Decoder(Ask | End)
ended_decoder: Final = msgspec.msgpack.Decoder(bool)
told_decoder: Final = msgspec.msgpack.Decoder(Told)


def this_host() -> str:
    """Return a name that is the same for two processes on one machine that see the same files."""
    boot = mounts = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers may share the machine and its name, and not a single file.
        mounts = str(os.stat("/proc/self/ns/mnt").st_ino)
    return f"{os.uname().nodename}:{boot}:{mounts}"


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


def _let_in(channel: Channel, key: bytes, *, sealed: bool, has_place: Callable[[], bool]) -> None:
    """Of the slot: whoever is there must know the key, and wait for a place."""
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


class Door:
    """Answers what `look_up` finds, a thread per guest."""

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        key: bytes,
        look_up: Callable[[Ask], Told],
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
                # There are too many threads on this machine. Whoever asks is answered elsewhere.
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

        # An error ends the connection; whoever asked takes that for an answer.
        try:
            is_port = connected.family != socket.AF_UNIX
            if is_port:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_s = time.monotonic() + HANDSHAKE_S
            channel.until(end_s)
            _let_in(channel, self._key, sealed=is_port, has_place=has_place)
            channel.limit(0)
            sys.setswitchinterval(SWITCH_S)
            while True:
                ask = ask_decoder.decode(channel.receive(ASK_BYTES_MAX))
                if isinstance(ask, End):
                    channel.send(ask_encoder.encode(self._end(ask)))
                    continue
                self.last_used_s = time.monotonic()
                told = ask_encoder.encode(self._look_up(ask))
                if len(told) > TOLD_BYTES_MAX:
                    told = ask_encoder.encode(Told(None))
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
            # Who waits in accept() is woken by this, not by closing alone.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def open_door(
    spec: DoorSpec,
    directory: str,
    look_up: Callable[[Ask], Told],
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
