"""A backend in Redis: which rows it believes, and when it gives them up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cairn.backends.redis.backend import RedisBackend
from cairn.ids import new_id
from cairn.types.codec import codec
from tests import servers
from tests.backends import make, write_base
from tests.servers import RedisServer


def test_a_backend_that_has_dropped_what_was_lost_has_lost_nothing(tmp_path: Path) -> None:
    job_id = new_id()
    backend = make("redis", str(tmp_path / "b"), 1 << 20, job_id=job_id, operator="op")
    assert isinstance(backend, RedisBackend)
    backend.open_state("s", "value", codec("long"), codec("long"), None)
    for group in (0, 1):
        backend.rows("s", group).promote({group: 1})
    write_base(backend, groups=range(2))
    assert not backend.is_lost()
    client = servers.redis_server().client()
    client.delete(*client.scan_iter(match=f"cairn:{job_id}:*"))
    client.close()
    assert backend.is_lost()
    backend.drop("s", 0)
    assert backend.is_lost()
    # State that no epoch has is not restored, so nothing else ends the loss.
    backend.drop("s", 1)
    assert not backend.is_lost()
    backend.rows("s", 0).promote({0: 2})
    write_base(backend, groups=range(2))
    assert not backend.is_lost()
    backend.close()


def test_a_server_that_hangs_delays_one_begin_and_its_loss_is_noticed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer()
    url = f"{server.url}?socket_timeout=0.2"
    backend = RedisBackend(str(tmp_path / "b"), 1 << 20, url, job_id=new_id(), operator="op")
    backend.open_state("s", "value", codec("long"), codec("long"), None)
    backend.rows("s", 0).promote({0: 1})
    write_base(backend, groups=range(1))
    server.pause()
    assert not backend.is_lost(), "nobody knows"
    began_s = time.monotonic()
    assert not backend.is_lost()
    assert time.monotonic() - began_s < 0.1, "it is not asked again"
    server.kill()
    server.start(is_empty=True)
    monkeypatch.setattr("cairn.backends.redis.backend.CHECK_AGAIN_S", 0)
    backend._next_check_s = 0
    assert backend.is_lost()
    backend.close()
    server.kill()
