"""What is removed from Redis, and what stays listed."""

from __future__ import annotations

from cairn.backends.redis.cleaning import _remove, list_groups
from cairn.backends.redis.link import Link, address_of
from cairn.backends.redis.scripts import keys_of
from cairn.backends.redis.writer import claim
from cairn.ids import new_id
from tests import servers
from tests.backends import backend_name


def test_key_groups_of_a_newer_term_stay_and_stay_listed() -> None:
    link, job_id = Link(address_of(backend_name("redis")), "test"), new_id()
    claim(link, job_id, "op", [0, 2], 1, 1, "old")
    claim(link, job_id, "op", [10], 2, 1, "new")
    claim(link, job_id, "other", [1], 1, 1, "old")
    owned = list(list_groups(link, job_id))
    assert owned == [("op", 0), ("op", 2), ("op", 10), ("other", 1)]
    assert _remove(link, job_id, owned, term=1) == 3
    assert list(list_groups(link, job_id)) == [("op", 10)]
    client = servers.redis_server().client()
    assert client.exists(keys_of(job_id, "op", 10)[0])
    assert not client.exists(keys_of(job_id, "op", 0)[0])
    client.close()
    link.close()
