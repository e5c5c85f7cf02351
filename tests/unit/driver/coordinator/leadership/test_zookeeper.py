"""Leadership by ZooKeeper: what its URL says, and what a real server is left with."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

from cairn.driver.coordinator.leadership import Member, open_leadership
from cairn.driver.coordinator.leadership.zookeeper import (
    RETRY,
    ZooKeeperGrant,
    ZooKeeperLeadership,
)
from cairn.errors import PlanError
from cairn.storage.store import open_store
from tests.zookeeper import ZooKeeper

Open = Callable[[], ZooKeeperLeadership]


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeper]:
    made = ZooKeeper()
    yield made
    made.close()


@pytest.fixture
def open_group(server: ZooKeeper) -> Iterator[Open]:
    path = f"/cairn/{uuid.uuid4().hex}"
    made = []

    def open_one() -> ZooKeeperLeadership:
        url = f"zookeeper://me:secret@{server.hosts}{path}?session=20s"
        made.append(open_leadership(url, store=open_store("memory:")))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


def member(identity: str) -> Member:
    return Member(identity=identity, host="h", pid=1)


def lead(group: ZooKeeperLeadership, identity: str) -> ZooKeeperGrant:
    grant = group.campaign(member(identity), threading.Event())
    assert grant is not None
    grant.confirm(1)
    return grant


def try_once(group: ZooKeeperLeadership, identity: str) -> ZooKeeperGrant | None:
    group.update(member(identity))
    return group._try(group._connect())


def test_a_grant_that_is_lost_while_the_session_lives_releases_the_lead(open_group) -> None:
    one, two = open_group(), open_group()
    grant = lead(one, "a")
    assert try_once(two, "b") is None
    grant.lost.set()
    assert lead(two, "b") is not None, "a does not campaign, and its session has not ended"


def test_a_node_in_line_whose_creation_was_not_acknowledged_is_used(open_group) -> None:
    one, two = open_group(), open_group()
    lead(one, "a")
    assert try_once(two, "b") is None
    two._node = None  # The answer was lost.
    assert try_once(two, "b") is None
    assert [m.identity for m in one.waiting()] == ["b"]


def test_a_member_that_could_not_leave_the_line_leaves_it_while_it_leads(open_group) -> None:
    one = open_group()
    grant = lead(one, "a")
    one._stand_in_line(one._connect())  # The deletion has failed.
    assert [m.identity for m in one.waiting()] == ["a"]
    grant._show()
    assert one.waiting() == []
    one._stand_in_line(one._connect())
    grant.resign()
    assert one.waiting() == [] and one.leader() is None


def test_a_leader_node_whose_creation_was_not_acknowledged_does_not_block(open_group) -> None:
    one = open_group()
    lead(one, "a")._is_released = True
    one._grant.lost.set()
    assert one.leader() is not None
    assert lead(one, "a").lost.is_set() is False


def test_an_earlier_grant_does_not_release_the_node_of_the_present_one(open_group) -> None:
    one = open_group()
    first = lead(one, "a")
    first.lost.set()
    second = lead(one, "a")
    first._is_released = False
    first._try_to_release()
    assert second._is_own() and one.leader() is not None


def test_a_named_successor_is_preferred_once(open_group) -> None:
    ways = [open_group() for _ in range(3)]
    first = lead(ways[0], "a")
    assert try_once(ways[1], "b") is None and try_once(ways[2], "c") is None
    first.resign(to="c")
    assert try_once(ways[1], "b") is None
    second = try_once(ways[2], "c")
    assert second is not None
    # c loses the lead and waits again, behind b.
    second.lost.set()
    second._try_to_release()
    second.retire()
    ways[2]._stand_in_line(ways[2]._connect())
    assert try_once(ways[2], "c") is None
    assert try_once(ways[1], "b") is not None


def test_damaged_data_of_a_member_does_not_keep_the_lead_from_the_next(open_group) -> None:
    one, two, three = open_group(), open_group(), open_group()
    grant = lead(one, "a")
    assert try_once(two, "b") is None and try_once(three, "c") is None
    three._connect().set(three._node, b"damaged")
    assert [m.identity for m in one.waiting()] == ["b"]
    grant.resign()
    assert try_once(three, "c") is None and try_once(two, "b") is not None


def test_a_standby_that_waits_for_long_keeps_one_watch(open_group) -> None:
    one, two = open_group(), open_group()
    lead(one, "a")
    for _ in range(5):
        assert try_once(two, "b") is None
    watchers = two._connect()._data_watchers
    assert [len(found) for found in watchers.values()] == [1]


def test_other_credentials_neither_read_nor_take_the_lead(open_group, server) -> None:
    one = open_group()
    lead(one, "a")
    other = open_leadership(
        f"zookeeper://you:secret@{server.hosts}{one.path}?session=20s", store=open_store("memory:")
    )
    try:
        assert other.leader() is None and other.waiting() == []
        with pytest.raises(Exception, match="NoAuth") as refused:
            raise RuntimeError(_kind_of_failure(other))
        assert "secret" not in str(refused.value)
    finally:
        other.close()


def test_a_client_without_a_server_pauses_between_any_two_tries() -> None:
    from kazoo.retry import ForceRetryError, KazooRetry

    tries, pauses = iter(range(500)), []

    def connect() -> None:
        if next(tries, None) is not None:
            raise ForceRetryError("refused")

    KazooRetry(**RETRY, sleep_func=pauses.append)(connect)
    assert len(pauses) == 500 and min(pauses) >= 0.05 and max(pauses) <= 0.5


def test_a_group_that_is_closed_does_not_connect_again(open_group) -> None:
    one = open_group()
    lead(one, "a")
    one.close()
    assert one.leader() is None and one.waiting() == []
    assert one._client is None


def _kind_of_failure(group: ZooKeeperLeadership) -> str:
    try:
        try_once(group, "x")
    except Exception as error:
        return type(error).__name__
    return "none"


def test_credentials_come_from_the_environment_and_are_never_shown(
    server, monkeypatch, caplog
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("CAIRN_ZOOKEEPER_AUTH", "me:from-the-environment")
    path = f"/cairn/{uuid.uuid4().hex}"
    url = f"zookeeper://{server.hosts}{path}?session=20s"
    group = open_leadership(url, store=open_store("memory:"))
    try:
        lead(group, "a")
        acl = group._connect().get_acls(f"{path}/leader")[0]
        assert [each.id.scheme for each in acl] == ["digest"]
        assert acl[0].id.id.startswith("me:")
        assert group.url == url
        assert "from-the-environment" not in caplog.text
    finally:
        group.close()


@pytest.mark.parametrize("password", ["se?cret", "se/cret", "se#cret", "se?cret=x", "s/e?cret"])
def test_a_password_that_is_not_encoded_is_refused_and_in_no_message(password: str) -> None:
    with pytest.raises(PlanError) as refused:
        open_leadership(f"zookeeper://me:{password}@h1/a", store=open_store("memory:"))
    assert "cret" not in str(refused.value) and "next: " in str(refused.value)


def test_a_password_in_the_url_may_have_any_character(server) -> None:
    path = f"/cairn/{uuid.uuid4().hex}"
    url = f"zookeeper://me:p%40s%2Fs%3Aw%3F@{server.hosts}{path}?session=20s"
    group = open_leadership(url, store=open_store("memory:"))
    try:
        assert group._auth == "me:p@s/s:w?"
        lead(group, "a")
        assert group.url == f"zookeeper://{server.hosts}{path}?session=20s"
    finally:
        group.close()


def test_urls(monkeypatch) -> None:
    store = open_store("memory:")
    found = open_leadership("zookeeper://h1:2181,h2/a/b?session=3s", store=store)
    assert found.url == "zookeeper://h1:2181,h2/a/b?session=3s"
    for wrong in (
        "zookeeper://h1", "zookeeper:///a", "zookeeper://me@h1/a", "zookeeper://me:@h1/a",
        "zookeeper://h1/a?lease=3s", "zookeeper://h1/a?session=x",
    ):  # fmt: skip
        with pytest.raises(PlanError):
            open_leadership(wrong, store=store)
    monkeypatch.setenv("CAIRN_ZOOKEEPER_AUTH", "s3cr3t")
    with pytest.raises(PlanError) as refused:
        open_leadership("zookeeper://h1/a", store=store)
    assert "s3cr3t" not in str(refused.value)
