"""The address of a Redis server, and what never shows a password."""

from __future__ import annotations

import sys
import time

import msgspec
import pytest
import redis
from redis._parsers.base import BaseParser

from cairn.backends import check_url, kind_of, make_backend
from cairn.backends.redis.cleaning import write_note
from cairn.backends.redis.link import Link, address_of, describe, is_away
from cairn.backends.redis.writer import claim
from cairn.errors import EpochError, PlanError
from cairn.protocol.spec import JobSpec
from cairn.snapshots.verify_redis import verify_redis
from cairn.storage.log import create_or_open_job
from cairn.storage.store import open_store
from tests import servers
from tests.backends import backend_name
from tests.servers import RedisServer

URL = "redis://me:s3cret@127.0.0.1:1/3?socket_timeout=2&password=s3cret"


def test_an_address_has_the_user_and_no_password() -> None:
    assert address_of(URL) == "redis://me@127.0.0.1:1/3?socket_timeout=2"
    assert describe(address_of(URL)) == "redis://127.0.0.1:1/3"
    assert address_of("rediss://:s3cret@host/0") == "rediss://host/0"


def test_the_note_in_the_checkpoint_has_no_password() -> None:
    store = open_store("memory:")
    write_note(store, URL)
    (there,) = store.list("databases")
    assert msgspec.json.decode(store.get(there.path))["address"] == address_of(URL)
    assert b"s3cret" not in store.get(there.path)


def test_verify_without_the_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory:")
    create_or_open_job(store, "job", 8)
    write_note(store, URL)
    monkeypatch.setitem(sys.modules, "redis", None)
    checked = verify_redis(store)
    assert not checked.damage
    ((_, what),) = checked.lost
    assert "needs the package redis" in what


def test_the_error_of_a_server_that_is_away_has_no_password() -> None:
    link = Link(address_of(URL), "test")
    with pytest.raises(EpochError, match="cannot be reached") as raised:
        link.call([["PING"]])
    assert raised.value.facts["is_away"] is True
    shown = f"{raised.value!r} {raised.value.facts} {raised.value.__cause__!r}"
    assert "s3cret" not in shown


@pytest.mark.parametrize(
    "url", ["redis://me:s3cret@[host/0", "redis://:s3cret@/0", "redis://:s3cret@host:port/0"]
)
def test_a_url_that_cannot_be_read_is_not_shown(url: str) -> None:
    with pytest.raises(PlanError, match="cannot be read") as raised:
        address_of(url)
    assert "s3cret" not in f"{raised.value!r} {raised.value.__cause__!r}"


def test_a_job_does_not_show_its_url() -> None:
    assert "s3cret" not in repr(JobSpec("id", "name", 8, "memory:", URL, ()))


def test_a_variable_may_have_the_url(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("STATE_URL", backend_name("redis"))
    assert kind_of("env:STATE_URL") == "redis"
    check_url("env:STATE_URL")
    make_backend("env:STATE_URL", f"{tmp_path}/state").close()


def test_the_password_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.RedisServer()
    try:
        server.client().config_set("requirepass", "s3cret")
        with pytest.raises(PlanError, match="refuses the user or the password") as raised:
            check_url(server.url.replace("//", "//:wr0ng@"))
        assert "wr0ng" not in str(raised.value)
        monkeypatch.setenv("REDISCLI_AUTH", "s3cret")
        # An address alone, as in the note: another process knows no more.
        link = Link(server.url.replace("127.0.0.1", "localhost"), "test")
        assert link.call([["PING"]]) == [True]
        link.close()
    finally:
        server.kill()


def test_a_server_that_may_evict_state_is_refused() -> None:
    server = servers.RedisServer()
    try:
        server.client().config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(PlanError, match="may evict state") as raised:
            check_url(server.url)
        assert "found: allkeys-lru" in str(raised.value)
    finally:
        server.kill()


def test_a_start_does_not_need_the_server_to_be_there() -> None:
    check_url(URL)


@pytest.mark.parametrize(
    ("error", "is_gone"),
    [
        (redis.ConnectionError("reset"), True),
        (redis.TimeoutError("slow"), True),
        (redis.ReadOnlyError("READONLY You can't write against a read only replica."), True),
        (redis.BusyLoadingError("LOADING"), True),
        (redis.ResponseError("BUSY Redis is busy running a script."), True),
        (redis.ResponseError("WRONGTYPE Operation against a key"), False),
        (redis.AuthenticationError("WRONGPASS"), False),
    ],
)
def test_a_server_is_away_if_waiting_may_help(error: Exception, is_gone: bool) -> None:
    assert is_away(error) == is_gone


@pytest.mark.parametrize(
    "answer",
    [
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "READONLY You can't write against a read only replica.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.",
        "LOADING Redis is loading the dataset in memory",
        "NOREPLICAS Not enough good replicas to write.",
    ],
)
def test_a_server_that_refuses_commands_for_a_while_is_away(answer: str) -> None:
    # The client makes errors of some of them, and cuts off their first word.
    assert is_away(BaseParser.parse_error(answer))


def test_a_full_server_pauses_a_job_that_claims_its_key_groups() -> None:
    own_server = RedisServer()
    client = own_server.client()
    link = Link(address_of(own_server.url), "test")
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(EpochError, match="refuses commands now") as raised:
            claim(link, "job", "op", [0], 1, 1, "me")
        assert raised.value.facts["is_away"] is True
    finally:
        client.config_set("maxmemory", 0)
        client.close()
    assert claim(link, "job", "op", [0], 1, 1, "me")[0].marker == ""
    link.close()
    own_server.kill()


def test_a_server_that_hangs_is_waited_for_once() -> None:
    server = RedisServer()
    link = Link(address_of(f"{server.url}?socket_timeout=0.5"), "test")
    try:
        link.call([["PING"]])
        server.pause()
        began_s = time.monotonic()
        with pytest.raises(EpochError, match="cannot be reached"):
            link.call([["PING"]])
        assert 0.4 < time.monotonic() - began_s < 0.95
        server.resume()
        assert link.call([["PING"]]) == [True]
    finally:
        link.close()
        server.kill()
