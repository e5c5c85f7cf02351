"""A backend in Redis: which rows it believes, and when it gives them up."""

from __future__ import annotations

from pathlib import Path

from cairn.backends.redis.backend import RedisBackend
from cairn.ids import new_id
from cairn.types.codec import codec
from tests import servers
from tests.backends import make, write_base


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
