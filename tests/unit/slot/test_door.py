"""A slot's door lets in who has the key of the run, and reads no more than it must."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cairn.protocol import lookups
from cairn.protocol.channel import Channel, connect
from cairn.protocol.lookups import DoorSpec, LookupReply, LookupRequest, this_host
from cairn.query.doors import Doors
from cairn.slot import door
from cairn.slot.door import Door, open_door

KEY = b"k" * 32
ASK = LookupRequest("op", "s", "v", ("value", "bigint", "", ""), [1], [b"\x01"])
HERE = DoorSpec(KEY, this_host(), "127.0.0.1")
ELSEWHERE = DoorSpec(KEY, "another machine", "127.0.0.1")


def echo(ask: LookupRequest) -> LookupReply:
    return LookupReply([key if key != b"none" else None for key in ask.keys], 7)


@pytest.fixture(params=[HERE, ELSEWHERE], ids=["unix", "tcp"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Door]:
    made = open_door(request.param, str(tmp_path), echo)
    yield made
    made.close()


def doors_to(*addresses: str, key: bytes = KEY) -> Doors:
    return Doors(lambda: dict(enumerate(addresses)), key)


def raw(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    if kind == "unix":
        found = socket.socket(socket.AF_UNIX)
        found.connect(place)
    else:
        host, _, port = place.rpartition(":")
        found = socket.create_connection((host, int(port)))
    found.settimeout(5)
    return found


def test_where_the_driver_is_says_what_kind_of_door_there_is(tmp_path: Path) -> None:
    here = open_door(HERE, str(tmp_path), echo)
    there = open_door(ELSEWHERE, str(tmp_path), echo)
    assert here.address == f"unix:{tmp_path}/door"
    assert there.address.startswith("tcp:127.0.0.1:")
    here.close()
    there.close()


def test_a_guest_with_the_key_is_answered(opened: Door) -> None:
    doors = doors_to(opened.address, opened.address)
    asked = {at: dataclasses_replaced(ASK, [b"a" * at, b"none"]) for at in (0, 1)}
    for _ in range(3):
        told = doors.ask(asked)
        assert told == {at: LookupReply([b"a" * at, None], 7) for at in (0, 1)}
    doors.close()


def dataclasses_replaced(ask: LookupRequest, keys: list[bytes]) -> LookupRequest:
    return LookupRequest(ask.uid, ask.state, ask.version, ask.form, [0] * len(keys), keys)


def test_large_questions_and_answers_come_through_whole(opened: Door) -> None:
    keys = [bytes([at % 251]) * 50_000 for at in range(100)]
    assert doors_to(opened.address).ask({0: dataclasses_replaced(ASK, keys)}) == {
        0: LookupReply(keys, 7)
    }


def test_a_guest_with_a_wrong_key_is_refused(opened: Door) -> None:
    with pytest.raises(OSError):
        connect(opened.address, b"w" * 32, 5)
    assert doors_to(opened.address, key=b"").ask({0: ASK}) == {}
    assert doors_to(opened.address).ask({0: ASK}) == {0: LookupReply([b"\x01"], 7)}


def test_a_slot_without_the_key_is_not_believed(tmp_path: Path) -> None:
    strange = open_door(dataclasses.replace(HERE, key=b"w" * 32), str(tmp_path), echo)
    assert doors_to(strange.address).ask({0: ASK}) == {}
    strange.close()


def test_a_guest_that_asks_before_it_has_shown_the_key_gets_nothing(opened: Door) -> None:
    with raw(opened.address) as guest:
        nonce = guest.recv(100)
        assert len(nonce) == 4 + 32
        question = lookups.message_encoder.encode(ASK)
        guest.sendall(struct.pack(">I", len(question)) + question)
        assert guest.recv(100) == b""


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", struct.pack(">I", 64) + b"x" * 64])
def test_nonsense_ends_a_handshake_and_no_other(opened: Door, sent: bytes) -> None:
    with raw(opened.address) as guest:
        guest.recv(100)
        guest.sendall(sent)
        assert guest.recv(100) == b""
    assert 0 in doors_to(opened.address).ask({0: ASK})


@pytest.mark.parametrize("message", [b"\xc1", b"\x93\x01\x02\x03", b""])
def test_a_message_that_is_no_question_ends_the_connection(opened: Door, message: bytes) -> None:
    channel = connect(opened.address, KEY, 5)
    channel.send(message)
    with pytest.raises(OSError):
        channel.receive(100)
    channel.close()


def test_a_frame_beyond_the_largest_size_is_not_read(opened: Door) -> None:
    channel = connect(opened.address, KEY, 5)
    channel._socket.sendall(struct.pack(">I", lookups.REQUEST_BYTES_MAX + 100))
    with pytest.raises(OSError):
        channel.receive(100)
    channel.close()


def test_an_answer_that_is_too_large_is_no_answer(
    opened: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "REPLY_BYTES_MAX", 100)
    told = doors_to(opened.address).ask({0: dataclasses_replaced(ASK, [b"x" * 200])})
    assert told == {0: LookupReply(None)}


def test_a_slot_that_is_gone_or_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.query.doors.TIMEOUT_S", 0.1)
    silent = threading.Event()
    stuck = open_door(
        HERE, str(tmp_path), lambda ask: LookupReply(None) if silent.wait(5) else LookupReply([])
    )
    doors = doors_to(f"unix:{tmp_path}/nobody", stuck.address, "tcp:127.0.0.1:1")
    assert doors.ask({0: ASK, 1: ASK, 2: ASK, 3: ASK}) == {}
    silent.set()
    # The late answer is nobody's: the next question has a connection of its own.
    assert doors.ask({1: ASK}) == {1: LookupReply(None)}
    stuck.close()


def test_a_slot_that_came_back_is_found_again(tmp_path: Path) -> None:
    first = open_door(HERE, str(tmp_path), echo)
    doors = doors_to(first.address)
    assert 0 in doors.ask({0: ASK})
    first.close()
    for channels in doors._idle.values():
        # As when its process has died.
        for channel in channels:
            channel._socket.shutdown(socket.SHUT_RDWR)
    again = open_door(HERE, str(tmp_path), echo)
    doors.ask({0: ASK})
    assert 0 in doors.ask({0: ASK})
    again.close()


def test_more_guests_than_a_door_takes_wait_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "GUESTS_MAX", 2)
    crowded = open_door(HERE, str(tmp_path), echo)
    inside = [connect(crowded.address, KEY, 5) for _ in range(2)]
    with pytest.raises(OSError):
        connect(crowded.address, KEY, 0.1)
    for guest in inside:
        guest.close()
    connect(crowded.address, KEY, 5).close()
    crowded.close()


def test_the_key_of_a_run_is_shown_nowhere() -> None:
    assert "kkkk" not in repr(HERE) and KEY.hex() not in repr(HERE)


# Strangers


def test_a_stranger_that_sends_a_byte_now_and_then_has_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    opened = open_door(HERE, str(tmp_path), echo)
    with raw(opened.address) as stranger:
        stranger.recv(100)
        sent = 0
        # Each byte comes in time for a limit that would begin anew with it.
        with pytest.raises(OSError):
            while sent < 60:
                stranger.sendall(b"\x00")
                sent += 1
                stranger.settimeout(0.1)
                try:
                    if stranger.recv(100) == b"":
                        raise ConnectionError("closed")
                except TimeoutError:
                    pass
    assert sent < 60
    opened.close()


@pytest.mark.parametrize("spec", [HERE, ELSEWHERE], ids=["unix", "tcp"])
def test_strangers_keep_no_guest_out(
    spec: DoorSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "GUESTS_MAX", 4)
    monkeypatch.setattr(door, "STRANGERS_MAX", 8)
    opened = open_door(spec, str(tmp_path), echo)
    strangers = [raw(opened.address) for _ in range(30)]
    assert 0 in doors_to(opened.address).ask({0: ASK})
    # The first have had to go.
    for stranger in strangers[:20]:
        while stranger.recv(100):
            pass
    for stranger in strangers:
        stranger.close()
    opened.close()


class Failing:
    """A listening socket that fails now and then, though it is open."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self.failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(24, "Too many open files")
        return self._listening.accept()

    def shutdown(self, how: int) -> None:
        self._listening.shutdown(how)

    def close(self) -> None:
        self._listening.close()


def test_a_door_stays_open_when_accepting_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_PAUSE_S", 0.01)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{tmp_path}/door")
    listening.listen()
    failing = Failing(listening)
    opened = Door(failing, f"unix:{tmp_path}/door", KEY, echo)  # type: ignore[arg-type]
    assert 0 in doors_to(opened.address).ask({0: ASK})
    assert not failing.failures
    opened.close()


def test_a_door_stays_open_when_a_thread_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_PAUSE_S", 0.01)
    opened = open_door(HERE, str(tmp_path), echo)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError):
            connect(opened.address, KEY, 5)
    assert 0 in doors_to(opened.address).ask({0: ASK})
    opened.close()


# Who is in between


class Between:
    """Passes on what two ends of a connection send each other, but for what `change` changes."""

    def __init__(self, address: str, change: Callable[[int, bytes], bytes]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listening.getsockname()[1]}"
        self._there = raw(address)
        self._change = change
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        here, _ = self._listening.accept()
        threading.Thread(target=self._pass_on, args=(here, self._there, 0), daemon=True).start()
        self._pass_on(self._there, here, 100)

    def _pass_on(self, one: socket.socket, other: socket.socket, number: int) -> None:
        """Frames from the driver have the numbers 0, 1, …, those of the slot 100, 101, …"""
        with contextlib.suppress(OSError):
            while head := one.recv(4, socket.MSG_WAITALL):
                body = one.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)
                body = self._change(number, body)
                other.sendall(struct.pack(">I", len(body)) + body)
                number += 1
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Door]:
    made = open_door(ELSEWHERE, str(tmp_path), echo)
    yield made
    made.close()


def asked_through(port: Door, change: Callable[[int, bytes], bytes]) -> list[bool]:
    """Three questions over one connection: whether each was answered."""
    channel = connect(Between(port.address, change).address, KEY, 5)
    answered = []
    for _ in range(3):
        try:
            channel.send(lookups.message_encoder.encode(ASK))
            told = lookups.reply_decoder.decode(channel.receive(lookups.REPLY_BYTES_MAX))
            assert told == LookupReply([b"\x01"], 7)
            answered.append(True)
        except OSError:
            answered.append(False)
    channel.close()
    return answered


def test_frames_that_are_passed_on_unchanged_are_believed(port: Door) -> None:
    assert asked_through(port, lambda number, body: body) == [True] * 3


@pytest.mark.parametrize("at", [2, 103], ids=["question", "answer"])
def test_a_frame_that_was_changed_on_its_way_is_not_believed(port: Door, at: int) -> None:
    def change(number: int, body: bytes) -> bytes:
        return body.replace(b"\x01", b"\x02") if number == at else body

    assert asked_through(port, change) == [True, False, False]


@pytest.mark.parametrize("first", [1, 102], ids=["question", "answer"])
def test_a_frame_that_is_sent_again_is_not_believed(port: Door, first: int) -> None:
    kept: list[bytes] = []

    def change(number: int, body: bytes) -> bytes:
        if number == first:
            kept.append(body)
        return kept[0] if number == first + 1 else body

    assert asked_through(port, change) == [True, False, False]


def test_an_answer_made_of_a_question_is_not_believed(port: Door) -> None:
    kept: list[bytes] = []

    def change(number: int, body: bytes) -> bytes:
        if number == 1:
            kept.append(body)
        return kept[0] if number == 102 else body

    assert asked_through(port, change) == [False, False, False]


# Several slots


def test_silent_slots_are_waited_for_together_and_then_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.query.doors.TIMEOUT_S", 0.3)
    clock = [0.0]
    monkeypatch.setattr("cairn.query.doors.time", SimpleNamespace(monotonic=lambda: clock[0]))
    knocks: list[str] = []
    together = threading.Barrier(4)

    def counted(address: str, key: bytes, timeout_s: float) -> Channel:
        knocks.append(address)
        if len(knocks) <= 4:
            together.wait(5)  # One after the other they would not meet here.
        return connect(address, key, timeout_s)

    monkeypatch.setattr("cairn.query.doors.connect", counted)
    # They are connected to, by the system, and say nothing.
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    answering = open_door(HERE, str(tmp_path), echo)
    addresses = [f"tcp:127.0.0.1:{each.getsockname()[1]}" for each in silent]
    doors = doors_to(*addresses, answering.address)
    asked = dict.fromkeys(range(4), ASK)
    assert list(doors.ask(asked)) == [3]
    assert len(knocks) == 4
    for now_s, count in ((1.0, 4), (11.0, 7), (20.0, 7), (32.0, 10)):
        clock[0] = now_s
        assert list(doors.ask(asked)) == [3]
        assert len(knocks) == count
    for each in silent:
        each.close()
    answering.close()


def test_what_other_slots_have_said_counts_though_one_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.query.doors.TIMEOUT_S", 0.2)
    go_on = threading.Event()

    def late(ask: LookupRequest) -> LookupReply:
        go_on.wait(5)
        return LookupReply(None)

    made = []
    for at, look_up in enumerate((late, echo, late, echo)):
        (tmp_path / str(at)).mkdir()
        made.append(open_door(HERE, str(tmp_path / str(at)), look_up))
    doors = doors_to(*(each.address for each in made))
    for _ in range(2):
        assert sorted(doors.ask(dict.fromkeys(range(4), ASK))) == [1, 3]
    go_on.set()
    assert sorted(doors.ask(dict.fromkeys(range(4), ASK))) == [0, 1, 2, 3]
    for each in made:
        each.close()
