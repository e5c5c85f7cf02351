"""The server of a run comes and goes with it."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from cairn.driver.serving import Serve, as_serve
from cairn.errors import PlanError
from cairn.web.lifetime import Web
from tests.unit.snapshots.checkpoints import Checkpoint
from tests.unit.web.sites import TOKEN, FakeRun


def _answers(url: str | None) -> bool:
    with socket.socket() as asking:
        asking.settimeout(5)
        return asking.connect_ex(("127.0.0.1", urlsplit(url or "").port or 0)) == 0


def test_nothing_is_served_unless_asked_for(checkpoint: Checkpoint) -> None:
    web = Web(as_serve(None))
    web.open(FakeRun(checkpoint), checkpoint.store)
    assert (web.url, web.flight_url) == (None, None)
    web.close()


def test_port_is_known_at_once_and_let_go_at_the_end(checkpoint: Checkpoint) -> None:
    web = Web(as_serve(True))
    assert web.url is not None and web.url.startswith("http://127.0.0.1:")
    web.open(FakeRun(checkpoint), checkpoint.store)
    assert web.flight_url is not None and _answers(web.url)
    web.close()
    assert not _answers(web.url) and not _answers(web.flight_url)


def test_a_start_that_fails_lets_the_port_go() -> None:
    web = Web(as_serve("127.0.0.1:0"))
    with pytest.raises(ZeroDivisionError), web.close_on_error():
        raise ZeroDivisionError
    assert not _answers(web.url)


def test_a_run_that_is_over_before_it_is_served_is_not(checkpoint: Checkpoint) -> None:
    web = Web(as_serve(True))
    web.close()
    web.open(FakeRun(checkpoint), checkpoint.store)
    assert not _answers(web.url)


def test_a_server_that_cannot_start_raises_and_lets_the_port_go(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("no more threads")

    monkeypatch.setattr("cairn.web.server.Served", fail)
    run, web = FakeRun(checkpoint), Web(as_serve(True))
    with pytest.raises(OSError, match="no more threads"):
        web.open(run, checkpoint.store)
    assert run.asked == [] and not _answers(web.url)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"address": "0.0.0.0:1"}, "no token"),
        ({"address": "example.org:1"}, "no token"),
        ({"address": "localhost"}, "HOST:PORT"),
        ({"address": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"token": "short"}, "at least 16"),
        ({"control_token": "é" * 20}, "ASCII"),
        ({"token": TOKEN, "control_token": TOKEN}, "must differ"),
        ({"token": 1234567890123456}, "at least 16"),
        ({"flight_port": 65536}, "flight_port must be from 0"),
        ({"flight_port": "8081"}, "flight_port must be from 0"),
    ],
)
def test_settings_that_are_not_safe_are_refused_without_showing_a_token(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says) as error:
        Serve(**settings)
    assert TOKEN not in str(error.value) and TOKEN not in repr(Serve(token=TOKEN))


@pytest.mark.parametrize("serve", [8080, 3.5, ("127.0.0.1", 80), "8080", "127.0.0.1:99999"])
def test_what_is_no_address_is_told_at_once(serve: Any) -> None:
    with pytest.raises(PlanError, match="HOST:PORT"):
        as_serve(serve)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "fast"])
def test_a_rate_that_would_refuse_everybody_is_told_at_once(rate: Any) -> None:
    with pytest.raises(PlanError, match="requests_per_s"):
        Serve(requests_per_s=rate)
