"""Connections that do nothing, or half of something, over real sockets."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from cairn.web import connections
from cairn.web.connections import connections_max
from cairn.web.server import Served, serve
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.web.sites import TOKEN, site_of

HALF = b"GET /login HTTP/1.1\r\nHost: 127.0"
REST = b".0.1\r\n\r\n"


@pytest.fixture
def served(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    with serve(site_of(checkpoint, token=TOKEN, flight=False)) as served:
        yield served


def connect(served: Served, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection((urlsplit(served.url).hostname, urlsplit(served.url).port), 20)
    made.sendall(sent)
    return made


def is_closed(connection: socket.socket) -> bool:
    """Within the time that the connection waits for an answer."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def status(served: Served) -> int:
    asking = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=20)
    try:
        asking.request("GET", "/api/state", headers={"Authorization": f"Bearer {TOKEN}"})
        return asking.getresponse().status
    finally:
        asking.close()


def test_one_connection_too_many_is_closed_as_it_comes(served: Served) -> None:
    idle = [connect(served) for _ in range(8)]
    assert is_closed(connect(served))
    idle.pop().close()
    # Its end is seen in a moment.
    for _ in range(200):
        try:
            assert status(served) == 200
            break
        except (ConnectionError, http.client.BadStatusLine):
            pass
    else:
        raise AssertionError("the place was not given back")


def test_a_quarter_of_what_the_process_may_open_is_for_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for files_max, expected in ((1024, 256), (65536, 512), (-1, 512), (16, 8)):
        monkeypatch.setattr("resource.getrlimit", lambda _, found=files_max: (found, found))
        assert connections_max() == expected


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half"])
def test_a_head_that_does_not_come_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    assert is_closed(connect(served, sent))


def test_a_second_head_that_does_not_come_is_not_waited_for_either(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    connection = connect(served, HALF + REST)
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.sendall(HALF)
    assert is_closed(connection)


def test_a_head_in_two_parts_is_answered(served: Served) -> None:
    connection = connect(served, HALF)
    connection.sendall(REST)
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_bodies_without_a_token_are_not_waited_for(served: Served) -> None:
    head = b"POST /api/sql HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n{"
    assert connect(served, head).recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_a_client_that_takes_nothing_of_its_answers_is_cut_off(served: Served) -> None:
    ask = b"GET /static/app.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    connection = connect(served)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(5)
    with pytest.raises((ConnectionError, TimeoutError)):
        while True:
            connection.sendall(ask * 100)
    connection.settimeout(20)
    assert is_closed(connection)
