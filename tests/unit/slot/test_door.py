"""A slot's door lets in who has the key of the run, and reads no more than it must."""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.query.doors import Doors
from cairn.slot import door
from cairn.slot.door import Ask, Door, DoorSpec, Told, knock, open_door, this_host

KEY = b"k" * 32
ASK = Ask("op", "s", "v", ("value", "bigint", "", ""), [1], [b"\x01"])
HERE = DoorSpec(KEY, this_host(), "127.0.0.1")
ELSEWHERE = DoorSpec(KEY, "another machine", "127.0.0.1")


def echo(ask: Ask) -> Told:
    return Told([key if key != b"none" else None for key in ask.keys], 7)


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
        assert told == {at: Told([b"a" * at, None], 7) for at in (0, 1)}
    doors.close()


def dataclasses_replaced(ask: Ask, keys: list[bytes]) -> Ask:
    return Ask(ask.uid, ask.state, ask.version, ask.form, [0] * len(keys), keys)


def test_large_questions_and_answers_come_through_whole(opened: Door) -> None:
    keys = [bytes([at % 251]) * 50_000 for at in range(100)]
    assert doors_to(opened.address).ask({0: dataclasses_replaced(ASK, keys)}) == {0: Told(keys, 7)}


def test_a_guest_with_a_wrong_key_is_refused(opened: Door) -> None:
    with pytest.raises(OSError):
        knock(opened.address, b"w" * 32, 5)
    assert doors_to(opened.address, key=b"").ask({0: ASK}) == {}
    assert doors_to(opened.address).ask({0: ASK}) == {0: Told([b"\x01"], 7)}


def test_a_slot_without_the_key_is_not_believed(tmp_path: Path) -> None:
    strange = open_door(dataclasses.replace(HERE, key=b"w" * 32), str(tmp_path), echo)
    assert doors_to(strange.address).ask({0: ASK}) == {}
    strange.close()


def test_a_guest_that_asks_before_it_has_shown_the_key_gets_nothing(opened: Door) -> None:
    with raw(opened.address) as guest:
        nonce = guest.recv(100)
        assert len(nonce) == 4 + 32
        question = door.ask_encoder.encode(ASK)
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
    channel = knock(opened.address, KEY, 5)
    channel.send(message)
    with pytest.raises(OSError):
        channel.receive(100)
    channel.close()


def test_a_frame_beyond_the_largest_size_is_not_read(opened: Door) -> None:
    channel = knock(opened.address, KEY, 5)
    channel._socket.sendall(struct.pack(">I", door.ASK_BYTES_MAX + 1))
    with pytest.raises(OSError):
        channel.receive(100)
    channel.close()


def test_an_answer_that_is_too_large_is_no_answer(
    opened: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "TOLD_BYTES_MAX", 100)
    told = doors_to(opened.address).ask({0: dataclasses_replaced(ASK, [b"x" * 200])})
    assert told == {0: Told(None)}


def test_a_slot_that_is_gone_or_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.query.doors.TIMEOUT_S", 0.1)
    silent = threading.Event()
    stuck = open_door(HERE, str(tmp_path), lambda ask: Told(None) if silent.wait(5) else Told([]))
    doors = doors_to(f"unix:{tmp_path}/nobody", stuck.address, "tcp:127.0.0.1:1")
    assert doors.ask({0: ASK, 1: ASK, 2: ASK, 3: ASK}) == {}
    silent.set()
    # The late answer is nobody's: the next question has a connection of its own.
    assert doors.ask({1: ASK}) == {1: Told(None)}
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
    inside = [knock(crowded.address, KEY, 5) for _ in range(2)]
    with pytest.raises(OSError):
        knock(crowded.address, KEY, 0.1)
    for guest in inside:
        guest.close()
    knock(crowded.address, KEY, 5).close()
    crowded.close()


def test_the_key_of_a_run_is_shown_nowhere() -> None:
    assert "kkkk" not in repr(HERE) and KEY.hex() not in repr(HERE)
